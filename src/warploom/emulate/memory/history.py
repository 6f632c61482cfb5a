"""The history of shared memory: who wrote and read each cell when, and which accesses conflict with that.

A cell is as wide as the program's smallest access. Its history is its last write, and the last read by each warp and
each queue of transactions that sees it. A copy stands there as a write from its start, with a stamp that nobody can
know of, until it lands: so "in flight" and "never written" are found by the comparison that finds races.

Three things have tables of their own, as they conflict with part of what follows alone: strong reads and strong writes
(atomics do not conflict with each other), and stores of equal values, which do not conflict with each other either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.findings.report import MemoryReports
from warploom.emulate.memory.access import Access, Cells, Footprint, Place
from warploom.emulate.memory.lane_reads import MANY, LaneReads
from warploom.emulate.order.clocks import BITS, MOST_STAMPS, Clocks
from warploom.emulate.order.known import FAR, FENCED, ORDER
from warploom.ir.statements import Op

Array = NDArray[Any]

FLYING = MOST_STAMPS
"""Stamps from here on are known to nobody: of copies that still write, by the stamps at which they began."""
NEVER, MBARRIER = np.uint32(FLYING << BITS | MANY), np.uint32((2 * FLYING - 1) << BITS | MANY)
"""Records of cells that nobody has written, and of those that are an mbarrier's."""

_KINDS = {"read": "read", "strong read": "read", "strong write": "wrote", "alike": "wrote"}
"""Accesses that are kept for each warp: reads; strong ones, which do not conflict with each other; and the newest
writes where several warps have stored equal values and nothing orders them."""
_LANES = np.arange(32, dtype=np.uint32)


class Table:
    """The last access of one kind to each cell by each of the warps that see it; ``newest``: of each row, to any."""

    def __init__(self, past: str, warps: int, cells: int, rows: int) -> None:
        self.past = past
        self.records = np.zeros((warps, cells), np.uint32)
        self.newest = np.zeros(rows, np.uint32)


