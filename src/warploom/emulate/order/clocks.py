"""Order: which accesses of which warps each warp knows to have happened before its next step.

Every executed memory operation gets a *stamp* from one counter that only grows. ``known[w, ORDER, u] = s`` means that
all accesses of agent u with stamps up to s happened before what every lane of warp w does next; synchronisation raises
it. Because stamps are global, a vector clock here is a vector of stamps, and a warp's own clock is always "now".
``known[w, ORDER, w]`` is the last ``__syncwarp`` (or barrier): later accesses of other lanes of the same warp are
unordered. Other planes of the same array say what is fenced, visible, or passed by control alone
(:mod:`warploom.emulate.order.known`).

What one lane has learnt is its own, until the lanes of its warp meet: only then do the others know it. Such a lane has
a clock of its own meanwhile, and what it has done is told as a stamp of its own: a column for each lane would make the
clocks of grids 32 times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import EmulationError
from warploom.emulate.order.known import CONTROL, FAR, FENCED, NOBODY, ORDER, Known, Singles, learn
from warploom.emulate.order.places import Places
from warploom.ir.statements import Op

Array = NDArray[Any]
BITS, LANES = 6, 64
"""A record of an access is stamp << BITS | lane, with numbers of lanes below LANES."""
MOST_STAMPS = 1 << 25
"""Stamps of memory operations are below; those from here on mean something else in records of shared memory."""
MOST_CLOCKED = (1 << 31) - 1
"""Clocks have room for as many, where nothing records accesses to shared memory."""
_MANY_SINGLES = 64  # so many stamps of single lanes are worth looking which of them say nothing new


Release = Callable[[], Known]
"""Works out, when it is asked, what somebody has made known; what it tells is not to be changed."""


@dataclass(slots=True)
class Snapshot:
    """The knowledge of the lanes of one warp, which has the clocks' ``column``, at the stamp ``now``.

    ``known`` is what all of them do, ``alone`` what single lanes know beyond that, ``later`` what they have yet to
    learn, by lane and chain. What lanes do is told in the planes ``told``.
    """

    agent: int
    column: int
    now: int
    known: Known
    alone: dict[int, Known]
    later: dict[tuple[int, int], Release]
    told: list[int]

    def of_lanes(self, lanes: Sequence[int]) -> Known:
        """All that some lanes know, and what they did: what they release together."""
        found = self.known.copy()
        for extra in {id(e): e for lane in lanes if (e := self.alone.get(lane)) is not None}.values():
            found.join(extra)
        for (lane, _), release in self.later.items():
            if lane in lanes:
                found.join(release())
        found.clock[CONTROL, self.column] = self.now
        found.singles.update({(plane, self.column, lane): self.now for plane in self.told for lane in lanes})
        return found


class Clocks:
    """The clocks of the warps of one batch of CTAs: of all lanes of each warp, and of single lanes.

    ``first`` is the grid-wide number of the batch's first warp. ``across``: the program orders accesses across
    clusters, so that there are columns for all warps of the grid; otherwise only for those of a cluster (without
    clusters, of a CTA), which every cluster of the batch numbers alike. ``home``: so many warps access a CTA's shared
    memory. ``most``: so many stamps there may be.
    """

    def __init__(
        self,
        rows: int,
        places: Places,
        first: int,
        history: list[Op | None],
        *,
        across: bool,
        planes: int,
        home: int,
        most: int = MOST_STAMPS,
    ) -> None:
        self.most = most
        self.places, self.first, self.across, self.planes, self.home = places, first, across, planes, home
        self.warps_per_cta, self.domain = places.warps, places.domain
        self.clustered = places.together > 1
        self.warps = places.ctas * places.warps if across else places.domain  # the columns of warps
        self.columns = first + np.arange(rows) if across else np.arange(rows) % self.domain  # of each row
        self.known = np.zeros((rows, planes, self.warps), np.int32)
        self.history = history  # stamp → operation; stamp 0 is "before the kernel"
        # Records up to here are of accesses to its shared memory that each row knows, whoever made them.
        self.bound = np.full(rows, LANES - 1, np.uint32)
        self.queues: list[tuple[str, int, int]] = []  # of the columns after those of the warps: kind, CTA, number
        self._numbers: dict[tuple[str, int, int], int] = {}
        # The newest stamp of each queue, before which it does not hold a row's limit back, and the CTA it is of.
        self.newest, self._queue_ctas = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._told = [ORDER, CONTROL, FAR] if self.clustered else [ORDER, CONTROL]
        self.single: dict[int, Singles] = {}  # of each row: what all its lanes know of single lanes
        self._lanes: dict[int, dict[int, Known]] = {}  # row → lane → what this lane alone has learnt; never changed
        self._later: dict[int, dict[tuple[int, int], Release]] = {}  # row → what single lanes have yet to learn

    def stamp(self, op: Op) -> int:
        """A new stamp, for an execution of ``op``. Raises EmulationError where records have no room for more."""
        self.history.append(op)
        if len(self.history) > self.most:
            raise EmulationError(f"more than {self.most} memory operations: emulate fewer CTAs, or a smaller problem")
        return len(self.history) - 1

    @property
    def now(self) -> int:
        """The newest stamp."""
        return len(self.history) - 1

    # -- columns ---------------------------------------------------------------------------------------------------

    def queue(self, kind: str, cta: int, number: int) -> int:
        """The column of transactions that complete together, and access the memory of a CTA of the batch.

        Copies that complete on one mbarrier are one queue, the ``wgmma`` of a warpgroup another one, the bulk stores of
        a warp a third. Clusters that cannot know of each other number theirs alike.
        """
        key = kind, cta if self.across else cta % self.places.together, number
        if key not in self._numbers:
            self._numbers[key] = self.warps + len(self.queues)
            self.queues.append(key)
            self.newest, self._queue_ctas = np.append(self.newest, 0), np.append(self._queue_ctas, key[1])
            if self.warps + len(self.queues) > self.known.shape[2]:
                self.known = np.pad(self.known, ((0, 0), (0, 0), (0, max(8, len(self.queues)))))
        return self._numbers[key]

    def queue_acts(self, column: int, stamp: int) -> None:
        """A queue has made an access that memory records."""
        self.newest[column - self.warps] = stamp

    def column_of(self, agents: Array, rows: Array | int) -> Array:
        """The columns, for rows, of agents: grid-wide numbers of warps, or names, which stay as they are."""
        if self.across:
            return agents
        near = agents // self.domain == (self.first + rows) // self.domain
        return np.where(agents < 0, agents, np.where(near, agents % self.domain, NOBODY))

    def agents(self, columns: Array, rows: Array) -> Array:
        """Grid-wide numbers of the warps that have columns for rows; of queues -1 - their place among ``queues``."""
        first = 0 if self.across else self.first + rows // self.domain * self.domain
        return np.where(columns < self.warps, first + columns, self.warps - 1 - columns)

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
        if self.queues:
            known = self.known[rows, ORDER, self.warps : self.warps + len(self.queues)]
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
        self.known[rows[:, None], self._told, self.columns[rows][:, None]] = self.now

    def sync_warps(self, rows: Array) -> None:
        """All lanes of each row have met (``__syncwarp``)."""
        self.absorb(rows)
        self._raise_own(rows)
        self.refresh(rows)

    def sync_ctas(self, rows: Array) -> None:
        """All warps of the CTAs of ``rows`` (every warp listed, CTA by CTA) have met at a barrier."""
        self.absorb(rows)
        if self.single:  # such as a proxy fence by part of a warp
            for group in rows.reshape(-1, self.warps_per_cta).tolist():
                together: Singles = {}
                for row in group:
                    learn(together, self.single.get(row, {}))
                for row in group if together else ():
                    self._learn_singles(row, together)
        if not (self.queues or self.across or self.clustered or self.planes > FENCED):  # all there is to know
            self.known[rows] = self.now
            self._limit(rows, self.now)
            return
        self._raise_own(rows)
        known = self.known[rows].reshape(-1, self.warps_per_cta, *self.known.shape[1:]).max(axis=1)
        self.known[rows] = np.repeat(known, self.warps_per_cta, axis=0)
        self.refresh(rows)

    def meet(self, waiting: Array, known: Known) -> None:
        """The waiting warps learn what is ``known``, and their lanes have met."""
        self.absorb(waiting)
        width = known.clock.shape[1]
        self.known[waiting, :, :width] = np.maximum(self.known[waiting, :, :width], known.clock)
        for row in waiting.tolist() if known.singles else ():
            self._learn_singles(row, known.singles)
        self._raise_own(waiting)
        self.refresh(waiting)

    def _learn(self, row: int, known: Known) -> None:
        mine = self.known[row, :, : known.clock.shape[1]]
        np.maximum(mine, known.clock, out=mine)
        self._learn_singles(row, known.singles)

    def _learn_singles(self, row: int, singles: Singles) -> None:
        if not singles:
            return
        mine = self.single.setdefault(row, {})
        learn(mine, singles)
        if len(mine) > _MANY_SINGLES:
            clock = self.known[row]
            for plane, column, lane in [k for k, stamp in mine.items() if k[1] >= 0 and stamp <= clock[k[0], k[1]]]:
                del mine[plane, column, lane]

    # -- what single lanes know ------------------------------------------------------------------------------------

    def absorb(self, rows: Array) -> None:
        """The lanes of these warps have met: each knows what any of them acquired."""
        for row in rows.tolist() if self._lanes or self._later else ():
            for extra in {id(e): e for e in self._alone(row).values()}.values():
                self._learn(row, extra)
            self._lanes.pop(row, None)

    def _alone(self, row: int) -> dict[int, Known]:
        """Knowledge of single lanes of a warp beyond that of the whole warp."""
        self._settle(row)
        return self._lanes.get(row, {})

    def _settle(self, row: int) -> None:
        """Single lanes learn what they have acquired and not asked for yet."""
        for (lane, _), release in self._later.pop(row, {}).items():
            self._join(row, [lane], release())

    def _join(self, row: int, lanes: Sequence[int], known: Known) -> None:
        mine = self._lanes.setdefault(row, {})
        for lane in lanes:
            if lane in mine:
                joined = mine[lane].copy()
                joined.join(known)
                mine[lane] = joined
            else:
                mine[lane] = known

    def sync_lanes(self, row: int, members: Array) -> None:
        """Some lanes of a warp have met: they know each other's accesses, and what any of them has learnt."""
        self._settle(row)
        mine, lanes = self._now(row), members.tolist()
        mine.known = Known(np.zeros_like(self.known[row]))
        self._lanes.setdefault(row, {}).update(dict.fromkeys(lanes, mine.of_lanes(lanes)))

    def _now(self, row: int) -> Snapshot:
        """A view of what the lanes of a warp know, valid until any of them learns more."""
        known, later = Known(self.known[row], self.single.get(row, {})), self._later.get(row, {})
        return Snapshot(
            self.first + row, int(self.columns[row]), self.now, known, self._lanes.get(row, {}), later, self._told
        )

    def snapshot(self, row: int) -> Snapshot:
        """A copy of what the lanes of a warp know now."""
        found = self._now(row)
        found.known, found.alone, found.later = found.known.copy(), dict(found.alone), dict(found.later)
        return found

    # -- release and acquire -----------------------------------------------------------------------------------------

    def release(self, row: int, lanes: Sequence[int] | None) -> Known:
        """Return the knowledge that some lanes of a warp (None: all) release."""
        if lanes is not None:
            return self._now(row).of_lanes(lanes)
        found = Known(self.known[row].copy(), dict(self.single.get(row, {})))
        for extra in self._alone(row).values():
            found.join(extra)
        found.clock[self._told, self.columns[row]] = self.now
        return found

    def acquire(self, row: int, lanes: Sequence[int] | None, known: Known) -> None:
        """Some lanes of a warp (None: all) learn what was released, which nobody changes after that."""
        if lanes is None:
            self._learn(row, known)
            self.refresh(np.array([row]))
        else:
            self._join(row, lanes, known)

    def acquire_single(self, row: int, lanes: Sequence[int] | None, plane: int, name: int, stamp: int) -> None:
        """Some lanes of a warp (None: all) learn what has a name, and no column, up to a stamp."""
        self.acquire(row, lanes, Known(np.zeros((self.planes, 0), np.int32), {(plane, name, 0): stamp}))

    def acquire_later(self, row: int, lane: int, chain: int, release: Release) -> None:
        """One lane learns what was released, when asked for it: each of a chain tells all that earlier ones do."""
        self._later.setdefault(row, {})[lane, chain] = release

    def ended(self, column: int, stamp: int, passed: Array | None = None) -> Known:
        """Return the knowledge that a queue has ended its work up to a stamp, begun when others had ``passed``."""
        clock = np.zeros(self.known.shape[1:], np.int32)
        if passed is not None:
            clock[CONTROL, : self.warps] = passed[: self.warps]
        clock[ORDER, column] = stamp
        return Known(clock)

    def queue_done(self, rows: Array, column: int, stamp: int) -> None:
        """All lanes of some warps have waited for what a queue did up to a stamp."""
        self.known[rows, ORDER, column] = np.maximum(self.known[rows, ORDER, column], stamp)

    def proxy_fence(self, row: int, lanes: Sequence[int] | None, plane: int) -> None:
        """All accesses that these lanes know of now come before later ones of the async proxy as well."""
        if plane >= self.planes:
            return
        for group in (None,) if lanes is None else [[lane] for lane in lanes]:
            known = self.release(row, group)
            clock = np.zeros_like(known.clock)
            clock[plane, : self.warps] = known.clock[ORDER, : self.warps]
            singles = {(plane, c, lane): s for (p, c, lane), s in known.singles.items() if p == ORDER and c >= 0}
            self.acquire(row, group, Known(clock, singles))

    # -- the question ------------------------------------------------------------------------------------------------

    def passed(self, row: int) -> Array:
        """A stamp for each column: how far warps' control has come, and what is known of queues; any lane tells."""
        clock = self.known[row, :FAR].max(axis=0)
        for extra in self._alone(row).values():
            mine = clock[: extra.clock.shape[1]]
            np.maximum(mine, extra.clock[:FAR].max(axis=0), out=mine)
        clock[self.columns[row]] = self.now
        return clock

    def reach(self, rows: Sequence[int], lane: int | None) -> Array:
        """A clock (planes, columns) up to which rows that act together, or one lane of a single row, know all."""
        if lane is None:
            return self.known[rows].min(axis=0)
        extra = self._alone(rows[0]).get(lane)
        found = Known(self.known[rows[0]].copy())
        if extra is not None:
            found.join(extra)
        return found.clock

    def lanes_know(
        self, row: int, lanes: Sequence[int] | None, column: int, their_lane: int, stamp: int, plane: int = ORDER
    ) -> bool:
        """Whether each of some lanes (None: all of a warp) knows what a lane of an agent did, as :meth:`ordered`."""
        if plane == ORDER and column >= 0 and self.known[row, ORDER, column] >= stamp:
            return True
        mine = np.arange(32) if lanes is None else np.array(lanes)
        theirs = (np.full(mine.shape, x) for x in (column, their_lane, stamp))
        return bool(self.ordered(np.full(mine.shape, row), mine, False, *theirs, plane=plane).all())

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
        """Whether each access (column or name, its lane, stamp) came before the step of (row, lane) now, elementwise.

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
        if self._lanes or self._later or self.single:
            self._ask_lanes(result, (rows, lanes, planes, columns, their_lanes, stamps), whole_warp)
        return result

    def _ask_lanes(self, result: Array, accesses: tuple[Array, ...], whole_warp: bool) -> None:
        """Look up, in the clocks of single lanes, accesses that not all lanes of a warp know: each question once."""
        open_ones = np.nonzero(~result)[0]
        if not open_ones.size:
            return
        questions = np.stack([x[open_ones] for x in accesses], axis=1)
        different, which = np.unique(questions, axis=0, return_inverse=True)
        answers: list[bool] = []
        for row, lane, *access in different.tolist():
            plane, column, their_lane, stamp = access
            extra = None if whole_warp else self._alone(row).get(lane)
            answer = stamp <= self.single.get(row, {}).get((plane, column, their_lane), 0)
            answers.append(answer or (extra is not None and extra.has(plane, column, their_lane, stamp)))
        result[open_ones] = np.array(answers, np.bool_)[which.reshape(-1)]
