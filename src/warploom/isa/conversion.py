"""Lanewise conversions: between types, within a register's bits, and packed 16-bit pairs.

Sources: PTX ISA, "Data Movement and Conversion Instructions" and "Half Precision Floating-Point Instructions".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from warploom.core.dtypes import DType, bf16, f32, pred, s8, s32, s64, u8, u16, u32, u64
from warploom.core.errors import VerifyError
from warploom.isa.alu import ROUND_TO_INTEGRAL
from warploom.isa.base import (
    ANY,
    EQUALITY,
    PREFIX,
    PRIMARY,
    REGISTERS,
    SUM,
    Array,
    Lanewise,
    filled,
    takes,
    unsigned_bits,
)
from warploom.isa.poison import HIGH, LOW

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

Rounding = Literal["rzi", "rni", "rmi", "rpi"]
_INTRINSIC = {s32: "int", u32: "uint", s64: "ll", u64: "ull"}


@dataclass(frozen=True, slots=True)
class _Cast(Lanewise):
    """One register of type ``source`` in, one of type ``dtype`` out, lane by lane."""

    source: DType
    dtype: DType
    takes = ("source",)
    gives = ("dtype",)

    def __post_init__(self) -> None:
        for dtype in (self.source, self.dtype):
            takes("a conversion", dtype, REGISTERS)


@dataclass(frozen=True, slots=True)
class Bitcast(_Cast):
    """The same bits read as another type of the same width."""

    moves_bits: ClassVar[bool] = True
    ptx = "mov.b{self.dtype.bits}.{self.source}.{self.dtype}"

    def expression(self, operands: Sequence[str]) -> str:
        """``__float_as_uint(x)`` and its like between floats and integers, a cast between integers."""
        cast = _BITCAST.get((self.source.name, self.dtype.name), f"({self.dtype.cuda}){{}}")
        return cast.format(operands[0])

    @property
    def binds(self) -> tuple[int, tuple[int, ...]]:
        """As a cast."""
        return PREFIX, (PREFIX,)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """The operand's bits, viewed as the other type."""
        return (np.ascontiguousarray(operands[0]).view(self.dtype.numpy),)


@dataclass(frozen=True, slots=True)
class Convert(_Cast):
    """A conversion by value: integers widen, narrow (wrapping) or become floats; floats become integers.

    ``rounding`` is PTX's, and other than rzi of a float to an integer of 32 or 64 bits alone: rzi truncates, rni takes
    the nearest (of two the even one), rmi and rpi go down and up. Floats beyond an integer type's range become its
    nearest end; a NaN becomes 0 where both types have 32 bits, else the integer whose highest bit alone is set (PTX
    ISA, ``cvt``).
    """

    rounding: Rounding = "rzi"

    def __post_init__(self) -> None:
        _Cast.__post_init__(self)
        if self.rounding != "rzi" and not (self.source.is_float and self.dtype in _INTRINSIC):
            raise VerifyError(
                f"{self.rounding} rounds f32 and f64 to s32, u32, s64 and u64, not {self.source} to {self.dtype}"
            )

    @property
    def mnemonic(self) -> str:
        """``cvt.f32.s32``, ``cvt.rni.s32.f32``: the new type, then the old (PTX ISA, "cvt")."""
        rounding = "" if self.rounding == "rzi" else f"{self.rounding}."
        return f"cvt.{rounding}{self.dtype.name}.{self.source.name}"

    def expression(self, operands: Sequence[str]) -> str:
        """A C++ cast, ``x != 0`` for a predicate, or the function that rounds."""
        if self.dtype is pred:
            return f"{operands[0]} != 0"
        if self.rounding != "rzi":
            way = {"rni": "rn", "rmi": "rd", "rpi": "ru"}[self.rounding]
            return f"__{self.source.cuda}2{_INTRINSIC[self.dtype]}_{way}({operands[0]})"
        return f"({self.dtype.cuda}){operands[0]}"

    @property
    def binds(self) -> tuple[int, tuple[int, ...]]:
        """As a cast, or as a comparison with 0."""
        return (EQUALITY, (SUM,)) if self.dtype is pred else (PREFIX, (PREFIX,))

    @property
    def exact(self) -> Callable[..., Array] | None:  # type: ignore[override]
        """An integer that becomes one of a larger type stays as it is."""
        widens = self.source.is_integer and self.dtype.bits >= self.source.bits
        return Move.exact if widens else None

    def shadow(self, values: Sequence[Array], shadows: Sequence[Array], results: Sequence[Array]) -> tuple[Array, ...]:
        """Between integers the shadow converts as the value does: a poisoned sign poisons all bits it extends to."""
        if self.source.is_integer and self.dtype.is_integer:
            return (unsigned_bits(self.meaning(shadows[0].view(values[0].dtype))[0]),)
        return Lanewise.shadow(self, values, shadows, results)

    @property
    def _from_nan(self) -> int:
        if self.source.bits == self.dtype.bits == 32:
            return 0
        return -(1 << (self.dtype.bits - 1)) if self.dtype.kind == "signed" else 1 << (self.dtype.bits - 1)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """As ``cvt`` does it on the hardware, where NumPy's casts of NaN and large floats are undefined."""
        x = operands[0]
        if not (self.source.is_float and self.dtype.is_integer):
            return (x.astype(self.dtype.numpy),)
        info = np.iinfo(self.dtype.numpy)
        whole = np.nan_to_num(ROUND_TO_INTEGRAL[self.rounding](x.astype(np.float64)), nan=0.0)
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
class PackPair(Lanewise):
    """``cvt.rn.{f16x2,bf16x2}.f32``: two f32 values (low, high) rounded to nearest even into one u32."""

    half: DType
    ptx = "cvt.rn.{self.half}x2.f32"
    takes = (f32, f32)
    gives = (u32,)

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """Inline PTX, which names the high half first."""
        low, high = operands
        return Lanewise.cuda(self, results, (high, low))

    def shadow(self, values: Sequence[Array], shadows: Sequence[Array], results: Sequence[Array]) -> tuple[Array, ...]:
        """A poisoned operand poisons its half."""
        low, high = shadows
        return (np.where(low != 0, LOW, np.uint32(0)) | np.where(high != 0, HIGH, np.uint32(0)),)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """Each value rounded to nearest even; beyond the half type's range it becomes infinite."""
        low, high = (_to_half(x, self.half).astype(np.uint32) for x in operands)
        return (low | (high << np.uint32(16)),)


