"""Poison rules of lanewise forms: which bits of a result depend on poisoned bits of the operands.

Each rule takes the instruction, the operands, their shadows and the results. None: the rule says nothing of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product
from typing import Any

import numpy as np

from warploom.isa.form import Array, viewed

Arrays = Sequence[Array]
LOW, HIGH = np.uint32(0x0000FFFF), np.uint32(0xFFFF0000)


def anywhere(instruction: Any, values: Arrays, shadows: Arrays, results: Arrays) -> tuple[Array, ...]:
    """The rule of forms without one of their own: moves of bits move shadows too, else one poisoned bit poisons all."""
    if instruction.moves_bits:
        typed = [s if s.dtype == np.bool_ else s.view(v.dtype) for s, v in zip(shadows, values, strict=True)]
        return tuple(unsigned_bits(x) for x in instruction.meaning(*typed))
    poisoned = reduce(np.logical_or, [s != 0 for s in shadows])
    return tuple(filled(poisoned, r.dtype) for r in results)


def bitwise(instruction: Any, values: Arrays, shadows: Arrays, _: Arrays) -> tuple[Array, ...]:
    """Logic: the bits of the result that change with the poisoned bits of the operands, each of which has its own."""
    clean = unsigned_bits(instruction.meaning(*values)[0])
    poison = np.zeros_like(clean)
    for flips in product((False, True), repeat=len(values)):
        each = zip(values, shadows, flips, strict=True)
        flipped = [(unsigned_bits(v) ^ s).view(v.dtype) if flip else v for v, s, flip in each]
        poison = poison | (unsigned_bits(instruction.meaning(*flipped)[0]) ^ clean)
    return (poison,)


def moved(count: int) -> Callable[..., tuple[Array, ...] | None]:
    """Shifts and their like: where the operands after the first ``count`` are clean, the shadows of those move."""

    def rule(instruction: Any, values: Arrays, shadows: Arrays, _: Arrays) -> tuple[Array, ...] | None:
        if any(s.any() for s in shadows[count:]):
            return None
        typed = [s.view(v.dtype) for s, v in zip(shadows[:count], values, strict=False)]
        return (unsigned_bits(instruction.meaning(*typed, *values[count:])[0]),)

    return rule


def selected(_: Any, values: Arrays, shadows: Arrays, results: Arrays) -> tuple[Array, ...]:
    """``selp``: the shadow of the operand that is chosen, all bits where the predicate is poisoned."""
    chosen = np.where(values[0], shadows[1], shadows[2])
    return (chosen | filled(shadows[0], results[0].dtype),)


def packed(_: Any, __: Arrays, shadows: Arrays, ___: Arrays) -> tuple[Array, ...]:
    """Two values as the halves of a word: a poisoned one poisons its half."""
    low, high = shadows
    return (np.where(low != 0, LOW, np.uint32(0)) | np.where(high != 0, HIGH, np.uint32(0)),)


def unpacked(i: Any, _: Arrays, shadows: Arrays, results: Arrays) -> tuple[Array, ...]:
    """The value of one half of a word: a poisoned bit of the half poisons it."""
    return (filled((shadows[0] & (HIGH if i.part == "high" else LOW)) != 0, results[0].dtype),)


def by_halves(_: Any, __: Arrays, shadows: Arrays, ___: Arrays) -> tuple[Array, ...]:
    """Packed pairs: a poisoned bit poisons its half of the result."""
    wide = [np.where(s & LOW, LOW, np.uint32(0)) | np.where(s & HIGH, HIGH, np.uint32(0)) for s in shadows]
    return (reduce(np.bitwise_or, wide),)


def unsigned_bits(x: Array) -> Array:
    """View an array as unsigned integers; predicates stay as they are."""
    return x if x.dtype == np.bool_ else viewed(x, f"u{x.dtype.itemsize}")


def filled(where: Array, dtype: np.dtype[Any]) -> Array:
    """All ones where ``where`` holds, as the shadow of a register of ``dtype``."""
    if dtype == np.bool_:
        return np.asarray(where)
    zero: Any = np.dtype(f"u{dtype.itemsize}").type(0)
    return np.where(where, ~zero, zero)  # pyright: ignore[reportUnknownVariableType]
