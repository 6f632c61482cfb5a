"""Words of ``k`` for arithmetic: conversions, float functions, selection, packed pairs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Literal

import numpy as np

from warploom.core.dtypes import DType, bf16, e4m3, e5m2, f16, f32, s8, s16, s32, u8, u16, u32, u64
from warploom.core.errors import TraceError, shown
from warploom.isa.conversion import Rounding, bitcast, convert, half_of, pack_bytes, pack_pair, unpack_half
from warploom.isa.instruction import named
from warploom.isa.lanewise import multiply_wide, pair_arithmetic, select
from warploom.lang.builder import Builder, word
from warploom.lang.values import Element, Mutable, Number, Traced, holds_bits, is_a

RoundTo = Literal["zero", "nearest", "down", "up"]
_ROUNDING: dict[RoundTo, Rounding] = {"zero": "rzi", "nearest": "rni", "down": "rmi", "up": "rpi"}
_BYTES, _SHORTS, _HALVES, _FP8 = (s8, u8), (s16, u16), (f16, bf16), (e4m3, e5m2)


def _is_float(x: Number) -> bool:
    return x.dtype.is_float if isinstance(x, Traced) else isinstance(x, float)


class Arithmetic(Builder):
    """Arithmetic of each thread on its own values, conversions and registers."""

    def value(self, x: Number, dtype: DType) -> Traced:
        """``x`` as a traced value of ``dtype``: an immediate, or the value itself after a type check."""
        if not is_a(dtype, DType):
            raise TraceError(
                f"k.value takes a number and a type of warploom.lang, as k.value(0.0, f32), not {shown(x)} and "
                f"{shown(dtype)}"
            )
        return self.operand(x, dtype)

    def convert(self, x: Number, dtype: DType, *, rounding: RoundTo | None = None, saturate: bool = False) -> Traced:
        """``x`` converted by value: integers widen, narrow or become floats, floats become integers.

        ``rounding`` of a float to an integer is "zero" (the default), "nearest" (of two the even one), "down" or "up".
        Integers that do not fit wrap, unless ``saturate`` clamps them to the range of ``dtype``; floats always clamp to
        32 and 64 bits. Elements of fewer than 32 bits, as loads give them and stores take them, convert too:
        ``k.convert(x.load(i), f32)`` of bf16, ``y.store(k.convert(v, s8, rounding="nearest", saturate=True), i)``.
        """
        if not is_a(dtype, DType):
            raise TraceError(f"k.convert(x, dtype) takes a type of warploom.lang, not {shown(dtype)}")
        if rounding not in (None, *_ROUNDING):
            raise TraceError(f"rounding is {', '.join(_ROUNDING)}, not {shown(rounding)}")
        if isinstance(x, Mutable):
            x = x.get()
        if not isinstance(x, Traced):
            if dtype in (*_BYTES, *_SHORTS, *_HALVES, *_FP8):
                return self.convert(
                    self.constant(x, f32 if isinstance(x, float) else s32), dtype, rounding=rounding, saturate=saturate
                )
            return self.constant(int(x) if dtype.is_integer else float(x), dtype)
        if holds_bits(x) and dtype is not u32:
            return (
                x
                if x.element is dtype
                else self.convert(self._from_bits(x), dtype, rounding=rounding, saturate=saturate)
            )
        if dtype in _FP8:
            bits = self._to_fp8(self.convert(x, f32), 0.0, dtype)
            return Element(self.convert(bits, u32), dtype)
        if dtype in _HALVES:
            return Element(self.pack(self.convert(x, f32), 0.0, dtype), dtype)
        if dtype in (*_BYTES, *_SHORTS):
            return self._to_short(x, dtype, rounding, saturate)
        if rounding is not None and not (x.dtype.is_float and dtype.is_integer):
            raise TraceError(f"rounding is for floats that become integers, not {x.dtype} to {dtype}")
        if saturate and x.dtype.is_integer and dtype.is_integer:
            x = self._clamped(x, dtype)
        if x.dtype is dtype:
            return x
        if x.constant is not None and dtype.is_integer and x.dtype.is_integer:
            return self.constant(
                int(x.constant) & ((1 << x.dtype.bits) - 1)
                if dtype.bits > x.dtype.bits and x.dtype.kind == "unsigned"
                else int(x.constant),
                dtype,
            )
        return self.emit(convert(x.dtype, dtype, _ROUNDING[rounding or "zero"]), (x,))[0]

    def _from_bits(self, x: Element) -> Traced:
        """The value of an element that arrived as bits: f32 of a short float, s32 of a short signed integer."""
        if x.element in _FP8:
            return self._from_fp8(x, x.element)[0]
        if x.element in _HALVES:
            return self.unpack(x, x.element)[0]
        unused = 32 - x.element.bits
        return self.bitcast(x << unused, s32) >> unused

    def _to_short(self, x: Traced, dtype: DType, rounding: RoundTo | None, saturate: bool) -> Element:
        """The bits of an integer of 8 or 16 bits, in u32."""
        if x.dtype.is_float:
            x = self.convert(x, s32, rounding=rounding)
        if saturate:
            x = self._clamped(x, dtype)
        return Element(self.convert(x, u32) & ((1 << dtype.bits) - 1), dtype)

    def _clamped(self, x: Traced, dtype: DType) -> Traced:
        """An integer clamped to what both its type and ``dtype`` hold."""
        to, own = (np.iinfo(t.numpy) for t in (dtype, x.dtype))
        if to.min > own.min:
            x = self.maximum(x, int(to.min))
        return self.minimum(x, int(to.max)) if to.max < own.max else x

    def pack_bytes(self, values: Sequence[Number], dtype: DType) -> Traced:
        """Four s32 or f32 values as s8 or u8 in one u32, the first lowest: floats to nearest, all clamped.

        Or four f32 as e4m3 or e5m2 (sm_90), to nearest, numbers beyond the largest as the largest.
        """
        if dtype not in (*_BYTES, *_FP8) or len(values) != 4:
            raise TraceError(f"pack_bytes packs four values of s8, u8, e4m3 or e5m2, not {len(values)} of {dtype}")
        if dtype in _FP8:
            lower, upper = (self._to_fp8(values[i], values[i + 1], dtype) for i in (0, 2))
            return self.convert(upper, u32) << 16 | self.convert(lower, u32)
        low, second, third, high = (self.convert(x, s32, rounding="nearest") if _is_float(x) else x for x in values)
        upper = self.issue(pack_bytes(dtype), third, high, 0)[0]
        return self.issue(pack_bytes(dtype), low, second, upper)[0]

    def unpack_bytes(self, word: Traced, dtype: DType) -> tuple[Traced, Traced, Traced, Traced]:
        """The four bytes of a u32, the lowest first: of s8 and u8 as s32, of e4m3 and e5m2 (sm_90) as f32, exactly."""
        if dtype not in (*_BYTES, *_FP8):
            raise TraceError(f"unpack_bytes takes s8, u8, e4m3 or e5m2, not {dtype}")
        x = self.operand(word, u32)
        if dtype in _FP8:
            return *self._from_fp8(x, dtype), *self._from_fp8(x >> 16, dtype)
        at_top = (self.bitcast(x << (24 - 8 * i), s32) if dtype is s8 else x << (24 - 8 * i) for i in range(4))
        first, second, third, fourth = (self.bitcast(y >> 24, s32) for y in at_top)
        return first, second, third, fourth

    def unpack_fp8(self, word: Traced) -> tuple[Traced, Traced]:
        """The four ``e4m3`` of a u32 as two packed pairs of f16, the lowest first, exactly (sm_90)."""
        halves = [self.issue(half_of(u32, which), word)[0] for which in (0, 1)]  # no shift in SASS
        low, high = (self.issue(named("cvt.rn.f16x2.e4m3x2"), half)[0] for half in halves)
        return low, high

    def _to_fp8(self, low: Number, high: Number, dtype: DType) -> Traced:
        """A pair of f32 as fp8 in a u16."""
        return self.issue(named(f"cvt.rn.satfinite.{dtype}x2.f32"), high, low)[0]

    def _from_fp8(self, word: Traced, dtype: DType) -> tuple[Traced, Traced]:
        """The two fp8 of a word's lower half, as f32."""
        pair = self.issue(convert(u32, u16), word)[0]
        return self.unpack(self.issue(named(f"cvt.rn.f16x2.{dtype}x2"), pair)[0], f16)

    def bitcast(self, x: Traced, dtype: DType) -> Traced:
        """Reinterpret the bits of a value as another type of the same width."""
        if isinstance(x, Mutable):
            x = x.get()
        if x.dtype is dtype:
            return x
        if x.dtype.bits != dtype.bits:
            raise TraceError(f"bitcast from {x.dtype} to {dtype} changes the width; use k.convert")
        return self.emit(bitcast(x.dtype, dtype), (x,))[0]

    @word("fma.rn.f32")
    def fma(self, a: Number, b: Number, c: Number) -> Traced:
        """a·b + c in f32 with one rounding."""
        ...

    def mul_wide(self, a: Number, b: Number) -> Traced:
        """The 64-bit product of two u32 values."""
        x, y = (self.operand(v, u32) for v in (a, b))
        if x.constant is not None and y.constant is not None:
            mask = (1 << 32) - 1
            return self.constant((int(x.constant) & mask) * (int(y.constant) & mask), u64)
        return self.issue(multiply_wide(u32), x, y)[0]

    def maximum(self, a: Number, b: Number) -> Traced:
        """The larger; of floats the one that is not NaN."""
        return self.binary("max", a, b)

    def minimum(self, a: Number, b: Number) -> Traced:
        """The smaller; of floats the one that is not NaN."""
        return self.binary("min", a, b)

    @word("ex2.approx.ftz.f32")
    def exp2(self, x: Number) -> Traced:
        """2 to the x (``ex2.approx.ftz.f32``, at most 2 ulp)."""
        ...

    @word("lg2.approx.ftz.f32")
    def log2(self, x: Number) -> Traced:
        """Binary logarithm (``lg2.approx.ftz.f32``)."""
        ...

    @word("rcp.approx.ftz.f32")
    def reciprocal(self, x: Number) -> Traced:
        """1/x (``rcp.approx.ftz.f32``, at most 1 ulp)."""
        ...

    @word("rsqrt.approx.ftz.f32")
    def rsqrt(self, x: Number) -> Traced:
        """The reciprocal square root, 1/sqrt(x) (``rsqrt.approx.ftz.f32``)."""
        ...

    @word("sqrt.rn.f32")
    def sqrt(self, x: Number) -> Traced:
        """Square root, correctly rounded."""
        ...

    @word("tanh.approx.f32")
    def tanh(self, x: Number) -> Traced:
        """Hyperbolic tangent (``tanh.approx.f32``)."""
        ...

    def absolute(self, x: Number) -> Traced:
        """The absolute value of a float or a signed integer."""
        return self.unary("abs", x)

    def popc(self, x: Traced) -> Traced:
        """Count of set bits (u32) of an integer of 32 or 64 bits."""
        return self.unary("popc", x)

    def clz(self, x: Traced) -> Traced:
        """Count of leading zero bits (u32) of an integer of 32 or 64 bits."""
        return self.unary("clz", x)

    def brev(self, x: Traced) -> Traced:
        """The bits of an integer of 32 or 64 bits in reverse order, unsigned."""
        return self.unary("brev", x)

    @word("prmt.b32", ptx=False)
    def prmt(self, a: Traced, b: Traced, selector: int) -> Traced:
        """Four bytes of the pair (a low, b high), picked by the nibbles of ``selector``."""
        ...

    def select(self, condition: Number, a: Number, b: Number) -> Traced:
        """``a`` in the lanes where the predicate holds, else ``b``."""
        known = condition.constant if isinstance(condition, Traced) else condition
        dtype = self._common_type("select", a, b)
        if known is not None:
            return self.operand(a if known else b, dtype)
        return self.issue(select(dtype), condition, a, b)[0]

    @word("cvt.rna.tf32.f32")
    def to_tf32(self, x: Number) -> Traced:
        """An f32 rounded to tf32, as the u32 register that ``mma`` takes."""
        ...

    def pack(self, low: Number, high: Number, half: DType) -> Traced:
        """Two f32 values rounded to f16 or bf16, in one u32 (low in the low bits)."""
        self._check_half(half)
        return self.issue(pack_pair(half), low, high)[0]

    def unpack(self, pair: Traced, half: DType) -> tuple[Traced, Traced]:
        """The (low, high) halves of a packed pair as f32, exactly."""
        self._check_half(half)
        x = self.operand(pair, u32)
        return self.issue(unpack_half(half, 0), x)[0], self.issue(unpack_half(half, 1), x)[0]

    def pair(self, op: str, half: DType, *operands: Traced) -> Traced:
        """Packed 16-bit arithmetic: ``fma add mul min max`` on both halves at once."""
        self._check_half(half)
        return self.issue(pair_arithmetic(op, half), *operands)[0]

    def _check_half(self, half: DType) -> None:
        if half not in _HALVES:
            raise TraceError(f"a packed pair holds f16 or bf16, not {half}")

    def register(self, dtype: DType, value: Number | None = None, name: str = "") -> Mutable:
        """A mutable register, uninitialised unless ``value`` is given. It outlives loops and is what they carry."""
        if not is_a(dtype, DType):
            raise TraceError(f"a register holds a type of warploom.lang, as k.register(f32, 0.0), not {shown(dtype)}")
        register = Mutable(self, self.new_register(dtype, name))
        if value is not None:
            register.set(value)
        return register

    def registers(self, dtype: DType, count: int, value: Number | None = None, name: str = "") -> list[Mutable]:
        """``count`` mutable registers."""
        return [self.register(dtype, value, f"{name}{i}" if name else "") for i in range(count)]

    def reduce_values(self, op: str, values: Sequence[Traced]) -> Traced:
        """``op`` over values a thread holds, from the first to the last."""
        return reduce(partial(self.binary, op), values)
