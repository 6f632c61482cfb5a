"""Lanewise arithmetic: integers, bits, floats, comparisons, selection.

Sources: PTX ISA, "Integer Arithmetic", "Floating-Point", "Comparison and Selection", "Logic and Shift" and "Data
Movement and Conversion" instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from warploom.core.dtypes import DType, f32, pred, s16, s32, s64, u16, u32, u64
from warploom.isa.base import FLOATS, INTEGERS, REGISTERS, Array, Lanewise, takes
from warploom.isa.rounding import fma_double, fma_single

_NAN = np.uint32(0x7FFFFFFF)  # what conversions and approximations of the hardware make of any NaN
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%", "shl": "<<", "shr": ">>"}
_INFIX = _ARITHMETIC | {"and": "&", "or": "|", "xor": "^"} | COMPARISONS


_UNSIGNED = {s32: u32, s64: u64}


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


BINARY_MEANINGS: dict[str, Callable[[Array, Array], Array]] = {
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


_BINARY_TYPES: dict[str, Sequence[DType]] = {
    **dict.fromkeys(("add", "sub", "mul", "div", "min", "max", "lt", "le", "gt", "ge"), (*INTEGERS, *FLOATS)),
    **dict.fromkeys(("rem", "shl", "shr"), INTEGERS),
    **dict.fromkeys(("and", "or", "xor"), (pred, *INTEGERS)),
    **dict.fromkeys(("eq", "ne"), REGISTERS),
}


@dataclass(frozen=True, slots=True)
class Binary(Lanewise):
    """``add sub mul div rem and or xor min max shl shr`` and the comparisons ``lt le gt ge eq ne`` of one type.

    Integers wrap, signed ones too: C++, which leaves that open, gets them as unsigned. A shift by the width or more
    gives 0 (or the sign). A division of integers by zero is unspecified in PTX; here it gives all ones, as 32-bit
    divisions do on the hardware. ``min`` and ``max`` of floats return the operand that is not NaN and take -0 for less
    than +0. ``shl``/``shr`` take a u32 count. Floats round to nearest even.
    """

    op: str
    dtype: DType
    ptx = "{self.op}.{self.dtype}"

    def __post_init__(self) -> None:
        takes(self.op, self.dtype, _BINARY_TYPES[self.op])

    @property
    def wraps_signed(self) -> bool:
        """Whether its text computes in the unsigned type, so that it wraps."""
        return self.dtype in _UNSIGNED and self.op in ("add", "sub", "mul", "shl")

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """Both operands have ``dtype``; the count of a shift is u32."""
        return (self.dtype, u32 if self.op in ("shl", "shr") else self.dtype)

    @property
    def result_types(self) -> tuple[DType, ...]:
        """``dtype``, or a predicate for a comparison."""
        return (pred if self.op in COMPARISONS else self.dtype,)

    def expression(self, operands: Sequence[str]) -> str:
        """An infix operator of C++; ``min`` and ``max`` call ``fminf`` or ``fmin`` for floats, else ``min``."""
        a, b = operands
        if self.op in ("min", "max"):
            suffix = {f32.name: "f", "f64": ""}.get(self.dtype.name)
            return f"f{self.op}{suffix}({a}, {b})" if suffix is not None else f"{self.op}({a}, {b})"
        if self.wraps_signed:
            cast = f"({self.dtype.cuda})"
            inner = a.removeprefix(cast) if a.startswith(f"{cast}(") else a  # of a sum of sums only the outer cast
            return f"{cast}(({_UNSIGNED[self.dtype].cuda}){inner} {_INFIX[self.op]} {b})"
        if self.dtype is u16 and self.op == "mul":
            return f"(unsigned){a} * {b}"  # as int it could overflow
        return f"{a} {_INFIX[self.op]} {b}"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """One rounding, wrapping integers, and for edge cases what the class says; shape as the operands'."""
        return (BINARY_MEANINGS[self.op](operands[0], operands[1]),)


def flush_subnormal(x: Array) -> Array:
    """``.ftz``: subnormal f32 values become zero of the same sign."""
    return np.where(np.abs(x) < np.float32(1.1754943508222875e-38), np.copysign(np.float32(0), x), x)


def _bits(x: Array) -> Array:
    """The same bits, unsigned."""
    return np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")


def _bit_reverse(x: Array) -> Array:
    x = _bits(x)
    if x.dtype.itemsize == 8:
        low, high = (_bit_reverse((x >> np.uint64(n)).astype(np.uint32)).astype(np.uint64) for n in (0, 32))
        return (low << np.uint64(32)) | high
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        low = np.uint32(mask)
        x = ((x >> np.uint32(shift)) & low) | ((x & low) << np.uint32(shift))
    return x


def _leading_zeros(x: Array) -> Array:
    x = _bits(x)
    if x.dtype.itemsize == 8:
        low, high = (_leading_zeros((x >> np.uint64(n)).astype(np.uint32)) for n in (0, 32))
        return np.where(high == 32, low + np.uint32(32), high)
    return np.where(x == 0, 32, 31 - np.floor(np.log2(np.maximum(x, 1).astype(np.float64)))).astype(np.uint32)


def _round_tf32(x: Array) -> Array:
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, np.where(np.isnan(x), _NAN, bits))