class History:
    """Of ``cells`` cells of ``granule`` bytes for each CTA of a batch. ``parts``: part of a warp may meet."""

    def __init__(
        self, ctas: int, cells: int, granule: int, clocks: Clocks, report: MemoryReports, *, parts: bool
    ) -> None:
        self.cells, self.granule, self.clocks, self.report = cells, granule, clocks, report
        self.warps, self.rows, total = clocks.home, ctas * clocks.warps_per_cta, ctas * cells
        self.wrote = np.full(total, NEVER, np.uint32)
        self.writer = np.zeros(total, np.int32)  # its column
        self.tables: dict[str, Table] = {}  # by kind, of those that were needed
        self.queue_reads: dict[int, Array] = {}  # column → last read of each cell
        self.each = LaneReads(clocks) if parts else None

    # -- looking back ------------------------------------------------------------------------------------------------

    def table(self, kind: str) -> Table:
        """The table of accesses of a kind."""
        if kind not in self.tables:
            self.tables[kind] = Table(_KINDS[kind], self.warps, self.wrote.size, self.rows)
        return self.tables[kind]

    def check(
        self, at: Footprint, what: str, *, strong: bool = False, holds: Callable[[], Array] | None = None
    ) -> tuple[Array | None, Array | None]:
        """Report conflicts of an access with what came before it.

        Stores of values that their cells hold already (``holds`` says which do) do not conflict with unordered stores
        of the same. Returns the cells, as ``at`` has them, whose last write is not known at once, and those of them
        that another warp has so written; None for none.
        """
        late = at.late("wrote", self.wrote, self.writer)
        same = None if late is None or holds is None else late & holds()
        self._examine(at, what, "alike", None if same is None else ~same)
        if late is not None:
            mine = at.access(what, late)
            columns, record = self.writer[mine.cells], self.wrote[mine.cells]
            racing = self.judge(mine, "wrote", columns, record, alike=None if same is None else same[late])
            if same is not None:
                same[late] &= racing & (columns < self.clocks.warps)
                racing = same[late]
                if racing.any():
                    theirs = self.clocks.agents(columns[racing], mine.rows[0][racing]) - self.clocks.first
                    self._note_alike(mine.cells[racing], theirs, record[racing])
        for kind in () if strong else ("strong write",):
            self._examine(at, what, kind)
        for kind in () if what == "read" else ("read",) if strong else ("read", "strong read"):
            self._examine(at, what, kind)
        for column, records in self.queue_reads.items() if what != "read" else ():
            who = np.array(column)
            if not at.beyond("read", self.clocks.newest[column - self.clocks.warps] << BITS, who):
                continue
            found = at.late("read", records, who)
            if found is not None:
                mine = at.access(what, found)
                self.judge(mine, "read", np.full(mine.cells.shape, column), records[mine.cells])
        return late, same

    def _examine(self, at: Footprint, what: str, kind: str, among: Array | None = None) -> None:
        """Compare an access, or the cells ``among`` it, with a kind of accesses."""
        table, first = self.tables.get(kind), at.homes(self.warps)
        if table is None:
            return
        for number, records in enumerate(table.records):
            columns = self.clocks.columns[first] + number
            if not at.beyond(table.past, table.newest[first + number], columns):
                continue
            found = at.late(table.past, records, columns)
            if found is None or (among is not None and not np.count_nonzero(found := found & among)):
                continue
            mine = at.access(what, found)
            home = mine.cells // self.cells * self.clocks.warps_per_cta // self.warps * self.warps
            several = None if self.each is None or kind != "read" else number * self.wrote.size + mine.cells
            self.judge(mine, table.past, self.clocks.columns[home] + number, records[mine.cells], several=several)

    def judge(
        self,
        mine: Access,
        past: str,
        columns: Array,
        record: Array,
        *,
        alike: Array | None = None,
        several: Array | None = None,
    ) -> Array:
        """Report what of an access conflicts with records of its cells, one for each. Returns where it is not ordered.

        Those ``alike`` store what is there, and do not race with a warp's write. ``several``: where part of a warp may
        meet, the places of its reads among those of all warps.
        """
        known = record < NEVER
        if not known.all():
            self._unknown(mine[~known], record[~known])
        stamps, lanes = (record >> BITS).astype(np.int64), record & 63
        plane, fine = FAR if past == "wrote" and not mine.proxy else ORDER, np.ones(known.shape, np.bool_)
        for rows in mine.rows:
            fine &= self.clocks.ordered(rows, mine.lanes, mine.whole, columns, lanes, stamps, plane=plane)
        if several is not None and self.each is not None:
            self.each.judge(fine, (mine.rows[0], mine.lanes, columns, stamps), several, lanes == MANY, mine.whole)
        wrong = ~fine & known
        bad = wrong if alike is None else wrong & ~(alike & (columns < self.clocks.warps))
        if bad.any():
            agents = self.clocks.agents(columns[bad], mine.rows[0][bad])
            self.report.races(mine[bad], agents, stamps[bad], self.bytes(mine.cells[bad]), past + self._whose(mine))
        if mine.proxy and past == "wrote":
            open_ones = known & (columns < self.clocks.warps)
            fenced = np.ones(known.shape, np.bool_)
            for rows in mine.rows if open_ones.any() else ():
                fenced &= self.clocks.ordered(rows, mine.lanes, mine.whole, columns, lanes, stamps, plane=FENCED)
            open_ones &= ~fenced
            for stamp in np.unique(stamps[open_ones]).tolist():
                these = open_ones & (stamps == stamp)
                self.report.unfenced(mine[these], stamp, self.bytes(mine.cells[these]))
        return wrong

    def _unknown(self, mine: Access, record: Array) -> None:
        """An access to cells with stamps that nobody knows."""
        where, never, taken = self.bytes(mine.cells), record == NEVER, record == MBARRIER
        if taken.any():
            self.report.of_mbarrier(mine[taken], where[taken])
        flying = ~never & ~taken
        if flying.any():
            begun = (record[flying] >> BITS).astype(np.int64) - FLYING
            self.report.in_flight(mine[flying], begun, where[flying])
        if never.any() and (mine.what == "atomic" or (mine.proxy and mine.what == "read")):
            self.report.unset(mine[never], where[never])

    def bytes(self, cells: Array) -> Array:
        """The bytes of shared memory that cells begin at."""
        return cells % self.cells * self.granule

    def _whose(self, mine: Access) -> str:
        """The CTA of the cells of a transaction, if that is another than its starter's."""
        owner = int(mine.cells[0]) // self.cells * self.clocks.warps_per_cta
        row = int(mine.rows[0][0])
        if not mine.proxy or owner == row - row % self.clocks.warps_per_cta:
            return ""
        return f" in the shared memory of {self.report.cta(owner)}"

    def of(self, rows: Sequence[int], lane: int | None, cells: Array, op: Op, *, proxy: bool) -> Cells:
        """Cells of one CTA, which rows that act together, or one lane of one row, access.

        ``proxy``: through the async proxy, which must know of ordinary writes by fences.
        """
        clocks = self.clocks
        reach = clocks.reach(rows, lane).astype(np.uint32) << BITS | np.uint32(63)
        bounds = {"read": reach[ORDER], "wrote": reach[ORDER]}
        if proxy:
            bounds["wrote"] = reach[ORDER].copy()
            fenced = reach[FENCED, : clocks.warps] if clocks.planes > FENCED else 63
            bounds["wrote"][: clocks.warps] = np.minimum(reach[ORDER, : clocks.warps], fenced)
        return Cells(op, rows, lane, cells, proxy, bounds, int(cells[0]) // self.cells * clocks.warps_per_cta)

    # -- writing down ------------------------------------------------------------------------------------------------

    def begin(self, op: Op, cells: Array) -> int:
        """A copy begins to write cells: nobody may touch them until it lands. Returns its stamp."""
        stamp = self.clocks.stamp(op)
        self.wrote[cells] = np.uint32(FLYING + stamp << BITS | MANY)
        return stamp

    def land(self, begun: int, column: int, cells: Array, op: Op) -> int:
        """A copy has written cells that no other one has claimed since, in the name of a queue. Returns a stamp."""
        stamp = self.clocks.stamp(op)
        mine = cells[self.wrote[cells] >> BITS == FLYING + begun]
        self.wrote[mine], self.writer[mine] = np.uint32(stamp << BITS | MANY), column
        self.clocks.queue_acts(column, stamp)
        return stamp

    def read_by(self, column: int, cells: Array, stamp: int) -> None:
        """A queue reads cells until what it does up to a stamp has been waited for."""
        table = self.queue_reads.get(column)
        if table is None:
            table = self.queue_reads[column] = np.zeros(self.wrote.shape, np.uint32)
        table[cells] = np.uint32(stamp << BITS | MANY)
        self.clocks.queue_acts(column, stamp)

    def state(self, cells: Array) -> Array:
        """What changes when cells are written: a copy's begin over what nobody knows is no change."""
        return np.minimum(self.wrote[cells], NEVER)

    def overwritten(self, op: Op, cells: Array, row: int, lane: int) -> None:
        """A finding: these cells have been written while a transaction of a lane was reading them."""
        records = self.wrote[cells]
        record = records[np.argmax((records > NEVER) & (records < MBARRIER))]  # a copy under way, or else the first
        other = None if record in (NEVER, MBARRIER) else self.clocks.history[(int(record) >> BITS) % FLYING]
        if other is not None:
            self.report.overwritten(op, other, row, lane, cells.size, int(self.bytes(cells[:1])[0]))

    def claim(self, cta: int, start: int, size: int, row: int, lane: int, op: Op) -> None:
        """A lane makes an mbarrier of some bytes of its CTA: nobody else may touch them now, or from here on."""
        cells = self._cells(cta, start, size)
        ordinary = cells[self.wrote[cells] != MBARRIER]
        if ordinary.size:
            self.check(self.of([row], lane, ordinary, op, proxy=False), "write")
        self.wrote[cells] = MBARRIER

    def disclaim(self, cta: int, start: int, size: int, row: int, lane: int, stamp: int) -> None:
        """A lane ends an mbarrier: its bytes are ordinary memory to whoever knows of that."""
        cells = self._cells(cta, start, size)
        self.wrote[cells], self.writer[cells] = np.uint32(stamp << BITS | lane), self.clocks.columns[row]

    def _cells(self, cta: int, start: int, size: int) -> Array:
        first = cta * self.cells + start // self.granule
        return np.arange(first, first + max(1, size // self.granule))

    # -- ordinary accesses -------------------------------------------------------------------------------------------

    def note(self, kind: str, place: Place, stamp: int) -> None:
        """Record an access in the table of its kind."""
        frame, parts, table = place.frame, place.parts, self.table(kind)
        table.newest[frame.span] = stamp << BITS
        records = table.records.reshape(-1, parts)
        where = place.index + (frame.flat % self.warps * (self.wrote.size // parts))[:, None]
        each = self.each if kind == "read" else None
        if place.collective:
            if place.active is not None:
                where = where[place.active]
            records[where] = np.uint32(stamp << BITS | MANY)
            if each is not None:
                each.forget((where.reshape(-1, 1) * parts + np.arange(parts)).reshape(-1))
            return
        lane, epoch = _LANES[: where.shape[1]], self._epoch(frame.flat)[:, None]
        if place.active is not None:
            lane, epoch = (np.broadcast_to(x, where.shape)[place.active] for x in (lane, epoch))
            where = where[place.active]
        old = records.take(where, axis=0)
        code, others = _with_others(old, np.uint32(stamp << BITS) | lane[..., None], epoch[..., None])
        records[where] = code
        shared = records.take(where, axis=0) != code  # several lanes of the warp come to the cell in this access
        if np.count_nonzero(shared):
            many = np.uint32(stamp << BITS | MANY)
            records[where] = np.where(shared.any(axis=-1, keepdims=True), many, records[where])
        if each is not None:
            many = ((others | shared) & (lane[..., None] < MANY)).reshape(-1, parts)
            each.note(
                many,
                where.reshape(-1) * parts,
                np.broadcast_to(lane, where.shape).reshape(-1),
                old.reshape(-1, parts),
                stamp,
            )

    def _epoch(self, rows: Array) -> Array:
        """Records of a row up to here are of accesses that all its lanes know of."""
        return (self.clocks.met(rows).astype(np.uint32) << BITS) | np.uint32(63)

    def _note_alike(self, cells: Array, rows: Array, records: Array) -> None:
        """Keep the records of the last writers, of these rows, of cells that others store the same value to."""
        table = self.table("alike")
        table.newest[rows] = np.maximum(table.newest[rows], records)
        flat, where = table.records.reshape(-1), rows % self.warps * self.wrote.size + cells
        flat[where] = _with_others(flat[where], records, self._epoch(rows))[0]

    def write(
        self, index: Array, rows: Array, lane: Array, stamp: int, parts: int, *, collective: bool
    ) -> tuple[Array, Array] | None:
        """Note who has written units of some ``parts``. Returns which of them several threads have, and which several
        warps; None for none."""
        table, columns = self.wrote.reshape(-1, parts), self.writer.reshape(-1, parts)
        code = (lane.astype(np.uint32) | np.uint32(stamp << BITS))[..., None]
        mine = self.clocks.columns[rows][..., None]
        table[index], columns[index] = code, mine
        clash = ((table[index] != code) | (columns[index] != mine)).any(axis=-1)
        found = None
        if clash.any():
            table[index[clash]] = np.uint32(stamp << BITS | MANY)
            found = clash, (columns[index] != mine).any(axis=-1)
        if collective:
            table[index] = np.uint32(stamp << BITS | MANY)
        return found

    def fill(self, cells: Array) -> None:
        """Cells that nobody had written have been by an atomic update, which reports that."""
        self.wrote[cells[self.wrote[cells] == NEVER]] = 0


def _with_others(old: Array, record: Array, epoch: Array) -> tuple[Array, Array]:
    """The record to keep of a warp's accesses of a cell, and whether it stands for several lanes: other lanes than its
    own have accessed the cell after the warp last met, at ``epoch``.
    """
    others = old > epoch
    if np.count_nonzero(others):
        others &= (old ^ record) & 63 != 0
    return (np.where(others, record >> BITS << BITS | MANY, record) if np.count_nonzero(others) else record), others