@dataclass(frozen=True, slots=True)
class UnpackHalf(Lanewise):
    """One half (0 low, 1 high) of a packed pair as f32, exactly."""

    half: DType
    which: int
    takes = (u32,)
    gives = (f32,)

    @property
    def mnemonic(self) -> str:
        """``cvt.f32.bf16.low`` or ``.high``: which half widens."""
        return f"cvt.f32.{self.half.name}.{'high' if self.which else 'low'}"

    @property
    def has_expression(self) -> bool:
        """True for bf16, whose bits are the upper half of an f32; f16 takes a ``cvt``."""
        return self.half is bf16

    def expression(self, operands: Sequence[str]) -> str:
        """bf16: the half shifted or masked into the upper 16 bits of an f32."""
        bits = f"{operands[0]} & 0xffff0000u" if self.which else f"{operands[0]} << 16"
        return f"__uint_as_float({bits})"

    @property
    def template(self) -> str:
        """f16: one half of the register, split, and converted."""
        pair = "{unused, half}" if self.which else "{half, unused}"
        return f"{{ .reg .b16 half, unused; mov.b32 {pair}, %1; cvt.f32.f16 %0, half; }}"

    @property
    def binds(self) -> tuple[int, tuple[int, ...]]:
        """As a call, around a shift or a mask."""
        return PRIMARY, (PREFIX,)

    def shadow(self, values: Sequence[Array], shadows: Sequence[Array], results: Sequence[Array]) -> tuple[Array, ...]:
        """A poisoned bit of the half poisons the result."""
        return (filled((shadows[0] & (HIGH if self.which else LOW)) != 0, results[0].dtype),)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """The exact value; every f16 and bf16 value is an f32."""
        bits = (operands[0] >> np.uint32(16 * self.which)).astype(np.uint16)
        return (half_to_f32(bits, self.half),)


@dataclass(frozen=True, slots=True)
class PackBytes(Lanewise):
    """``cvt.pack.sat.{s8,u8}.s32.b32``: two s32, clamped to bytes, below the low half of a word that moves up.

    Of (low, high, word) the result is ``word << 16 | high << 8 | low``.
    """

    byte: DType
    ptx = "cvt.pack.sat.{self.byte}.s32.b32"
    takes = (s32, s32, u32)
    gives = (u32,)

    def __post_init__(self) -> None:
        takes("cvt.pack", self.byte, (s8, u8))

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """Inline PTX, which names the high byte first."""
        low, high, word = operands
        return Lanewise.cuda(self, results, (high, low, word))

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """Both values clamped; the word's upper half leaves."""
        info = np.iinfo(self.byte.numpy)
        low, high = (np.clip(x, info.min, info.max).astype(np.uint32) & np.uint32(0xFF) for x in operands[:2])
        return (operands[2] << np.uint32(16) | high << np.uint32(8) | low,)


