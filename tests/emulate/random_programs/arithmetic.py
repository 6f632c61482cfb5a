"""What operations mean, on Python's integers, floats and fractions."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

BITS = {"u32": 32, "s32": 32, "u64": 64}


def wrap(kind: str, x: int) -> int:
    """An integer in the range of its type."""
    bits = BITS[kind]
    x &= (1 << bits) - 1
    return x - (1 << bits) if kind[0] == "s" and x >> (bits - 1) else x


def rounded(x: float | Fraction) -> float:
    """The nearest f32, ties to even; a Fraction is exact before."""
    if isinstance(x, Fraction):
        if x == 0:
            return 0.0
        near = rounded(float(x))  # rounded twice: mend ties
        if math.isinf(near):
            return near
        options = (near, _beside(near, 1), _beside(near, -1))
        return min(options, key=lambda y: (abs(Fraction(y) - x) if math.isfinite(y) else math.inf, bits_of(y) & 1))
    if math.isnan(x) or math.isinf(x):
        return x
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


def bits_of(x: float) -> int:
    """The pattern of an f32."""
    return struct.unpack("I", struct.pack("f", x))[0]


def _beside(x: float, step: int) -> float:
    bits = bits_of(x)
    magnitude = (bits & 0x7FFFFFFF) + step
    if magnitude < 0 or magnitude > 0x7F800000:
        return x
    return struct.unpack("f", struct.pack("I", bits & 0x80000000 | magnitude))[0]


def integer(op: str, kind: str, x: int, y: int) -> int:
    """A binary operation on integers; quotients round towards 0."""
    if op in ("div", "rem"):
        quotient = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
        return wrap(kind, quotient if op == "div" else x - quotient * y)
    calls: dict[str, Callable[[int, int], int]] = {
        "add": operator.add,
        "sub": operator.sub,
        "mul": operator.mul,
        "and": operator.and_,
        "or": operator.or_,
        "xor": operator.xor,
        "min": min,
        "max": max,
        "shl": operator.lshift,
        "shr": operator.rshift,
    }
    return wrap(kind, calls[op](x, y))


def floating(op: str, x: float, y: float) -> float:
    """A binary operation on f32; the other operand where one is NaN, for min and max."""
    if op in ("min", "max"):
        if math.isnan(x) or math.isnan(y):
            return y if math.isnan(x) else x
        if x == y:  # -0 is less than +0
            less, more = sorted((x, y), key=lambda z: math.copysign(1, z))
        else:
            less, more = sorted((x, y))
        return less if op == "min" else more
    if op == "mul" and ((math.isinf(x) and y == 0) or (math.isinf(y) and x == 0)):
        return math.nan
    return rounded({"add": operator.add, "sub": operator.sub, "mul": operator.mul}[op](x, y))


def unary(op: str, kind: str, x: int) -> int:
    """A count, a reversal or a complement of bits."""
    bits = BITS[kind]
    pattern = x & (1 << bits) - 1
    if op == "popc":
        return pattern.bit_count()
    if op == "clz":
        return bits - pattern.bit_length()
    if op == "brev":
        return wrap(kind, int(f"{pattern:0{bits}b}"[::-1], 2))
    return wrap(kind, ~x)


def converted(x: Any, kind: str, to: str) -> Any:
    """A conversion by value; NaN becomes 0, and the highest bit alone where the integer has 64 bits."""
    if to == "f32":
        return rounded(Fraction(x)) if kind != "f32" else x
    if kind == "f32":
        if math.isnan(x):
            return 0 if BITS[to] == 32 else 1 << 63
        least, most = wrap(to, 1 << BITS[to] - 1) if to[0] == "s" else 0, (1 << BITS[to] - (to[0] == "s")) - 1
        return most if x >= most else least if x <= least else int(x)
    return wrap(to, x)


def fused(x: float, y: float, z: float) -> float:
    """x·y + z of f32, rounded once. The product of two f32 is exact in a double."""
    product = x * y if math.isfinite(x) and math.isfinite(y) else floating("mul", x, y)
    if not math.isfinite(product) or not math.isfinite(z):
        return product + z
    exact = Fraction(product) + Fraction(z)
    return rounded(exact) if exact else product + z
