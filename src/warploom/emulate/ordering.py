"""Order through global memory: fences, acquire and release, and the atomics that carry them (PTX memory model)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.clocks import Clocks
from warploom.emulate.frames import Frame
from warploom.isa.effects import Access, Scope

Array = NDArray[Any]
Singles = dict[tuple[int, int], int]


@dataclass(slots=True)
class _Release:
    """What a thread has made ready for others: a clock, stamps of single lanes, and how far it reaches."""

    clock: Array
    singles: Singles
    scope: Scope
    cta: int


def _joined(first: _Release | None, second: _Release | None) -> _Release | None:
    if first is None or second is None:
        return first or second
    singles = dict(first.singles)
    for key, stamp in second.singles.items():
        singles[key] = max(stamp, singles.get(key, 0))
    scope: Scope = "cta" if "cta" in (first.scope, second.scope) else "gpu"
    return _Release(np.maximum(first.clock, second.clock), singles, scope, second.cta)


class Ordering:
    """Which clocks travel through which addresses. ``published`` outlives the batch; the rest belongs to its warps."""

    def __init__(self, clocks: Clocks, published: dict[int, _Release]) -> None:
        self.clocks = clocks
        self.published = published
        self.fenced: dict[tuple[int, int], _Release] = {}
        self.seen: dict[tuple[int, int], _Release] = {}

    def _release_of(self, row: int, lane: int, whole: bool, scope: Scope) -> _Release:
        clocks = self.clocks
        agent = clocks.first + row
        clock = clocks.snapshot(row) if whole else clocks.lane_snapshot(row, lane)
        singles = clocks.singles(np.array([row]))
        if not whole:
            singles.update(clocks.itself(row, lane))
        return _Release(clock, singles, scope, agent // clocks.warps_per_cta)

    def _acquire(self, row: int, lane: int, release: _Release) -> None:
        cta = (self.clocks.first + row) // self.clocks.warps_per_cta
        if release.scope == "cta" and release.cta != cta:
            return
        self.clocks.join_lane(row, lane, release.clock)
        self.clocks.learn_singles(np.array([row]), release.singles)

    def fence(self, frame: Frame, scope: Scope) -> None:
        """Each active thread: what it did is ready to be published, what it saw published is now known."""
        active = np.ones((frame.n, 32), np.bool_) if frame.active is None else frame.active
        for i, lane in np.argwhere(active).tolist():
            row = int(frame.flat[i])
            seen = self.seen.pop((row, lane), None)
            if seen is not None:
                self._acquire(row, lane, seen)
            self.fenced[(row, lane)] = self._release_of(row, lane, False, scope)

    def strong_access(self, frame: Frame, access: Access, addresses: Array, active: Array) -> None:
        """A relaxed, acquire or release access of each active thread to its address (warps, lanes)."""
        reads, writes = access.mode != "store", access.mode != "load"
        for i, lane in np.argwhere(active).tolist():
            row, address = int(frame.flat[i]), int(addresses[i, lane])
            before = self.published.get(address)
            if reads and before is not None:
                if access.order in ("acquire", "acq_rel"):
                    self._acquire(row, lane, before)
                else:
                    seen = _joined(self.seen.get((row, lane)), before)
                    assert seen is not None
                    self.seen[(row, lane)] = seen
            if not writes:
                continue
            mine = self.fenced.get((row, lane))
            if access.order in ("release", "acq_rel"):
                mine = _joined(mine, self._release_of(row, lane, False, access.scope))
            # A read-modify-write continues the release sequence that it reads from; a store ends it.
            after = _joined(before, mine) if reads else mine
            if after is None:
                self.published.pop(address, None)
            else:
                self.published[address] = after
