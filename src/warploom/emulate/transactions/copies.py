"""``cp.async``: copies that are under way, the groups threads commit them to, and their landing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame, Lanes
from warploom.emulate.findings.report import Reporter
from warploom.emulate.memory.global_memory import GlobalMemory, Target
from warploom.emulate.memory.shared_memory import Place, SharedMemory
from warploom.ir.statements import Op

Array = NDArray[Any]


@dataclass(slots=True)
class _Copy:
    """One execution of a copy: units still under way per (warp, lane), with the group each belongs to."""

    op: Op
    rows: Array
    index: Array
    data: Array
    group: Array
    under_way: Array
    frame: Frame
    reads: list[tuple[list[Target], int]]
    number: int
    begun: int
    """The newest stamp when it was issued."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The part of a copy, some (warps, lanes) of it, that an mbarrier keeps track of from now on."""

    copy: _Copy
    lanes: Array

    @property
    def index(self) -> Array:
        """Units of shared memory."""
        return self.copy.index[self.lanes]

    @property
    def data(self) -> Array:
        """Their words."""
        return self.copy.data[self.lanes]


class CopyQueue:
    """The copies of all threads of a batch. A thread's group number counts its commits."""

    def __init__(self, rows: int, shared: SharedMemory, memory: GlobalMemory, reporter: Reporter) -> None:
        self.shared = shared
        self.memory = memory
        self.report = reporter
        self.committed = np.zeros((rows, 32), np.int32)
        self.copies: list[_Copy] = []

    def start(self, place: Place, data: Array, reads: list[tuple[list[Target], int]]) -> None:
        """The threads issue copies whose bytes are ``data`` (warps, lanes, words)."""
        frame, number = place.frame, self.shared.begin_copy(place)
        under_way = np.ones(place.index.shape, np.bool_) if place.active is None else place.active.copy()
        if not under_way.any():
            return
        group, now = self.committed[frame.flat], self.memory.clocks.now
        self.copies.append(_Copy(place.op, frame.flat, place.index, data, group, under_way, frame, reads, number, now))

    def commit(self, frame: Frame) -> None:
        """Each active thread closes its group."""
        self.committed[frame.flat] += 1 if frame.active is None else frame.active

    def wait(self, frame: Frame, pending: int) -> None:
        """Copies of all but the newest ``pending`` committed groups of each active thread land."""
        rows = np.zeros(self.committed.shape[0], np.bool_)
        rows[frame.flat] = True
        done_below = np.full(self.committed.shape, -1, np.int32)
        lanes = np.ones((frame.n, 32), np.bool_) if frame.active is None else frame.active
        done_below[frame.flat] = np.where(lanes, self.committed[frame.flat] - pending, -1)
        left: list[_Copy] = []
        for copy in self.copies:
            done = copy.under_way & (copy.group < done_below[copy.rows])
            if not done.any():
                left.append(copy)
                continue
            self._read_again(copy, done)
            row, lane = np.nonzero(done)
            self.shared.land(
                copy.rows[row], lane.astype(np.int32), copy.index[row, lane], copy.data[row, lane], copy.op
            )
            if done.sum() != copy.under_way.sum():
                copy.under_way &= ~done
                left.append(copy)
        self.copies = left

    def take(self, row: int, lanes: Lanes) -> list[Taken]:
        """The copies that lanes of a warp have under way: they are in no group any more."""
        which = slice(None) if lanes is None else lanes
        taken: list[Taken] = []
        for copy in self.copies:
            mine = np.zeros_like(copy.under_way)
            mine[:, which] = copy.under_way[:, which] & (copy.rows == row)[:, None]
            if mine.any():
                taken.append(Taken(copy, mine))
                copy.under_way &= ~mine
        self.copies = [copy for copy in self.copies if copy.under_way.any()]
        return taken

    def land(self, taken: Taken) -> None:
        """Its bytes arrive."""
        self._read_again(taken.copy, taken.lanes)
        view = self.shared.data.view(taken.data.dtype).reshape(-1, taken.data.shape[1])
        view[taken.index] = taken.data
        if self.shared.shadow is not None:
            self.shared.shadow.view(taken.data.dtype).reshape(view.shape)[taken.index] = 0

    def _read_again(self, copy: _Copy, lanes: Array) -> None:
        """What arrives for some (warps, lanes) may have been written since the copy was issued."""
        for targets, size in copy.reads:
            mine = [target.of(lanes) for target in targets]
            self.memory.track(copy.frame, mine, size, copy.op, "read", since=copy.begun)

    def at_exit(self) -> None:
        """Copies nobody waited for write into shared memory that the next CTA may own."""
        for copy in self.copies:
            row, lane = (int(x[0]) for x in np.nonzero(copy.under_way))
            uncommitted = copy.group[row, lane] >= self.committed[copy.rows[row], lane]
            what = "was never committed to a group" if uncommitted else "was never waited for"
            cure = "commit it and wait for its group" if uncommitted else "wait for its group"
            message = f"the kernel ends while {copy.op.instruction.mnemonic} is under way; it {what}: {cure}"
            self.report.add("leak", copy.op.where, message, int(copy.rows[row]), lane, count=int(copy.under_way.sum()))
