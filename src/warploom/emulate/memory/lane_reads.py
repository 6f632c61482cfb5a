"""Which lanes of a warp have read a cell, where part of a warp may meet: then "several have" is not enough."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.order.clocks import BITS, Clocks

Array = NDArray[Any]


MANY = 32
"""In place of the lane: several lanes, or a collective access."""


class LaneReads:
    """Which lanes MANY stands for, where part of a warp may meet: cell → lane → stamp of its last read.

    A cell that is not here was read by all lanes at once.
    """

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._of: dict[int, dict[int, int]] = {}

    def forget(self, cells: Array) -> None:
        """All lanes of a warp read these together."""
        if self._of:
            for cell in cells.tolist():
                self._of.pop(cell, None)

    def note(self, many: Array, first: Array, lane: Array, old: Array, stamp: int) -> None:
        """The reads of single lanes, with what was there before them."""
        for i, part in zip(*np.nonzero(many), strict=True):
            cell, before = int(first[i]) + int(part), int(old[i, part])
            if cell not in self._of:
                lanes = range(32) if before & 63 == MANY else (before & 63,)
                self._of[cell] = dict.fromkeys(lanes, before >> BITS) if before else {}
            elif before & 63 != MANY:
                self._of[cell][before & 63] = before >> BITS
            self._of[cell][int(lane[i])] = stamp

    def judge(self, fine: Array, accesses: tuple[Array, ...], cells: Array, many: Array, collective: bool) -> None:
        """Reads of several lanes are ordered where each lane's is, though not all of their warp have met.

        ``fine`` says which of the accesses (rows, lanes, columns, stamps) are ordered, and is mended in place.
        """
        for i in np.nonzero(~fine & many)[0]:
            row, lane, column, stamp = (int(x[i]) for x in accesses)
            read = self._of.get(int(cells[i]), dict.fromkeys(range(32), stamp))
            lanes, stamps = np.array(list(read)), np.array(list(read.values()))
            rows, mine, columns = (np.full(lanes.shape, x) for x in (row, lane, column))
            fine[i] = self._clocks.ordered(rows, mine, collective, columns, lanes, stamps).all()
