"""The history of a memory: who wrote and read each cell when, and which accesses conflict with that.

A cell is as wide as the program's smallest access. Its history is its last write, and the reads and strong writes of
each agent since. A copy stands there as a write from its start, with a stamp that nobody can know of, until it lands:
so "in flight" and "never written" are found by the comparison that finds races.

Stores of equal values do not conflict with each other: an unordered store of what is there leaves the last write as it
is, and is kept as "alike".

How accesses are compared is the same for every memory; :class:`SharedHistory` keeps reads in a table for each warp, and
:class:`~warploom.emulate.memory.global_history.GlobalHistory` in lists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.findings.report import Reporter
from warploom.emulate.memory.access import MemoryAccess
from warploom.emulate.order.clocks import BITS, LANES, MOST_STAMPS, Clocks
from warploom.emulate.order.planes import FAR, FENCED, ORDER
from warploom.ir.statements import Op

Array = NDArray[Any]

MANY = 32
"""In place of the lane: several lanes, or a collective access."""
NEVER, MBARRIER = np.uint32(MOST_STAMPS << BITS | MANY), np.uint32((2 * MOST_STAMPS - 1) << BITS | MANY)
"""Records of cells of shared memory that nobody has written, and of those that are an mbarrier's."""

Lanes = Callable[[Array], Array]
"""Of some cells of an access, the stamps (cells, 32) at which each lane of the warp has made a record; 0 for never."""


class Earlier(Protocol):
    """Accesses of one kind that the last write of a cell does not stand for."""

    past: str

    def note(self, at: MemoryAccess) -> None:
        """Record an access."""
        ...

    def late(
        self, at: MemoryAccess, harmless: Callable[[], Array] | None
    ) -> Iterator[tuple[MemoryAccess, Array, Array, Lanes | None]]:
        """Yield accesses to the cells of another, except ``harmless`` ones, that its threads do not know of at once."""
        ...


class Kind(NamedTuple):
    """The accesses in one table: "read", "update" (strong writes) or "alike" (stores of equal values).

    Those of strong accesses have their ``scope`` (:attr:`MemoryAccess.narrow`) and the ``width`` of elements in bytes.

    Source: PTX ISA, "Morally Strong Operations".
    """

    what: Literal["read", "update", "alike"]
    scope: int | None = None
    width: int = 0

    @classmethod
    def of(cls, at: MemoryAccess) -> Kind:
        """The table of an access that the last write of its cells does not stand for."""
        what = "read" if at.what == "read" else "update"
        return cls(what, at.narrow, at.width) if at.strong else cls(what)

    def conflicts(self, at: MemoryAccess) -> bool:
        """Whether an access may conflict with these: strong ones of one width do not, in each other's scope."""
        if self.what == at.what == "read":
            return False
        if not at.strong or self.scope is None:
            return True
        return self.mixed(at) or bool(self.scope or at.narrow)

    def mixed(self, at: MemoryAccess) -> bool:
        """Whether these are wider or narrower than an access."""
        return 0 < self.width != at.width > 0


READ, ALIKE = Kind("read"), Kind("alike")


