"""What lanewise forms mean: functions of arrays, by the name of an operation or made of the words of an instruction.

Integers wrap, signed ones too. A shift by the width or more gives 0 (or the sign), a division of integers by zero all
ones, as 32-bit divisions do on the hardware. ``min`` and ``max`` of floats return the operand that is not NaN and take
-0 for less than +0. Floats round to nearest even.

Flags such as ``.ftz``, ``.sat`` and ``.NaN`` are functions around functions, so that a line of the table does not
mention them. Approximations (``.approx``, ``.full``) give the exact value, rounded: hardware may differ by what PTX
allows (2 ulp for ``div.full``, ``ex2``, ``rcp`` and ``rsqrt``).
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from warploom.core.dtypes import DType, bf16, f16
from warploom.isa.cpp import OPPOSITE, SAME
from warploom.isa.form import Array, viewed
from warploom.isa.instruction import Instruction
from warploom.isa.poison import unsigned_bits

# Sums and products rounded once, by way of rounding to odd: a result that is inexact gets an odd last bit; rounding it
# again to a format at least two bits shorter is then as good as rounding the exact value. Source: S. Boldo and
# G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", IEEE
# Transactions on Computers 57 (2008).


Meaning = Callable[..., Any]
_SPLIT = 2.0**27 + 1.0


def _two_sum(x: Array, y: Array) -> tuple[Array, Array]:
    """(s, e) with s = x + y rounded and s + e exact (Knuth)."""
    total = x + y
    back = total - x
    return total, (x - (total - back)) + (y - back)


def _made_odd(total: Array, error: Array, integers: np.dtype[Any]) -> Array:
    """The neighbour of ``total`` with an odd last bit where there is an error; ``total`` elsewhere."""
    bits = viewed(total, integers)
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
    bits = viewed(total, np.uint64)
    tie = (bits & np.uint64(0x1FFFFFFF)) == np.uint64(0x10000000)
    return bool((tie | (np.abs(total) < 2.0**-125)).any())


def fma_single(a: Array, b: Array, c: Array) -> Array:
    """a·b + c of f32 arrays, rounded once. The product is exact in f64."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    if _ties_are_possible(total):
        total = sum_to_odd(product, addend)
    return total.astype(np.float32)


DIRECTED = {"rz": 0.0, "rm": -np.inf, "rp": np.inf}
"""Roundings in a direction, and what they go towards."""


def sum_towards(x: Array, y: Array, mode: str) -> Array:
    """x + y of f64 arrays as f32, rounded down (``rm``), up (``rp``) or to zero (``rz``)."""
    exact, limit = sum_to_odd(x, y), DIRECTED[mode]
    single = exact.astype(np.float32)
    beyond = np.sign(single - exact) * np.sign(limit - exact) < 0
    found = np.where(beyond, np.nextafter(single, np.float32(limit)), single)
    cancelled = (exact == 0) & (np.signbit(x) != np.signbit(y))
    return np.where(cancelled, np.float32(-0.0 if mode == "rm" else 0.0), found)


def single_towards(x: Array, mode: str) -> Array:
    """Integers or f64 as f32, rounded in a direction."""
    if x.dtype.kind == "f":
        return sum_towards(x, np.copysign(0.0, x), mode)
    wide = x.astype(f"{x.dtype.kind}8")
    low = wide & 0xFFFF  # the rest is exact in f64
    return sum_towards((wide - low) * 1.0, low * 1.0, mode)


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


# Operations by their names


_NAN = np.uint32(0x7FFFFFFF)  # what conversions and approximations of the hardware make of any NaN


def _shifted_left(value: Array, count: Array) -> Array:
    bits = value.dtype.itemsize * 8
    return np.where(count < bits, value << np.minimum(count, bits - 1).astype(value.dtype), value.dtype.type(0))


def _shifted_right(value: Array, count: Array) -> Array:
    bits = value.dtype.itemsize * 8
    beyond = value >> value.dtype.type(bits - 1) if value.dtype.kind == "i" else value.dtype.type(0)
    return np.where(count < bits, value >> np.minimum(count, bits - 1).astype(value.dtype), beyond)


