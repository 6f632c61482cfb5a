"""Order through memory: fences, acquire and release, and the atomics that carry them (PTX memory model)."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame, Turns, lanes_of
from warploom.emulate.order.clocks import Clocks, Snapshot
from warploom.emulate.order.planes import joined
from warploom.isa.effects import Access, Scope

Array = NDArray[Any]


Ctas: TypeAlias = range | None
"""The CTAs that a scope reaches, None where it is the whole GPU."""


def _smaller(one: Ctas, other: Ctas) -> Ctas:
    """The narrower of two scopes around one thread."""
    return min((x for x in (one, other) if x is not None), key=len, default=None)


class Sequence:
    """A release sequence: what a lane told at some moment, on top of what was told at the same address before.

    Nothing is joined before somebody asks.
    """

    __slots__ = ("_before", "_hearers", "_known", "_lane", "_narrow", "_snapshot", "_told", "by_one")

    def __init__(self, before: Sequence | None, snapshot: Snapshot, lane: int, hearers: Ctas) -> None:
        self._before, self._snapshot, self._lane, self._hearers = before, snapshot, lane, hearers
        self._narrow = hearers is not None or (before is not None and before._narrow)
        self._told: set[tuple[int, int]] = before._told if before is not None else set()  # of the whole sequence
        self._told.add((id(snapshot), lane))
        self._known: dict[int | None, Array] = {}
        me = snapshot.agent, lane
        self.by_one = me if before is None or before.by_one == me else None  # the only thread that has told anything

    @classmethod
    def after(cls, before: Sequence | None, snapshot: Snapshot, lane: int, hearers: Ctas) -> Sequence:
        """The sequence with what a lane tells; the same one where that is told already."""
        if before is not None and (id(snapshot), lane) in before._told:
            return before
        return cls(before, snapshot, lane, hearers)

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
        known = joined(earlier, *(one._snapshot.of_lanes([one._lane]) for one in heard))
        if tellers is None:
            self._known[cta if self._narrow else None] = known
        return known

    def _memory(self, cta: int) -> Array | None:
        return self._known.get(cta if self._narrow else None)


class Ordering:
    """Release sequences by their addresses. ``published`` outlives the batch; the rest belongs to its warps."""

    def __init__(self, clocks: Clocks, published: dict[int, Sequence]) -> None:
        self.clocks = clocks
        self.published = published
        self._fenced: dict[int, dict[int, tuple[Snapshot, Ctas]]] = {}  # row → lane → what its fence made ready
        # Row → lane, chain → the sequence read since the lane's last fence, and at which scope.
        self._seen: dict[int, dict[tuple[int, int], tuple[Sequence, Ctas]]] = {}

    def _cta(self, row: int) -> int:
        return (self.clocks.first + row) // self.clocks.warps_per_cta

    def _within(self, row: int, scope: Scope) -> Ctas:
        """The CTAs of a scope around a warp, by their numbers in the grid; None for all."""
        if scope not in ("cta", "cluster"):
            return None
        count = 1 if scope == "cta" else self.clocks.places.together
        first = self._cta(row) // count * count
        return range(first, first + count)

    def fence(self, frame: Frame, scope: Scope) -> None:
        """Each active thread: what it did is ready to be published, what it saw published is now known."""
        for _, row, lanes in lanes_of(frame, None):
            acting, within = range(32) if lanes is None else lanes, self._within(row, scope)
            seen = self._seen.get(row, {})
            for lane, chain in [key for key in seen if key[0] in acting]:
                sequence, read_within = seen.pop((lane, chain))
                self._acquire(row, lane, sequence, _smaller(read_within, within))
            self._fenced.setdefault(row, {}).update(dict.fromkeys(acting, (self.clocks.snapshot(row), within)))

    def _acquire(self, row: int, lane: int, sequence: Sequence, within: Ctas) -> None:
        release = partial(sequence.heard_by, self._cta(row), within, self.clocks.warps_per_cta)
        self.clocks.acquire_later(row, lane, sequence.chain, release)

    def strong_access(self, frame: Frame, access: Access, addresses: Array, turns: Turns) -> None:
        """A relaxed, acquire or release access of each active thread to its address, (warps, lanes), in turn."""
        releases = access.order in ("release", "acq_rel")
        if not (releases or self.published or self._fenced):
            return
        acquires = access.order in ("acquire", "acq_rel")
        reads, writes = access.mode != "store", access.mode != "load"
        published = self.published
        for i, row, lanes in lanes_of(frame, None):
            within, fenced = self._within(row, access.scope), self._fenced.get(row, {})
            snapshot = self.clocks.snapshot(row) if releases and writes else None
            for lane, address in self._places(addresses[i], lanes, turns):
                before = published.get(address) if reads else None
                if before is not None and before.by_one != (self.clocks.first + row, lane):
                    if acquires:
                        self._acquire(row, lane, before, within)
                    else:
                        self._seen.setdefault(row, {})[lane, before.chain] = before, within
                if not writes:
                    continue
                # A read-modify-write continues the release sequence that it reads from; a store ends it.
                after = before
                if lane in fenced:
                    earlier, fenced_within = fenced[lane]
                    after = Sequence.after(after, earlier, lane, _smaller(fenced_within, within))
                if snapshot is not None:
                    after = Sequence.after(after, snapshot, lane, within)
                if after is not None:
                    published[address] = after
                else:
                    published.pop(address, None)

    @staticmethod
    def _places(addresses: Array, lanes: list[int] | None, turns: Turns) -> list[tuple[int, int]]:
        listed = addresses.tolist()
        return [(lane, listed[lane]) for lane in turns if lanes is None or lane in lanes]
