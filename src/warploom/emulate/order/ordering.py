"""Order through memory: fences, acquire and release, and the atomics that carry them (PTX memory model)."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame, Lanes, Turns, lanes_of
from warploom.emulate.order.clocks import LANES, Clocks, Snapshot
from warploom.emulate.order.planes import ORDER, joined
from warploom.ir.statements import Op
from warploom.isa.effects import Access, Fence, Scope

Array = NDArray[Any]


Ctas: TypeAlias = range | None
"""The CTAs that a scope reaches, None where it is the whole GPU."""


def _smaller(one: Ctas, other: Ctas) -> Ctas:
    """The narrower of two scopes around one thread."""
    return min((x for x in (one, other) if x is not None), key=len, default=None)


class Sequence:
    """A release sequence: what lanes told at some moment, on top of what was told at the same address before.

    Nothing is joined before somebody asks.
    """

    __slots__ = ("_before", "_hearers", "_known", "_lanes", "_narrow", "_snapshot", "_told", "by_one")

    def __init__(self, before: Sequence | None, snapshot: Snapshot, lanes: Lanes, hearers: Ctas) -> None:
        self._before, self._snapshot, self._lanes, self._hearers = before, snapshot, lanes, hearers
        self._narrow = hearers is not None or (before is not None and before._narrow)
        self._told: set[tuple[int, Any]] = before._told if before is not None else set()  # of the whole sequence
        self._told.add(self._key(snapshot, lanes))
        self._known: dict[int | None, Array] = {}
        me = snapshot.agent, None if lanes is None else lanes[0]
        self.by_one = me if before is None or before.by_one == me else None  # the only thread that has told anything

    @classmethod
    def after(cls, before: Sequence | None, snapshot: Snapshot, lanes: Lanes, hearers: Ctas) -> Sequence:
        """The sequence with what lanes tell; the same one where that is told already."""
        if before is not None and cls._key(snapshot, lanes) in before._told:
            return before
        return cls(before, snapshot, lanes, hearers)

    @staticmethod
    def _key(snapshot: Snapshot, lanes: Lanes) -> tuple[int, Any]:
        return id(snapshot), None if lanes is None else tuple(lanes)

    @property
    def chain(self) -> int:
        """A number that all parts of one release sequence share."""
        return id(self._told)

    def heard_by(self, cta: int, tellers: Ctas, warps: int) -> Array:
        """Return what a thread of a CTA, of so many ``warps``, learns from the sequence; not to be changed.

        Where its own scope ends at some CTAs, that is what their threads have told.
        """
        told: list[Sequence] = []
        link: Sequence | None = self
        while link is not None and (tellers is not None or link._memory(cta) is None):
            told.append(link)
            link = link._before
        earlier = None if link is None else link._memory(cta)
        earlier = np.zeros_like(self._snapshot.known) if earlier is None else earlier
        heard = [one for one in told if one._hearers is None or cta in one._hearers]
        heard = [one for one in heard if tellers is None or one._snapshot.agent // warps in tellers]
        known = joined(earlier, *(one._snapshot.of_lanes(one._lanes) for one in heard))
        if tellers is None:
            self._known[cta if self._narrow else None] = known
        return known

    def _memory(self, cta: int) -> Array | None:
        return self._known.get(cta if self._narrow else None)


@dataclass(frozen=True, slots=True)
class Told:
    """The clocks that a relaxed wait for an mbarrier saw: of arrivals from its CTA, and from others of the cluster."""

    mbarrier: object
    known: list[Array]

    @property
    def chain(self) -> int:
        """A number of the mbarrier's."""
        return id(self.mbarrier)

    def heard_by(self, cta: int, tellers: Ctas, warps: int) -> Array:
        """Return what a thread of a CTA learns by a fence, whose scope and that of its wait are ``tellers``."""
        return joined(*(self.known if tellers is None or len(tellers) > 1 else self.known[:1]))


@dataclass
class Published:
    """The release sequences of a launch, and the ``fence.sc`` before writes, each by the address that was written."""

    sequences: dict[int, Sequence] = field(default_factory=dict[int, Sequence])
    fenced: dict[int, tuple[Sequence, bool]] = field(default_factory=dict[int, tuple[Sequence, bool]])


