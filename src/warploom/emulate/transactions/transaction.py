"""Transactions: what an instruction starts, and what reads and writes memory later, beside its thread.

A transaction ends in one of two ways. Its thread waits for the group that it was committed to (``cp.async``, bulk
stores and reductions, ``wgmma``), or it lands on an mbarrier, whose phase others wait for (TMA and bulk loads,
``st.async``, ``cp.async`` that an mbarrier keeps track of).

Source: PTX ISA, "Completion mechanisms for asynchronous copies".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.barriers.barriers import Wait
from warploom.emulate.barriers.mbarriers import Mbarrier
from warploom.emulate.control.frames import Actor, Execution, Frame, Lanes, Origin
from warploom.emulate.findings.report import Reporter
from warploom.emulate.memory.access import GlobalAccess, SharedAccess
from warploom.emulate.memory.global_memory import GlobalMemory
from warploom.emulate.memory.history import SharedHistory
from warploom.emulate.memory.shared_memory import SharedMemory
from warploom.ir.statements import Op
from warploom.isa.effects import CommitGroup, WaitGroup

Array = NDArray[Any]


@dataclass(eq=False)
class Transaction:
    """Transactions that lanes of warps ``rows`` have started together; ``under_way`` (warps, lanes) are not over.

    ``group`` (warps, lanes) is the number of the group that they are in.
    """

    op: Op
    rows: Array
    under_way: Array
    group: Array = field(init=False)


S = TypeVar("S", bound=Transaction)


class Groups(Generic[S]):
    """Transactions that end when their thread waits for their group. Each thread of a batch counts its commits."""

    def __init__(self, rows: int, report: Reporter) -> None:
        self.report = report
        self.committed = np.zeros((rows, 32), np.int32)
        self.open: list[S] = []

    def add(self, started: S) -> None:
        """Its threads have started it, in their current groups."""
        started.group = self.committed[started.rows]
        self.open.append(started)
        self.report.recorder.starts(started)

    def commit(self, call: Execution[CommitGroup]) -> None:
        """Each active thread closes its group."""
        active = call.frame.active
        self.committed[call.frame.rows] += 1 if active is None else active

    def wait(self, call: Execution[WaitGroup]) -> Wait | None:
        """Active threads wait for all but their newest groups."""
        raise NotImplementedError

    def over(self, frame: Frame, pending: int) -> list[tuple[S, Array]]:
        """Return which transactions end, for which (warps, lanes), as threads wait for all but their newest groups."""
        if not self.open:
            return []
        below = np.full(self.committed.shape, -1, np.int32)
        lanes = True if frame.active is None else frame.active
        below[frame.rows] = np.where(lanes, self.committed[frame.rows] - pending, -1)
        found = [(started, started.under_way & (started.group < below[started.rows])) for started in self.open]
        return [(started, done) for started, done in found if done.any()]

    def close(self, ended: list[tuple[S, Array]], op: Op | None = None) -> None:
        """Take transactions of some (warps, lanes), which ``op`` has waited for, out of their groups."""
        for started, done in ended:
            self.report.recorder.ends(started, done, op)
            started.under_way = started.under_way & ~done
        if ended:
            self.open = [one for one in self.open if one.under_way.any()]

    def leak(self, started: S, does: str, cure: str) -> bool:
        """A finding: the kernel ends while something is under way. Returns whether it was committed to a group."""
        i, lane = (int(x[0]) for x in np.nonzero(started.under_way))
        row = int(started.rows[i])
        committed = bool(started.group[i, lane] < self.committed[row, lane])
        what = f"never waited for: {cure}" if committed else "never committed: commit it and wait for its group"
        message = f"the kernel ends while {started.op.instruction.mnemonic} {does}; it was {what}"
        self.report.add("leak", started.op.where, message, row, lane, count=int(started.under_way.sum()))
        return committed


@dataclass(eq=False)
class Copies(Transaction):
    """One execution of a ``cp.async``: units of shared memory (warps, lanes) and their words (warps, lanes, words).

    ``poison`` is the shadow of the words, if any is poison, and where it comes from.

    ``source``, where they come from, is read at any time after ``begun``, the stamp of the issue.
    """

    index: Array
    data: Array
    poison: tuple[Array | None, Origin | None]
    source: GlobalAccess
    number: int
    begun: int


class CopyQueue(Groups[Copies]):
    """The copies of all threads of a batch."""

    def __init__(self, rows: int, shared: SharedMemory, memory: GlobalMemory, reporter: Reporter) -> None:
        super().__init__(rows, reporter)
        self.shared = shared
        self.memory = memory
        self.waited: dict[int, Op] = {}  # row → its last wait for groups

    def start(
        self, place: SharedAccess, data: Array, source: GlobalAccess, poison: tuple[Array | None, Origin | None]
    ) -> None:
        """The threads issue copies whose bytes are ``data`` (warps, lanes, words); ``poison``: their shadow, whence."""
        frame, number = place.frame, self.shared.begin_copy(place)
        under_way = np.ones(place.index.shape, np.bool_) if place.active is None else place.active
        if under_way.any():
            now = self.memory.clocks.now
            self.add(Copies(place.op, frame.rows, under_way, place.index, data, poison, source, number, now))

    def wait(self, call: Execution[WaitGroup]) -> None:
        """Copies of all but the newest committed groups of each active thread land."""
        self.waited.update(dict.fromkeys(call.frame.rows.tolist(), call.op))
        over = self.over(call.frame, call.effect.pending)
        for copies, done in over:
            self._read_again(copies, done)
            row, lane = np.nonzero(done)
            data, (shadow, origin) = copies.data[done], copies.poison
            self.shared.land(
                copies.rows[row], lane, copies.index[done], data, copies.op, None if shadow is None else shadow[done]
            )
            if origin is not None:
                self.shared.origins[self.memory.clocks.now] = origin
        self.close(over, call.op)

    def how_to_wait(self, row: int, begun: int) -> str:
        """Say how a warp, or the thread that started a copy of this stamp, waits for it; empty if none is under way."""
        for copies in self.open:
            if copies.number != begun:
                continue
            mine = copies.under_way & (copies.rows == row)[:, None]
            mine = mine if mine.any() else copies.under_way
            newer = int((self.committed[copies.rows] - copies.group)[mine].min()) - 1
            if newer < 0:
                return "commit its group (k.commit_group) and wait for it first"
            last, n = self.waited.get(row), "group is" if newer == 1 else "groups are"
            told = "" if last is None else f"; the last wait, at {last.where}, leaves more of them under way"
            return f"wait for its group first: {newer} newer {n} committed, so wait_group({newer}) or less{told}"
        return ""

    def of_lanes(self, row: int, lanes: Lanes) -> list[tuple[Copies, Array]]:
        """The copies that lanes of a warp have under way: from now on they are in no group."""
        mine = np.isin(np.arange(32), range(32) if lanes is None else lanes)
        found = [(copies, copies.under_way & mine & (copies.rows == row)[:, None]) for copies in self.open]
        taken = [(copies, which) for copies, which in found if which.any()]
        self.close(taken)
        return taken

    def land(self, copies: Copies, lanes: Array) -> None:
        """The bytes of some (warps, lanes) arrive in nobody's name."""
        self._read_again(copies, lanes)
        shadow = copies.poison[0]
        self.shared.put(copies.index[lanes], copies.data[lanes], None if shadow is None else shadow[lanes])

    def _read_again(self, copies: Copies, lanes: Array) -> None:
        """Report writes, since the copy was issued, of the bytes that arrive for some (warps, lanes)."""
        active = copies.source.active
        self.memory.track(
            replace(copies.source, active=lanes if active is None else active & lanes), since=copies.begun
        )

    def at_exit(self) -> None:
        """Copies nobody waited for write into shared memory that the next CTA may own."""
        for copies in self.open:
            self.leak(copies, "is under way", "wait for its group")


