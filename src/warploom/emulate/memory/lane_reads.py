"""Which lanes of a warp have accessed a cell, where part of a warp may meet: then "several have" is not enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.memory.access import Access
from warploom.emulate.order.clocks import BITS, Clocks

Array = NDArray[Any]


MANY = 32
"""In place of the lane: several lanes, or a collective access."""


class LaneReads:
    """Which lanes MANY stands for, where part of a warp may meet: cell → lane → stamp of its last access.

    A cell that is not here was accessed by all lanes at once.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._of: dict[int, dict[int, int]] = {}

    def forget(self, cells: Array) -> None:
        """All lanes of a warp access these together."""
        if self._of:
            for cell in cells.tolist():
                self._of.pop(cell, None)

    def note(self, many: Array, first: Array, lane: Array, old: Array, stamp: int) -> None:
        """The accesses of single lanes, with what was there before them."""
        for i, part in zip(*np.nonzero(many), strict=True):
            cell, before = int(first[i]) + int(part), int(old[i, part])
            if cell not in self._of:
                lanes = range(32) if before & 63 == MANY else (before & 63,)
                self._of[cell] = dict.fromkeys(lanes, before >> BITS) if before else {}
            elif before & 63 != MANY:
                self._of[cell][before & 63] = before >> BITS
            self._of[cell][int(lane[i])] = stamp

    def answer(self, cells: Array) -> Callable[[Array, Access, Array, Array, Array], None]:
        """Accesses of several lanes are ordered where each lane's is, though not all of their warp have met."""

        def answer(fine: Array, mine: Access, columns: Array, lanes: Array, stamps: Array) -> None:
            for i in np.nonzero(~fine & (lanes == MANY))[0]:
                read = self._of.get(int(cells[i]), dict.fromkeys(range(32), int(stamps[i])))
                who, when = np.array(list(read)), np.array(list(read.values()))
                row, lane, column = (np.full(who.shape, x[i]) for x in (mine.rows[0], mine.lane_of_each[:, 0], columns))
                fine[i] = self._clocks.ordered(row, lane, mine.whole, column, who, when).all()

        return answer
