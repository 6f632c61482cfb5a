"""Order: which accesses of which warps each warp knows to have happened before its next step.

Every executed memory operation gets a *stamp* from one counter that only grows. ``known[w, u] = s`` means that all
accesses of warp u with stamps up to s happened before what warp w does next; synchronisation raises it. Because stamps
are global, a vector clock here is a vector of stamps, and a warp's own clock is always "now". ``known[w, w]`` is the
last ``__syncwarp`` (or barrier): later accesses of other lanes of the same warp are unordered.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.places import Places
from warploom.ir.statements import Op

Array = NDArray[Any]
Singles = dict[tuple[int, int], int]
"""(agent, its lane) → stamp: what is known of single lanes."""

VISIBLE = 64
"""Added to a lane's number: what it has made visible beyond its CTA."""
FENCED = 128
"""Added to a lane's number: up to when its writes to global memory are fenced against the async proxy."""
ASYNC_AGENT = -(1 << 40)
"""Agents from here downwards are loads of global memory by the mbarrier they complete on; known singly alone."""


class Clocks:
    """Vector clocks of the warps of one batch of CTAs.

    ``across``: the program orders accesses across clusters (fences, acquire, release), so that every warp's clock
    covers all warps of the grid; otherwise only those of its *domain*, its cluster (without clusters, its CTA).
    ``first`` is the grid-wide number of the batch's first warp, ``ranks`` the CTA of the cluster of each engine.

    In clusters, a second column for each warp of the domain tells which of its writes are *visible* beyond its CTA: a
    remote arrival without release at the cluster's scope lets shared memory be overwritten, and no more.
    """

    def __init__(
        self, rows: int, places: Places, first: int, across: bool, history: list[Op | None], ranks: Array,
        global_fences: bool = False,
    ) -> None:  # fmt: skip
        self.warps_per_cta = places.warps
        self.domain = places.domain
        self.across = across
        self.first = first
        self.warps = places.ctas * places.warps if across else self.domain
        self._ranks = ranks
        self._visible = self.warps + ranks.size
        self.clustered = places.together > 1
        self._global_fence = self._visible + self.domain * self.clustered
        self.global_fences = global_fences
        self.known = np.zeros((rows, self._global_fence + self.warps * global_fences), np.int64)
        # Engines used so far, and the newest stamp of each: what they did before it does not hold a row's limit back.
        self.newest = np.zeros(ranks.size, np.int64)
        self._ordering: list[int] = []
        self.rows = rows
        self.history = history  # stamp → operation; stamp 0 is "before the kernel"
        self.limit = np.zeros(rows, np.int64)
        self.lanes: dict[tuple[int, int], Array] = {}
        # What single lanes released about themselves: row → {(agent, its lane): stamp}.
        self.single: dict[int, Singles] = {}
        self._own = self._column_of(np.arange(rows))

    def engine_acts(self, engine: int, stamp: int) -> None:
        """An engine whose accesses are recorded in cells has made one."""
        if engine not in self._ordering:
            self._ordering.append(engine)
        self.newest[engine] = stamp

    def _column_of(self, row: Array) -> Array:
        return self.first + row if self.across else row % self.domain

    def _domain_first(self, row: int) -> int:
        """The column of the first warp of a row's domain."""
        return self.first + row // self.domain * self.domain if self.across else 0

    def _raise_own(self, rows: Array) -> None:
        """All that the lanes of each row did until now is known to all of them."""
        self.known[rows, self._own[rows]] = self.now
        if self.clustered:
            self.known[rows, self._visible + rows % self.domain] = self.now

    def stamp(self, op: Op) -> int:
        """A new stamp, for an execution of ``op``."""
        self.history.append(op)
        return len(self.history) - 1

    @property
    def now(self) -> int:
        """The newest stamp."""
        return len(self.history) - 1

    def in_cta(self, rows: Array) -> Array:
        """``known`` of the warps of each row's own CTA, (rows, warps per CTA)."""
        if not self.across and not self.clustered:
            return self.known[rows, : self.warps] if self.newest.size else self.known[rows]
        columns = self._column_of(rows - rows % self.warps_per_cta)[:, None] + np.arange(self.warps_per_cta)
        return self.known[rows[:, None], columns]

    def refresh(self, rows: Array) -> None:
        """Recompute the stamp up to which a row knows everything of its CTA."""
        self.limit[rows] = self.in_cta(rows).min(axis=1)
        if self._ordering:
            engines = np.array(self._ordering)
            known = self.known[rows][:, self.warps + engines]
            seen = np.where(known >= self.newest[engines], self.now, known)
            if self.clustered:  # engines of other CTAs do not touch this one's memory
                mine = (rows % self.domain // self.warps_per_cta)[:, None] == self._ranks[engines]
                seen = np.where(mine, seen, self.now)
            self.limit[rows] = np.minimum(self.limit[rows], seen.min(axis=1))

    def sync_warps(self, rows: Array) -> None:
        """All lanes of each row have met (``__syncwarp``)."""
        for key in [k for k in self.lanes if k[0] in set(rows.tolist())] if self.lanes else ():
            row, agent = key
            if agent == row:
                del self.lanes[key]
        self._raise_own(rows)
        self.absorb(rows)
        self.refresh(rows)

    def sync_ctas(self, rows: Array) -> None:
        """All warps of the CTAs of ``rows`` (every warp listed, CTA by CTA) have met at a barrier."""
        if self.across or self.clustered:
            groups = rows.reshape(-1, self.warps_per_cta)
            for group in groups:
                self.sync_group(group, group)
            return
        self.absorb(rows)
        if self.single:  # such as a proxy fence by part of a warp
            for group in rows.reshape(-1, self.warps_per_cta):
                self.learn_singles(group, self.singles(group))
        if not self.newest.size:
            self.known[rows] = self.now
            self.limit[rows] = self.now
            return
        self.known[rows, : self.warps] = self.now
        others = self.known.shape[1] - self.warps
        engines = self.known[rows, self.warps :].reshape(-1, self.warps_per_cta, others)
        together = np.broadcast_to(engines.max(axis=1, keepdims=True), engines.shape)
        self.known[rows, self.warps :] = together.reshape(rows.size, -1)
        self.refresh(rows)

    def snapshot(self, row: int) -> Array:
        """What a whole warp releases: all it knows, and all that its own lanes did until now."""
        clock = self.known[row].copy()
        clock[self._own[row]] = self.now
        if self.clustered:
            clock[self._visible + row % self.domain] = self.now
        return clock

    def sync_group(self, releasing: Array, waiting: Array) -> None:
        """A barrier of some warps of one CTA completes."""
        self.absorb(releasing)
        clock = np.max(np.stack([self.snapshot(int(r)) for r in releasing]), axis=0)
        self.meet(waiting, clock, self.singles(releasing))

    def singles(self, rows: Array) -> Singles:
        """What the rows know of single lanes of other warps."""
        found: Singles = {}
        for row in rows.tolist() if self.single else ():
            for key, stamp in self.single.get(row, {}).items():
                found[key] = max(stamp, found.get(key, 0))
        return found

    def meet(self, waiting: Array, clock: Array, singles: Singles) -> None:
        """The waiting warps learn ``clock``, and their lanes have met."""
        self.absorb(waiting)
        self.known[waiting] = np.maximum(self.known[waiting], clock)
        self._raise_own(waiting)
        self.learn_singles(waiting, singles)
        self.refresh(waiting)

    def learn_singles(self, rows: Array, singles: Singles) -> None:
        """The rows learn what single lanes released about themselves."""
        for row in rows.tolist() if singles else ():
            mine = self.single.setdefault(row, {})
            for key, stamp in singles.items():
                mine[key] = max(stamp, mine.get(key, 0))

    # -- single lanes --------------------------------------------------------------------------------------------

    def join_lane(self, row: int, lane: int, clock: Array) -> None:
        """One lane learns ``clock``; its warp does when the lanes next meet."""
        key = (row, -1 - lane)
        self.lanes[key] = np.maximum(self.lanes[key], clock) if key in self.lanes else clock.copy()

    def sync_lanes(self, row: int, members: Array) -> None:
        """Some lanes of a warp have met: they know each other's accesses, the others do not."""
        table = self.lanes.setdefault((row, row), np.zeros((32, 32), np.int64))
        table[np.ix_(members, members)] = self.now

    def lane_snapshot(self, row: int, lane: int) -> Array:
        """What one lane knows of each warp."""
        clock = self.known[row].copy()
        extra = self.lanes.get((row, -1 - lane))
        return clock if extra is None else np.maximum(clock, extra)

    def absorb(self, rows: Array) -> None:
        """The lanes of these warps have met: each knows what any of them acquired."""
        if not self.lanes:
            return
        chosen = set(rows.tolist())
        for key in [k for k in self.lanes if k[1] < 0 and k[0] in chosen]:
            row = key[0]
            self.known[row] = np.maximum(self.known[row], self.lanes.pop(key))

    # -- mbarriers and proxies -------------------------------------------------------------------------------------

    def itself(self, row: int, lane: int) -> Singles:
        """What a lane releases about itself."""
        agent = self.first + row
        own = {(agent, lane): self.now}
        return {**own, (agent, lane + VISIBLE): self.now} if self.clustered else own

    def near_only(self, clock: Array, singles: Singles) -> tuple[Array, Singles]:
        """The same without writes that are visible beyond their CTA."""
        clock[self._visible : self._global_fence] = 0
        return clock, {key: stamp for key, stamp in singles.items() if key[1] < VISIBLE}

    def release(self, row: int, lanes: list[int] | None) -> tuple[Array, Singles]:
        """What some lanes of a warp (None: all) make known to who acquires it."""
        singles = self.singles(np.array([row]))
        if lanes is None:
            clock = self.snapshot(row)
            for (owner, agent), extra in self.lanes.items():
                if owner == row and agent < 0:
                    clock = np.maximum(clock, extra)
            return clock, singles
        clock = np.max(np.stack([self.lane_snapshot(row, lane) for lane in lanes]), axis=0)
        for lane in lanes:
            singles.update(self.itself(row, lane))
        return clock, singles

    def acquire(self, row: int, lanes: list[int] | None, clock: Array, singles: Singles) -> None:
        """Some lanes of a warp (None: all) learn a release."""
        rows = np.array([row])
        if lanes is None:
            self.known[row] = np.maximum(self.known[row], clock)
            self.refresh(rows)
        else:
            for lane in lanes:
                self.join_lane(row, lane, clock)
        self.learn_singles(rows, singles)

    def global_fence(self, row: int, lanes: list[int] | None) -> None:
        """The writes to global memory that these lanes know of now also come before later bulk copies."""
        mine = slice(self._global_fence, self._global_fence + self.warps)
        for lane in range(1) if lanes is None else lanes:
            clock = self.snapshot(row) if lanes is None else self.lane_snapshot(row, lane)
            clock[mine] = np.maximum(clock[mine], clock[: self.warps])
            if lanes is None:
                self.known[row, mine] = clock[mine]
            else:
                self.join_lane(row, lane, clock)
                self.learn_singles(np.array([row]), {(self.first + row, lane + FENCED): self.now})
        known = self.single.get(row, {})
        own = {(agent, lane + FENCED): stamp for (agent, lane), stamp in known.items() if agent >= 0 and lane < VISIBLE}
        self.learn_singles(np.array([row]), own)

    def fenced_globally(self, row: int, lane: int, agents: Array, lanes: Array, stamps: Array) -> Array:
        """Whether writes to global memory (agent, its lane, stamp) are fenced for what a lane starts now."""
        fine = np.zeros(agents.shape, np.bool_)
        if self.global_fences:
            near = agents // self.domain == (self.first + row) // self.domain
            columns = self._global_fence + (agents if self.across else agents % self.domain)
            fine = (stamps <= self.lane_snapshot(row, lane)[columns]) & (near | self.across)
            known = self.single.get(row, {})
            for i in np.nonzero(~fine)[0] if known else ():
                fine[i] = stamps[i] <= known.get((int(agents[i]), int(lanes[i]) + FENCED), 0)
        return fine

    def proxy_fence(self, row: int, lanes: list[int] | None) -> None:
        """All that these lanes know of generic accesses now also comes before later accesses of the async proxy."""
        warps = self.domain
        mine = slice(self.warps, self.warps + warps)
        first = self._domain_first(row)
        for lane in range(1) if lanes is None else lanes:
            clock = self.snapshot(row) if lanes is None else self.lane_snapshot(row, lane)
            clock[mine] = np.maximum(clock[mine], clock[first : first + warps])
            if lanes is None:
                self.known[row, mine] = clock[mine]
            else:
                self.join_lane(row, lane, clock)
                self.learn_singles(np.array([row]), {(-1 - row % warps, lane): self.now})

    def reach(self, row: int, lane: int | None) -> Array:
        """What a lane (None: the warp) knows of the warps and engines of its domain, by their number within it."""
        clock = self.known[row] if lane is None else self.lane_snapshot(row, lane)
        if not self.across:
            return clock
        first = self._domain_first(row)
        return np.concatenate([clock[first : first + self.domain], clock[self.warps :]])

    def reached(self, rows: Array, agent: int, lane: int | None, stamp: int) -> bool:
        """Whether any of these warps knows what a warp of the domain (one lane, or all) did at a stamp."""
        column = int(self._own[agent])
        if self.known[rows, column].max() >= stamp:
            return True
        waiting = [clock[column] for (row, other), clock in self.lanes.items() if other < 0 and row in rows.tolist()]
        if any(known >= stamp for known in waiting):
            return True
        key = (self.first + agent, -1 if lane is None else lane)
        return any(self.single.get(row, {}).get(key, 0) >= stamp for row in rows.tolist())

    # -- the question --------------------------------------------------------------------------------------------

    def ordered(
        self, rows: Array, lanes: Array, whole_warp: bool, agents: Array, agent_lanes: Array, stamps: Array, *,
        visible: bool = False,
    ) -> Array:  # fmt: skip
        """Whether each access (agent, agent lane, stamp) happened before the step of (row, lane) now, elementwise.

        ``agents`` are grid-wide warp numbers, or engines of the same domain (-1 - engine); an agent lane above 31
        stands for several lanes; ``whole_warp`` means the step is a collective one, on behalf of every lane. With
        ``visible``, what warps of other CTAs did must be visible here.
        """
        mine = self.first + rows
        singly = agents <= ASYNC_AGENT
        columns = np.where(singly, 0, self._columns(agents))
        far = np.zeros(agents.shape, np.bool_)
        if visible and self.clustered:
            far = (agents >= 0) & (agents // self.domain == mine // self.domain)
            far &= agents // self.warps_per_cta != mine // self.warps_per_cta
            columns = np.where(far, self._visible + agents % self.domain, columns)
        if self.across:
            known = self.known[rows, columns]
        else:
            near = (agents < 0) | (agents // self.domain == mine // self.domain)
            known = np.where(near, self.known[rows, columns], 0)
        result = (stamps <= known) & ~singly
        if not whole_warp:
            result |= (agents == mine) & (agent_lanes == lanes)
        if self.lanes or self.single:
            for i in np.nonzero(~result)[0]:
                result[i] = self._ordered_for_lane(
                    (int(rows[i]), int(lanes[i])), whole_warp, (int(agents[i]), int(agent_lanes[i])), int(stamps[i]),
                    int(columns[i]), bool(far[i]),
                )  # fmt: skip
        return result

    def _columns(self, agents: Array) -> Array:
        """The column of ``known`` of each agent (of the own domain, unless clocks cover the grid)."""
        warps = agents if self.across else agents % self.domain
        return np.where(agents < 0, self.warps - 1 - agents, warps) if self.newest.size else warps

    def _ordered_for_lane(
        self, mine: tuple[int, int], whole_warp: bool, theirs: tuple[int, int], stamp: int, column: int, far: bool
    ) -> bool:
        (row, lane), (agent, agent_lane) = mine, theirs
        if stamp <= self.single.get(row, {}).get((agent, agent_lane + VISIBLE * far), 0):
            return True
        if whole_warp:
            return False
        extra = self.lanes.get((row, -1 - lane))
        if extra is not None:
            same_domain = ASYNC_AGENT < agent < 0 or agent // self.domain == (self.first + row) // self.domain
            if (self.across or same_domain) and stamp <= extra[column]:
                return True
        met = self.lanes.get((row, row))
        return (
            met is not None and agent == self.first + row and agent_lane < 32 and bool(stamp <= met[lane, agent_lane])
        )
