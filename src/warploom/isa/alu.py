"""What arithmetic of one and of two operands means: functions of arrays by the name of the operation.

Integers wrap, signed ones too. A shift by the width or more gives 0 (or the sign), a division of integers by zero all
ones, as 32-bit divisions do on the hardware. ``min`` and ``max`` of floats return the operand that is not NaN and take
-0 for less than +0. Floats round to nearest even.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from warploom.isa.base import Array

_NAN = np.uint32(0x7FFFFFFF)  # what conversions and approximations of the hardware make of any NaN


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
ROUND_TO_INTEGRAL: dict[str, Callable[[Array], Array]] = {
    "rzi": np.trunc,
    "rni": np.rint,
    "rmi": np.floor,
    "rpi": np.ceil,
}
