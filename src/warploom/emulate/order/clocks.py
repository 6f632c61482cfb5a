"""Order: which accesses of which warps each warp knows to have happened before its next step.

Every executed memory operation gets a *stamp* from one counter that only grows. ``known[w, u] = s`` means that all
accesses of warp u with stamps up to s happened before what every lane of warp w does next; synchronisation raises it.
Because stamps are global, a vector clock here is a vector of stamps, and a warp's own clock is always "now".
``known[w, w]`` is the last ``__syncwarp`` (or barrier): later accesses of other lanes of the same warp are unordered.

What one lane has learnt is its own, until the lanes of its warp meet: only then do the others know it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.order.columns import ASYNC_AGENT, Columns
from warploom.emulate.order.known import (
    FENCED,
    FENCED_GLOBALLY,
    VISIBLE,
    Known,
    Pending,
    Release,
    Singles,
    Snapshot,
    learn,
)
from warploom.ir.statements import Op

Array = NDArray[Any]
_MANY_SINGLES = 64  # so many stamps of single lanes are worth looking which of them say nothing new


class Clocks:
    """The vector clocks of the warps of one batch of CTAs: of all lanes of each warp, and of single lanes."""

    def __init__(self, rows: int, columns: Columns, history: list[Op | None]) -> None:
        self.rows = rows
        self.columns = columns
        self.warps_per_cta, self.domain, self.first = columns.warps_per_cta, columns.domain, columns.first
        self.known = np.zeros((rows, columns.count), np.int64)
        self.history = history  # stamp → operation; stamp 0 is "before the kernel"
        self.limit = np.zeros(rows, np.int64)
        # Engines used so far, and the newest stamp of each: what they did before it does not hold a row's limit back.
        self.newest = np.zeros(columns.engines, np.int64)
        self._ordering: list[int] = []
        self.single: dict[int, Singles] = {}  # of each row: what all its lanes know of single lanes
        self._lanes: dict[int, dict[int, Known]] = {}  # row → lane → what this lane alone has learnt
        self._later: dict[int, Pending] = {}  # row → what single lanes have yet to learn
        self._met: dict[int, Array] = {}  # row → [lane, other lane] → the stamp at which these two last met
        self._own = columns.of_row(np.arange(rows))

    def stamp(self, op: Op) -> int:
        """A new stamp, for an execution of ``op``."""
        self.history.append(op)
        return len(self.history) - 1

    @property
    def now(self) -> int:
        """The newest stamp."""
        return len(self.history) - 1

    def engine_acts(self, engine: int, stamp: int) -> None:
        """An engine whose accesses are recorded in cells has made one."""
        if engine not in self._ordering:
            self._ordering.append(engine)
        self.newest[engine] = stamp

    def of_engine(self, engine: int, stamp: int, passed: Array | None = None) -> Known:
        """What it tells that an engine has ended what it did at a stamp; who started it had come to ``passed``."""
        clock = np.zeros(self.columns.count, np.int64)
        if passed is not None:
            clock[self.columns.control] = passed[self.columns.control]
        clock[self.columns.warps + engine] = stamp
        return Known(clock)

    # -- what all lanes of a warp know -----------------------------------------------------------------------------

    def in_cta(self, rows: Array) -> Array:
        """``known`` of the warps of each row's own CTA, (rows, warps per CTA)."""
        if not self.columns.across and not self.columns.clustered:
            return self.known[rows, : self.columns.warps]
        columns = self.columns.of_row(rows - rows % self.warps_per_cta)[:, None] + np.arange(self.warps_per_cta)
        return self.known[rows[:, None], columns]

    def met(self, rows: Array) -> Array:
        """The stamp at which all lanes of each row last met."""
        return self.known[rows, self._own[rows]]

    def refresh(self, rows: Array) -> None:
        """Recompute the stamp up to which a row knows everything of its CTA."""
        self.limit[rows] = self.in_cta(rows).min(axis=1)
        if self._ordering:
            engines = np.array(self._ordering)
            known = self.known[rows][:, self.columns.warps + engines]
            seen = np.where(known >= self.newest[engines], self.now, known)
            if self.columns.clustered:  # engines of other CTAs do not touch this one's memory
                mine = (rows % self.domain // self.warps_per_cta)[:, None] == self.columns.ranks[engines]
                seen = np.where(mine, seen, self.now)
            self.limit[rows] = np.minimum(self.limit[rows], seen.min(axis=1))

    def _raise_own(self, rows: Array) -> None:
        """All that the lanes of each row did until now is known to all of them."""
        self.known[rows, self._own[rows]] = self.known[rows, self.columns.passed(rows)] = self.now
        if self.columns.clustered:
            self.known[rows, self.columns.visible(rows)] = self.now
        for row in rows.tolist() if self._met else ():
            self._met.pop(row, None)

    def sync_warps(self, rows: Array) -> None:
        """All lanes of each row have met (``__syncwarp``)."""
        self._raise_own(rows)
        self.absorb(rows)
        self.refresh(rows)

    def sync_ctas(self, rows: Array) -> None:
        """All warps of the CTAs of ``rows`` (every warp listed, CTA by CTA) have met at a barrier."""
        if self.columns.across or self.columns.clustered:
            for group in rows.reshape(-1, self.warps_per_cta):
                together = self.release(int(group[0]), None)
                for row in group[1:].tolist():
                    together.join(self.release(row, None))
                self.meet(group, together)
            return
        self.absorb(rows)
        if self.single:  # such as a proxy fence by part of a warp
            for group in rows.reshape(-1, self.warps_per_cta).tolist():
                singles = self._singles_of(group)
                for row in group if singles else ():
                    self.single[row] = dict(singles)
        for row in rows.tolist() if self._met else ():
            self._met.pop(row, None)
        if not self.newest.size:
            self.known[rows] = self.now
            self.limit[rows] = self.now
            return
        warps = self.columns.warps
        self.known[rows, self.columns.passed(rows)] = self.now
        others = self.known.shape[1] - warps
        engines = self.known[rows, warps:].reshape(-1, self.warps_per_cta, others)
        together = np.broadcast_to(engines.max(axis=1, keepdims=True), engines.shape)
        self.known[rows, warps:] = together.reshape(rows.size, -1)
        self.known[rows, :warps] = self.now
        self.refresh(rows)

    def _singles_of(self, rows: list[int]) -> Singles:
        found: Singles = {}
        for row in rows:
            if row in self.single:
                learn(found, self.single[row])
        return found

    def meet(self, waiting: Array, known: Known) -> None:
        """The waiting warps learn what is ``known``, and their lanes have met."""
        self.absorb(waiting)
        self.known[waiting] = np.maximum(self.known[waiting], known.clock)
        self._raise_own(waiting)
        if known.singles:
            for row in waiting.tolist():
                self._learn_singles(row, known.singles)
        self.refresh(waiting)

    def _learn_singles(self, row: int, singles: Singles) -> None:
        if not singles:
            return
        mine = self.single.setdefault(row, {})
        learn(mine, singles)
        if len(mine) > _MANY_SINGLES:
            clock, columns = self.known[row], self.columns
            for (agent, lane), stamp in list(mine.items()):
                if agent > ASYNC_AGENT and lane < FENCED and stamp <= clock[columns.of_agents(np.array(agent))]:
                    del mine[agent, lane]

    # -- what single lanes know ------------------------------------------------------------------------------------

    def absorb(self, rows: Array) -> None:
        """The lanes of these warps have met: each knows what any of them acquired."""
        if not self._lanes and not self._later:
            return
        for row in rows.tolist():
            self._settle(row)
            for extra in self._lanes.pop(row, {}).values():
                np.maximum(self.known[row], extra.clock, out=self.known[row])
                self._learn_singles(row, extra.singles)

    def _settle(self, row: int) -> None:
        """Single lanes learn what they have acquired and not asked for yet."""
        for (lane, _), release in self._later.pop(row, {}).items():
            self._join(row, lane, release.known())

    def _extras(self, row: int) -> dict[int, Known]:
        """What single lanes of a warp know beyond what all of them do."""
        if row in self._later:
            self._settle(row)
        return self._lanes.get(row, {})

    def _join(self, row: int, lane: int, known: Known) -> None:
        extras = self._lanes.setdefault(row, {})
        if lane in extras:
            extras[lane].join(known)
        else:
            extras[lane] = known.copy()

    def sync_lanes(self, row: int, members: Array) -> None:
        """Some lanes of a warp have met: they know each other's accesses, and what any of them has learnt."""
        met = self._met.setdefault(row, np.zeros((32, 32), np.int64))
        met[members] = met[members].max(axis=0)
        met[np.ix_(members, members)] = self.now
        extras = self._extras(row)
        mine = [extras[lane] for lane in members.tolist() if lane in extras]
        if mine:
            together = mine[0].copy()
            for extra in mine[1:]:
                together.join(extra)
            for lane in members.tolist():
                extras[lane] = together.copy()

    def _now(self, row: int) -> Snapshot:
        """What the lanes of a warp know; valid until any of them learns more."""
        known = Known(self.known[row], self.single.get(row, {}))
        together = int(self.known[row, self._own[row]])
        return Snapshot(
            self.first + row,
            self.now,
            known,
            self._lanes.get(row, {}),
            self._later.get(row, {}),
            self._met.get(row),
            together,
            self.columns.clustered,
        )

    def snapshot(self, row: int) -> Snapshot:
        """What the lanes of a warp know now, to keep."""
        found = self._now(row)
        found.known = found.known.copy()
        found.extras = {lane: extra.copy() for lane, extra in found.extras.items()}
        found.later = dict(found.later)
        found.met = None if found.met is None else found.met.copy()
        return found

    def of_lane(self, row: int, lane: int) -> Known:
        """All that one lane knows, and what it and those it has met did: what it releases."""
        return self._now(row).of_lane(lane)

    # -- release and acquire -----------------------------------------------------------------------------------------

    def release(self, row: int, lanes: list[int] | None) -> Known:
        """What some lanes of a warp (None: all) make known to who acquires it."""
        if lanes is not None:
            found = self.of_lane(row, lanes[0])
            for lane in lanes[1:]:
                found.join(self.of_lane(row, lane))
            found.clock[self.columns.passed(row)] = self.now
            return found
        clock = self.known[row].copy()
        clock[self._own[row]] = clock[self.columns.passed(row)] = self.now
        if self.columns.clustered:
            clock[self.columns.visible(row)] = self.now
        found = Known(clock, dict(self.single.get(row, {})))
        for extra in self._extras(row).values():
            found.join(extra)
        return found

    def near_only(self, known: Known) -> Known:
        """The same without writes that are visible beyond their CTA."""
        clock = known.clock.copy()
        clock[self.columns.far] = 0
        return Known(clock, {key: stamp for key, stamp in known.singles.items() if key[1] < VISIBLE})

    def acquire(self, row: int, lanes: list[int] | None, known: Known) -> None:
        """Some lanes of a warp (None: all) learn what was released."""
        if lanes is None:
            np.maximum(self.known[row], known.clock, out=self.known[row])
            self._learn_singles(row, known.singles)
            self.refresh(np.array([row]))
        else:
            for lane in lanes:
                self._join(row, lane, known)

    def acquire_later(self, row: int, lane: int, release: Release) -> None:
        """One lane learns what was released, when it is asked for it."""
        self._later.setdefault(row, {})[lane, release.chain] = release

    def engine_done(self, row: int, engine: int, stamp: int) -> None:
        """All lanes of a warp have waited for what an engine did up to a stamp."""
        column = self.columns.warps + engine
        self.known[row, column] = max(self.known[row, column], stamp)

    # -- fences against the async proxy ----------------------------------------------------------------------------

    def proxy_fence(self, row: int, lanes: list[int] | None, globally: bool) -> None:
        """All accesses that these lanes know of now come before later ones of the async proxy as well."""
        if lanes is not None:
            for lane in lanes:
                self._join(row, lane, self._fenced(row, self.of_lane(row, lane), globally))
            return
        fenced = self._fenced(row, self.release(row, None), globally)
        np.maximum(self.known[row], fenced.clock, out=self.known[row])
        self._learn_singles(row, fenced.singles)

    def _fenced(self, row: int, known: Known, globally: bool) -> Known:
        """What a fence makes of what is known."""
        columns, clock = self.columns, np.zeros(self.columns.count, np.int64)
        if globally:
            clock[columns.global_fence] = known.clock[: columns.warps]
        else:
            clock[columns.fences] = known.clock[columns.domain_of(row)]
        added = FENCED_GLOBALLY if globally else FENCED
        own = {(a, lane + added): stamp for (a, lane), stamp in known.singles.items() if a >= 0 and lane < FENCED}
        return Known(clock, own)

    def fenced(self, row: int, lane: int | None, agents: Array, lanes: Array, stamps: Array, globally: bool) -> Array:
        """Whether accesses (agent, its lane, stamp) are fenced for what a lane (None: the warp) starts now."""
        if globally and not self.columns.global_fences:
            return np.zeros(agents.shape, np.bool_)
        known = Known(self.known[row], self.single.get(row, {})) if lane is None else self.of_lane(row, lane)
        columns = self.columns.fenced_globally(agents) if globally else self.columns.fenced(agents)
        near = self.columns.same_domain(agents, row)
        fine = near & (stamps <= known.clock[np.where(near, columns, 0)])
        added = FENCED_GLOBALLY if globally else FENCED
        for i in np.nonzero(~fine)[0] if known.singles else ():
            fine[i] = stamps[i] <= known.singles.get((int(agents[i]), int(lanes[i]) + added), 0)
        return fine

    # -- the question ------------------------------------------------------------------------------------------------

    def passed(self, row: int) -> Array:
        """A clock that says how far the control of engines and of the domain's warps has come; any lane tells."""
        clock = self.known[row].copy()
        for extra in self._extras(row).values():
            np.maximum(clock, extra.clock, out=clock)
        clock[self.columns.passed(row)] = self.now
        return clock

    def reach(self, rows: Sequence[int], lane: int | None) -> Array:
        """A stamp for each warp and engine of the domain, by its number within it, up to which all of it is known."""
        clock = self.known[rows].min(axis=0) if lane is None else self.known[rows[0]]
        extra = None if lane is None else self._extras(rows[0]).get(lane)
        if extra is not None:
            clock = np.maximum(clock, extra.clock)
        if not self.columns.across:
            return clock
        return np.concatenate([clock[self.columns.domain_of(rows[0])], clock[self.columns.warps :]])

    def knows(self, row: int, lanes: list[int] | None, other: int, other_lane: int, stamp: int) -> bool:
        """Whether each of some lanes (None: all of a warp) knows what a lane of the batch did at a stamp."""
        agent = self.first + other
        if agent // self.domain == (self.first + row) // self.domain and self.known[row, self._own[other]] >= stamp:
            return True
        return self.lanes_know(row, lanes, agent, other_lane, stamp)

    def lanes_know(
        self, row: int, lanes: list[int] | None, agent: int, agent_lane: int, stamp: int, *, visible: bool = False
    ) -> bool:
        """Whether each of some lanes (None: all of a warp) knows what a lane of an agent did, as :meth:`ordered`."""
        mine = np.arange(32) if lanes is None else np.array(lanes)
        theirs = (np.full(mine.shape, x) for x in (agent, agent_lane, stamp))
        return bool(self.ordered(np.full(mine.shape, row), mine, False, *theirs, visible=visible).all())

    def anybody_knows(self, rows: Array, row: int, lane: int | None, stamp: int) -> bool:
        """Whether a lane of any of these warps knows what another one (one lane, or all) did at a stamp."""
        column, key = int(self._own[row]), (self.first + row, -1 if lane is None else lane)
        for mine in rows.tolist():
            everything = (Known(self.known[mine], self.single.get(mine, {})), *self._extras(mine).values())
            if any(k.clock[column] >= stamp or k.singles.get(key, 0) >= stamp for k in everything):
                return True
        return False

    def ordered(
        self,
        rows: Array,
        lanes: Array,
        whole_warp: bool,
        agents: Array,
        agent_lanes: Array,
        stamps: Array,
        *,
        visible: bool = False,
    ) -> Array:
        """Whether each access (agent, agent lane, stamp) happened before the step of (row, lane) now, elementwise.

        ``agents`` are grid-wide warp numbers, or engines of the same domain (-1 - engine); an agent lane above 31
        stands for several lanes; ``whole_warp`` means the step is a collective one, on behalf of every lane. With
        ``visible``, what warps of other CTAs did must be visible here.
        """
        mine = self.first + rows
        columns = self.columns.of_agents(agents)
        far = np.zeros(agents.shape, np.bool_)
        if visible and self.columns.clustered:
            far = (agents >= 0) & (agents // self.domain == mine // self.domain)
            far &= agents // self.warps_per_cta != mine // self.warps_per_cta
            columns = np.where(far, self.columns.visible(agents), columns)
        near = self.columns.same_domain(agents, rows)
        columns = np.where(near, columns, 0)
        result = (stamps <= self.known[rows, columns]) & near
        if not whole_warp:
            result |= (agents == mine) & (agent_lanes == lanes)
        if self._lanes or self._later or self.single or self._met:
            self._ask_lanes(result, (rows, lanes, agents, agent_lanes, stamps, columns, far, near), whole_warp)
        return result

    def _ask_lanes(self, result: Array, accesses: tuple[Array, ...], whole_warp: bool) -> None:
        """The same for what all lanes of a warp do not know: each question once."""
        open_ones = np.nonzero(~result)[0]
        if not open_ones.size:
            return
        questions = np.stack([x[open_ones] for x in accesses], axis=1)
        different, which = np.unique(questions, axis=0, return_inverse=True)
        answers = np.array([self._lane_knows(whole_warp, *question) for question in different.tolist()], np.bool_)
        result[open_ones] = answers[which.reshape(-1)]

    def _lane_knows(
        self,
        whole_warp: bool,
        row: int,
        lane: int,
        agent: int,
        agent_lane: int,
        stamp: int,
        column: int,
        far: int,
        near: int,
    ) -> bool:
        key = (agent, agent_lane + VISIBLE * far)
        if stamp <= self.single.get(row, {}).get(key, 0):
            return True
        if whole_warp:
            return False
        extra = self._extras(row).get(lane)
        if extra is not None and ((near and stamp <= extra.clock[column]) or stamp <= extra.singles.get(key, 0)):
            return True
        met = self._met.get(row)
        return (
            met is not None and agent == self.first + row and agent_lane < 32 and bool(stamp <= met[lane, agent_lane])
        )
