"""Lanewise PTX instructions by their full form, as others' compilers write them: one line each.

What the language itself uses stands in :mod:`warploom.isa.alu` and :mod:`warploom.isa.conversion`. 16-bit floats are
patterns in u16 registers here. Approximations (``.approx``, ``.full``) give the exact value, rounded: hardware may
differ by what PTX allows (2 ulp for ``div.full``, ``ex2``, ``rcp`` and ``rsqrt``).

Sources: PTX ISA, "Integer Arithmetic", "Floating-Point", "Half Precision Floating-Point", "Logic and Shift" and "Data
Movement and Conversion" instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from warploom.core.dtypes import DType, bf16, f16, f32, f64, s16, s32, s64, u16, u32, u64
from warploom.core.errors import VerifyError
from warploom.isa.alu import BINARY_MEANINGS, UNARY_MEANINGS, flush_subnormal
from warploom.isa.base import Array, Lanewise
from warploom.isa.conversion import half_to_f32
from warploom.isa.integers import (
    bit_mask,
    distance_and_sum,
    extended,
    extract,
    funnel_shift,
    highest,
    insert,
    left_of_highest,
    logic3,
    multiply_high,
    permute,
)
from warploom.isa.narrow import FP8, dot, f16_to_fp8, fp8_to_f16, held, pair_without_negatives, product24, to_fp8
from warploom.isa.rounding import fma_single, single_to_odd, sum_to_odd, sum_towards

One = Callable[[Array], Array]
Two = Callable[[Array, Array], Array]
Meaning = Callable[..., Array]
_INTEGERS = (u16, s16, u32, s32, u64, s64)
_BITS = {16: u16, 32: u32, 64: u64}
_TABLE: dict[str, tuple[tuple[DType, ...], DType, Meaning]] = {}
_pairs: list[str] = []


@dataclass(frozen=True, slots=True)
class Scalar(Lanewise):
    """The lanewise PTX instruction ``form``, one of :data:`SCALARS`; ``immediate`` is its last operand, if any.

    Raises VerifyError for another form.
    """

    form: str
    immediate: int | None = None

    def __post_init__(self) -> None:
        if self.form not in _TABLE:
            raise VerifyError("this form is not supported")

    @property
    def mnemonic(self) -> str:
        """The form, with its immediate operand."""
        return self.form if self.immediate is None else f"{self.form}.{self.immediate:#x}"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """Those of the form; 16-bit floats as u16, pairs of them as u32."""
        return _TABLE[self.form][0]

    @property
    def result_types(self) -> tuple[DType, ...]:
        """That of the form."""
        return (_TABLE[self.form][1],)

    @property
    def template(self) -> str:
        """The PTX instruction itself."""
        places = ", ".join(f"%{i}" for i in range(1 + len(self.operand_types)))
        return f"{self.form} {places}{'' if self.immediate is None else f', {self.immediate:#x}'};"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """The exact result, rounded to nearest even to the result's type."""
        _, result, function = _TABLE[self.form]
        found = function(*operands) if self.immediate is None else function(*operands, self.immediate)
        return (found.astype(result.numpy, copy=False),)


def _add(form: str, operands: tuple[DType, ...], result: DType, meaning: Meaning) -> None:
    _TABLE[form] = (operands, result, meaning)


# Floats


def _flushed(function: Meaning) -> Meaning:
    return lambda *x: flush_subnormal(function(*(flush_subnormal(v) for v in x)))


def _with_ftz(form: str, count: int, meaning: Meaning, *, plain: bool = True) -> None:
    """An f32 form, and the one that flushes subnormals: ``form`` has a place for ``.ftz``."""
    if plain:
        _add(form.format(""), (f32,) * count, f32, meaning)
    _add(form.format(".ftz"), (f32,) * count, f32, _flushed(meaning))


def _or_nan(choose: Two) -> Two:
    return lambda a, b: np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), choose(a, b))


def _negated(a: Array) -> Array:
    return -a


def _reciprocal(a: Array) -> Array:
    return a.dtype.type(1) / a


def _reciprocal_root(a: Array) -> Array:
    return a.dtype.type(1) / np.sqrt(a)


def _with_sign(sign: Array, value: Array) -> Array:
    return np.copysign(value, sign)


def _saturated(a: Array) -> Array:
    return np.where(a > 0, np.minimum(a, a.dtype.type(1)), a.dtype.type(0))


def _divided(a: Array, b: Array) -> Array:
    """``div.approx``: beyond 2^126 the reciprocal of a divisor counts as 0."""
    return BINARY_MEANINGS["div"](a, np.where(np.abs(b) > 2.0**126, np.copysign(b.dtype.type(np.inf), b), b))


