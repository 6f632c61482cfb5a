"""Lanewise arithmetic: integers, bits, floats, comparisons, conversions and packed 16-bit pairs.

Sources: PTX ISA, "Integer Arithmetic", "Floating-Point", "Comparison and Selection", "Logic and Shift" and "Data
Movement and Conversion" instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from warploom.core.dtypes import DType, bf16, f32, pred, s32, s64, u32, u64
from warploom.isa.base import Array, Instruction, inline_ptx
from warploom.isa.rounding import fma_double, fma_single, single_to_odd, sum_to_odd

COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%", "shl": "<<", "shr": ">>"}
_INFIX = _ARITHMETIC | {"and": "&", "or": "|", "xor": "^"} | COMPARISONS


def _shift(kind: str, value: Array, count: Array) -> Array:
    bits = value.dtype.itemsize * 8
    safe = np.minimum(count, bits - 1).astype(value.dtype)
    if kind == "shl":
        return np.where(count < bits, value << safe, value.dtype.type(0))
    beyond = value >> value.dtype.type(bits - 1) if value.dtype.kind == "i" else value.dtype.type(0)
    return np.where(count < bits, value >> safe, beyond)


def _divide(value: Array, by: Array) -> Array:
    if value.dtype.kind == "f":
        return value / by
    safe = np.where(by == 0, by.dtype.type(1), by)
    if value.dtype.kind == "i":
        unsigned = np.dtype(f"u{value.dtype.itemsize}")  # the magnitude of the least integer fits there alone
        sizes = [np.ascontiguousarray(np.abs(x)).view(unsigned) for x in (value, safe)]
        magnitude = (sizes[0] // sizes[1]).view(value.dtype)
        quotient = np.where((value < 0) != (safe < 0), -magnitude, magnitude)
    else:
        quotient = value // safe
    return np.where(by == 0, ~by.dtype.type(0), quotient)


def _remainder(value: Array, by: Array) -> Array:
    safe = np.where(by == 0, by.dtype.type(1), by)
    return np.where(by == 0, value, np.fmod(value, safe))


def _extreme(choose: Callable[[Array, Array], Array], a: Array, b: Array, if_negative: Array, if_not: Array) -> Array:
    """The smaller or the larger; of equal values (zeros of either sign) the one that the sign of ``a`` tells."""
    if a.dtype.kind != "f":
        return choose(a, b)
    return np.where(a == b, np.where(np.signbit(a), if_negative, if_not), choose(a, b))


_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": _divide,
    "rem": _remainder,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "min": lambda a, b: _extreme(np.fmin, a, b, a, b),
    "max": lambda a, b: _extreme(np.fmax, a, b, b, a),
    "shl": lambda a, b: _shift("shl", a, b),
    "shr": lambda a, b: _shift("shr", a, b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
}


@dataclass(frozen=True, slots=True)
class Binary(Instruction):
    """``add sub mul div rem and or xor min max shl shr`` and the comparisons ``lt le gt ge eq ne`` of one type.

    Integers wrap. A shift by the width or more gives 0 (or the sign). A division of integers by zero is unspecified in
    PTX; here it gives all ones, as 32-bit divisions do on the hardware. ``min`` and ``max`` of floats return the
    operand that is not NaN and take -0 for less than +0. ``shl``/``shr`` take a u32 count. Floats round to nearest
    even.
    """

    op: str
    dtype: DType
    pure: ClassVar[bool] = True
    lanewise: ClassVar[bool] = True

    @property
    def mnemonic(self) -> str:
        return f"{self.op}.{self.dtype.name}"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return (self.dtype, u32 if self.op in ("shl", "shr") else self.dtype)

    @property
    def result_types(self) -> tuple[DType, ...]:
        return (pred if self.op in COMPARISONS else self.dtype,)

    def expression(self, operands: Sequence[str]) -> str:
        a, b = operands
        if self.op in ("min", "max"):
            suffix = {f32.name: "f", "f64": ""}.get(self.dtype.name)
            return f"f{self.op}{suffix}({a}, {b})" if suffix is not None else f"{self.op}({a}, {b})"
        return f"{a} {_INFIX[self.op]} {b}"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            return (_BINARY[self.op](operands[0], operands[1]),)


def flush_subnormal(x: Array) -> Array:
    """``.ftz``: subnormal f32 values become zero of the same sign."""
    return np.where(np.abs(x) < np.float32(1.1754943508222875e-38), np.copysign(np.float32(0), x), x)


def _bit_reverse(x: Array) -> Array:
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        low = np.uint32(mask)
        x = ((x >> np.uint32(shift)) & low) | ((x & low) << np.uint32(shift))
    return x


def _leading_zeros(x: Array) -> Array:
    return np.where(x == 0, 32, 31 - np.floor(np.log2(np.maximum(x, 1).astype(np.float64)))).astype(np.uint32)


def _round_tf32(x: Array) -> Array:
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, bits & np.uint32(0xFFFFE000))


_UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": lambda a: -a,
    "not": lambda a: ~a,
    "abs": lambda a: np.abs(a),
    "ex2": lambda a: flush_subnormal(np.exp2(flush_subnormal(a))),
    "lg2": lambda a: np.log2(flush_subnormal(a)),
    "rcp": lambda a: flush_subnormal(np.float32(1) / flush_subnormal(a)),
    "rsqrt": lambda a: np.float32(1) / np.sqrt(flush_subnormal(a)),
    "sqrt": lambda a: np.sqrt(a),
    "tanh": lambda a: np.tanh(a),
    "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
    "clz": _leading_zeros,
    "brev": _bit_reverse,
    "tf32": _round_tf32,
}
_UNARY_PTX = {
    "ex2": "ex2.approx.ftz.f32",
    "lg2": "lg2.approx.ftz.f32",
    "rcp": "rcp.approx.ftz.f32",
    "rsqrt": "rsqrt.approx.ftz.f32",
    "sqrt": "sqrt.rn.f32",
    "tanh": "tanh.approx.f32",
    "tf32": "cvt.rna.tf32.f32",
}
_UNARY_CALL = {
    "popc": "__popc({})",
    "clz": "__clz({})",
    "brev": "__brev({})",
    "neg": "-{}",
    "not": "~{}",
}
_ABS_CALL = {"f32": "fabsf({})", "f64": "fabs({})", "s32": "abs({})", "s64": "llabs({})"}


@dataclass(frozen=True, slots=True)
class Unary(Instruction):
    """``neg not abs popc clz brev sqrt``, the approximations ``ex2 lg2 rcp rsqrt tanh`` and rounding to ``tf32``.

    ``ex2 lg2 rcp rsqrt`` are the ``.approx.ftz.f32`` forms: the hardware's error is at most 2 ulp (PTX ISA); the
    emulator rounds the exact value, so results may differ in the last bits.
    """

    op: str
    dtype: DType
    pure: ClassVar[bool] = True
    lanewise: ClassVar[bool] = True

    @property
    def mnemonic(self) -> str:
        return _UNARY_PTX.get(self.op, f"{self.op}.{self.dtype.name}")

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return (self.dtype,)

    @property
    def result_types(self) -> tuple[DType, ...]:
        return (u32 if self.op in ("popc", "clz", "brev", "tf32") else self.dtype,)

    @property
    def has_expression(self) -> bool:
        return self.op not in _UNARY_PTX

    def expression(self, operands: Sequence[str]) -> str:
        if self.dtype is pred and self.op == "not":
            return f"!{operands[0]}"
        call = _ABS_CALL[self.dtype.name] if self.op == "abs" else _UNARY_CALL[self.op]
        return call.format(operands[0])

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        if self.has_expression:
            return f"{results[0]} = {self.expression(operands)};"
        out = (f"={self.result_types[0].constraint}", results[0])
        return inline_ptx(f"{_UNARY_PTX[self.op]} %0, %1;", [out], [("f", operands[0])], volatile=False)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            return (_UNARY[self.op](operands[0]),)


@dataclass(frozen=True, slots=True)
class Fma(Instruction):
    """``fma.rn``: a·b + c of f32 or f64, rounded once."""

    dtype: DType = f32
    pure: ClassVar[bool] = True
    lanewise: ClassVar[bool] = True

    @property
    def mnemonic(self) -> str:
        return f"fma.rn.{self.dtype.name}"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return (self.dtype,) * 3

    @property
    def result_types(self) -> tuple[DType, ...]:
        return (self.dtype,)

    def expression(self, operands: Sequence[str]) -> str:
        return f"{'__fmaf_rn' if self.dtype is f32 else '__fma_rn'}({', '.join(operands)})"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            return ((fma_single if self.dtype is f32 else fma_double)(*operands),)


@dataclass(frozen=True, slots=True)
class MultiplyWide(Instruction):
    """``mul.wide``: the 64-bit product of two 32-bit integers (``u32`` → ``u64``, ``s32`` → ``s64``)."""

    dtype: DType
    pure: ClassVar[bool] = True
    lanewise: ClassVar[bool] = True

    @property
    def mnemonic(self) -> str:
        return f"mul.wide.{self.dtype.name}"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return (self.dtype, self.dtype)

    @property
    def result_types(self) -> tuple[DType, ...]:
        return (u64 if self.dtype is u32 else s64,)

    def expression(self, operands: Sequence[str]) -> str:
        wide = self.result_types[0].cuda
        return f"({wide}){operands[0]} * {operands[1]}"  # the second operand widens by itself

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        wide = self.result_types[0].numpy
        return (operands[0].astype(wide) * operands[1].astype(wide),)


@dataclass(frozen=True, slots=True)
class Select(Instruction):
    """``selp``: the second operand where the predicate holds, else the third."""

    dtype: DType
    pure: ClassVar[bool] = True
    lanewise: ClassVar[bool] = True

    @property
    def mnemonic(self) -> str:
        return f"selp.{self.dtype.name}"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return (pred, self.dtype, self.dtype)

    @property
    def result_types(self) -> tuple[DType, ...]:
        return (self.dtype,)

    def expression(self, operands: Sequence[str]) -> str:
        return "{} ? {} : {}".format(*operands)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        return (np.where(operands[0], operands[1], operands[2]).astype(self.dtype.numpy),)


_BITCAST = {
    (f32.name, u32.name): "__float_as_uint({})",
    (u32.name, f32.name): "__uint_as_float({})",
    (f32.name, s32.name): "__float_as_int({})",
    (s32.name, f32.name): "__int_as_float({})",
    ("f64", "s64"): "__double_as_longlong({})",
    ("s64", "f64"): "__longlong_as_double({})",
    ("f64", "u64"): "(unsigned long long)__double_as_longlong({})",
    ("u64", "f64"): "__longlong_as_double((long long)({}))",
}


@dataclass(frozen=True, slots=True)
class Bitcast(Instruction):
    """The same bits read as another type of the same width."""

    source: DType
    dtype: DType
    pure: ClassVar[bool] = True
    lanewise: ClassVar[bool] = True
    moves_bits: ClassVar[bool] = True

    @property
    def mnemonic(self) -> str:
        return f"mov.b{self.dtype.bits}.{self.source.name}.{self.dtype.name}"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return (self.source,)

    @property
    def result_types(self) -> tuple[DType, ...]:
        return (self.dtype,)

    def expression(self, operands: Sequence[str]) -> str:
        cast = _BITCAST.get((self.source.name, self.dtype.name), f"({self.dtype.cuda}){{}}")
        return cast.format(operands[0])

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        return (np.ascontiguousarray(operands[0]).view(self.dtype.numpy),)


@dataclass(frozen=True, slots=True)
class Convert(Instruction):
    """A conversion by value: integers widen, narrow (wrapping) or become floats; floats truncate toward zero.

    Floats beyond an integer type's range become its nearest end; a NaN becomes 0 where both types have 32 bits, else
    the integer whose highest bit alone is set (PTX ISA, ``cvt``).
    """

    source: DType
    dtype: DType
    pure: ClassVar[bool] = True
    lanewise: ClassVar[bool] = True

    @property
    def mnemonic(self) -> str:
        return f"cvt.{self.dtype.name}.{self.source.name}"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return (self.source,)

    @property
    def result_types(self) -> tuple[DType, ...]:
        return (self.dtype,)

    def expression(self, operands: Sequence[str]) -> str:
        if self.dtype is pred:
            return f"{operands[0]} != 0"
        return f"({self.dtype.cuda}){operands[0]}"

    @property
    def _from_nan(self) -> int:
        if self.source.bits == self.dtype.bits == 32:
            return 0
        return -(1 << (self.dtype.bits - 1)) if self.dtype.kind == "signed" else 1 << (self.dtype.bits - 1)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        x = operands[0]
        with np.errstate(all="ignore"):
            if not (self.source.is_float and self.dtype.is_integer):
                return (x.astype(self.dtype.numpy),)
            info = np.iinfo(self.dtype.numpy)
            whole = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0)
            clipped = np.clip(whole, float(info.min), float(info.max))
            at_top = clipped >= float(info.max)
            converted = np.where(at_top, info.max, np.where(at_top, 0, clipped).astype(self.dtype.numpy))
            return (np.where(np.isnan(x), self.dtype.numpy.type(self._from_nan), converted),)


def _to_half(x: Array, half: DType) -> Array:
    return np.ascontiguousarray(x).astype(half.numpy).view(np.uint16)


def half_to_f32(bits: Array, half: DType) -> Array:
    """float32 values of 16-bit patterns of type ``half`` (f16 or bf16)."""
    if half is bf16:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)


@dataclass(frozen=True, slots=True)
class PackPair(Instruction):
    """``cvt.rn.{f16x2,bf16x2}.f32``: two f32 values (low, high) rounded to nearest even into one u32."""

    half: DType
    pure: ClassVar[bool] = True
    lanewise: ClassVar[bool] = True

    @property
    def mnemonic(self) -> str:
        return f"cvt.rn.{self.half.name}x2.f32"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return (f32, f32)

    @property
    def result_types(self) -> tuple[DType, ...]:
        return (u32,)

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        low, high = operands  # PTX puts its first source into the upper half
        return inline_ptx(
            f"{self.mnemonic} %0, %1, %2;", [("=r", results[0])], [("f", high), ("f", low)], volatile=False
        )

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        with np.errstate(all="ignore"):
            low, high = (_to_half(x, self.half).astype(np.uint32) for x in operands)
        return (low | (high << np.uint32(16)),)


@dataclass(frozen=True, slots=True)
class UnpackHalf(Instruction):
    """One half (0 low, 1 high) of a packed pair as f32, exactly."""

    half: DType
    which: int
    pure: ClassVar[bool] = True
    lanewise: ClassVar[bool] = True

    @property
    def mnemonic(self) -> str:
        return f"cvt.f32.{self.half.name}.{'high' if self.which else 'low'}"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return (u32,)

    @property
    def result_types(self) -> tuple[DType, ...]:
        return (f32,)

    @property
    def has_expression(self) -> bool:
        return self.half is bf16

    def expression(self, operands: Sequence[str]) -> str:
        bits = f"{operands[0]} & 0xffff0000u" if self.which else f"{operands[0]} << 16"
        return f"__uint_as_float({bits})"

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        if self.half is bf16:
            return f"{results[0]} = {self.expression(operands)};"
        pair = "{unused, half}" if self.which else "{half, unused}"
        body = f"{{ .reg .b16 half, unused; mov.b32 {pair}, %1; cvt.f32.f16 %0, half; }}"
        return inline_ptx(body, [("=f", results[0])], [("r", operands[0])], volatile=False)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        bits = (operands[0] >> np.uint32(16 * self.which)).astype(np.uint16)
        return (half_to_f32(bits, self.half),)


_PAIR_COUNT = {"fma": 3, "add": 2, "mul": 2, "min": 2, "max": 2}


@dataclass(frozen=True, slots=True)
class PairArithmetic(Instruction):
    """Packed 16-bit arithmetic, ``fma add mul min max`` on f16x2 or bf16x2 (bf16 has add and mul from sm_90 on).

    Each operation rounds once to the half type. ``min``/``max`` return the operand that is not NaN.
    """

    op: str
    half: DType
    pure: ClassVar[bool] = True
    lanewise: ClassVar[bool] = True

    @property
    def mnemonic(self) -> str:
        rounding = "" if self.op in ("min", "max") else ".rn"
        return f"{self.op}{rounding}.{self.half.name}x2"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return (u32,) * _PAIR_COUNT[self.op]

    @property
    def result_types(self) -> tuple[DType, ...]:
        return (u32,)

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        sources = ", ".join(f"%{i + 1}" for i in range(len(operands)))
        ins = [("r", x) for x in operands]
        return inline_ptx(f"{self.mnemonic} %0, {sources};", [("=r", results[0])], ins, volatile=False)

    def _to_odd(self, *x: Array) -> Array:
        """The exact result in f64, rounded to odd where it does not fit (products always do)."""
        if self.op == "fma":
            return sum_to_odd(x[0] * x[1], x[2])
        return sum_to_odd(*x) if self.op == "add" else _BINARY[self.op](*x)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        halves: list[Array] = []
        with np.errstate(all="ignore"):
            for shift in (0, 16):
                bits = [(x >> np.uint32(shift)).astype(np.uint16) for x in operands]
                x = [half_to_f32(b, self.half).astype(np.float64) for b in bits]
                halves.append(_to_half(single_to_odd(self._to_odd(*x)), self.half).astype(np.uint32))
        return (halves[0] | (halves[1] << np.uint32(16)),)


@dataclass(frozen=True, slots=True)
class Permute(Instruction):
    """``prmt.b32``: four bytes picked from the eight of two registers by the nibbles of an immediate selector."""

    selector: int
    pure: ClassVar[bool] = True
    lanewise: ClassVar[bool] = True
    moves_bits: ClassVar[bool] = True

    @property
    def mnemonic(self) -> str:
        return f"prmt.b32.{self.selector:#06x}"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return (u32, u32)

    @property
    def result_types(self) -> tuple[DType, ...]:
        return (u32,)

    def expression(self, operands: Sequence[str]) -> str:
        return f"__byte_perm({operands[0]}, {operands[1]}, {self.selector:#x})"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        low, high = operands
        result = np.zeros(np.broadcast(low, high).shape, np.uint32)
        for i in range(4):
            pick = (self.selector >> (4 * i)) & 7
            source = low if pick < 4 else high
            result |= ((source >> np.uint32(8 * (pick & 3))) & np.uint32(0xFF)) << np.uint32(8 * i)
        return (result,)


@dataclass(frozen=True, slots=True)
class Move(Instruction):
    """A copy of one register: how a mutable register is set and how its value is kept."""

    dtype: DType
    pure: ClassVar[bool] = True
    lanewise: ClassVar[bool] = True
    moves_bits: ClassVar[bool] = True

    @property
    def mnemonic(self) -> str:
        return f"mov.{self.dtype.name}"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        return (self.dtype,)

    @property
    def result_types(self) -> tuple[DType, ...]:
        return (self.dtype,)

    def expression(self, operands: Sequence[str]) -> str:
        return operands[0]

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        return (operands[0],)