@dataclass(frozen=True, slots=True)
class Permute(Lanewise):
    """``prmt.b32``: four bytes picked from the eight of two registers by the nibbles of an immediate selector.

    The first register has the bytes 0 to 3, the second those from 4 to 7.
    """

    selector: int
    moves_bits: ClassVar[bool] = True
    ptx = "prmt.b32.{self.selector:#06x}"
    call = "__byte_perm({0}, {1}, {self.selector:#x})"
    takes = (u32, u32)
    gives = (u32,)

    def __post_init__(self) -> None:
        if not 0 <= self.selector <= 0x7777 or self.selector & 0x8888:
            raise VerifyError(f"prmt picks four of the bytes 0 to 7, one a hex digit, not {self.selector:#x}")

    @property
    def binds(self) -> tuple[int, tuple[int, ...]]:
        """As a call."""
        return PRIMARY, (ANY, ANY)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """Byte i is the one that nibble i of the selector names; sign replication is not supported."""
        low, high = operands
        result = np.zeros(np.broadcast(low, high).shape, np.uint32)
        for i in range(4):
            pick = (self.selector >> (4 * i)) & 7
            source = low if pick < 4 else high
            result |= ((source >> np.uint32(8 * (pick & 3))) & np.uint32(0xFF)) << np.uint32(8 * i)
        return (result,)


_HALF_TYPE = {u32: u16, u64: u32}


@dataclass(frozen=True, slots=True)
class Combine(Lanewise):
    """``mov.b32 d, {low, high}``: two registers as the halves of one of type ``dtype``, u32 or u64."""

    dtype: DType
    moves_bits: ClassVar[bool] = True
    ptx = "mov.b{self.dtype.bits}.combine"
    inline = "mov.b{self.dtype.bits} %0, {{%1, %2}};"
    gives = ("dtype",)

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """The low half, the high half."""
        return (_HALF_TYPE[self.dtype],) * 2

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """The bits of both, side by side."""
        low, high = (x.astype(self.dtype.numpy) for x in operands)
        return (low | high << self.dtype.numpy.type(self.dtype.bits // 2),)


@dataclass(frozen=True, slots=True)
class Half(Lanewise):
    """``mov.b32 {low, high}, a``: one half (0 low, 1 high) of a register of type ``dtype``, u32 or u64."""

    dtype: DType
    which: int
    moves_bits: ClassVar[bool] = True
    takes = ("dtype",)

    @property
    def mnemonic(self) -> str:
        """The move, its width and which half (PTX ISA, "mov")."""
        return f"mov.b{self.dtype.bits}.{'high' if self.which else 'low'}"

    @property
    def result_types(self) -> tuple[DType, ...]:
        """The half."""
        return (_HALF_TYPE[self.dtype],)

    @property
    def template(self) -> str:
        """``mov`` of a register into a vector, of which one part stays."""
        bits, pair = self.dtype.bits // 2, "{unused, half}" if self.which else "{half, unused}"
        return f"{{ .reg .b{bits} half, unused; mov.b{self.dtype.bits} {pair}, %1; mov.b{bits} %0, half; }}"

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """The half's bits."""
        half = self.result_types[0]
        moved = operands[0] >> self.dtype.numpy.type(half.bits) if self.which else operands[0]
        return (moved.astype(half.numpy),)


@dataclass(frozen=True, slots=True)
class Move(Lanewise):
    """A copy of one register: how a mutable register is set and how its value is kept."""

    dtype: DType
    moves_bits: ClassVar[bool] = True
    ptx = "mov.{self.dtype}"
    call = "{0}"
    takes = ("dtype",)
    gives = ("dtype",)

    @staticmethod
    def exact(x: Array) -> Array:  # type: ignore[override]
        """The value, unchanged."""
        return x

    @staticmethod
    def gradient(_k: Any, _y: Any, g: Any, _x: Any) -> Sequence[Any]:  # type: ignore[override]
        """The gradient, unchanged."""
        return (g,)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """The operand, unchanged."""
        return (operands[0],)