class History:
    """The history of cells of ``granule`` bytes, all of which begin with the record ``first``.

    Stamps from ``flying`` on are known to nobody: of copies that still write, by the stamps at which they began.
    """

    clocks: Clocks
    report: Reporter
    read_plane, fenced_plane = ORDER, FENCED

    def __init__(self, cells: int, granule: int, first: Any, flying: int) -> None:
        self.granule, self.flying, self.record = granule, flying, type(first)
        self.wrote = np.full(cells, first, type(first))
        self.writer = np.zeros(cells, np.int64)
        self.first, self.tables = first, dict[Kind, Earlier]()  # accesses by kind

    # -- what memories differ in -------------------------------------------------------------------------------------

    def _table(self, past: str) -> Earlier:
        """A record of accesses, none of which has been made."""
        raise NotImplementedError

    def writers(self, at: MemoryAccess) -> Array:
        """The agents who make an access, one for each line, as they are written down."""
        raise NotImplementedError

    def _warps(self, mine: MemoryAccess) -> Array:
        """The warps that make an access, as writers are written down."""
        raise NotImplementedError

    def _columns(self, writers: Array, rows: Array) -> Array:
        """The columns of agents as they are written down, to these rows."""
        raise NotImplementedError

    def agents(self, writers: Array, rows: Array) -> Array:
        """The agents, as findings name them."""
        raise NotImplementedError

    def _ordinary(self, mine: MemoryAccess, past: str, writers: Array) -> Array:
        """Which of the records of an access's cells ordinary instructions have made, through the generic proxy."""
        raise NotImplementedError

    def stored(self, cells: Array) -> Array:
        """The cells whose last write an ordinary instruction has made."""
        raise NotImplementedError

    def bytes(self, mine: MemoryAccess) -> Array:
        """The bytes that an access's cells begin at, as findings name them."""
        raise NotImplementedError

    # -- looking back ------------------------------------------------------------------------------------------------

    def check(self, at: MemoryAccess, holds: Callable[[], Array] | None = None) -> tuple[Array | None, Array | None]:
        """Report conflicts of an access with what came before it.

        Stores of values that their cells hold already (``holds`` says which do) do not conflict with unordered stores
        of the same. Returns the cells whose last write is not known at once, and those of unordered equal stores.
        """
        late, same = at.late(self.wrote, self.writer), None
        held = None if holds is None else cache(holds)
        if late is not None:
            mine = at.among(late)
            harmless = None if held is None else lambda: held()[late]
            alike = self.judge(mine, "wrote", self.writer[mine.cells], self.wrote[mine.cells], harmless=harmless)
            if alike.any():
                same = np.zeros(late.shape, np.bool_)
                same[late] = alike
        for kind, earlier in self.tables.items():
            if not kind.conflicts(at):
                continue
            for mine, writers, records, each in earlier.late(at, held if kind is ALIKE else None):
                self.judge(mine, earlier.past, writers, records, each, kind=kind)
        if same is not None:
            self.check_ended(at.among(same))
        return late, same

    def check_ended(self, mine: MemoryAccess) -> None:
        """Report conflicts of equal stores with accesses before the last write, where that write has ended those."""

    def judge(
        self,
        mine: MemoryAccess,
        past: str,
        writers: Array,
        record: Array,
        each: Lanes | None = None,
        harmless: Callable[[], Array] | None = None,
        kind: Kind | None = None,
    ) -> Array:
        """Report what of an access conflicts with records of its cells, one for each.

        Records of several lanes are ordered where ``each`` of them is, though not all of their warp have met.
        Returns the cells that are not ordered, and ``harmless``.
        """
        found, unknown = np.zeros(record.shape, np.bool_), record >> BITS >= self.flying
        if unknown.any():
            self._unknown(mine[unknown], record[unknown])
            mine, writers, record = mine[~unknown], writers[~unknown], record[~unknown]
        stamps, lanes = (record >> BITS).astype(np.int64), record & (LANES - 1)
        columns = self._columns(writers, mine.rows[0])
        plane = self.read_plane if past == "read" or mine.proxy else FAR
        fine = self._ordered(mine, plane, columns, lanes, stamps, each)
        fine |= self._harmless(mine, kind, writers, record, fine)
        if harmless is not None and not fine.all():
            found[~unknown] = ~fine
            found &= harmless()
            fine |= found[~unknown]
        if not fine.all():
            bad, agents = mine[~fine], self.agents(writers[~fine], mine.rows[0][~fine])
            again = self._repeated(mine, past, writers, record)[~fine]
            self.report.races(bad, agents, stamps[~fine], self.bytes(bad), past + self._whose(bad), again)
        if mine.proxy:
            ordinary, what = self._ordinary(mine, past, writers), "not fenced"
            if past == "read":
                ordinary, what = ordinary & fine, "read, not fenced"
            if ordinary.any():
                ordinary &= ~self._ordered(mine, self.fenced_plane, columns, lanes, stamps, each)
            for stamp in np.unique(stamps[ordinary]).tolist():
                these = mine[ordinary & (stamps == stamp)]
                self.report.tell(what, these, self.bytes(these), stamp)
        return found

    def _ordered(
        self, mine: MemoryAccess, plane: int, columns: Array, lanes: Array, stamps: Array, each: Lanes | None = None
    ) -> Array:
        """Whether all rows of an access know of records of its cells; of several lanes, of ``each`` one's."""
        fine, mine_lanes = np.ones(columns.shape, np.bool_), mine.lane_of_each[:, 0]
        for rows in mine.rows:
            fine &= self.clocks.ordered(rows, mine_lanes, mine.whole, columns, lanes, stamps, plane=plane)
        if each is not None and (several := np.nonzero(~fine & (lanes == MANY))[0]).size:
            when = each(several)
            one, lane = np.nonzero(when)
            some = several[one]
            known = self._ordered(mine[some], plane, columns[some], lane, when[one, lane])
            fine[several] = np.bincount(one[~known], minlength=several.size) == 0
        return fine

    def _repeated(self, mine: MemoryAccess, past: str, writers: Array, record: Array) -> Array:
        """Which records read, for several warps, a block of a compiler's that the writing warp has read as well."""
        return np.zeros(record.shape, np.bool_)

    def _whose(self, mine: MemoryAccess) -> str:
        """The CTA whose memory an access goes to, where findings name it."""
        return ""

    def _harmless(self, mine: MemoryAccess, kind: Kind | None, writers: Array, record: Array, known: Array) -> Any:
        """Which records of a kind an access may be unordered with: of strong accesses, those in each other's scope.

        It is ``known`` with which ones it is ordered.
        """
        if kind is None or kind.scope is None or not mine.strong or kind.mixed(mine):
            return False
        warps = min((x for x in (mine.narrow, kind.scope) if x), default=0) * self.clocks.warps_per_cta
        return not warps or writers // warps == self._warps(mine) // warps

    def _unknown(self, mine: MemoryAccess, record: Array) -> None:
        """Report an access to cells with stamps that nobody knows."""
        begun = (record >> BITS).astype(np.int64) - self.flying
        self.report.in_flight(mine, begun, self.bytes(mine))

    # -- writing down ------------------------------------------------------------------------------------------------

    def coded(self, stamp: int, lane: Array | int) -> Array:
        """The record of an access of a lane."""
        return np.asarray(stamp << BITS | np.asarray(lane, np.int64)).astype(self.record)

    def table(self, kind: Kind) -> Earlier:
        """The record of accesses of a kind."""
        if kind not in self.tables:
            self.tables[kind] = self._table({"read": "read", "update": "updated", "alike": "wrote"}[kind.what])
        return self.tables[kind]

    def note(self, at: MemoryAccess) -> None:
        """Record a read, or a strong write such as an atomic update, for the accesses that come after it."""
        self.table(Kind.of(at)).note(at)
        if at.what != "read":
            cells = at.cells
            self.wrote[cells[self.wrote[cells] == self.first]] = 0

    def write(self, at: MemoryAccess) -> tuple[Array, Array] | None:
        """Note who has written some units.

        Returns which of the units other threads have written as well, and which of them other warps; None for none.
        """
        wrote, writer, units = self.wrote.reshape(-1, at.parts), self.writer.reshape(-1, at.parts), at.units
        code = self.coded(at.stamp, at.lane_of_each)[..., None]
        mine = at.each(self.writers(at)[:, None])[..., None]
        wrote[units], writer[units] = code, mine
        elsewhere = writer[units] != mine
        clash = ((wrote[units] != code) | elsewhere).any(axis=-1)
        if at.whole:
            wrote[units] = self.coded(at.stamp, MANY)
        return (clash, elsewhere.any(axis=-1)) if np.count_nonzero(clash) else None

    def begin(self, cells: Array, stamp: int) -> None:
        """A transaction begins to write cells: nobody may touch them until it lands."""
        self.wrote[cells] = self.coded(self.flying + stamp, MANY)

    def written_since(self, cells: Array, stamp: int) -> Array:
        """Which cells have been written, or have begun to be, after a stamp."""
        records = self.wrote[cells]
        return ((records >> BITS & self.flying - 1) > stamp) & (records != MBARRIER)

    def check_unchanged(self, mine: MemoryAccess, what: str, since: int) -> None:
        """Report, as ``what``, writes since a stamp of cells (one on each line) that are read all the time."""
        changed = mine[self.written_since(mine.cells, since)]
        if changed.cells.size:
            stamp = int(self.wrote[changed.cells[0]] >> BITS) % self.flying
            self.report.tell(what, changed, self.bytes(changed), stamp)

    def still_written(self, cells: Array, begun: int) -> Array:
        """Which cells no other transaction has claimed since one began to write them."""
        return self.wrote[cells] >> BITS == self.flying + begun