def _divide(value: Array, by: Array) -> Array:
    if value.dtype.kind == "f":
        return value / by
    safe = np.where(by == 0, by.dtype.type(1), by)
    if value.dtype.kind == "i":
        unsigned = np.dtype(f"u{value.dtype.itemsize}")  # the magnitude of the least integer fits there alone
        sizes = [viewed(np.abs(x), unsigned) for x in (value, safe)]
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
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "rem": _remainder,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "min": lambda a, b: _extreme(np.fmin, a, b, a, b),
    "max": lambda a, b: _extreme(np.fmax, a, b, b, a),
    "shl": _shifted_left,
    "shr": _shifted_right,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


def flush_subnormal(x: Array) -> Array:
    """``.ftz``: subnormal f32 values become zero of the same sign."""
    return np.where(np.abs(x) < np.float32(1.1754943508222875e-38), np.copysign(np.float32(0), x), x)


def _bit_reverse(x: Array) -> Array:
    x = unsigned_bits(x)
    if x.dtype.itemsize == 8:
        low, high = map(_bit_reverse, halves_of(x))
        return packed(high, low)
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        low = np.uint32(mask)
        x = ((x >> np.uint32(shift)) & low) | ((x & low) << np.uint32(shift))
    return x


def _leading_zeros(x: Array) -> Array:
    x = unsigned_bits(x)
    if x.dtype.itemsize == 8:
        low, high = map(_leading_zeros, halves_of(x))
        return np.where(high == 32, low + np.uint32(32), high)
    return np.where(x == 0, 32, 31 - np.floor(np.log2(np.maximum(x, 1).astype(np.float64)))).astype(np.uint32)


def _round_tf32(x: Array) -> Array:
    bits = viewed(x, np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded, np.where(np.isnan(x), _NAN, bits))


UNARY_MEANINGS: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative,
    "not": np.invert,
    "abs": np.abs,
    "ex2": lambda a: flush_subnormal(np.exp2(flush_subnormal(a))),
    "lg2": lambda a: np.log2(flush_subnormal(a)),
    "rcp": lambda a: flush_subnormal(np.float32(1) / flush_subnormal(a)),
    "rsqrt": lambda a: np.float32(1) / np.sqrt(flush_subnormal(a)),
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "popc": lambda a: np.bitwise_count(unsigned_bits(a)).astype(np.uint32),
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


# High products, fields of bits, bytes by a selector


def multiply_high(a: Array, b: Array) -> Array:
    """``mul.hi``: the upper half of a product."""
    bits = a.dtype.itemsize * 8
    if bits < 64:
        wide = np.dtype(f"{a.dtype.kind}{a.dtype.itemsize * 2}")
        return (a.astype(wide) * b.astype(wide)) >> wide.type(bits)
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    x, y = (viewed(v, np.uint64) for v in (a, b))
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
    word = unsigned_bits(value).astype(np.uint64)
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
    """u64 words whose lowest ``count`` bits (0 to 64) are 1."""
    ones = (np.uint64(1) << np.minimum(count, 63).astype(np.uint64)) - np.uint64(1)
    return np.where(count > 63, ~np.uint64(0), ones)


def bit_mask(clamps: bool) -> Meaning:
    """``bmsk``: ones from a position on; ``clamps``: numbers of 32 and more count as 32, else modulo 32."""

    def mask(start: Array, count: Array) -> Array:
        first, length = (np.minimum(x, 32) if clamps else x & np.uint32(31) for x in (start, count))
        return (_low_ones(length) << first.astype(np.uint64)).astype(np.uint32)

    return mask


def extended(clamps: bool) -> Meaning:
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


PERMUTATIONS = {
    "f4e": "3210 4321 5432 6543",
    "b4e": "5670 6701 7012 0123",
    "rc8": "0000 1111 2222 3333",
    "ecl": "3210 3211 3222 3333",
    "ecr": "0000 1110 2210 3210",
    "rc16": "1010 3232 1010 3232",
}
"""Mode of ``prmt`` → its selectors for 0 to 3."""


def permuted(i: Instruction) -> Meaning:
    """``prmt``; a mode makes the selector of the last operand's two low bits."""
    if not i.mode:
        return permute
    selectors = np.array([int(x, 16) for x in PERMUTATIONS[i.mode].split()], np.uint32)
    return lambda a, b, c: permute(a, b, selectors[c & 3])


