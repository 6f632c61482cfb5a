"""Poison: how the shadow bits of operands become those of results.

Instructions that only move bits apply their meaning to the shadows. Bitwise logic, shifts by known counts, selects and
packed halves are tracked bit for bit or half for half; for all other arithmetic a poisoned operand poisons the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.isa.alu import Binary, Select, Unary
from warploom.isa.base import Instruction
from warploom.isa.conversion import Convert, PackPair, PairArithmetic, UnpackHalf
from warploom.isa.matrix import FragmentSlot, MmaSync
from warploom.isa.scalar import PAIRS, Scalar

Array = NDArray[Any]
_LOW, _HIGH = np.uint32(0x0000FFFF), np.uint32(0xFFFF0000)
_BITWISE = frozenset({"and", "or", "xor", "not", "lop3"})
_MOVED = {"shl": 1, "shr": 1, "bfe": 1, "szext": 1, "brev": 1, "shf": 2, "bfi": 2, "prmt": 2}
"""Opcode → how many of its first operands it moves the bits of, as the operands after them say."""


def _filled(where: Array, dtype: np.dtype[Any]) -> Array:
    """All ones where ``where`` holds, as the shadow of a register of ``dtype``."""
    if dtype == np.bool_:
        return np.asarray(where)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return np.where(where, ~unsigned.type(0), unsigned.type(0))


def _halves(shadow: Array) -> Array:
    """A packed pair's shadow, widened to whole halves."""
    return np.where(shadow & _LOW, _LOW, np.uint32(0)) | np.where(shadow & _HIGH, _HIGH, np.uint32(0))


def _unsigned(array: Array) -> Array:
    return array if array.dtype == np.bool_ else np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def _opcode(instruction: Instruction) -> str:
    """The opcode of integer arithmetic; empty for all else."""
    if isinstance(instruction, Scalar):
        return instruction.form.partition(".")[0]
    if isinstance(instruction, Binary | Unary) and not instruction.dtype.is_float:
        return instruction.op
    return ""


def _bitwise(instruction: Instruction, values: Sequence[Array], shadows: Sequence[Array]) -> Array:
    """The bits of the result that change with the poisoned bits of the operands, of which each depends on its own."""
    clean = _unsigned(instruction.meaning(*values)[0])
    poison = np.zeros_like(clean)
    for flips in product((False, True), repeat=len(values)):
        flipped = [(_unsigned(v) ^ s).view(v.dtype) if f else v for v, s, f in zip(values, shadows, flips, strict=True)]
        poison = poison | (_unsigned(instruction.meaning(*flipped)[0]) ^ clean)
    return poison


def lanewise(
    instruction: Instruction, values: Sequence[Array], shadows: Sequence[Array], results: Sequence[Array]
) -> tuple[Array, ...]:
    """The shadows of a lanewise instruction's results; ``shadows`` of clean operands are zeros."""
    opcode = _opcode(instruction)
    if isinstance(instruction, Select):
        chosen = np.where(values[0], shadows[1], shadows[2])
        return (chosen | _filled(shadows[0], results[0].dtype),)
    if opcode in _BITWISE:
        return (_bitwise(instruction, values, shadows),)
    if isinstance(instruction, PackPair):
        low, high = shadows
        return (np.where(low != 0, _LOW, np.uint32(0)) | np.where(high != 0, _HIGH, np.uint32(0)),)
    if isinstance(instruction, UnpackHalf):
        return (_filled((shadows[0] & (_HIGH if instruction.which else _LOW)) != 0, results[0].dtype),)
    if isinstance(instruction, PairArithmetic) or (isinstance(instruction, Scalar) and instruction.form in PAIRS):
        return (reduce(np.bitwise_or, [_halves(s) for s in shadows]),)
    if isinstance(instruction, Convert) and instruction.source.is_integer and instruction.dtype.is_integer:
        # A poisoned sign poisons all bits that it is extended to.
        return (_unsigned(instruction.meaning(shadows[0].view(values[0].dtype))[0]),)
    moved = len(values) if instruction.moves_bits else _MOVED.get(opcode, 0)
    if moved and not any(s.any() for s in shadows[moved:]):
        typed = [s if s.dtype == np.bool_ else s.view(v.dtype) for s, v in zip(shadows, values, strict=True)]
        return tuple(_unsigned(x) for x in instruction.meaning(*typed[:moved], *values[moved:]))
    poisoned = reduce(np.logical_or, [s != 0 for s in shadows])
    return tuple(_filled(poisoned, r.dtype) for r in results)


def _poisoned_elements(slot: FragmentSlot, shadows: Sequence[Array]) -> Array:
    """Which elements of a matrix operand have poison, bool (warps, rows, columns)."""
    stacked = np.ascontiguousarray(np.stack(shadows, axis=-1))
    parts = stacked.view(np.uint16) if slot.dtype.bits == 16 else stacked
    index = np.asarray(slot.layout.gather_index()).reshape(-1)
    rows, columns = slot.layout.shape
    matrix = np.zeros((stacked.shape[0], rows * columns), np.bool_)
    matrix[:, index] = parts.reshape(stacked.shape[0], -1) != 0
    return matrix.reshape(-1, rows, columns)


def mma(instruction: MmaSync, shadows: Sequence[Array]) -> tuple[Array, ...]:
    """The shadows of D: a poisoned element of A spoils its row of D, of B its column, of C itself."""
    a, b, c = (_poisoned_elements(s, shadows[s.first : s.first + s.count]) for s in instruction.slots)
    spoiled = a.any(axis=2, keepdims=True) | b.any(axis=1, keepdims=True) | c
    slot = instruction.slots[2]
    index = np.asarray(slot.layout.gather_index())
    elements = spoiled.reshape(spoiled.shape[0], -1)[:, index.reshape(-1)].reshape(spoiled.shape[0], *index.shape)
    part = np.dtype(f"u{slot.dtype.bits // 8}")
    words = np.ascontiguousarray(np.where(elements, ~part.type(0), part.type(0))).view(np.uint32)
    return tuple(np.ascontiguousarray(words[..., i]) for i in range(slot.count))
