"""What families of lanewise forms mean: functions of arrays, made of the words of an instruction.

Flags such as ``.ftz``, ``.sat`` and ``.NaN`` are functions around functions, so that a line of the table does not
mention them. Approximations (``.approx``, ``.full``) give the exact value, rounded: hardware may differ by what PTX
allows (2 ulp for ``div.full``, ``ex2``, ``rcp`` and ``rsqrt``).
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from warploom.core.dtypes import bf16, f16
from warploom.isa.alu import BINARY_MEANINGS, UNARY_MEANINGS, flush_subnormal
from warploom.isa.base import Array
from warploom.isa.form import Formed
from warploom.isa.integers import multiply_high
from warploom.isa.narrow import half_to_f32, held, without_negatives
from warploom.isa.rounding import fma_double, fma_single, single_to_odd, sum_to_odd, sum_towards

Meaning = Callable[..., Any]
_HALF = {"f16": f16, "bf16": bf16}


# Flags


def flagged(i: Formed, function: Meaning) -> Meaning:
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
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "rcp": lambda a: a.dtype.type(1) / a,
    "rsqrt": lambda a: a.dtype.type(1) / np.sqrt(a),
}


def one(i: Formed) -> Meaning:
    """A function of one operand. The four that the language has with ``.ftz`` flush as their hardware does."""
    if i.ptx_name.endswith(".approx.ftz.f32") and i.op in UNARY_MEANINGS:
        return UNARY_MEANINGS[i.op]
    return flagged(i, _EXACT.get(i.op) or UNARY_MEANINGS[i.op])


def two(i: Formed) -> Meaning:
    """A sum, a difference, a product, a minimum or the like; of floats rounded as ``.rnd`` says."""
    if i.fields.get("rnd", "rn") in ("", "rn"):
        return flagged(i, BINARY_MEANINGS[i.op])
    return flagged(i, _towards(i.rnd, i.op))


def three(i: Formed) -> Meaning:
    """A minimum or maximum of three operands."""
    choose = two(i)
    return lambda a, b, c: choose(choose(a, b), c)


def divided(i: Formed) -> Meaning:
    """``div``: beyond 2^126 ``.approx`` takes the reciprocal of a divisor for 0."""
    divide = BINARY_MEANINGS["div"]
    if i.how != "approx":
        return flagged(i, divide)
    return flagged(i, lambda a, b: divide(a, np.where(np.abs(b) > 2.0**126, np.copysign(b.dtype.type(np.inf), b), b)))


def fused(i: Formed) -> Meaning:
    """``fma`` of f32 and f64, rounded once."""
    if i.rnd == "rn":
        return flagged(i, fma_single if i.words[-1] == "f32" else fma_double)
    return flagged(i, _towards(i.rnd, "fma"))


def _towards(mode: str, op: str) -> Meaning:
    """A sum, difference, product or ``fma`` of f32, rounded in a direction; their products are exact in f64."""

    def rounded(*x: Array) -> Array:
        a, b, *c = (v.astype(np.float64) for v in x)
        if op in ("add", "sub"):
            return sum_towards(a, b if op == "add" else -b, mode)
        product = a * b
        return sum_towards(product, c[0] if c else np.copysign(np.zeros_like(product), product), mode)

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
    "ex2": lambda a: np.exp2(a),
}


def halves(i: Formed) -> Meaning:
    """Arithmetic of f16 and bf16, alone or in pairs: exact in f64, rounded once."""
    kind = i.fields.get("half") or i.fields["pair"]
    half = _HALF[kind.removesuffix("x2")]
    flushes = i.fields.get("ftz") and (
        lambda x: flush_subnormal(x.astype(np.float32))
    )  # bf16 alone, whose range is f32's
    function = _then(flushes, _HALVES[i.op]) if flushes else flagged(i, _HALVES[i.op])

    def single(*x: Array) -> Array:
        exact = function(*(half_to_f32(v, half).astype(np.float64) for v in x))
        return np.ascontiguousarray(single_to_odd(exact)).astype(half.numpy).view(np.uint16)

    return paired(single) if kind.endswith("x2") else single


def paired(function: Meaning) -> Meaning:
    """A function of 16-bit patterns, of both halves of 32-bit words."""

    def both(*x: Array) -> Array:
        low, high = (function(*((v >> np.uint32(s)).astype(np.uint16) for v in x)).astype(np.uint32) for s in (0, 16))
        return low | high << np.uint32(16)

    return both


# Comparisons


_SAME = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
_OPPOSITE = {"equ": "ne", "neu": "eq", "ltu": "ge", "leu": "gt", "gtu": "le", "geu": "lt"}
"""Comparisons that are true where one operand is a NaN → the ordered ones that they are the opposite of."""


def _numbers(a: Array, b: Array) -> Array:
    return ~(np.isnan(a) | np.isnan(b))


def _holds(cmp: str, kind: str, ftz: str) -> Meaning:
    """A comparison of registers of a PTX type."""
    half, least = _HALF.get(kind), np.float32(2.0**-14 if kind == "f16" else 2.0**-126)

    def number(x: Array) -> Array:
        x = x if half is None else half_to_f32(x, half)
        return np.where(np.abs(x) < least, np.float32(0), x) if ftz else x

    def compare(a: Array, b: Array) -> Array:
        a, b = number(a), number(b)
        if cmp in ("num", "nan"):
            return _numbers(a, b) if cmp == "num" else ~_numbers(a, b)
        if cmp in _OPPOSITE:
            return ~(BINARY_MEANINGS[_OPPOSITE[cmp]](a, b) & _numbers(a, b))
        found = BINARY_MEANINGS[_SAME.get(cmp, cmp)](a, b)
        return found & _numbers(a, b) if a.dtype.kind == "f" and cmp == "ne" else found

    return compare


def _words_of_halves(*x: Array) -> list[tuple[Array, ...]]:
    """The low and the high halves of 32-bit words."""
    return [tuple((v >> np.uint32(s)).astype(np.uint16) for v in x) for s in (0, 16)]


def compared(i: Formed) -> Meaning:
    """``setp``: a predicate and its opposite; of pairs one for each half. Each is combined with a third operand."""
    kind, cmp = i.type, i.cmp
    combine = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}.get(i.fields.get("bool", ""))
    if i.operator:  # what the language has too
        return BINARY_MEANINGS[i.operator]
    compare = _holds(cmp, kind.removesuffix("x2"), i.fields.get("ftz", ""))

    def meaning(a: Array, b: Array, *c: Array) -> tuple[Array, ...]:
        both = tuple(compare(*x) for x in _words_of_halves(a, b)) if kind.endswith("x2") else (compare(a, b),)
        both = both if len(both) == 2 else (both[0], ~both[0])
        return tuple(x if combine is None else combine(x, c[0]) for x in both)[: len(i.result_types)]

    return meaning


def flag_set(i: Formed) -> Meaning:
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


def carried(i: Formed) -> Meaning:
    """``add.cc`` and its like: the result, and the carry if one is left; a carry that is taken is the last operand.

    A difference carries what it borrows.
    """
    takes, op, how = i.op.endswith("c"), i.op.removesuffix("c"), i.fields.get("how", "")

    def meaning(*x: Array) -> tuple[Array, ...]:
        x, carry = (x[:-1], x[-1]) if takes else (x, None)
        if op == "mad":
            x = (np.ascontiguousarray(product(how)(x[0], x[1])), x[2])
        a, b = (np.ascontiguousarray(v).view(f"u{v.dtype.itemsize}") for v in x)
        result = a - b if op == "sub" else a + b
        out = a < b if op == "sub" else result < a
        if carry is not None:
            first, by = result, carry.astype(a.dtype)
            result = first - by if op == "sub" else first + by
            out = out | (first < by if op == "sub" else result < first)
        return (result.view(x[0].dtype), out.astype(np.uint32))[: len(i.result_types)]

    return meaning


def held_sum(i: Formed) -> Meaning:
    """``add.sat.s32``: within the range of the type."""
    return held(BINARY_MEANINGS[i.op])