UNARY_MEANINGS: dict[str, Callable[[Array], Array]] = {
    "neg": lambda a: -a,
    "not": lambda a: ~a,
    "abs": lambda a: np.abs(a),
    "ex2": lambda a: flush_subnormal(np.exp2(flush_subnormal(a))),
    "lg2": lambda a: np.log2(flush_subnormal(a)),
    "rcp": lambda a: flush_subnormal(np.float32(1) / flush_subnormal(a)),
    "rsqrt": lambda a: np.float32(1) / np.sqrt(flush_subnormal(a)),
    "sqrt": lambda a: np.sqrt(a),
    "tanh": lambda a: np.tanh(a),
    "popc": lambda a: np.bitwise_count(_bits(a)).astype(np.uint32),
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
_COUNTING = ("popc", "clz", "brev")
_UNARY_TYPES: dict[str, Sequence[DType]] = {
    **dict.fromkeys(("ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh", "tf32"), (f32,)),
    **dict.fromkeys(_COUNTING, (u32, s32, u64, s64)),
    "neg": (*INTEGERS, *FLOATS),
    "abs": (s16, s32, s64, *FLOATS),
    "not": (pred, *INTEGERS),
}


@dataclass(frozen=True, slots=True)
class Unary(Lanewise):
    """``neg not abs popc clz brev sqrt``, the approximations ``ex2 lg2 rcp rsqrt tanh`` and rounding to ``tf32``.

    ``popc`` and ``clz`` give a u32, ``brev`` an unsigned integer of the operand's width; bits are bits, signed or not.
    ``ex2 lg2 rcp rsqrt`` are the ``.approx.ftz.f32`` forms: the hardware's error is at most 2 ulp (PTX ISA); the
    emulator rounds the exact value, so results may differ in the last bits.
    """

    op: str
    dtype: DType
    takes = ("dtype",)

    def __post_init__(self) -> None:
        takes(self.op, self.dtype, _UNARY_TYPES[self.op])

    @property
    def mnemonic(self) -> str:
        """PTX's name with its qualifiers, ``ex2.approx.ftz.f32``, where inline PTX prints it; else ``neg.s32``."""
        return _UNARY_PTX.get(self.op, f"{self.op}.{self.dtype.name}")

    @property
    def result_types(self) -> tuple[DType, ...]:
        """``dtype``; u32 for counts and a tf32 value (its bits in a 32-bit register), unsigned for reversed bits."""
        if self.op == "brev":
            return (_UNSIGNED.get(self.dtype, self.dtype),)
        return (u32 if self.op in ("popc", "clz", "tf32") else self.dtype,)

    @property
    def has_expression(self) -> bool:
        """True for what C++ or a plain intrinsic computes; approximations and ``sqrt.rn`` are inline PTX."""
        integer_abs = self.op == "abs" and self.dtype.is_integer  # C++'s leaves the least integer open
        return self.op not in _UNARY_PTX and not integer_abs

    def expression(self, operands: Sequence[str]) -> str:
        """``-x`` (of the unsigned type), ``~x`` (``!x`` of a predicate), ``fabsf(x)``, ``__popc(x)``, ``__clzll(x)``"""
        (x,) = operands
        if self.op == "not":
            return f"!{x}" if self.dtype is pred else f"~{x}"
        if self.op == "neg":
            unsigned = _UNSIGNED.get(self.dtype)
            return f"-{x}" if unsigned is None else f"({self.dtype.cuda})-({unsigned.cuda}){x}"
        if self.op == "abs":
            return f"{'fabsf' if self.dtype is f32 else 'fabs'}({x})"
        return f"__{self.op}{'ll' if self.dtype.bits == 64 else ''}({x})"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """NumPy's value; the ``.ftz`` forms take subnormal inputs and results as zero."""
        return (UNARY_MEANINGS[self.op](operands[0]),)


@dataclass(frozen=True, slots=True)
class Fma(Lanewise):
    """``fma.rn``: a·b + c of f32 or f64, rounded once."""

    dtype: DType = f32
    ptx = "fma.rn.{self.dtype}"
    takes = ("dtype",) * 3
    gives = ("dtype",)

    def __post_init__(self) -> None:
        takes("fma", self.dtype, FLOATS)

    def expression(self, operands: Sequence[str]) -> str:
        """``__fmaf_rn(a, b, c)`` or ``__fma_rn(a, b, c)``, which the compiler neither splits nor joins."""
        return f"{'__fmaf_rn' if self.dtype is f32 else '__fma_rn'}({', '.join(operands)})"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """a·b + c rounded once to nearest even, for subnormals and infinities too."""
        return ((fma_single if self.dtype is f32 else fma_double)(*operands),)


@dataclass(frozen=True, slots=True)
class MultiplyWide(Lanewise):
    """``mul.wide``: the 64-bit product of two 32-bit integers (``u32`` → ``u64``, ``s32`` → ``s64``)."""

    dtype: DType
    ptx = "mul.wide.{self.dtype}"
    takes = ("dtype", "dtype")

    def __post_init__(self) -> None:
        takes("mul.wide", self.dtype, (u32, s32))

    @property
    def result_types(self) -> tuple[DType, ...]:
        """u64 for u32, s64 for s32."""
        return (u64 if self.dtype is u32 else s64,)

    def expression(self, operands: Sequence[str]) -> str:
        """A product in the 64-bit type, which ptxas makes one wide multiplication."""
        wide = self.result_types[0].cuda
        return f"({wide}){operands[0]} * {operands[1]}"  # the second operand widens by itself

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """The whole product: nothing wraps."""
        wide = self.result_types[0].numpy
        return (operands[0].astype(wide) * operands[1].astype(wide),)


@dataclass(frozen=True, slots=True)
class Select(Lanewise):
    """``selp``: the second operand where the predicate holds, else the third."""

    dtype: DType
    ptx = "selp.{self.dtype}"
    call = "{0} ? {1} : {2}"  # both values are computed already, so nothing branches
    takes = (pred, "dtype", "dtype")
    gives = ("dtype",)

    def __post_init__(self) -> None:
        takes("selp", self.dtype, REGISTERS)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """Per lane the second or the third operand, bit for bit."""
        return (np.where(operands[0], operands[1], operands[2]).astype(self.dtype.numpy),)
