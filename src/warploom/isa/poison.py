"""Poison rules of lanewise forms: which bits of a result depend on poisoned bits of the operands.

Each rule takes the instruction, the operands, their shadows and the results. None: the rule says nothing of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from warploom.isa.base import Array, filled, unsigned_bits

Arrays = Sequence[Array]
LOW, HIGH = np.uint32(0x0000FFFF), np.uint32(0xFFFF0000)


def bitwise(instruction: Any, values: Arrays, shadows: Arrays, _: Arrays) -> tuple[Array, ...]:
    """``and``, ``or``, ``xor``: a clean 0 (of ``or`` a clean 1) decides a bit whatever the other operand holds."""
    (a, b), (poison_a, poison_b) = map(unsigned_bits, values), shadows
    if instruction.op == "xor":
        return (poison_a | poison_b,)
    decides_a, decides_b = (~a, ~b) if instruction.op == "and" else (a, b)
    return ((poison_a & ~(decides_b & ~poison_b)) | (poison_b & ~(decides_a & ~poison_a)),)


def shifted(instruction: Any, values: Arrays, shadows: Arrays, _: Arrays) -> tuple[Array, ...] | None:
    """A shift by a clean count moves the shadow."""
    if shadows[1].any():
        return None
    value, count = values
    return (unsigned_bits(instruction.meaning(shadows[0].view(value.dtype), count)[0]),)


def selected(_: Any, values: Arrays, shadows: Arrays, results: Arrays) -> tuple[Array, ...]:
    """``selp``: the shadow of the operand that is chosen, all bits where the predicate is poisoned."""
    chosen = np.where(values[0], shadows[1], shadows[2])
    return (chosen | filled(shadows[0], results[0].dtype),)


def by_halves(_: Any, __: Arrays, shadows: Arrays, ___: Arrays) -> tuple[Array, ...]:
    """Packed pairs: a poisoned bit poisons its half of the result."""
    wide = [np.where(s & LOW, LOW, np.uint32(0)) | np.where(s & HIGH, HIGH, np.uint32(0)) for s in shadows]
    return (reduce(np.bitwise_or, wide),)