def _towards(mode: str, op: str) -> Meaning:
    """A sum, difference, product or ``fma`` of f32, rounded in a direction; their products are exact in f64."""

    def rounded(*x: Array) -> Array:
        a, b, *c = (v.astype(np.float64) for v in x)
        if op in ("add", "sub"):
            return sum_towards(a, b if op == "add" else -b, mode)
        product = a * b
        return sum_towards(product, c[0] if c else np.copysign(np.zeros_like(product), product), mode)

    return rounded


_ROUNDED: dict[str, One] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_APPROXIMATE: dict[str, One] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "sqrt": np.sqrt,
    "rcp": _reciprocal,
    "rsqrt": _reciprocal_root,
}


def _floats() -> None:
    for op in ("add", "sub", "mul"):
        _with_ftz(op + ".rn{}.f32", 2, BINARY_MEANINGS[op], plain=False)
    _with_ftz("div.rn{}.f32", 2, BINARY_MEANINGS["div"], plain=False)
    _with_ftz("div.full{}.f32", 2, BINARY_MEANINGS["div"])
    _with_ftz("div.approx{}.f32", 2, _divided)
    _with_ftz("fma.rn{}.f32", 3, fma_single, plain=False)
    for mode in ("rz", "rm", "rp"):
        for op in ("add", "sub", "mul", "fma"):
            _with_ftz(f"{op}.{mode}" + "{}.f32", 3 if op == "fma" else 2, _towards(mode, op))
    for op in ("min", "max"):
        _with_ftz(op + "{}.f32", 2, BINARY_MEANINGS[op], plain=False)
        _with_ftz(op + "{}.NaN.f32", 2, _or_nan(BINARY_MEANINGS[op]))
    for op, function in _APPROXIMATE.items():
        _with_ftz(op + ".approx{}.f32", 1, function)
    for op in ("sqrt", "rcp"):
        _with_ftz(op + ".rn{}.f32", 1, _APPROXIMATE[op])
        _add(f"{op}.rn.f64", (f64,), f64, _APPROXIMATE[op])
    _add("rcp.approx.ftz.f64", (f64,), f64, _reciprocal)
    _add("rsqrt.approx.f64", (f64,), f64, _reciprocal_root)
    _with_ftz("neg{}.f32", 1, _negated, plain=False)
    _with_ftz("abs{}.f32", 1, np.abs, plain=False)
    for mode, function in _ROUNDED.items():
        _with_ftz(f"cvt.{mode}" + "{}.f32.f32", 1, function)
        _add(f"cvt.{mode}.f64.f64", (f64,), f64, function)
    for dtype in (f32, f64):
        _add(f"copysign.{dtype.name}", (dtype, dtype), dtype, _with_sign)
    _with_ftz("cvt.sat{}.f32.f32", 1, _saturated)


# 16-bit floats


def _rounded(exact: Array, half: DType) -> Array:
    """f64 values, rounded to odd where they are inexact, as patterns of ``half``."""
    return np.ascontiguousarray(single_to_odd(exact)).astype(half.numpy).view(np.uint16)


def _difference(a: Array, b: Array) -> Array:
    return sum_to_odd(a, -b)


def _product_and_sum(a: Array, b: Array, c: Array) -> Array:
    return sum_to_odd(a * b, c)


_HALF_OPS: dict[str, tuple[int, Meaning]] = {
    "add{}": (2, sum_to_odd),
    "sub{}": (2, _difference),
    "mul{}": (2, BINARY_MEANINGS["mul"]),
    "fma.rn": (3, _product_and_sum),
    "min": (2, BINARY_MEANINGS["min"]),
    "max": (2, BINARY_MEANINGS["max"]),
    "min.NaN": (2, _or_nan(BINARY_MEANINGS["min"])),
    "max.NaN": (2, _or_nan(BINARY_MEANINGS["max"])),
    "neg": (1, _negated),
    "abs": (1, np.abs),
    "tanh.approx": (1, np.tanh),
}


def _half(function: Meaning, half: DType) -> Meaning:
    def meaning(*x: Array) -> Array:
        return _rounded(function(*(half_to_f32(v, half).astype(np.float64) for v in x)), half)

    return meaning


def _pair(function: Meaning) -> Meaning:
    def both(*x: Array) -> Array:
        low, high = (function(*((v >> np.uint32(s)).astype(np.uint16) for v in x)).astype(np.uint32) for s in (0, 16))
        return low | high << np.uint32(16)

    return both


def _widening(half: DType) -> One:
    return lambda x: half_to_f32(x, half)


def _narrowing(half: DType) -> One:
    return lambda x: np.ascontiguousarray(x).astype(half.numpy).view(np.uint16)


def _power_of_two(x: Array) -> Array:
    return flush_subnormal(np.exp2(x).astype(np.float32))


