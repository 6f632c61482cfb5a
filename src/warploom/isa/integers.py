"""What integer forms of :mod:`warploom.isa.lanewise` mean: high products, fields of bits, bytes by a selector.

Sources: PTX ISA, "Integer Arithmetic" and "Logic and Shift" instructions, ``prmt``.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from warploom.isa.alu import UNARY_MEANINGS
from warploom.isa.base import Array

Two = Callable[[Array, Array], Array]
Meaning = Callable[..., Array]


def multiply_high(a: Array, b: Array) -> Array:
    """``mul.hi``: the upper half of a product."""
    bits = a.dtype.itemsize * 8
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
        return (a.astype(wide) * b.astype(wide)) >> wide.type(bits)
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    x, y = (np.ascontiguousarray(v).view(np.uint64) for v in (a, b))
    x_low, x_high, y_low, y_high = x & mask, x >> half, y & mask, y >> half
    middle = x_high * y_low + (x_low * y_low >> half)
    other = x_low * y_high + (middle & mask)
    high = x_high * y_high + (middle >> half) + (other >> half)
    if a.dtype.kind == "i":  # a negative factor counts 2^64 too much
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


def funnel_shift(left: bool, wrap: bool) -> Meaning:
    """``shf``: two words are shifted as one; ``wrap``: by a count modulo 32, else by 32 at most."""

    def shift(low: Array, high: Array, count: Array) -> Array:
        n = (count & np.uint32(31) if wrap else np.minimum(count, np.uint32(32))).astype(np.uint64)
        both = high.astype(np.uint64) << np.uint64(32) | low
        moved = both << n >> np.uint64(32) if left else both >> n
        return (moved & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return shift


def extract(value: Array, position: Array, length: Array) -> Array:
    """``bfe``: a field of bits, zero- or sign-extended by the type; beyond the top, the sign."""
    bits = value.dtype.itemsize * 8
    start, count = (np.minimum(x & np.uint32(255), bits).astype(np.int64) for x in (position, length))
    word = np.ascontiguousarray(value).view(f"u{value.dtype.itemsize}").astype(np.uint64)
    mask = _low_ones(count)
    found = np.where(start < 64, word >> np.minimum(start, 63).astype(np.uint64), np.uint64(0)) & mask
    if value.dtype.kind == "i":
        top = np.clip(np.minimum(start + count - 1, bits - 1), 0, 63).astype(np.uint64)
        found = np.where((word >> top & np.uint64(1) == 1) & (count > 0), found | ~_inside(mask, start, bits), found)
    return found.astype(f"u{value.dtype.itemsize}").view(value.dtype)


def _inside(mask: Array, start: Array, bits: int) -> Array:
    """The bits of an extracted field that come from the value itself, not from beyond its top."""
    return mask & _low_ones(np.clip(bits - start, 0, bits))


def _low_ones(count: Array) -> Array:
    """As many one bits from the bottom, u64; ``count`` is 0 to 64."""
    ones = (np.uint64(1) << np.minimum(count, 63).astype(np.uint64)) - np.uint64(1)
    return np.where(count > 63, ~np.uint64(0), ones)


def bit_mask(clamps: bool) -> Two:
    """``bmsk``: ones from a position on; ``clamps``: numbers of 32 and more count as 32, else modulo 32."""

    def mask(start: Array, count: Array) -> Array:
        first, length = (np.minimum(x, 32) if clamps else x & np.uint32(31) for x in (start, count))
        return (_low_ones(length) << first.astype(np.uint64)).astype(np.uint32)

    return mask


def extended(clamps: bool) -> Two:
    """``szext``: the low bits as a number, by the type; a count of 32 and more as such, or modulo 32."""

    def extended(x: Array, count: Array) -> Array:
        bits = (np.minimum(count, 32) if clamps else count & np.uint32(31)).astype(np.int64)
        low = (x.astype(np.int64) & _low_ones(bits).astype(np.int64)).astype(np.int64)
        if x.dtype.kind == "i":
            top = np.where(bits > 0, low >> np.maximum(bits - 1, 0) & 1, 0)
            low = low - (top << bits)
        return low.astype(np.uint32).view(x.dtype)

    return extended


def insert(field: Array, into: Array, position: Array, length: Array) -> Array:
    """``bfi``: the low bits of ``field`` in place of bits of ``into``."""
    bits = into.dtype.itemsize * 8
    start, count = ((x & np.uint32(255)).astype(np.int64) for x in (position, length))
    fits = (start < bits) & (count > 0)
    mask = _low_ones(np.minimum(count, bits - np.minimum(start, bits)))
    shift = np.minimum(start, 63).astype(np.uint64)
    mask = np.where(fits, mask << shift, np.uint64(0)).astype(into.dtype)
    return (into & ~mask) | ((field.astype(np.uint64) << shift).astype(into.dtype) & mask)


def logic3(a: Array, b: Array, c: Array, table: int) -> Array:
    """``lop3``: bit i of ``table`` is the result where the bits of a, b, c make the number i."""
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for i in range(8):
        if table >> i & 1:
            result = result | (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


def permute(a: Array, b: Array, selector: Array) -> Array:
    """``prmt``: bytes by nibbles of the selector, whose highest bit replicates the byte's sign."""
    both = b.astype(np.uint64) << np.uint64(32) | a
    result = np.zeros(np.broadcast_shapes(a.shape, b.shape, selector.shape), np.uint32)
    for i in range(4):
        nibble = selector >> np.uint32(4 * i) & np.uint32(15)
        byte = (both >> ((nibble & np.uint32(7)) * np.uint32(8)).astype(np.uint64) & np.uint64(255)).astype(np.uint32)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        result = result | np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * i)
    return result


def highest(x: Array) -> Array:
    """``bfind``: the position of the highest bit that is not the sign, all ones for none."""
    word = np.ascontiguousarray(np.where(x < 0, ~x, x) if x.dtype.kind == "i" else x).view(f"u{x.dtype.itemsize}")
    return np.uint32(x.dtype.itemsize * 8 - 1) - UNARY_MEANINGS["clz"](word)


def left_of_highest(x: Array) -> Array:
    """``bfind.shiftamt``: the shift that would put that bit in the highest place, all ones for none."""
    at = highest(x)
    return np.where(at > 63, at, np.uint32(x.dtype.itemsize * 8 - 1) - at)


def distance_and_sum(a: Array, b: Array, c: Array) -> Array:
    """``sad``: how far a is from b, and c."""
    return np.maximum(a, b) - np.minimum(a, b) + c