class Ordering:
    """Release sequences by their addresses. ``published`` outlives the batch; the rest belongs to its warps."""

    def __init__(self, clocks: Clocks, published: Published) -> None:
        self.clocks = clocks
        self.published = published.sequences
        self.sc_fences = ScFences(clocks, published.fenced)
        # Row → lane → what its fences made ready, the widest first: each is the last of those that are as wide.
        self._fenced: dict[int, dict[int, tuple[tuple[Snapshot, Ctas], ...]]] = {}
        # Row → lane, chain → the sequence read since the lane's last fence, and at which scope.
        self._seen: dict[int, dict[tuple[int, int], tuple[Sequence | Told, Ctas]]] = {}

    def _cta(self, row: int) -> int:
        return (self.clocks.first + row) // self.clocks.warps_per_cta

    def _within(self, row: int, scope: Scope) -> Ctas:
        """The CTAs of a scope around a warp, by their numbers in the grid; None for all."""
        if scope not in ("cta", "cluster"):
            return None
        count = 1 if scope == "cta" else self.clocks.places.together
        first = self._cta(row) // count * count
        return range(first, first + count)

    def fence(self, frame: Frame, op: Op, fence: Fence) -> None:
        """Each active thread: what it did is ready to be published, what it saw published is now known."""
        if fence.sc:
            self.clocks.stamp(op)
        for _, row, lanes in lanes_of(frame, None):
            acting, within = range(32) if lanes is None else lanes, self._within(row, fence.scope)
            seen = self._seen.get(row, {}) if fence.acquires else {}
            for lane, chain in [key for key in seen if key[0] in acting]:
                sequence, read_within = seen.pop((lane, chain))
                self._acquire(row, lane, sequence, _smaller(read_within, within))
            if fence.sc:
                self.sc_fences.acquire(row, lanes, within)
            if not fence.releases:
                continue
            snapshot = self.clocks.snapshot(row)
            made = self._fenced.setdefault(row, {})
            for lane in acting:
                wider = [
                    f for f in made.get(lane, ()) if within is not None and (f[1] is None or len(f[1]) > len(within))
                ]
                made[lane] = (*wider, (snapshot, within))
            if fence.sc:
                self.sc_fences.note(row, ScFence(snapshot, lanes, within))

    def published_by(self, agent: int, stamp: int) -> Op | None:
        """The last ``fence.sc`` of a thread of its CTA that has made known what a warp did at a stamp; None: none."""
        clocks, row = self.clocks, agent - self.clocks.first
        if not 0 <= row < len(clocks.columns):
            return None
        first, column = row // clocks.warps_per_cta * clocks.warps_per_cta, clocks.columns[row]
        for other in range(first, first + clocks.warps_per_cta):
            for made in self._fenced.get(other, {}).values():
                for snapshot, _ in made:
                    knows = snapshot.now if other == row else snapshot.known[ORDER, column]
                    op = clocks.history[snapshot.now]
                    if (
                        knows >= stamp
                        and op is not None
                        and any(isinstance(e, Fence) for e in op.instruction.effects())
                    ):
                        return op
        return None

    def fenced(self, row: int, lanes: Lanes, cta: int) -> list[Array]:
        """Return the clocks that relaxed writes by some lanes of a warp release to a CTA, by each lane's fences."""
        made = self._fenced.get(row, {})
        ready: dict[int, tuple[Snapshot, list[int]]] = {}
        for lane in [x for x in (range(32) if lanes is None else lanes) if x in made]:
            for snapshot, within in made[lane]:
                if within is None or cta in within:
                    ready.setdefault(id(snapshot), (snapshot, []))[1].append(lane)
        return [snapshot.of_lanes(None if len(acting) == 32 else acting) for snapshot, acting in ready.values()]

    def saw(self, row: int, lanes: Lanes, told: Told, scope: Scope) -> None:
        """Some lanes have waited for an mbarrier, relaxed: their next fence takes in what its phases have told."""
        if told.known:
            seen = self._seen.setdefault(row, {})
            for lane in range(32) if lanes is None else lanes:
                seen[lane, told.chain] = told, self._within(row, scope)

    def _acquire(self, row: int, lane: int, sequence: Sequence | Told, within: Ctas) -> None:
        release = partial(sequence.heard_by, self._cta(row), within, self.clocks.warps_per_cta)
        self.clocks.acquire_later(row, lane, sequence.chain, release)

    def strong_access(self, frame: Frame, op: Op, access: Access, addresses: Array, turns: Turns) -> None:
        """A relaxed, acquire or release access of each active thread to its address, (warps, lanes), in turn."""
        releases = access.order in ("release", "acq_rel")
        if not (releases or self.published or self._fenced or self.sc_fences.told):
            return
        acquires = access.order in ("acquire", "acq_rel")
        reads, writes = access.mode != "store", access.mode != "load"
        published, sc_fences = self.published, self.sc_fences
        stamp = self.clocks.stamp(op) if sc_fences.told or sc_fences.made else 0
        for i, row, lanes in lanes_of(frame, None):
            within, fenced, fences = self._within(row, access.scope), self._fenced.get(row, {}), sc_fences.of(row)
            snapshot = self.clocks.snapshot(row) if releases and writes else None
            for lane, address in _places(addresses[i], lanes, turns):
                before, me = published.get(address), (self.clocks.first + row, lane)
                if reads and before is not None and before.by_one != me:
                    if acquires:
                        self._acquire(row, lane, before, within)
                    else:
                        self._seen.setdefault(row, {})[lane, before.chain] = before, within
                if reads and address in sc_fences.told:
                    sc_fences.read(row, lane, address, stamp, within)
                if not writes:
                    continue
                if fences:
                    sc_fences.write(row, lane, address, within, not reads)
                # A read-modify-write continues the release sequence that it reads from; a store ends those of others.
                after = before if reads or (before is not None and before.by_one == me) else None
                for earlier, fenced_within in fenced.get(lane, ()):
                    after = Sequence.after(after, earlier, [lane], _smaller(fenced_within, within))
                if snapshot is not None:
                    after = Sequence.after(after, snapshot, [lane], within)
                if after is not None:
                    published[address] = after
                else:
                    published.pop(address, None)