def highest(x: Array) -> Array:
    """``bfind``: the position of the highest bit that is not the sign, all ones for none."""
    word = viewed(np.where(x < 0, ~x, x) if x.dtype.kind == "i" else x, f"u{x.dtype.itemsize}")
    return np.uint32(x.dtype.itemsize * 8 - 1) - UNARY_MEANINGS["clz"](word)


def left_of_highest(x: Array) -> Array:
    """``bfind.shiftamt``: the shift that would put that bit in the highest place, all ones for none."""
    at = highest(x)
    return np.where(at > 63, at, np.uint32(x.dtype.itemsize * 8 - 1) - at)


def distance_and_sum(a: Array, b: Array, c: Array) -> Array:
    """``sad``: how far a is from b, and c."""
    return np.maximum(a, b) - np.minimum(a, b) + c


# Dot products of bytes, 24-bit products, the types of fp8


FP8: dict[str, Any] = {"e4m3x2": ml_dtypes.float8_e4m3fn, "e5m2x2": ml_dtypes.float8_e5m2}
"""Pairs of fp8 by PTX's name, and NumPy's type of one."""
_NAN_FP8 = np.uint8(0x7F)


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


def halves_of(x: Array) -> tuple[Array, Array]:
    """The low and the high half of unsigned integers."""
    half = np.dtype(f"u{x.dtype.itemsize // 2}")
    return x.astype(half), (x >> x.dtype.type(8 * half.itemsize)).astype(half)


def packed(low: Array, high: Array) -> Array:
    """The bits of two values as the halves of an unsigned integer."""
    bits = 8 * low.dtype.itemsize
    word = np.dtype(f"u{2 * low.dtype.itemsize}").type
    low, high = (unsigned_bits(x).astype(word) for x in (low, high))
    return high << word(bits) | low


def without_negatives(x: Array) -> Array:
    """``.relu``: negative numbers and -0 become 0."""
    return np.where((x > 0) | np.isnan(x), x, x.dtype.type(0))


def to_fp8(kind: str, relu: bool) -> Meaning:
    """Meaning f32, the high one first, as a pair of fp8: to nearest even, and no larger than its largest number."""
    dtype = FP8[kind]
    most = np.float32(float(ml_dtypes.finfo(dtype).max))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]

    def converted(*x: Array) -> Array:
        high, low = (np.clip(without_negatives(v) if relu else v, -most, most).astype(dtype).view(np.uint8) for v in x)
        high, low = (np.where(np.isnan(v), _NAN_FP8, part) for v, part in zip(x, (high, low), strict=True))
        return packed(low, high)

    return converted


def f16_to_fp8(kind: str, relu: bool) -> Meaning:
    """A pair of f16 in one register as a pair of fp8, rounded as :func:`to_fp8` does."""
    convert = to_fp8(kind, relu)

    def converted(pair: Array) -> Array:
        low, high = (viewed(x, np.float16).astype(np.float32) for x in halves_of(pair))
        return convert(high, low)

    return converted


def fp8_to_f16(kind: str, relu: bool) -> Meaning:
    """A pair of fp8 as one of f16, which holds them exactly."""

    def converted(pair: Array) -> Array:
        numbers = [viewed(x, FP8[kind]).astype(np.float16) for x in halves_of(pair)]
        return packed(*(without_negatives(v) if relu else v for v in numbers))

    return converted


def half_to_f32(bits: Array, half: DType) -> Array:
    """float32 values of 16-bit patterns of type ``half`` (f16 or bf16)."""
    if half is bf16:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return viewed(bits, np.float16).astype(np.float32)


def pack_halves(half: DType, low: Array, high: Array) -> Array:
    """Meaning f32 rounded to nearest even, as a pair of f16 or bf16."""
    return packed(*(np.ascontiguousarray(x).astype(half.numpy) for x in (low, high)))


def pair_without_negatives(half: DType) -> Meaning:
    """``cvt.rn.relu`` of two f32, the high one first, as a pair of f16 or bf16."""

    def converted(*x: Array) -> Array:
        high, low = map(without_negatives, x)
        return pack_halves(half, low, high)

    return converted


# Families of forms


HALVES = {"f16": f16, "bf16": bf16}


# Flags


