"""Order: which accesses of which warps each warp knows to have happened before its next step.

Every executed memory operation gets a *stamp* from one counter that only grows. ``known[w, ORDER, u] = s`` means that
all accesses of agent u with stamps up to s happened before what every lane of warp w does next; synchronisation raises
it. Because stamps are global, a vector clock here is a vector of stamps, and a warp's own clock is always "now".
``known[w, ORDER, w]`` is the last ``__syncwarp`` (or barrier): later accesses of other lanes of the same warp are
unordered. Other planes of the same array say what is fenced, visible, or passed by control alone
(:mod:`warploom.emulate.order.planes`).

What one lane has learnt is its own, until the lanes of its warp meet: only then do the others know it. Such a lane has
a clock of its own meanwhile, and a column of its own once it alone has told others what it has done: a column for each
lane would make the clocks of grids 32 times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import EmulationError
from warploom.emulate.order.launches import EarlierLaunches
from warploom.emulate.order.places import Places
from warploom.emulate.order.planes import CONTROL, FAR, FENCED, NOBODY, ORDER, joined
from warploom.ir.statements import Op

Array = NDArray[Any]
BITS, LANES = 6, 64
"""A record of an access is stamp << BITS | lane, with numbers of lanes below LANES."""
MOST_STAMPS = 1 << 25
"""Stamps of memory operations are below; those from here on mean something else in records of shared memory."""
MOST_CLOCKED = (1 << 31) - 1
"""Clocks have room for as many, where nothing records accesses to shared memory."""
_MOST_COLUMNS = 1 << 32

Release = Callable[[], Array]
"""Works out, when it is asked, what somebody has made known: a clock that is not to be changed."""


@dataclass(slots=True)
class Snapshot:
    """The knowledge of the lanes of one warp (a row of the batch) at the stamp ``now``.

    ``known`` is what all of them do, ``alone`` what single lanes know beyond that, ``later`` what they have yet to
    learn, by lane and chain.
    """

    clocks: Clocks
    row: int
    now: int
    known: Array
    alone: dict[int, Array]
    later: dict[tuple[int, int], Release]

    @property
    def agent(self) -> int:
        """The grid-wide number of the warp."""
        return self.clocks.first + self.row

    def of_lanes(self, lanes: Sequence[int] | None) -> Array:
        """All that some lanes (None: all) know, and what they did: what they release together."""
        acting, clocks = range(32) if lanes is None else lanes, self.clocks
        own = int(clocks.columns[self.row])
        told = [own] if lanes is None else [clocks.lane(own, lane) for lane in lanes]
        extra = {id(e): e for lane in acting if (e := self.alone.get(lane)) is not None}.values()
        later = [release() for (lane, _), release in self.later.items() if lane in acting]
        found = joined(clocks.nothing, self.known, *extra, *later)
        found[CONTROL, own] = self.now
        for column in told:
            found[clocks.told, column] = self.now
        return found


def _room(names: Mapping[tuple[str, int, int], int]) -> int:
    """The number of columns that clocks have for queues and single lanes."""
    return 1 << len(names).bit_length()


class Clocks:
    """The clocks of the warps of one batch of CTAs: of all lanes of each warp, and of single lanes.

    ``first`` is the grid-wide number of the batch's first warp. ``across``: the program orders accesses across
    clusters, so that there are columns for all warps of the grid; otherwise only for those of a cluster (without
    clusters, of a CTA), which every cluster of the batch numbers alike. ``home``: so many warps access a CTA's shared
    memory. ``most``: so many stamps there may be. ``history`` and ``names`` are those of the launch, ``earlier``
    are the launches before it.
    """

    def __init__(
        self,
        rows: int,
        places: Places,
        first: int,
        history: list[Op | None],
        names: dict[tuple[str, int, int], int],
        *,
        across: bool,
        planes: int,
        home: int,
        most: int = MOST_STAMPS,
        earlier: EarlierLaunches,
    ) -> None:
        self.most, self.earlier = most, earlier
        self.places, self.first, self.across, self.planes, self.home = places, first, across, planes, home
        self.warps_per_cta, self.domain = places.warps, places.domain
        self.clustered = places.together > 1
        self.warps = places.ctas * places.warps if across else places.domain  # the columns of warps
        self.columns = first + np.arange(rows) if across else np.arange(rows) % self.domain  # of each row
        room = _room(names)
        self.known = np.zeros((rows, planes, self.warps + room), np.int32)
        self.history = history  # stamp → operation; stamp 0 is "before the kernel"
        # Records up to here are of accesses to its shared memory that each row knows, whoever made them.
        self.bound = np.full(rows, LANES - 1, np.uint32)
        self.names = names  # kind, CTA or column, number → its place among the columns after those of the warps
        # The newest stamp of each queue, before which it does not hold a row's limit back, and the CTA it is of.
        self.newest, self._queue_ctas = np.zeros(room, np.int64), np.zeros(room, np.int64)
        self.told = [ORDER, CONTROL, FAR] if self.clustered else [ORDER, CONTROL]
        """The planes in which others learn what an agent does."""
        self._lanes: dict[int, dict[int, Array]] = {}  # row → lane → what this lane alone has learnt; never changed
        self._later: dict[int, dict[tuple[int, int], Release]] = {}  # row → what single lanes have yet to learn

    def stamp(self, op: Op) -> int:
        """A new stamp, for an execution of ``op``. Raises EmulationError where records have no room for more."""
        self.history.append(op)
        if len(self.history) > self.most:
            raise EmulationError(f"more than {self.most} memory operations: emulate fewer CTAs, or a smaller problem")
        return len(self.history) - 1

    @property
    def now(self) -> int:
        """The stamp that was given last."""
        return len(self.history) - 1

    # -- columns ---------------------------------------------------------------------------------------------------

    def queue(self, kind: str, cta: int, number: int) -> int:
        """The column of transactions that complete together, and access the memory of a CTA of the batch.

        Copies that complete on one mbarrier are one queue, the ``wgmma`` of a warpgroup another one, the bulk stores of
        a warp a third. Clusters that cannot know of each other number theirs alike.
        """
        cta = cta if self.across else cta % self.places.together
        column = self._column(kind, cta, number)
        self._queue_ctas[column - self.warps] = cta
        return column

    def lane(self, column: int, lane: int) -> int:
        """The column of one lane of the warp that has a ``column``."""
        return self._column("lane", column, lane)

    def _column(self, *name: Any) -> int:
        index = self.names.setdefault(name, len(self.names))
        self._make_room()
        return self.warps + index

    def _make_room(self) -> None:
        """Clocks have columns for all names, and some more: those of all batches equally many."""
        more = _room(self.names) - self.newest.size
        if more > 0:
            self.known = np.pad(self.known, ((0, 0), (0, 0), (0, more)))
            self.newest, self._queue_ctas = (np.pad(x, (0, more)) for x in (self.newest, self._queue_ctas))

    @property
    def nothing(self) -> Array:
        """The clock of who knows nothing."""
        return np.zeros(self.known.shape[1:], np.int32)

    def queue_acts(self, column: int, stamp: int) -> None:
        """A queue has made an access that memory records."""
        self.newest[column - self.warps] = stamp

    def column_of(self, agents: Array, rows: Array | int) -> Array:
        """The columns, for rows, of agents as :meth:`agents` numbers them."""
        queues, near = agents < 0, np.ones(agents.shape, np.bool_)
        columns = np.where(queues, self.warps + (-1 - agents) % _MOST_COLUMNS, agents)
        if not self.across:
            ours = (self.first + rows) // self.domain
            near = np.where(queues, (-1 - agents) // _MOST_COLUMNS, agents // self.domain) == ours
            columns = np.where(queues, columns, agents % self.domain)
        return np.where(near, columns, NOBODY)

    def agents(self, columns: Array, rows: Array) -> Array:
        """The grid-wide numbers of agents that have columns for rows: warps as the grid counts them, queues below 0."""
        cluster = 0 if self.across else (self.first + rows) // self.domain
        queues = -1 - (cluster * _MOST_COLUMNS + columns - self.warps)
        return np.where(columns < self.warps, cluster * self.domain + columns, queues)

    def queue_of(self, agent: int) -> tuple[str, int, int]:
        """The kind, CTA and number of the queue that has a number below 0."""
        return list(self.names)[(-1 - agent) % _MOST_COLUMNS]

    # -- what all lanes of a warp know -----------------------------------------------------------------------------

    def met(self, rows: Array) -> Array:
        """The stamp at which all lanes of each row last met."""
        return self.known[rows, ORDER, self.columns[rows]]

    def refresh(self, rows: Array) -> None:
        """Recompute the stamp up to which a row knows everything that sees its shared memory."""
        seen = self.columns[rows - rows % self.home][:, None] + np.arange(self.home)
        limit = self.known[rows[:, None], ORDER, seen].min(axis=1)
        if self.home > self.warps_per_cta:
            limit = np.minimum(limit, self.known[rows[:, None], FAR, seen].min(axis=1))
        if self.names:
            known = self.known[rows, ORDER, self.warps :]
            late = known < self.newest
            if self.across or self.clustered:  # queues of other CTAs do not touch this one's memory
                cta = rows // self.warps_per_cta if self.across else rows % self.domain // self.warps_per_cta
                apart = self.home // self.warps_per_cta
                late &= cta[:, None] // apart == self._queue_ctas // apart
            limit = np.minimum(limit, np.where(late, known, self.now).min(axis=1))
        self._limit(rows, limit)

    def _limit(self, rows: Array, limit: Any) -> None:
        self.bound[rows] = np.asarray(limit, np.int64) << BITS | LANES - 1

    def _raise_own(self, rows: Array) -> None:
        """All that the lanes of each row did until now is known to all of them."""
        self.known[rows[:, None], self.told, self.columns[rows][:, None]] = self.now

    def sync_warps(self, rows: Array) -> None:
        """All lanes of each row have met (``__syncwarp``)."""
        self.absorb(rows)
        self._raise_own(rows)
        self.refresh(rows)

    def sync_ctas(self, rows: Array) -> None:
        """All warps of the CTAs of ``rows`` (every warp listed, CTA by CTA) have met at a barrier."""
        self.absorb(rows)
        if not (self.names or self.across or self.clustered or self.planes > FENCED):  # all there is to know
            self.known[rows] = self.now
            self._limit(rows, self.now)
            return
        self._raise_own(rows)
        known = self.known[rows].reshape(-1, self.warps_per_cta, *self.known.shape[1:]).max(axis=1)
        self.known[rows] = np.repeat(known, self.warps_per_cta, axis=0)
        self.refresh(rows)

    def meet(self, waiting: Array, known: Array) -> None:
        """The waiting warps learn what is ``known``, and their lanes have met."""
        self.absorb(waiting)
        self._learn(waiting, known)
        self._raise_own(waiting)
        self.refresh(waiting)

    def _learn(self, rows: Any, known: Array) -> None:
        self._make_room()  # what was released in an earlier batch may have more columns
        width = known.shape[1]
        self.known[rows, :, :width] = np.maximum(self.known[rows, :, :width], known)

    # -- what single lanes know ------------------------------------------------------------------------------------

    def absorb(self, rows: Array) -> None:
        """The lanes of these warps have met: each knows what any of them acquired."""
        for row in rows.tolist() if self._lanes or self._later else ():
            for extra in {id(e): e for e in self._alone(row).values()}.values():
                self._learn(row, extra)
            self._lanes.pop(row, None)

    def _alone(self, row: int) -> dict[int, Array]:
        """Knowledge of single lanes of a warp beyond that of the whole warp."""
        for (lane, _), release in self._later.pop(row, {}).items():  # acquired, and not asked for yet
            self._join(row, [lane], release())
        self._make_room()
        return self._lanes.get(row, {})

    def _join(self, row: int, lanes: Sequence[int], known: Array) -> None:
        mine = self._lanes.setdefault(row, {})
        for lane in lanes:
            mine[lane] = joined(mine[lane], known) if lane in mine else known

    def sync_lanes(self, row: int, members: Array) -> None:
        """Some lanes of a warp have met: they know each other's accesses, and what any of them has learnt."""
        lanes = members.tolist()
        self._lanes[row] = {**self._alone(row), **dict.fromkeys(lanes, self.release(row, lanes))}

    def snapshot(self, row: int) -> Snapshot:
        """A copy of what the lanes of a warp know now."""
        alone, later = dict(self._lanes.get(row, {})), dict(self._later.get(row, {}))
        return Snapshot(self, row, self.now, self.known[row].copy(), alone, later)

    # -- release and acquire -----------------------------------------------------------------------------------------

    def release(self, row: int, lanes: Sequence[int] | None) -> Array:
        """Return the knowledge that some lanes of a warp (None: all) release."""
        return self.snapshot(row).of_lanes(lanes)

    def acquire(self, row: int, lanes: Sequence[int] | None, known: Array) -> None:
        """Some lanes of a warp (None: all) learn what was released, which nobody changes after that."""
        if lanes is None:
            self._learn(row, known)
            self.refresh(np.array([row]))
        else:
            self._join(row, lanes, known)

    def acquire_later(self, row: int, lane: int, chain: int, release: Release) -> None:
        """One lane learns what was released, when asked for it: each of a chain tells all that earlier ones do."""
        self._later.setdefault(row, {})[lane, chain] = release

    def ended(self, stamps: Mapping[int, int], *, plane: int = ORDER, passed: Array | None = None) -> Array:
        """The clock of who knows agents up to stamps, by their columns, and how far others had ``passed``."""
        clock = self.nothing
        if passed is not None:
            clock[CONTROL, : self.warps] = passed[: self.warps]
        clock[plane, list(stamps)] = list(stamps.values())
        return clock

    def await_launches(self, row: int, lanes: Sequence[int] | None) -> None:
        """Some lanes of a warp (None: all) have waited for earlier launches: these are over in every sense."""
        if waits := self.earlier.waits:
            known = self.nothing
            known[:, [self.warps + place for place in waits]] = list(waits.values())
            self.acquire(row, lanes, known)

    def queue_done(self, rows: Array, column: int, stamp: int) -> None:
        """All lanes of some warps have waited for what a queue did up to a stamp."""
        self.known[rows, ORDER, column] = np.maximum(self.known[rows, ORDER, column], stamp)

    def proxy_fence(self, row: int, lanes: Sequence[int] | None, plane: int) -> None:
        """All accesses that these lanes know of now come before later ones of the async proxy as well."""
        if plane >= self.planes:
            return
        for group in (None,) if lanes is None else [[lane] for lane in lanes]:
            known = self.release(row, group)
            clock = np.zeros_like(known)
            clock[plane] = known[ORDER]
            self.acquire(row, group, clock)

    # -- the question ------------------------------------------------------------------------------------------------

    def passed(self, row: int) -> Array:
        """A stamp for each column: how far warps' control has come, and what is known of queues; any lane tells."""
        alone, clock = self._alone(row).values(), self.known[row, :FAR].max(axis=0)
        for extra in alone:
            mine = clock[: extra.shape[1]]
            np.maximum(mine, extra[:FAR].max(axis=0), out=mine)
        clock[self.columns[row]] = self.now
        return clock

    def reach(self, rows: Sequence[int], lane: int | None) -> Array:
        """A clock (planes, columns) up to which rows that act together, or one lane of a single row, know all."""
        if lane is None:
            return self.known[rows].min(axis=0)
        extra = self._alone(rows[0]).get(lane)
        return self.known[rows[0]] if extra is None else joined(self.known[rows[0]], extra)

    def lanes_know(
        self, row: int, lanes: Sequence[int] | None, column: int, their_lane: int, stamp: int, plane: int = ORDER
    ) -> bool:
        """Whether each of some lanes (None: all of a warp) knows what a lane of an agent did, as :meth:`ordered`."""
        if plane == ORDER and column >= 0 and self.known[row, ORDER, column] >= stamp:
            return True
        mine = np.arange(32) if lanes is None else np.array(lanes)
        theirs = (np.full(mine.shape, x) for x in (column, their_lane, stamp))
        return bool(self.ordered(np.full(mine.shape, row), mine, False, *theirs, plane=plane).all())

    def lane_knows(self, row: int, lane: int | None, column: int, their_lane: int, stamp: int) -> bool:
        """Whether one lane (None: all of a warp alike) knows what a lane of an agent did, as :meth:`ordered`."""
        if self.known[row, ORDER, column] >= stamp or (lane == their_lane and column == self.columns[row]):
            return True
        extra = None if lane is None else self._alone(row).get(lane)
        clocks = (self.known[row],) if extra is None else (self.known[row], extra)
        return any(self.has(clock, ORDER, column, their_lane, stamp) for clock in clocks)

    def anybody_knows(self, rows: Array, row: int, lane: int | None, stamp: int) -> bool:
        """Whether a lane of any of these warps knows what another one (one lane, or all) did at a stamp."""
        mine = np.repeat(rows, 32), np.tile(np.arange(32), rows.size)
        theirs = (np.full(mine[0].shape, x) for x in (int(self.columns[row]), LANES if lane is None else lane, stamp))
        return bool(self.ordered(*mine, False, *theirs).any())

    def ordered(
        self,
        rows: Array,
        lanes: Array,
        whole_warp: bool,
        columns: Array,
        their_lanes: Array,
        stamps: Array,
        *,
        plane: int = ORDER,
    ) -> Array:
        """Whether each access (column, its lane, stamp) came before the step of (row, lane) now, elementwise.

        A lane above 31 stands for several lanes; ``whole_warp`` means the step is a collective one, on behalf of every
        lane. In the plane FAR, what warps of other CTAs did must be visible here; what else did, be ordered.
        """
        own, planes = self.columns[rows], np.full(columns.shape, plane)
        if plane == FAR:
            far = (
                (columns >= 0)
                & (columns < self.warps)
                & self.clustered
                & (columns // self.domain == own // self.domain)
            )
            far &= columns // self.warps_per_cta != own // self.warps_per_cta
            planes = np.where(far, FAR, ORDER)
        elif plane >= self.planes:
            return np.zeros(columns.shape, np.bool_)
        result = (stamps <= self.known[rows, planes, np.maximum(columns, 0)]) & (columns >= 0)
        if plane < FENCED and not whole_warp:
            result |= (columns == own) & (their_lanes == lanes)
        if not result.all():
            self._ask_lanes(result, (rows, lanes, planes, columns, their_lanes, stamps), whole_warp)
        return result

    def _ask_lanes(self, result: Array, accesses: tuple[Array, ...], whole_warp: bool) -> None:
        """Look up, in the clocks of single lanes, accesses that not all lanes of a warp know: each question once."""
        open_ones = np.nonzero(~result)[0]
        answers: dict[tuple[int, ...], bool] = {}
        for i, question in zip(
            open_ones.tolist(), zip(*(x[open_ones].tolist() for x in accesses), strict=True), strict=True
        ):
            if question not in answers:
                row, lane, *access = question
                extra = None if whole_warp else self._alone(row).get(lane)
                known = self.has(self.known[row], *access)
                answers[question] = known or (extra is not None and self.has(extra, *access))
            result[i] = answers[question]

    def has(self, clock: Array, plane: int, column: int, lane: int, stamp: int) -> bool:
        """Whether a clock includes what a lane of an agent did at a stamp."""
        columns = column, self.warps + self.names.get(("lane", column, lane), NOBODY - self.warps)
        return any(0 <= c < clock.shape[1] and stamp <= clock[plane, c] for c in columns)