def _halves() -> None:
    for half in (f16, bf16):
        for op, (count, exact) in _HALF_OPS.items():
            function = _half(exact, half)
            form = op.format(".rn") if half is f16 else op.format("")
            _add(f"{form}.{half.name}", (u16,) * count, u16, function)
            _add(f"{form}.{half.name}x2", (u32,) * count, u32, _pair(function))
            _pairs.append(f"{form}.{half.name}x2")
        _add(f"cvt.f32.{half.name}", (u16,), f32, _widening(half))
        _add(f"cvt.rn.{half.name}.f32", (f32,), u16, _narrowing(half))
    _add("ex2.approx.f16", (u16,), u16, _half(np.exp2, f16))
    _add("ex2.approx.ftz.bf16", (u16,), u16, _half(_power_of_two, bf16))


# Integers and bits
def _integers() -> None:
    for dtype in _INTEGERS:
        _add(f"mul.hi.{dtype.name}", (dtype, dtype), dtype, multiply_high)
        kind = dtype.name if dtype.kind == "signed" else f"u{dtype.bits}"
        _add(f"shr.{kind}", (dtype, u32), dtype, BINARY_MEANINGS["shr"])
        if dtype.bits > 16:
            _add(f"bfe.{dtype.name}", (dtype, u32, u32), dtype, extract)
            _add(f"bfind.{dtype.name}", (dtype,), u32, highest)
            _add(f"bfind.shiftamt.{dtype.name}", (dtype,), u32, left_of_highest)
    for bits, dtype in _BITS.items():
        _add(f"shl.b{bits}", (dtype, u32), dtype, BINARY_MEANINGS["shl"])
        if bits > 16:
            _add(f"bfi.b{bits}", (dtype, dtype, u32, u32), dtype, insert)
    for way in ("l", "r"):
        for mode in ("wrap", "clamp"):
            _add(f"shf.{way}.{mode}.b32", (u32, u32, u32), u32, funnel_shift(way == "l", mode == "wrap"))
    for mode in ("wrap", "clamp"):
        _add(f"bmsk.{mode}.b32", (u32, u32), u32, bit_mask(mode == "clamp"))
        for dtype in (u32, s32):
            _add(f"szext.{mode}.{dtype.name}", (dtype, u32), dtype, extended(mode == "clamp"))
    _add("lop3.b32", (u32, u32, u32), u32, logic3)
    _add("prmt.b32", (u32, u32, u32), u32, permute)
    for op in ("popc", "clz", "brev"):
        _add(f"{op}.b64", (u64,), u64 if op == "brev" else u32, UNARY_MEANINGS[op])
    for dtype in (u32, s32):
        _add(f"sad.{dtype.name}", (dtype,) * 3, dtype, distance_and_sum)


def _narrow() -> None:
    for op in ("add", "sub"):
        _add(f"{op}.sat.s32", (s32, s32), s32, held(BINARY_MEANINGS[op]))
    for a in (u32, s32):
        for how in ("lo", "hi"):
            _add(f"mul24.{how}.{a.name}", (a, a), a, product24(how == "hi"))
        for b in (u32, s32):
            signs, result = (a is s32, b is s32), u32 if a is b is u32 else s32
            _add(f"dp4a.{a.name}.{b.name}", (a, b, result), result, dot(0, *signs))
            for first, half in ((0, "lo"), (2, "hi")):
                _add(f"dp2a.{half}.{a.name}.{b.name}", (a, b, result), result, dot(first, *signs, 16))
    for relu in ("", ".relu"):
        for kind in FP8:
            _add(f"cvt.rn.satfinite{relu}.{kind}.f32", (f32, f32), u16, to_fp8(kind, bool(relu)))
            _add(f"cvt.rn.satfinite{relu}.{kind}.f16x2", (u32,), u16, f16_to_fp8(kind, bool(relu)))
            _add(f"cvt.rn{relu}.f16x2.{kind}", (u16,), u32, fp8_to_f16(kind, bool(relu)))
    for half in (f16, bf16):
        _add(f"cvt.rn.relu.{half.name}x2.f32", (f32, f32), u32, pair_without_negatives(half))


_floats()
_halves()
_integers()
_narrow()
SCALARS = frozenset(_TABLE)
"""The forms that :class:`Scalar` knows."""
PAIRS = frozenset(_pairs)
"""Those of packed 16-bit floats, of which each half of the result depends on the same half of the operands alone."""
SM_90_SCALARS = frozenset(
    {"ex2.approx.ftz.bf16"}
    | {f"{op}.bf16{x}" for op in ("add", "sub", "mul", "tanh.approx") for x in ("", "x2")}
    | {form for form in SCALARS if any(kind in form for kind in FP8)}
)
"""Those that GPUs have from sm_90 on."""
