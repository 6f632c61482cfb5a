"""What narrow forms of :mod:`warploom.isa.lanewise` mean: dot products of bytes, 24-bit products, the types of fp8.

Sources: PTX ISA, "Integer Arithmetic Instructions" (``dp4a``, ``dp2a``, ``mul24``) and "Data Movement and Conversion
Instructions" (``cvt``, ``.e4m3x2``, ``.e5m2x2``, ``.satfinite``, ``.relu``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from warploom.core.dtypes import DType, bf16
from warploom.isa.base import Array

Meaning = Callable[..., Array]
FP8: dict[str, Any] = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}
"""Pairs of fp8 by PTX's name, and NumPy's type of one."""
_NAN = np.uint8(0x7F)


def _parts(word: Array, bits: int, signed: bool) -> Array:
    """The fields of a word of 32 bits, (…, fields) in s64, the lowest first."""
    kind = f"{'i' if signed else 'u'}{bits // 8}"
    return np.ascontiguousarray(word)[..., None].view(kind).astype(np.int64)


def dot(first: int, a_signed: bool, b_signed: bool, a_bits: int = 8) -> Meaning:
    """``dp4a``, and (``a_bits`` 16) ``dp2a`` with the bytes of b from ``first`` on: c + the products' sum, wrapped."""

    def product(a: Array, b: Array, c: Array) -> Array:
        left, right = _parts(a, a_bits, a_signed), _parts(b, 8, b_signed)[..., first : first + 32 // a_bits]
        total = c.astype(np.int64) + (left * right).sum(axis=-1)
        return (total & 0xFFFFFFFF).astype(np.uint32).view(c.dtype)

    return product


def product24(high: bool) -> Meaning:
    """``mul24``: the low (high) 32 bits of the product of the low 24 bits, which has 48."""

    def product(a: Array, b: Array) -> Array:
        left, right = (
            (x.astype(np.int64) << 40) >> 40 if x.dtype.kind == "i" else x.astype(np.int64) & 0xFFFFFF for x in (a, b)
        )
        return (left * right >> (16 if high else 0) & 0xFFFFFFFF).astype(np.uint32).view(a.dtype)

    return product


def held(sum_of: Meaning) -> Meaning:
    """A sum or difference of s32, within their range (``.sat``)."""

    def meaning(a: Array, b: Array) -> Array:
        exact = sum_of(a.astype(np.int64), b.astype(np.int64))
        return np.clip(exact, np.iinfo(np.int32).min, np.iinfo(np.int32).max).astype(np.int32)

    return meaning


def packed(low: Array, high: Array) -> Array:
    """The bits of two values as the halves of an unsigned integer."""
    bits = 8 * low.dtype.itemsize
    word = np.dtype(f"u{2 * low.dtype.itemsize}").type
    low, high = (np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}").astype(word) for x in (low, high))
    return high << word(bits) | low


def without_negatives(x: Array) -> Array:
    """``.relu``: negative numbers and -0 become 0."""
    return np.where((x > 0) | np.isnan(x), x, x.dtype.type(0))


def to_fp8(kind: str, relu: bool) -> Meaning:
    """Two f32, the high one first, as a pair of fp8: to nearest even, and no larger than its largest number."""
    dtype = FP8[kind]
    most = np.float32(float(ml_dtypes.finfo(dtype).max))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]

    def converted(*x: Array) -> Array:
        high, low = (np.clip(without_negatives(v) if relu else v, -most, most).astype(dtype).view(np.uint8) for v in x)
        high, low = (np.where(np.isnan(v), _NAN, part) for v, part in zip(x, (high, low), strict=True))
        return packed(low, high)

    return converted


def f16_to_fp8(kind: str, relu: bool) -> Meaning:
    """A pair of f16 in one register as a pair of fp8, rounded as :func:`to_fp8` does."""
    convert = to_fp8(kind, relu)

    def converted(pair: Array) -> Array:
        low, high = (
            np.ascontiguousarray(x).view(np.float16).astype(np.float32)
            for x in (pair.astype(np.uint16), (pair >> np.uint32(16)).astype(np.uint16))
        )
        return convert(high, low)

    return converted


def fp8_to_f16(kind: str, relu: bool) -> Meaning:
    """A pair of fp8 as one of f16, which holds them exactly."""

    def converted(pair: Array) -> Array:
        numbers = [
            np.ascontiguousarray(x).view(FP8[kind]).astype(np.float16)
            for x in (pair.astype(np.uint8), (pair >> np.uint16(8)).astype(np.uint8))
        ]
        return packed(*(without_negatives(v) if relu else v for v in numbers))

    return converted


def half_to_f32(bits: Array, half: DType) -> Array:
    """float32 values of 16-bit patterns of type ``half`` (f16 or bf16)."""
    if half is bf16:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)


def pack_halves(half: DType, low: Array, high: Array) -> Array:
    """Two f32 rounded to nearest even, as a pair of f16 or bf16."""
    return packed(*(np.ascontiguousarray(x).astype(half.numpy) for x in (low, high)))


def pair_without_negatives(half: DType) -> Meaning:
    """``cvt.rn.relu`` of two f32, the high one first, as a pair of f16 or bf16."""

    def converted(*x: Array) -> Array:
        high, low = map(without_negatives, x)
        return pack_halves(half, low, high)

    return converted
