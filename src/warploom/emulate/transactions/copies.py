"""``cp.async``: each thread takes its bytes now, and they arrive when it waits for their group.

What has arrived is that thread's own write; others need a barrier after its wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame, Lanes
from warploom.emulate.findings.report import Reporter
from warploom.emulate.memory.access import Place
from warploom.emulate.memory.global_memory import GlobalMemory, GlobalPlace
from warploom.emulate.memory.shared_memory import SharedMemory
from warploom.emulate.transactions.transaction import Groups, Started

Array = NDArray[Any]


@dataclass(eq=False)
class Copies(Started):
    """One execution of a ``cp.async``: units of shared memory (warps, lanes) and their words (warps, lanes, words).

    ``reads`` are the parts of global memory they come from, read at any time after ``begun``, the stamp of the issue.
    """

    index: Array
    data: Array
    frame: Frame
    reads: list[GlobalPlace]
    number: int
    begun: int


class CopyQueue(Groups[Copies]):
    """The copies of all threads of a batch."""

    def __init__(self, rows: int, shared: SharedMemory, memory: GlobalMemory, reporter: Reporter) -> None:
        super().__init__(rows, reporter)
        self.shared = shared
        self.memory = memory

    def start(self, place: Place, data: Array, reads: list[GlobalPlace]) -> None:
        """The threads issue copies whose bytes are ``data`` (warps, lanes, words)."""
        frame, number = place.frame, self.shared.begin_copy(place)
        under_way = np.ones(place.index.shape, np.bool_) if place.active is None else place.active
        if under_way.any():
            now = self.memory.clocks.now
            self.add(Copies(place.op, frame.flat, under_way, place.index, data, frame, reads, number, now))

    def wait(self, frame: Frame, pending: int) -> None:
        """Copies of all but the newest ``pending`` committed groups of each active thread land."""
        over = self.over(frame, pending)
        for copies, done in over:
            self._read_again(copies, done)
            row, lane = np.nonzero(done)
            data = copies.data[done]
            self.shared.land(copies.rows[row], lane.astype(np.int32), copies.index[done], data, copies.op)
        self.close(over)

    def of_lanes(self, row: int, lanes: Lanes) -> list[tuple[Copies, Array]]:
        """The copies that lanes of a warp have under way: from now on they are in no group."""
        mine = np.isin(np.arange(32), range(32) if lanes is None else lanes)
        found = [(copies, copies.under_way & mine & (copies.rows == row)[:, None]) for copies, _ in self.open]
        taken = [(copies, which) for copies, which in found if which.any()]
        self.close(taken)
        return taken

    def land(self, copies: Copies, lanes: Array) -> None:
        """The bytes of some (warps, lanes) arrive in nobody's name."""
        self._read_again(copies, lanes)
        self.shared.bring(copies.index[lanes], copies.data[lanes])

    def _read_again(self, copies: Copies, lanes: Array) -> None:
        """What arrives for some (warps, lanes) may have been written since the copy was issued."""
        for place in copies.reads:
            self.memory.track(place.of(lanes), "read", since=copies.begun)

    def at_exit(self) -> None:
        """Copies nobody waited for write into shared memory that the next CTA may own."""
        for copies, group in self.open:
            self.leak(copies, group, "is under way", "wait for its group")