def flagged(i: Instruction, function: Meaning) -> Meaning:
    """A function of floats with what the flags of an instruction add to it."""
    if i.fields.get("NaN"):
        function = _or_nan(function)
    if i.fields.get("ftz"):
        function = _flushed(function)
    if i.fields.get("sat"):
        function = _then(saturated, function)
    if i.fields.get("relu"):
        function = _then(without_negatives, function)
    return function


def saturated(x: Array) -> Array:
    """``.sat``: within 0 and 1, and 0 for NaN."""
    return np.where(x > 0, np.minimum(x, x.dtype.type(1)), x.dtype.type(0))


def _then(after: Meaning, function: Meaning) -> Meaning:
    return lambda *x: after(function(*x))


def _flushed(function: Meaning) -> Meaning:
    return lambda *x: flush_subnormal(function(*map(flush_subnormal, x)))


def _or_nan(choose: Meaning) -> Meaning:
    return lambda a, b: np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), choose(a, b))


# Floats


_EXACT: dict[str, Meaning] = {
    "ex2": np.exp2,
    "lg2": np.log2,
    "sin": np.sin,
    "cos": np.cos,
    "rcp": lambda a: a.dtype.type(1) / a,
    "rsqrt": lambda a: a.dtype.type(1) / np.sqrt(a),
}


def one(i: Instruction) -> Meaning:
    """A function of one operand. The four that the language has with ``.ftz`` flush as their hardware does."""
    if i.fields.get("rnd", "rn") != "rn":
        return flagged(i, _towards(i, i.rnd, i.op))
    if i.ptx_name.endswith(".approx.ftz.f32") and i.op in UNARY_MEANINGS:
        return UNARY_MEANINGS[i.op]
    return flagged(i, _EXACT.get(i.op) or UNARY_MEANINGS[i.op])


def two(i: Instruction) -> Meaning:
    """A sum, a difference, a product, a minimum or the like; of floats rounded as ``.rnd`` says."""
    if i.fields.get("rnd", "rn") in ("", "rn"):
        return flagged(i, BINARY_MEANINGS[i.op])
    return flagged(i, _towards(i, i.rnd, i.op))


def three(i: Instruction) -> Meaning:
    """A minimum or maximum of three operands."""
    choose = two(i)
    return lambda a, b, c: choose(choose(a, b), c)


def divided(i: Instruction) -> Meaning:
    """``div``: beyond 2^126 ``.approx`` takes the reciprocal of a divisor for 0."""
    divide = _towards(i, i.how, "div") if i.how in DIRECTED else BINARY_MEANINGS["div"]
    if i.how != "approx":
        return flagged(i, divide)
    return flagged(i, lambda a, b: divide(a, np.where(np.abs(b) > 2.0**126, np.copysign(b.dtype.type(np.inf), b), b)))


def fused(i: Instruction) -> Meaning:
    """``fma`` of f32 and f64, rounded once."""
    if i.rnd == "rn":
        return flagged(i, fma_double if i.words[-1] == "f64" else fma_single)
    return flagged(i, _towards(i, i.rnd, "fma"))


_QUOTIENTS: dict[str, Meaning] = {"div": np.divide, "rcp": np.reciprocal, "sqrt": np.sqrt}


_RATIONAL: dict[str, Callable[..., Fraction]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "rcp": lambda a: 1 / a,
    "sqrt": lambda a: a,  # of the square
    "fma": lambda a, b, c: a * b + c,
    "mad": lambda a, b, c: a * b + c,
}


def _corrected(mode: str, op: str, nearest: float, *x: float) -> float:
    """An operation of f64 rounded in a direction, by rational numbers; rounded to nearest it is ``nearest``."""
    if not all(map(math.isfinite, x)) or math.isnan(nearest) or (op in ("div", "rcp") and x[-1] == 0):
        return nearest
    exact = _RATIONAL[op](*map(Fraction, x))
    if math.isinf(nearest):
        up = nearest < 0
    else:
        found = Fraction(nearest) ** (2 if op == "sqrt" else 1)
        if found == exact:
            signs = [math.copysign(1, v) for v in x]
            first, last = math.prod(signs[:-1]), -signs[-1] if op == "sub" else signs[-1]
            return -0.0 if mode == "rm" and exact == 0 and op in _SUMS and first != last else nearest
        up = exact > found
    beyond = {"rm": not up, "rp": up, "rz": nearest != 0 and up == (nearest < 0)}[mode]
    return math.nextafter(nearest, DIRECTED[mode]) if beyond else nearest


