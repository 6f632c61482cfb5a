"""Which lanes of which warps act, and what they give: for instructions that single threads execute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.frames import Frame
from warploom.isa.atomic import Atomic, ReduceAdd

Array = NDArray[Any]
Lanes = list[int] | None
"""Lanes of one warp; None: all of them."""
Turns: TypeAlias = Sequence[int]
"""The order in which the lanes of a warp take turns where an instruction lets them act one by one."""
ASCENDING: Turns = range(32)


def lanes_of(frame: Frame, guard: Array | None) -> Iterator[tuple[int, int, Lanes]]:
    """(position in the frame, row, acting lanes) of each warp with any."""
    if guard is None and frame.mask is None:
        for i, row in enumerate(frame.flat.tolist()):
            yield i, row, None
        return
    acting = np.ones((frame.n, 32), np.bool_) if guard is None else frame.full(guard)
    if frame.active is not None:
        acting = acting & frame.active
    for i, row in enumerate(frame.flat.tolist()):
        lanes = np.nonzero(acting[i])[0].tolist()
        if lanes:
            yield i, row, None if len(lanes) == 32 else lanes


def in_turn(lanes: Array, turns: Turns) -> Array:
    """The order in which lanes of a frame, by their numbers in it, take turns at an atomic: warp by warp."""
    return np.arange(lanes.size) if turns is ASCENDING else np.lexsort((np.argsort(turns)[lanes % 32], lanes // 32))


def apply_in_turn(
    instruction: Atomic | ReduceAdd, view: Array, index: Array, values: list[Array], acting: Array
) -> Array:
    """Apply the lanes of an atomic in the order of ``acting``. Returns the old values in the shape of ``index``."""
    flat = np.ascontiguousarray(index).reshape(-1)
    operands = [v.reshape(-1) for v in values]
    old = np.zeros(flat.size, view.dtype)
    # Lanes that hit one address take turns: turn t serves the t-th lane of every address.
    order = acting[np.argsort(flat[acting], kind="stable")]
    starts = np.r_[True, flat[order][1:] != flat[order][:-1]] if order.size else np.zeros(0, np.bool_)
    group_start = np.maximum.accumulate(np.where(starts, np.arange(order.size), 0)) if order.size else starts
    turn = np.arange(order.size) - group_start
    by_turn = np.argsort(turn, kind="stable")
    edges = np.r_[0, np.cumsum(np.bincount(turn[by_turn]))] if order.size else np.zeros(1, np.int64)
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        lanes = order[by_turn[begin:end]]
        old[lanes] = view[flat[lanes]]
        view[flat[lanes]] = instruction.combine(old[lanes], *[v[lanes] for v in operands])
    return old.reshape(index.shape)


def split(values: Array, lanes: Lanes) -> list[tuple[Any, Lanes]]:
    """The acting lanes by the value they give (one row of 32, or of one entry per value)."""
    if lanes is not None and len(lanes) == 1:
        return [(values[lanes[0]].tolist(), lanes)]
    first = values[0 if lanes is None else lanes[0]]
    mine = values if lanes is None else values[lanes]
    if (mine == first).all():
        return [(first.tolist(), lanes)]
    numbers = range(32) if lanes is None else lanes
    found: dict[Any, list[int]] = {}
    for lane in numbers:
        found.setdefault(values[lane].tolist(), []).append(lane)
    return list(found.items())


def by_both(places: Array, parities: Array, lanes: Lanes) -> list[tuple[tuple[int, int], Lanes]]:
    """The acting lanes by the two values they give."""
    found: list[tuple[tuple[int, int], Lanes]] = []
    for place, group in split(places, lanes):
        found += [((place, odd), part) for odd, part in split(parities, group)]
    return found