@dataclass(eq=False)
class SharedRead:
    """Cells of shared memory that a transaction of a queue reads at any time between its start and its end."""

    history: SharedHistory
    op: Op
    queue: int
    cells: Array
    stamp: int

    def begin(self, rows: Sequence[int], lane: int | None) -> None:
        """Warps that act together, or one lane, start it."""
        self.history.check(self.history.of(rows, lane, self.cells, self.op, "read", proxy=True))
        self.history.read_by(self.queue, self.cells, self.stamp)

    def end(self, row: int, lane: int) -> None:
        """It has been waited for: nobody may have written its cells since it began."""
        if np.count_nonzero(self.history.written_since(self.cells, self.stamp)):
            mine = self.history.of([row], lane, self.cells, self.op, "read", proxy=True)
            self.history.check_unchanged(mine.flat, "overwritten", self.stamp)


def cells_of(units: Array, size: int, history: SharedHistory) -> Array:
    """The cells of units of ``size`` bytes, in their order."""
    parts = size // history.granule
    return units if parts == 1 else (units[:, None] * parts + np.arange(parts)).reshape(-1)


@dataclass(eq=False)
class Landing:
    """A transaction that ends on an mbarrier: by ``size`` bytes, or by arrivals of the lanes that started it.

    ``deliver`` writes its data in the name of an engine, and returns what else its end makes known. ``passed`` is how
    far others had come when it was started, None without checks.
    """

    by: Actor
    barrier: Mbarrier
    passed: Array | None
    deliver: Callable[[int], dict[int, int]]
    size: int = 0