_SUMS = ("add", "sub", "fma", "mad")


def _doubles_towards(mode: str, op: str) -> Meaning:
    """An operation of f64, rounded in a direction."""
    nearest = fma_double if op in ("fma", "mad") else _EXACT.get(op) or _QUOTIENTS.get(op) or BINARY_MEANINGS[op]
    correct = np.vectorize(partial(_corrected, mode, op), otypes=[np.float64])
    return lambda *x: correct(nearest(*x), *x)


def _towards(i: Instruction, mode: str, op: str) -> Meaning:
    """An operation of f32 or f64, rounded in a direction.

    Products are exact in f64. Quotients and roots are rounded there, but lie on the same side of every f32: of one that
    they are not, they are further away than 2^-50 of their size.
    """
    if i.result_types[0].bits == 64 and not i.words[-1].endswith("x2"):
        return _doubles_towards(mode, op)

    def rounded(*x: Array) -> Array:
        a, *others = (v.astype(np.float64) for v in x)
        if op in ("add", "sub"):
            return sum_towards(a, others[0] if op == "add" else -others[0], mode)
        found = _QUOTIENTS.get(op, np.multiply)(a, *others[:1])
        return sum_towards(found, others[1], mode) if op == "fma" else single_towards(found, mode)

    return rounded


_HALVES: dict[str, Meaning] = {
    "add": sum_to_odd,
    "sub": lambda a, b: sum_to_odd(a, -b),
    "mul": np.multiply,
    "fma": lambda a, b, c: sum_to_odd(a * b, c),
    "min": BINARY_MEANINGS["min"],
    "max": BINARY_MEANINGS["max"],
    "neg": np.negative,
    "abs": np.abs,
    "tanh": np.tanh,
    "ex2": np.exp2,
}


def halves(i: Instruction) -> Meaning:
    """Arithmetic of f16 and bf16, alone or in pairs: exact in f64, rounded once."""
    kind = i.fields.get("half") or i.fields["pair"]
    half = HALVES[kind.removesuffix("x2")]
    flushes = i.fields.get("ftz") and (
        lambda x: flush_subnormal(x.astype(np.float32))
    )  # bf16 alone, whose range is f32's
    function = _then(flushes, _HALVES[i.op]) if flushes else flagged(i, _HALVES[i.op])

    def single(*x: Array) -> Array:
        exact = function(*(half_to_f32(v, half).astype(np.float64) for v in x))
        return np.ascontiguousarray(single_to_odd(exact)).astype(half.numpy).view(np.uint16)

    return paired(single) if kind.endswith("x2") else single


def integer_pairs(i: Instruction) -> Meaning:
    """Sums, minima and maxima of integers in both halves of 32-bit registers."""
    dtype, relu = np.int16 if i.words[-1] == "s16x2" else np.uint16, bool(i.fields.get("relu"))
    function = BINARY_MEANINGS[i.op]

    def half(*x: Array) -> Array:
        found = function(*(viewed(v, dtype) for v in x))
        return viewed(np.maximum(found, 0) if relu else found, np.uint16)

    return paired(half)


def single_pairs(i: Instruction) -> Meaning:
    """Arithmetic of f32 in both halves of 64-bit registers."""
    function = fused(i) if i.op == "fma" else two(i)
    return paired(lambda *x: function(*(viewed(v, np.float32) for v in x)))


def paired(function: Meaning) -> Meaning:
    """A function of the bits of a half, of both halves of registers."""

    def both(*x: Array) -> Array:
        return packed(*(function(*half) for half in zip(*map(halves_of, x), strict=True)))

    return both


# Comparisons


def _numbers(a: Array, b: Array) -> Array:
    return ~(np.isnan(a) | np.isnan(b))


