"""Batches of matrix products: which of them one launch can take, and where the others begin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from warploom.interop.arrays import ArrayView
from warploom.kernels.matmul.problem import MOST_GRID_ROWS

Offsets = tuple[int, int, int, int]
"""Bytes, of (a, b, the result, the extra matrices)."""


@dataclass(frozen=True)
class Batches:
    """Leading dimensions as one launch sees them: ``count`` batches at the strides of (a, b, out, extras).

    ``offsets`` (elements): where each launch begins. ``folded``: the batches are more rows of A instead
    (b is one matrix, and rows follow each other evenly).
    """

    count: int
    strides: tuple[int, int, int, int]
    offsets: tuple[Offsets, ...]
    folded: bool = False

    @classmethod
    def of(cls, views: Sequence[ArrayView], shape: tuple[int, ...], out: tuple[int, ...]) -> Batches:
        """The batches of arrays (a, b, …) whose product has a shape and goes to strides ``out``."""
        a, b = views[:2]
        lead, rows, cols = shape[:-2], shape[-2], shape[-1]
        of_extra = tuple(math.prod(shape[i + 1 :]) for i in range(len(lead)))
        dims = [
            (size, (sa, sb, so, se))
            for size, sa, sb, so, se in zip(
                lead, _lead_strides(a, lead), _lead_strides(b, lead), out[:-2], of_extra, strict=True
            )
            if size != 1
        ]
        merged: list[tuple[int, tuple[int, int, int, int]]] = []
        for size, strides in dims:
            if merged and merged[-1][1] == tuple(size * s for s in strides):
                merged[-1] = (merged[-1][0] * size, strides)
            else:
                merged.append((size, strides))
        if not merged:
            return cls(1, (0, 0, 0, 0), ((0, 0, 0, 0),))
        count, strides = merged[-1]
        as_rows = (rows * a.strides[-2], 0, rows * out[-2], rows * cols)
        folded = rows > 0 and (rows == 1 or strides == as_rows) and strides[1] == 0 and _is_row_major(a)
        if rows == 1:
            folded = folded and strides[3] == cols
        outer = merged[:-1]
        if not folded and count > MOST_GRID_ROWS:
            outer, count, strides = merged, 1, (0, 0, 0, 0)
        return cls(count, strides, _offsets(outer), folded)


def _offsets(dims: Sequence[tuple[int, tuple[int, int, int, int]]]) -> tuple[Offsets, ...]:
    """Element offsets of every combination of the outer dimensions."""
    found: list[Offsets] = [(0, 0, 0, 0)]
    for size, strides in dims:
        found = [
            (o[0] + i * strides[0], o[1] + i * strides[1], o[2] + i * strides[2], o[3] + i * strides[3])
            for o in found
            for i in range(size)
        ]
    return tuple(found)


def _lead_strides(view: ArrayView, lead: tuple[int, ...]) -> tuple[int, ...]:
    """Strides along the result's leading dimensions; 0 where the array has one matrix for all."""
    own, strides = view.shape[:-2], view.strides[:-2]
    missing = len(lead) - len(own)
    return (0,) * missing + tuple(0 if size == 1 else s for size, s in zip(own, strides, strict=True))


def _is_row_major(view: ArrayView) -> bool:
    return view.strides[-1] == 1 or view.shape[-1] == 1
