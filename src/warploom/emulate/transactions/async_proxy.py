"""Shared memory as engines see it: what they read and write through the async proxy, against everybody else's accesses.

The source and destination of an engine's access are cells of one CTA, given as a flat list. It is checked with the
clock of the thread that starts it, and recorded in the name of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.findings.report import Reporter
from warploom.emulate.findings.traffic import TrafficCounter
from warploom.emulate.memory.shared_memory import LANE_BITS, MANY, NEVER, SHARED_BASE, SharedMemory
from warploom.emulate.order.clocks import Clocks
from warploom.emulate.order.known import FENCED, ORDER
from warploom.ir.statements import Op

Array = NDArray[Any]
Starter = tuple[Sequence[int], int | None]
"""Who starts an access: rows of warps that act together, and the lane if it is a single one."""


class AsyncProxy:
    """Checks and records of one batch."""

    def __init__(
        self, shared: SharedMemory, clocks: Clocks, reporter: Reporter, counter: TrafficCounter, checks: bool
    ) -> None:
        self.shared = shared
        self.clocks = clocks
        self.report = reporter
        self.counter = counter
        self.checks = checks

    def cells(self, addresses: Array, cta: int) -> Array:
        """The cells of a CTA that hold the bytes at shared addresses (each within one cell's reach)."""
        local = np.unique((addresses - SHARED_BASE) // self.shared.granule)
        return local + cta * self.shared.stride // self.shared.granule

    def chunk_cells(self, addresses: Array, cta: int) -> Array:
        """The cells of 16-byte chunks."""
        granule = self.shared.granule
        first = (addresses - SHARED_BASE + cta * self.shared.stride) // granule
        return first if granule == 16 else (first[:, None] + np.arange(16 // granule)).reshape(-1)

    def state(self, cells: Array) -> Array:
        """What a later call of :meth:`unchanged` compares with."""
        return self.shared.writer[cells]

    # -- starting an access --------------------------------------------------------------------------------------

    def check(self, starter: Starter, cells: Array, what: str, op: Op) -> None:
        """Conflicts of an access ("read" or "write") with those before it."""
        row, shared = starter[0][0], self.shared
        reach = self.clocks.reach(*starter)
        record, columns = shared.writer[cells], shared.writer_column[cells]
        if self._all_known(reach, columns, record, cells, what):
            return
        flying = shared.in_flight[cells] != 0
        if flying.any():
            self._in_flight(row, starter[1], cells[flying], what, op)
        written = record != NEVER
        if what == "read":
            unset = ~written & ~flying
            if unset.any():
                where = self._byte(cells[unset][0])
                message = f"{op.instruction.mnemonic} reads byte {where} of shared memory, which nobody has written"
                message += ": write it, or wait for its data, before"
                self.report.add(
                    "uninitialised", op.where, message, row, starter[1] or 0, count=int(unset.sum()), address=where
                )
        whose = self._whose(row, cells)
        mine = cells[written], columns[written], record[written]
        self._check_records(starter, reach, *mine, what, op, f"wrote{whose}")
        self._check_proxy(starter, reach, *mine, what, op)
        for past, column, table in shared.others(self._owner(cells), writes=what == "write"):
            theirs = cells, np.full(cells.shape, column), table[cells]
            self._check_records(starter, reach, *theirs, what, op, f"{past}{whose}")
            if past == "wrote":
                self._check_proxy(starter, reach, *theirs, what, op)

    def _all_known(self, reach: Array, columns: Array, record: Array, cells: Array, what: str) -> bool:
        """Whether all that was done to cells is known, and fenced, at a look at the last writer and at each table."""
        clocks, limit = self.clocks, reach[ORDER] << LANE_BITS | 63
        if np.count_nonzero(record > limit[columns]):  # such as NEVER
            return False
        generic = columns < clocks.warps
        if np.count_nonzero(generic):
            fenced = reach[FENCED, columns[generic]] if clocks.planes > FENCED else 0
            if np.count_nonzero(record[generic] >> LANE_BITS > fenced):
                return False
        for past, column, table in self.shared.others(self._owner(cells), writes=what == "write"):
            if column >= clocks.warps and clocks.newest[column - clocks.warps] <= reach[ORDER, column]:
                continue
            if past == "wrote" or np.count_nonzero(table[cells] > limit[column]):
                return False
        return True

    def _owner(self, cells: Array) -> int:
        """The first warp of the CTA that owns the cells."""
        return int(cells[0]) * self.shared.granule // self.shared.stride * self.clocks.warps_per_cta

    def _whose(self, row: int, cells: Array) -> str:
        """The CTA of the cells, if that is another than the row's."""
        first = self._owner(cells)
        own = first == row - row % self.clocks.warps_per_cta
        return "" if own else f" in the shared memory of {self.report.cta(first)}"

    def _check_records(
        self, starter: Starter, reach: Array, cells: Array, columns: Array, record: Array, what: str, op: Op, past: str
    ) -> None:
        rows, lane = starter
        open_ones = np.nonzero(record >> LANE_BITS > reach[ORDER, columns])[0]
        if not open_ones.size:
            return
        cells, columns, record = cells[open_ones], columns[open_ones], record[open_ones]
        stamps, lanes = record >> LANE_BITS, record & 63
        fine = np.ones(columns.shape, np.bool_)
        for row in rows:
            me = np.full(columns.shape, row), np.full(columns.shape, lane or 0)
            fine &= self.clocks.ordered(*me, lane is None, columns, lanes, stamps)
        if not fine.all():
            wrong = ~fine
            who = np.full(int(wrong.sum()), rows[0]), np.full(int(wrong.sum()), lane or 0)
            where = (cells[wrong] * self.shared.granule) % self.shared.stride
            agents = self.clocks.agents(columns[wrong], who[0])
            self.report.races(op, what, *who, agents, stamps[wrong], where, past)

    def _check_proxy(
        self, starter: Starter, reach: Array, cells: Array, columns: Array, record: Array, what: str, op: Op
    ) -> None:
        """Data that the generic proxy wrote must be fenced before the async proxy touches it."""
        rows, lane = starter
        generic = columns < self.clocks.warps
        generic &= record >> LANE_BITS > (reach[FENCED, columns] if self.clocks.planes > FENCED else 0)
        if not generic.any():
            return
        cells, stamps, lanes = cells[generic], record[generic] >> LANE_BITS, record[generic] & 63
        fine = np.ones(cells.shape, np.bool_)
        for row in rows:
            me = np.full(cells.shape, row), np.full(cells.shape, lane or 0)
            fine &= self.clocks.ordered(*me, lane is None, columns[generic], lanes, stamps, plane=FENCED)
        for stamp in np.unique(stamps[~fine]):
            these = np.nonzero(~fine & (stamps == stamp))[0]
            where = self._byte(cells[these[0]])
            message = (
                f"{op.instruction.mnemonic} {what}s byte {where} of shared memory through the async proxy, which "
                f"{self.report.name_of(int(stamp))} wrote through the generic proxy: fence (fence.proxy.async) in the "
                "writing threads before they signal"
            )
            self.report.add(
                "proxy",
                op.where,
                message,
                rows[0],
                lane or 0,
                other=self.report.line_of(int(stamp)),
                count=these.size,
                address=where,
            )

    def _byte(self, cell: Any) -> int:
        return int(cell) * self.shared.granule % self.shared.stride

    def _in_flight(self, row: int, lane: int | None, cells: Array, what: str, op: Op) -> None:
        numbers = self.shared.in_flight[cells]
        lanes = np.full(cells.shape, lane or 0)
        where = (cells * self.shared.granule) % self.shared.stride
        rows = np.full(cells.shape, row)
        self.shared.report.in_flight(op, what, rows, lanes, numbers, where, self.shared.copies)

    # -- recording -----------------------------------------------------------------------------------------------

    def record_read(self, queue: int, cells: Array, stamp: int) -> None:
        """A queue (its column) reads cells until what it does up to ``stamp`` has been waited for."""
        table = self.shared.queue_readers.get(queue)
        if table is None:
            table = self.shared.queue_readers[queue] = np.zeros(self.shared.cells, np.int32)
        table[cells] = np.int32(stamp << LANE_BITS | MANY)
        self.clocks.queue_acts(queue, stamp)

    def unchanged(self, row: int, lane: int, cells: Array, before: Array, op: Op) -> None:
        """A read that ends now: nobody may have written its cells since it began."""
        changed = self.shared.writer[cells] != before
        if not changed.any():
            return
        cell = cells[changed]
        flying = self.shared.in_flight[cell] > 0
        if flying.any():
            other = self.shared.copies[int(self.shared.in_flight[cell[flying][0]]) - 1][0]
        else:
            found = self.clocks.history[int(self.shared.writer[cell[0]]) >> LANE_BITS]
            if found is None:
                return
            other = found
        where = self._byte(cell[0])
        message = (
            f"{op.instruction.mnemonic} may still read byte {where} of shared memory when {other.instruction.mnemonic} "
            "overwrites it: wait for its group before the memory is given away"
        )
        self.report.add("race", op.where, message, row, lane, other=other.where, count=cell.size, address=where)

    def begin_write(self, row: int, cells: Array, op: Op) -> int:
        """The cells hold nothing until the write lands. Returns the number of the copy."""
        shared = self.shared
        shared.copies.append((op, row))
        shared.in_flight[cells] = len(shared.copies)
        shared.writer[cells] = NEVER
        return len(shared.copies)

    def end_write(self, queue: int, cells: Array, number: int, op: Op) -> int:
        """The write lands, in cells that no other copy has claimed since. Returns its stamp."""
        shared, stamp = self.shared, self.clocks.stamp(op)
        mine = cells[shared.in_flight[cells] == number]
        shared.in_flight[mine] = 0
        shared.writer[mine] = np.int32(stamp << LANE_BITS | MANY)
        shared.writer_column[mine] = queue
        self.clocks.queue_acts(queue, stamp)
        return stamp