def _holds(cmp: str, kind: str, ftz: str) -> Meaning:
    """A comparison of registers of a PTX type."""
    half, least = HALVES.get(kind), np.float32(2.0**-14 if kind == "f16" else 2.0**-126)

    def number(x: Array) -> Array:
        x = x if half is None else half_to_f32(x, half)
        return np.where(np.abs(x) < least, np.float32(0), x) if ftz else x

    def compare(a: Array, b: Array) -> Array:
        a, b = number(a), number(b)
        if cmp in ("num", "nan"):
            return _numbers(a, b) if cmp == "num" else ~_numbers(a, b)
        if cmp in OPPOSITE:
            return ~(BINARY_MEANINGS[OPPOSITE[cmp]](a, b) & _numbers(a, b))
        found = BINARY_MEANINGS[SAME.get(cmp, cmp)](a, b)
        return found & _numbers(a, b) if a.dtype.kind == "f" and cmp == "ne" else found

    return compare


def compared(i: Instruction) -> Meaning:
    """``setp``: a predicate and its opposite; of pairs one for each half. Each is combined with a third operand."""
    kind, cmp = i.type, i.cmp
    combine = BINARY_MEANINGS.get(i.fields.get("bool", ""))
    if i.operator:  # what the language has too
        return BINARY_MEANINGS[i.operator]
    compare = _holds(cmp, kind.removesuffix("x2"), i.fields.get("ftz", ""))

    def meaning(a: Array, b: Array, *c: Array) -> tuple[Array, ...]:
        if kind.endswith("x2"):
            both = tuple(map(compare, halves_of(a), halves_of(b)))
        else:
            both = (holds := compare(a, b), ~holds)
        return tuple(x if combine is None else combine(x, c[0]) for x in both)[: len(i.result_types)]

    return meaning


def flag_set(i: Instruction) -> Meaning:
    """``set``: all ones or 1.0 where a comparison holds; of pairs in each half."""
    kind, to = i.type, i.to.removesuffix("x2")
    compare = _holds(i.cmp, kind.removesuffix("x2"), i.fields.get("ftz", ""))
    is_pair = kind.endswith("x2")
    word = np.dtype(np.uint16) if is_pair else i.result_types[0].numpy
    one_bits: dict[str, Any] = {"f32": np.float32(1), "f16": np.uint16(0x3C00), "bf16": np.uint16(0x3F80)}
    yes = one_bits[to] if to in one_bits else word.type(~np.zeros((), word))
    set_one = lambda a, b: np.where(compare(a, b), yes, word.type(0))  # noqa: E731
    return paired(set_one) if is_pair else set_one


# Integers


def product(how: str) -> Meaning:
    """The lower half, the upper half or the whole of an integer product."""
    if how == "wide":
        return lambda a, b: a.astype(wide := f"{a.dtype.kind}{2 * a.dtype.itemsize}") * b.astype(wide)
    return multiply_high if how == "hi" else np.multiply


def product_sum(how: str) -> Meaning:
    """``mad``: a product and a sum, of any sign."""
    multiply = product(how)
    return lambda a, b, c: multiply(a, b) + c


def carried(i: Instruction) -> Meaning:
    """``add.cc`` and its like: the result, and the carry if one is left; a carry that is taken is the last operand.

    A difference carries what it borrows.
    """
    takes, op, how = i.op.endswith("c"), i.op.removesuffix("c"), i.fields.get("how", "")

    def meaning(*x: Array) -> tuple[Array, ...]:
        x, carry = (x[:-1], x[-1]) if takes else (x, None)
        if op == "mad":
            x = (np.ascontiguousarray(product(how)(x[0], x[1])), x[2])
        a, b = (unsigned_bits(v) for v in x)
        result = a - b if op == "sub" else a + b
        out = a < b if op == "sub" else result < a
        if carry is not None:
            first, by = result, carry.astype(a.dtype)
            result = first - by if op == "sub" else first + by
            out = out | (first < by if op == "sub" else result < first)
        return (result.view(x[0].dtype), out.astype(np.uint32))[: len(i.result_types)]

    return meaning


def held_sum(i: Instruction) -> Meaning:
    """A sum or difference of s32, within their range (``add.sat.s32``)."""
    info = np.iinfo(np.int32)
    return lambda a, b: np.clip(BINARY_MEANINGS[i.op](a.astype(np.int64), b.astype(np.int64)), info.min, info.max)


def as_words(values: Sequence[Array], word: np.dtype[Any]) -> Array:
    """Stack registers of shape (warps, 32) into memory words of shape (warps, 32, len(values))."""
    return np.stack([viewed(v, word) for v in values], axis=-1)
