"""The history of global memory: of each cell the last write, and all reads and updates since.

Shared memory has a table for each warp that sees it. For a grid that would be too much: reads and updates of global
memory are kept apart (:mod:`warploom.emulate.memory.last_access`). Warps are numbered as the grid counts them, as what
one batch of CTAs has done is compared with what the next one does. A bulk store is a write that nobody knows of from
its start until its thread has waited for it.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.findings.report import MemoryReports
from warploom.emulate.memory.access import Access
from warploom.emulate.memory.buffers import GlobalBuffer, Region
from warploom.emulate.memory.last_access import Accesses, LastAccesses
from warploom.emulate.order.clocks import Clocks
from warploom.emulate.order.known import FAR, FENCED_GLOBALLY
from warploom.ir.statements import Op

Array = NDArray[Any]

Mode = Literal["read", "write", "atomic"]
STRONG, CTA_ONLY = 1, 2
"""Kinds of reads and updates: not weak; with a scope that ends at the CTA."""
FLYING = 1 << 40
"""Added to the stamp at which a bulk store has begun to write: nobody can know of it."""


def _harmless(mine: Access, past: str, kind: int) -> bool:
    """Whether an access may be unordered with an earlier one of this kind."""
    if mine.what != "atomic":
        return False
    return bool(kind & STRONG) if past == "read" else not (kind & CTA_ONLY or mine.cta_only)


class GlobalHistory:
    """Of a region, in cells of ``granule`` bytes. ``clocks`` and ``report`` change with the batch."""

    clocks: Clocks
    report: MemoryReports

    def __init__(self, region: Region, granule: int) -> None:
        self.region, self.granule = region, granule
        count = -(-region.bytes // granule) + 1
        self.wrote, self.writer = np.zeros(count, np.int64), np.zeros(count, np.int64)  # stamp, agent
        self.lane = np.zeros(count, np.int8)
        self.generic = np.zeros(count, np.bool_)  # last written by an ordinary instruction
        self.reads, self.updates = LastAccesses(self.wrote), LastAccesses(self.wrote)

    def cells(self, buffer: GlobalBuffer, offsets: Array) -> Array:
        """The cells at byte offsets in a buffer."""
        return (offsets + (buffer.real - self.region.real)) // self.granule

    def bytes(self, mine: Access) -> Array:
        """The byte offsets of an access's cells in its buffer."""
        assert mine.buffer is not None
        return mine.cells * self.granule + self.region.real - mine.buffer.real

    def access(self, op: Op, what: Mode, buffer: GlobalBuffer, cells: Array, rows: Array, lanes: Array) -> Access:
        """An access of these rows and lanes, one for each cell, made now."""
        return Access(op, what, (rows,), lanes, cells, buffer=buffer, stamp=self.clocks.stamp(op))

    def _agents(self, mine: Access) -> Array:
        rows = mine.rows[0]
        return np.full(rows.shape, mine.name) if mine.name else self.clocks.first + rows

    # -- looking back ------------------------------------------------------------------------------------------------

    def check(self, mine: Access) -> None:
        """Report conflicts of an access with what came before it."""
        stamps = self.wrote[mine.cells]
        if stamps.any():
            flying = stamps >= FLYING
            if flying.any():
                self.report.in_flight(mine[flying], stamps[flying] - FLYING, self.bytes(mine)[flying])
            written = np.nonzero((stamps > 0) & ~flying)[0]
            cells = mine.cells[written]
            self._compare(mine, written, self._last_writes(cells), "wrote")
        if mine.what != "read":
            self._against(self.reads, mine, "read")
        if mine.what != "read" or not mine.strong:
            self._against(self.updates, mine, "updated")

    def _against(self, earlier: LastAccesses, mine: Access, past: str) -> None:
        found = earlier.of(mine.cells, lambda kind: _harmless(mine, past, kind))
        if found is not None:
            self._compare(mine, *found, past)

    def _last_writes(self, cells: Array) -> Accesses:
        kinds = np.zeros(cells.shape, np.int8)
        return Accesses(cells, self.writer[cells], self.lane[cells], self.wrote[cells], kinds)

    def _compare(self, mine: Access, me: Array, theirs: Accesses, past: str) -> None:
        """Report races of the cells at ``me`` with accesses to them: atomics race with none that is strong."""
        clocks, rows = self.clocks, mine.rows[0][me]
        columns = clocks.column_of(theirs.agents, rows)
        fine = clocks.ordered(rows, mine.lanes[me], False, columns, theirs.lanes, theirs.stamps, plane=FAR)
        if past != "wrote" and mine.what == "atomic":
            fine |= np.array([_harmless(mine, past, kind) for kind in range(STRONG + CTA_ONLY + 1)])[theirs.kinds]
            if past == "updated":
                fine |= theirs.agents // clocks.warps_per_cta == (clocks.first + rows) // clocks.warps_per_cta
        self.races(mine, me[~fine], theirs.agents[~fine], theirs.stamps[~fine], past)

    def races(self, mine: Access, me: Array, agents: Array, stamps: Array, past: str) -> None:
        """Report races of the cells at ``me`` with accesses of others."""
        if me.size:
            self.report.races(mine[me], agents, stamps, self.bytes(mine)[me], past)

    def check_proxy(self, mine: Access) -> None:
        """Report what ordinary instructions wrote and is not fenced against an access through the async proxy."""
        me = np.nonzero(self.generic[mine.cells])[0]
        cells = mine.cells[me]
        theirs = self._last_writes(cells)
        updates = None if mine.what == "atomic" else self.updates.of(mine.cells, lambda _: False)
        if updates is not None:
            ordinary = updates[1].agents >= 0
            me = np.concatenate([me, updates[0][ordinary]])
            theirs = Accesses.joined([theirs, updates[1][ordinary]])
        clocks, rows = self.clocks, mine.rows[0][me]
        columns = clocks.column_of(theirs.agents, rows)
        fine = clocks.ordered(rows, mine.lanes[me], False, columns, theirs.lanes, theirs.stamps, plane=FENCED_GLOBALLY)
        fine |= theirs.stamps >= FLYING
        for stamp in np.unique(theirs.stamps[~fine]).tolist():
            these = me[~fine & (theirs.stamps == stamp)]
            self.report.unfenced(mine[these], stamp, self.bytes(mine)[these])

    def check_unwritten(self, mine: Access) -> None:
        """Report a read through a cache for what the kernel does not write."""
        stamps = self.wrote[mine.cells]
        written = (stamps > 0) | self.updates.touched(mine.cells)
        if written.any():
            self.report.cached(mine[written], int(stamps[written][0]) % FLYING, self.bytes(mine)[written])

    def check_unchanged(self, mine: Access, since: int) -> None:
        """Report writes of what was being read all the time since a stamp."""
        stamps = self.wrote[mine.cells]
        changed = (stamps > since) & (stamps < FLYING)
        if changed.any():
            self.report.changed(mine[changed], int(stamps[changed][0]), self.bytes(mine)[changed])

    def check_scope(self, mine: Access) -> None:
        """Report updates of one cell in one execution by CTAs that its scope leaves out."""
        agents = self._agents(mine)
        ctas = agents // self.clocks.warps_per_cta
        order = np.lexsort((ctas, mine.cells))
        first, then = order[:-1], order[1:]
        meet = (mine.cells[first] == mine.cells[then]) & (ctas[first] != ctas[then])
        me = then[meet]
        self.races(mine, me, agents[first[meet]], np.full(me.shape, mine.stamp), "updated")

    def check_clash(self, mine: Access, data: Array, per_lane: int) -> None:
        """Several threads storing to one address in one execution: fine only within a warp and with equal bits."""
        cells = mine.cells
        across = self.writer[cells] != self._agents(mine)
        if not (across | (self.lane[cells] != mine.lanes)).any():
            return
        unique, first = np.unique(cells[::per_lane], return_index=True)
        group = np.searchsorted(unique, cells[::per_lane])
        differs = (data != data[first[group]]).any(axis=1)
        bad = (across.reshape(-1, per_lane).any(axis=1)) | (np.bincount(group, differs, unique.size) > 0)[group]
        bad &= np.bincount(group)[group] > 1
        if bad.any():
            these = np.nonzero(bad)[0] * per_lane
            self.report.clash(mine[these], self.bytes(mine)[these])

    # -- writing down ------------------------------------------------------------------------------------------------

    def note(self, mine: Access) -> None:
        """Record an access for those that come after it."""
        agents, cells = self._agents(mine), mine.cells
        if mine.what == "write":
            self._write(cells, mine.stamp, agents, mine.lanes, generic=True)
            return
        lanes = np.zeros_like(mine.lanes) if mine.name else mine.lanes
        kind = np.full(cells.shape, mine.strong * STRONG + mine.cta_only * CTA_ONLY, np.int8)
        accesses = Accesses(cells, agents, lanes, np.full(cells.shape, mine.stamp), kind)
        (self.reads if mine.what == "read" else self.updates).note(accesses)

    def _write(self, cells: Array, stamp: int, agents: Array, lanes: Array, *, generic: bool) -> None:
        self.wrote[cells], self.writer[cells], self.lane[cells], self.generic[cells] = stamp, agents, lanes, generic
        self.reads.forget(cells)
        self.updates.forget(cells)

    def begin(self, mine: Access) -> None:
        """A bulk store begins to write: nobody may touch its cells until it has landed."""
        self.wrote[mine.cells] = FLYING + mine.stamp

    def land(self, mine: Access) -> None:
        """The thread of a bulk store knows that it has written, where no other one has begun to since."""
        mine = mine[self.wrote[mine.cells] == FLYING + mine.stamp]
        stamp = self.clocks.stamp(mine.op)
        self._write(mine.cells, stamp, self._agents(mine), mine.lanes, generic=False)
