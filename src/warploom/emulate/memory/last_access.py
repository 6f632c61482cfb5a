"""Who has read, or atomically updated, each cell of a region since it was last written: what a later write must follow.

As a rule that is one thread, and a few arrays hold it. Of cells that several threads touch, a list of all accesses is
kept, sorted by cell and merged as it grows, so that looking some up and adding some stay cheap however many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
_UNMERGED = 8  # lists that may wait to be merged


@dataclass(slots=True)
class Accesses:
    """Parallel arrays: cells, grid-wide warps (or other agents), lanes, stamps, and what kind of access it was."""

    cells: Array
    agents: Array
    lanes: Array
    stamps: Array
    kinds: Array

    def __getitem__(self, where: Array) -> Accesses:
        return Accesses(*(x[where] for x in self._arrays))

    @property
    def _arrays(self) -> tuple[Array, ...]:
        return self.cells, self.agents, self.lanes, self.stamps, self.kinds

    @classmethod
    def joined(cls, parts: list[Accesses]) -> Accesses:
        """All of them, one after the other."""
        return cls(*(np.concatenate(x) for x in zip(*(p._arrays for p in parts), strict=True)))


class LastAccesses:
    """The reads, or the updates, of a region; ``written`` is when each cell was last written, which ends a record."""

    def __init__(self, written: Array) -> None:
        count = written.size
        self._written = written
        self._touched, self._several = np.zeros(count, np.bool_), np.zeros(count, np.bool_)  # at all; by more than one
        self._agents, self._stamps = np.zeros(count, np.int64), np.zeros(count, np.int64)  # of the last one
        self._lanes, self._kinds = np.zeros(count, np.int8), np.zeros(count, np.int8)
        self._known_kinds: set[int] = set()
        self._sorted: list[Accesses] = []  # all to cells that several threads have touched: the longest list first

    def _last(self, cells: Array) -> Accesses:
        return Accesses(cells, self._agents[cells], self._lanes[cells], self._stamps[cells], self._kinds[cells])

    def note(self, new: Accesses) -> None:
        """Record accesses of one execution, all of one kind."""
        self._known_kinds.update(new.kinds[:1].tolist())
        cells, before = new.cells, self._last(new.cells)
        other = self._touched[cells] & ~self._several[cells]
        other &= (before.agents != new.agents) | (before.lanes != new.lanes) | (before.kinds != new.kinds)
        self._touched[cells] = True
        self._agents[cells], self._lanes[cells] = new.agents, new.lanes
        self._stamps[cells], self._kinds[cells] = new.stamps, new.kinds
        if other.any():
            self._several[cells[other]] = True
            self._keep(before[other])
        clash = (self._lanes[cells] != new.lanes) | (self._agents[cells] != new.agents)
        if clash.any():
            self._several[cells[clash]] = True
        several = self._several[cells]
        if several.any():
            self._keep(new[several])

    def touched(self, cells: Array) -> Array:
        """Whether there is any access to each of some cells since it was last written."""
        return self._touched[cells]

    def forget(self, cells: Array) -> None:
        """The cells have been written, by somebody that was compared with all of these accesses."""
        self._touched[cells] = False
        self._several[cells] = False

    def of(self, cells: Array, harmless: Callable[[int], bool]) -> tuple[Array, Accesses] | None:
        """The accesses to some cells: positions among them, and who it was. None for none that is not ``harmless``."""
        if all(harmless(kind) for kind in self._known_kinds):
            return None
        touched = np.nonzero(self._touched[cells])[0]
        if not touched.size:
            return None
        alone = touched[~self._several[cells[touched]]]
        found = [(alone, self._last(cells[alone]))]
        if alone.size < touched.size:
            several = touched[self._several[cells[touched]]]
            wanted = cells[several]
            for part in self._sorted:
                mine, theirs = _matches(wanted, part.cells)
                current = part.stamps[theirs] > self._written[wanted[mine]]
                found.append((several[mine[current]], part[theirs[current]]))
        positions = np.concatenate([mine for mine, _ in found])
        return positions, Accesses.joined([theirs for _, theirs in found])

    def _keep(self, new: Accesses) -> None:
        self._sorted.append(new[np.argsort(new.cells, kind="stable")])
        if len(self._sorted) <= _UNMERGED:
            return
        while len(self._sorted) > 1 and (
            len(self._sorted) > _UNMERGED or self._sorted[-2].cells.size < 2 * self._sorted[-1].cells.size
        ):
            self._sorted[-2:] = [self._merged(*self._sorted[-2:])]

    def _merged(self, first: Accesses, second: Accesses) -> Accesses:
        """Both, without what a write has ended and without a thread's older accesses to the same cell."""
        both = Accesses.joined([first, second])
        both = both[both.stamps > self._written[both.cells]]
        both = both[np.lexsort((both.stamps, both.kinds, both.lanes, both.agents, both.cells))]
        same = (both.cells[1:] == both.cells[:-1]) & (both.agents[1:] == both.agents[:-1])
        same &= (both.lanes[1:] == both.lanes[:-1]) & (both.kinds[1:] == both.kinds[:-1])
        return both[np.append(~same, True)] if both.cells.size else both


def _matches(wanted: Array, ordered: Array) -> tuple[Array, Array]:
    """All pairs of positions at which two lists hold the same cell; the second one is sorted."""
    low, high = np.searchsorted(ordered, wanted, "left"), np.searchsorted(ordered, wanted, "right")
    counts = high - low
    mine = np.repeat(np.arange(wanted.size), counts)
    starts = np.repeat(low - np.concatenate([[0], np.cumsum(counts)[:-1]]), counts)
    return mine, starts + np.arange(mine.size)