class SharedHistory(History):
    """The history of ``cells`` cells for each CTA of a batch. ``apart``: lanes of one warp may learn different things.

    Agents are columns of the clocks.
    """

    def __init__(self, ctas: int, cells: int, granule: int, clocks: Clocks, report: Reporter, *, apart: bool) -> None:
        super().__init__(ctas * cells, granule, NEVER, MOST_STAMPS)
        self.cells, self.clocks, self.report, self.apart = cells, clocks, report, apart
        self.reads = self.tables[READ] = WarpTable("read", self)

    def _table(self, past: str) -> WarpTable:
        return WarpTable(past, self)

    def writers(self, at: MemoryAccess) -> Array:
        """The columns of the rows that make an access."""
        return self.clocks.columns[at.rows[0]]

    def _warps(self, mine: MemoryAccess) -> Array:
        return self.clocks.columns[mine.rows[0]]

    def _columns(self, writers: Array, rows: Array) -> Array:
        return writers

    def agents(self, writers: Array, rows: Array) -> Array:
        """The numbers in the grid of writers, to these rows."""
        return self.clocks.agents(writers, rows)

    def _ordinary(self, mine: MemoryAccess, past: str, writers: Array) -> Array:
        return writers < self.clocks.warps

    def stored(self, cells: Array) -> Array:
        """The cells whose last write an ordinary instruction has made."""
        return (self.wrote[cells] < NEVER) & (self.writer[cells] < self.clocks.warps)

    def bytes(self, mine: MemoryAccess) -> Array:
        """The bytes of shared memory that an access's cells begin at."""
        return mine.cells % self.cells * self.granule

    def _whose(self, mine: MemoryAccess) -> str:
        owner, warps = int(mine.cells[0]) // self.cells * self.clocks.warps_per_cta, self.clocks.warps_per_cta
        other = mine.proxy and owner != int(mine.rows[0][0]) // warps * warps
        return f" in the shared memory of {self.report.cta(owner)}" if other else ""

    def of(
        self, rows: Sequence[int], lane: int | None, cells: Array, op: Op, what: str, *, proxy: bool
    ) -> MemoryAccess:
        """An access to cells of one CTA by rows that act together, or by one lane of one row.

        ``proxy``: through the async proxy, which must know of ordinary accesses by fences.
        """
        clocks = self.clocks
        reach = clocks.reach(rows, lane).astype(np.uint32) << BITS | np.uint32(LANES - 1)
        known = reach[ORDER].copy()
        if proxy:
            fenced = reach[FENCED, : clocks.warps] if clocks.planes > FENCED else LANES - 1
            known[: clocks.warps] = np.minimum(known[: clocks.warps], fenced)
        each, lanes = tuple(np.array(rows)[:, None]), np.array([lane or 0])
        return MemoryAccess(
            op=op,
            what=what,
            rows=each,
            index=cells[None],
            lanes=lanes,
            whole=lane is None,
            proxy=proxy,
            reach=known,
        )

    def _unknown(self, mine: MemoryAccess, record: Array) -> None:
        where, never, taken = self.bytes(mine), record == NEVER, record == MBARRIER
        if taken.any():
            self.report.tell("an mbarrier", mine[taken], where[taken])
        flying = ~never & ~taken
        if flying.any():
            super()._unknown(mine[flying], record[flying])
        if never.any() and (mine.what == "atomic" or (mine.proxy and mine.what == "read")):
            self.report.tell("never written", mine[never], where[never])

    # -- transactions ------------------------------------------------------------------------------------------------

    def land(self, begun: int, column: int, cells: Array, op: Op) -> None:
        """A transaction of a queue has written cells, except those that another one has claimed since."""
        stamp, mine = self.clocks.stamp(op), cells[self.still_written(cells, begun)]
        self.wrote[mine], self.writer[mine] = self.coded(stamp, MANY), column
        self.clocks.queue_acts(column, stamp)

    def read_by(self, column: int, cells: Array, stamp: int) -> None:
        """A queue reads cells until what it does up to a stamp has been waited for."""
        queues = self.reads.queues
        if column not in queues:
            queues[column] = np.zeros(self.wrote.shape, np.uint32)
        queues[column][cells] = self.coded(stamp, MANY)
        self.clocks.queue_acts(column, stamp)

    # -- mbarriers ---------------------------------------------------------------------------------------------------

    def claim(self, cta: int, start: int, size: int, row: int, lane: int, op: Op) -> None:
        """A lane makes an mbarrier of some bytes of its CTA: nobody else may touch them now, or from here on."""
        cells = self._cells(cta, start, size)
        ordinary = cells[self.wrote[cells] != MBARRIER]
        if ordinary.size:
            self.check(self.of([row], lane, ordinary, op, "write", proxy=False))
        self.wrote[cells] = MBARRIER

    def disclaim(self, cta: int, start: int, size: int, row: int, lane: int, stamp: int) -> None:
        """A lane ends an mbarrier: its bytes are ordinary memory to whoever knows of that."""
        cells = self._cells(cta, start, size)
        self.wrote[cells], self.writer[cells] = self.coded(stamp, lane), self.clocks.columns[row]

    def _cells(self, cta: int, start: int, size: int) -> Array:
        first = cta * self.cells + start // self.granule
        return np.arange(first, first + max(1, size // self.granule))


class WarpTable:
    """The last access of one kind to each cell, by each of the warps and queues that see it.

    Where several lanes of a warp have accessed a cell since all of them met, MANY stands in place of the lane.
    """

    def __init__(self, past: str, history: SharedHistory) -> None:
        self.past, self.history, self.clocks = past, history, history.clocks
        self.warps, cells = self.clocks.home, history.wrote.size
        self.records = np.zeros((self.warps, cells), np.uint32)
        self.newest = np.zeros(self.clocks.columns.size, np.uint32)  # by each row of the batch, to any cell
        self.queues: dict[int, Array] = {}  # column → its last access to each cell
        self.lanes = LaneStamps(self.records, self.clocks) if history.apart else None

    def _home(self, cells: Array) -> Array:
        """The first row of the warps that see cells."""
        return cells // self.history.cells * self.clocks.warps_per_cta // self.warps * self.warps

    def late(
        self, at: MemoryAccess, harmless: Callable[[], Array] | None
    ) -> Iterator[tuple[MemoryAccess, Array, Array, Lanes | None]]:
        """Yield, for each warp and queue, accesses that the threads of another do not know of at once."""
        clocks = self.clocks
        for number, columns, records in self._agents(at):
            found = at.late(records, columns)
            if found is None or (harmless is not None and not np.count_nonzero(found := found & ~harmless())):
                continue
            mine, each, writers = at.among(found), None, columns
            if number is not None:
                writers = clocks.columns[self._home(mine.cells)] + number
                each = None if self.lanes is None else partial(self.lanes.of, number, mine.cells)
            yield mine, np.broadcast_to(writers, mine.cells.shape), records[mine.cells], each

    def _agents(self, at: MemoryAccess) -> Iterator[tuple[int | None, Array, Array]]:
        """Each warp, by its number, and queue with news that sees the cells: columns, and the records of cells."""
        homes, numbers = self._home(at.index[:, 0] * at.parts), np.arange(self.warps)
        columns = self.clocks.columns[homes][:, None] + numbers
        news = at.newer(self.newest[homes[:, None] + numbers], columns)
        for number in np.nonzero(news)[0].tolist():
            yield number, columns[:, number], self.records[number]
        if self.queues:
            queues = np.fromiter(self.queues, np.int64)
            news = at.newer(self.clocks.newest[queues - self.clocks.warps][None] << BITS, queues[None])
            for column in queues[news].tolist():
                yield None, np.array([column]), self.queues[column]

    def note(self, at: MemoryAccess) -> None:
        """Record an access of whole warps, or of their lanes."""
        (rows,), parts, stamp = at.rows, at.parts, at.stamp
        self.newest[rows] = stamp << BITS
        records, units = self.records.reshape(-1, parts), self.history.wrote.size // parts
        where, many = at.units + at.each((rows % self.warps * units)[:, None]), np.uint32(stamp << BITS | MANY)
        if at.whole:
            if self.lanes is not None:
                self.lanes.note(where, parts, stamp)
            records[where] = many
            return
        lane, met = at.lane_of_each, self.clocks.met(rows).astype(np.uint32) << BITS | np.uint32(LANES - 1)
        code, old = np.uint32(stamp << BITS) | lane.astype(np.uint32)[..., None], records.take(where, axis=0)
        if self.lanes is not None:
            self.lanes.note(where, parts, stamp, lane, old)
        others = old > at.each(met[:, None])[..., None]  # accesses since the warp met, by other lanes
        if np.count_nonzero(others):
            others &= (old ^ code) & (LANES - 1) != 0
            code = np.where(others, many, code)
        records[where] = code
        shared = records.take(where, axis=0) != code  # by several lanes in this access
        if np.count_nonzero(shared):
            records[where[shared.any(axis=-1)]] = many


_MOST_PENDING = 1 << 21


class LaneStamps:
    """The stamps of each lane's last access to the cells of a :class:`WarpTable`, whose ``records`` these are.

    Accesses are written down when somebody asks, or when many are pending; most are known to all warps before that.
    Cells that lanes have accessed have a line of stamps; others have been accessed by whole warps alone.
    """

    def __init__(self, records: Array, clocks: Clocks) -> None:
        self.records, self.clocks, self.line = records, clocks, np.zeros(records.shape, np.int32)
        self.stamps, self.used = np.zeros((1, 32), np.uint32), 1  # nobody has line 0
        self.pending: list[tuple[Array, int, int, Array | None, Array | None]] = []
        self.size = 0  # of what is pending, in cells

    def of(self, number: int, cells: Array, some: Array) -> Array:
        """The stamps (cells, 32) of the lanes of a warp at some of the cells."""
        self._write()
        lines, whole = self.line[number, cells[some]], self.records[number, cells[some]] >> BITS
        return np.where(lines[:, None] > 0, self.stamps[lines], whole[:, None])

    def note(self, where: Array, parts: int, stamp: int, lanes: Array | None = None, old: Array | None = None) -> None:
        """Lanes (None: whole warps) access units of so many cells, of which the records said ``old``."""
        if lanes is None and self.used == 1 and not self.pending:
            return
        self.pending.append((where, parts, stamp, lanes, old))
        self.size += where.size * parts
        if self.size > _MOST_PENDING:
            known = int(self.clocks.bound.min()) >> BITS
            self.pending = [access for access in self.pending if access[2] > known]
            self.size = sum(where.size * parts for where, parts, *_ in self.pending)
            if self.size > _MOST_PENDING // 2:
                self._write()

    def _write(self) -> None:
        for where, parts, stamp, lanes, old in self.pending:
            lines = self.line.reshape(-1, parts)[where]
            if lanes is None or old is None:
                self.stamps[lines[lines > 0]] = stamp
                continue
            new = lines == 0
            if new.any():
                self._add((where[..., None] * parts + np.arange(parts))[new], old[new])
                lines = self.line.reshape(-1, parts)[where]
            self.stamps[lines, lanes[..., None]] = stamp
        self.pending, self.size = [], 0

    def _add(self, cells: Array, records: Array) -> None:
        """Give lines to cells (of the flat table), which whole warps have accessed last as these records say."""
        cells, first = np.unique(cells, return_index=True)
        lines = self.used + np.arange(cells.size)
        self.used += cells.size
        if self.used > len(self.stamps):
            self.stamps = np.pad(self.stamps, ((0, 2 * self.used - len(self.stamps)), (0, 0)))
        self.line.reshape(-1)[cells] = lines
        self.stamps[lines] = records[first][:, None] >> BITS
