"""Sums and products rounded once, by way of rounding to odd.

A result that is inexact gets an odd last bit; rounding it again to a format at least two bits shorter is then as good
as rounding the exact value. Source: S. Boldo and G. Melquiond, "Emulation of FMA and correctly rounded sums: proved
algorithms using rounding to odd", IEEE Transactions on Computers 57 (2008).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_SPLIT = 2.0**27 + 1.0
_SPLIT_LIMIT = 2.0**970
"""Beyond it the parts of a product leave the range of f64."""


def _two_sum(x: Array, y: Array) -> tuple[Array, Array]:
    """(s, e) with s = x + y rounded and s + e exact (Knuth)."""
    total = x + y
    back = total - x
    return total, (x - (total - back)) + (y - back)


def _made_odd(total: Array, error: Array, integers: np.dtype[Any]) -> Array:
    """The neighbour of ``total`` with an odd last bit where there is an error; ``total`` elsewhere."""
    bits = np.ascontiguousarray(total).view(integers)
    outward = (error > 0) == (total > 0)
    odd = (bits + np.where(outward, 1, -1).astype(integers)).view(total.dtype)
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


def fma_double(a: Array, b: Array, c: Array) -> Array:
    """a·b + c of f64 arrays, rounded once where no factor or product is near the ends of the range."""
    product, product_error = _two_product(a, b)
    low, low_error = _two_sum(c, product_error)
    high, high_error = _two_sum(product, low)
    result = high + sum_to_odd(low_error, high_error)
    usable = (np.abs(a) < _SPLIT_LIMIT) & (np.abs(b) < _SPLIT_LIMIT) & np.isfinite(result)
    return np.where(usable, result, a * b + c)


def _two_product(a: Array, b: Array) -> tuple[Array, Array]:
    """(p, e) with p = a·b rounded and p + e exact (Dekker)."""
    product = a * b
    a_high, b_high = (_SPLIT * x - (_SPLIT * x - x) for x in (a, b))
    a_low, b_low = a - a_high, b - b_high
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low
