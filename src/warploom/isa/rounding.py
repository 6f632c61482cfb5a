"""Sums and products rounded once, by way of rounding to odd.

A result that is inexact gets an odd last bit; rounding it again to a format at least two bits shorter is then as good
as rounding the exact value. Source: S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved
algorithms using rounding to odd", IEEE Transactions on Computers 57 (2008).
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_SPLIT = 2.0**27 + 1.0


def _two_sum(x: Array, y: Array) -> tuple[Array, Array]:
    """(s, e) with s = x + y rounded and s + e exact (Knuth)."""
    total = x + y
    back = total - x
    return total, (x - (total - back)) + (y - back)


def _made_odd(total: Array, error: Array, integers: np.dtype[Any]) -> Array:
    """The neighbour of ``total`` with an odd last bit where there is an error; ``total`` elsewhere."""
    bits = np.ascontiguousarray(total).view(integers)
    outward = (error > 0) == (total > 0)
    beside = (bits + np.where(outward, 1, -1).astype(integers)).view(total.dtype)
    least = np.copysign(np.ones_like(bits).view(total.dtype), error).astype(total.dtype)
    odd = np.where(total == 0, least, beside)
    return np.where((error != 0) & (bits & 1 == 0) & np.isfinite(total), odd, total)


def sum_to_odd(x: Array, y: Array) -> Array:
    """x + y of f64 arrays, rounded to odd."""
    total, error = _two_sum(x, y)
    return _made_odd(total, error, np.dtype(np.int64))


def single_to_odd(x: Array) -> Array:
    """f64 values as f32, rounded to odd: what may be rounded once more, to a 16-bit type."""
    single = x.astype(np.float32)
    finite = np.where(np.isfinite(x) & np.isinf(single), np.copysign(np.finfo(np.float32).max, x), single)
    single = finite.astype(np.float32)
    return _made_odd(single, x - single.astype(np.float64), np.dtype(np.int32))


def _ties_are_possible(total: Array) -> bool:
    """Whether rounding an f64 sum to f32 could meet a tie, or a subnormal result: else one rounding is hidden."""
    bits = np.ascontiguousarray(total).view(np.uint64)
    tie = (bits & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    return bool((tie | (np.abs(total) < 2.0**-125)).any())


def fma_single(a: Array, b: Array, c: Array) -> Array:
    """a·b + c of f32 arrays, rounded once. The product is exact in f64."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    if _ties_are_possible(total):
        total = sum_to_odd(product, addend)
    return total.astype(np.float32)


def sum_towards(x: Array, y: Array, mode: str) -> Array:
    """x + y of f64 arrays as f32, rounded down (``rm``), up (``rp``) or to zero (``rz``)."""
    exact = sum_to_odd(x, y)
    single = exact.astype(np.float32)
    back = single.astype(np.float64)
    if mode == "rz":
        beyond, limit = np.abs(back) > np.abs(exact), np.float32(0)
    else:
        beyond, limit = (back > exact, np.float32(-np.inf)) if mode == "rm" else (back < exact, np.float32(np.inf))
    found = np.where(beyond & np.isfinite(exact), np.nextafter(single, limit), single)
    cancelled = (exact == 0) & (np.signbit(x) != np.signbit(y))
    return np.where(cancelled, np.float32(-0.0 if mode == "rm" else 0.0), found)


def fma_double(a: Array, b: Array, c: Array) -> Array:
    """a·b + c of f64 arrays, rounded once."""
    x, y, exponent = _balanced(a, b)
    product, product_error = _two_product(x, y)
    low, low_error = _two_sum(c, product_error)
    high, high_error = _two_sum(product, low)
    result = high + sum_to_odd(low_error, high_error)
    # A zero or an infinity has its sign from the plain operations.
    result = np.where(np.isfinite(result) & (result != 0), result, a * b + c)
    # Where the errors of the product could underflow, or a sum could overflow on its way to a smaller one.
    extreme = (exponent < -960) | (exponent > 1020) | (np.frexp(c)[1] > 1020)
    extreme = extreme & (a != 0) & (b != 0) & np.isfinite(a) & np.isfinite(b) & np.isfinite(c)
    for place in map(tuple, np.argwhere(extreme)):
        result[place] = _exact_fma(*(float(np.broadcast_to(x, result.shape)[place]) for x in (a, b, c)))
    return result


def _exact_fma(a: float, b: float, c: float) -> float:
    """a·b + c in rational numbers, rounded once; where that is 0, the plain operations are exact and give its sign."""
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return a * b + c
    try:
        size = float(abs(exact))
    except OverflowError:
        size = math.inf
    return size if exact > 0 else -size


def _balanced(a: Array, b: Array) -> tuple[Array, Array, Array]:
    """Factors of the same product with similar exponents, so that splitting them does not overflow; their sum."""
    (a_part, a_exponent), (b_part, b_exponent) = np.frexp(a), np.frexp(b)
    total = a_exponent + b_exponent
    half = total // 2
    return np.ldexp(a_part, half), np.ldexp(b_part, total - half), total


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """(p, e) with p = a·b rounded and p + e exact (Dekker)."""
    product = a * b
    a_high, b_high = (_SPLIT * x - (_SPLIT * x - x) for x in (a, b))
    a_low, b_low = a - a_high, b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
