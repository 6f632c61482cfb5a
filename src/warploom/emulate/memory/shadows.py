"""Poison of matrix products; that of lanewise instructions they say themselves (``Instruction.shadow``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.isa.matrix import FragmentSlot

Array = NDArray[Any]


def elements(slot: FragmentSlot, shadows: Sequence[Array]) -> Array:
    """Which elements of a matrix in registers have poison, bool (warps, rows, columns)."""
    stacked = np.ascontiguousarray(np.stack(shadows, axis=-1))
    parts = stacked.view(f"u{slot.dtype.bits // 8}")
    index = np.asarray(slot.layout.gather_index()).reshape(-1)
    rows, columns = slot.layout.shape
    matrix = np.zeros((stacked.shape[0], rows * columns), np.bool_)
    matrix[:, index] = parts.reshape(stacked.shape[0], -1) != 0
    return matrix.reshape(-1, rows, columns)


def registers(slot: FragmentSlot, poisoned: Array) -> tuple[Array, ...]:
    """The shadows of a matrix's registers, by which of its elements have poison."""
    index = np.asarray(slot.layout.gather_index())
    marks = poisoned.reshape(poisoned.shape[0], -1)[:, index.reshape(-1)].reshape(poisoned.shape[0], *index.shape)
    part = np.dtype(f"u{slot.dtype.bits // 8}")
    words = np.ascontiguousarray(np.where(marks, ~part.type(0), part.type(0))).view(f"u{max(4, part.itemsize)}")
    return tuple(np.ascontiguousarray(words[..., i]) for i in range(slot.count))


def mma(slots: Sequence[FragmentSlot], shadows: Sequence[Array]) -> tuple[Array, ...]:
    """The shadows of D: a poisoned element of A spoils its row of D, of B its column, of C itself."""
    a, b, c = (elements(s, shadows[s.first : s.first + s.count]) for s in slots)
    return registers(slots[2], a.any(axis=2, keepdims=True) | b.any(axis=1, keepdims=True) | c)