def _places(addresses: Array, lanes: Lanes, turns: Turns) -> list[tuple[int, int]]:
    """The acting lanes with their addresses, in the order in which they take turns."""
    listed = addresses.tolist()
    return [(lane, listed[lane]) for lane in turns if lanes is None or lane in lanes]


@dataclass(frozen=True, slots=True)
class ScFence:
    """Lanes of a warp have executed a ``fence.sc``; the snapshot is of what they knew, at a stamp of its own."""

    snapshot: Snapshot
    lanes: Lanes
    within: Ctas

    @property
    def acting(self) -> range | list[int]:
        """The lanes, one by one."""
        return range(32) if self.lanes is None else self.lanes


@dataclass(frozen=True, slots=True)
class ScRead:
    """A strong read, at a stamp of its own, of what fences were ``told`` before."""

    stamp: int
    told: Sequence
    beyond: bool
    within: Ctas


_KEPT = 4
"""So many fences of a warp, and reads of a lane, are remembered at least: others of the CTA may know of older ones
alone."""


class ScFences:
    """Fence-SC order: all of ``fence.sc`` are in one order, which agrees with what is read.

    If a strong write comes after one fence, and a strong read of it (or of what is written there later) before another
    one, the first fence comes first, and with it all that came before. Write and read may be of other threads than the
    fences, of the same CTA, with a barrier between. ``told`` are the fences that come before the writes of an address,
    and whether a release sequence does not say the same.
    """

    def __init__(self, clocks: Clocks, told: dict[int, tuple[Sequence, bool]]) -> None:
        self.clocks, self.told = clocks, told
        self.made: dict[int, dict[int, list[ScFence]]] = {}  # CTA → row → its fences
        self._reads: dict[int, dict[tuple[int, int, int], list[ScRead]]] = {}  # CTA → row, lane and chain
        self._heard: dict[Any, Sequence] = {}

    def _cta(self, row: int) -> int:
        return (self.clocks.first + row) // self.clocks.warps_per_cta

    def of(self, row: int) -> dict[int, list[ScFence]] | None:
        """The fences of a row's CTA, by rows; None if there are none."""
        return self.made.get(self._cta(row)) if self.made else None

    def note(self, row: int, fence: ScFence) -> None:
        """Lanes of a row have executed a fence."""
        fences = self.made.setdefault(self._cta(row), {}).setdefault(row, [])
        fences.append(fence)
        if len(fences) > 2 * _KEPT:
            self._forget(row, fences)

    def _forget(self, row: int, fences: list[ScFence]) -> None:
        """Keep of a row's fences the newest ones, and those that are the last of a lane that some warp knows of."""
        warps, column = self.clocks.warps_per_cta, int(self.clocks.columns[row])
        first = row // warps * warps
        ends = {int(x) for x in self.clocks.known[first : first + warps, ORDER, column]} | {fences[-1].snapshot.now}
        kept, newest_first = set(range(len(fences) - _KEPT, len(fences))), range(len(fences) - 1, -1, -1)
        for end in ends:
            done: set[int] = set()
            for i in newest_first:
                if fences[i].snapshot.now <= end and not done.issuperset(fences[i].acting):
                    kept.add(i)
                    done.update(fences[i].acting)
        fences[:] = [fences[i] for i in sorted(kept)]

    def acquire(self, row: int, lanes: Lanes, within: Ctas) -> None:
        """Lanes of a row execute a fence: those before it are the ones that were told to reads which come before it."""
        cta, warps = self._cta(row), self.clocks.warps_per_cta
        for (reader, lane, chain), reads in self._reads.get(cta, {}).items():
            own = reader == row and (lanes is None or lane in lanes)
            for read in reversed(reads):
                if self._knows(row, lanes, reader, [lane], read.stamp):
                    mine = lanes
                elif own:
                    mine = [lane]
                else:
                    continue
                key = row, None if mine is None else tuple(mine), reader, lane, chain
                if (read.beyond or mine != [lane] or not own) and self._heard.get(key) is not read.told:
                    known = read.told.heard_by(cta, _smaller(read.within, within), warps)
                    self.clocks.acquire(row, mine, known)
                    self._heard[key] = read.told
                own = False
                if mine == lanes:
                    break

    def read(self, row: int, lane: int, address: int, stamp: int, within: Ctas) -> None:
        """A lane makes a strong read of an address that fences come before."""
        told, beyond = self.told[address]
        reads = self._reads.setdefault(self._cta(row), {}).setdefault((row, lane, told.chain), [])
        if not reads or reads[-1].told is not told:
            reads.append(ScRead(stamp, told, beyond, within))
            del reads[:-_KEPT]

    def write(self, row: int, lane: int, address: int, within: Ctas, ends: bool) -> None:
        """A lane makes a strong write at an address; it ``ends`` release sequences there."""
        told, beyond = self.told.get(address, (None, False))
        beyond |= ends and told is not None
        cta = self._cta(row)
        for other, fences in self.made[cta].items():
            done: set[int] = set()  # lanes of whom a later fence comes before the write
            for fence in reversed(fences):
                if done.issuperset(fence.acting):
                    continue
                own = other == row and lane in fence.acting
                if self._knows(row, [lane], other, fence.lanes, fence.snapshot.now):
                    lanes = fence.lanes
                elif own and lane not in done:
                    lanes = [lane]
                else:
                    continue
                done.update(fence.acting if lanes is None else lanes)
                beyond |= not own or lanes != [lane]
                told = Sequence.after(told, fence.snapshot, lanes, _smaller(fence.within, within))
                if len(done) == 32:
                    break
        if told is not None:
            self.told[address] = told, beyond

    def _knows(self, row: int, lanes: Lanes, other: int, theirs: Lanes, stamp: int) -> bool:
        """Whether lanes of a row know what those of another one did at a stamp."""
        column = int(self.clocks.columns[other])
        mine: Lanes | list[None] = [None] if lanes is None else lanes
        return all(self.clocks.lane_knows(row, x, column, y, stamp) for x in mine for y in theirs or [LANES])
