"""What is known of others: a clock, and stamps of single lanes. What a release gives away, and an acquire learns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Singles = dict[tuple[int, int], int]
"""(agent, its lane) → stamp: what is known of single lanes."""

FENCED = 64
"""Added to a lane's number: up to when its accesses to shared memory are fenced against the async proxy."""
VISIBLE = 128
"""Added to a lane's number: what it has made visible beyond its CTA."""
FENCED_GLOBALLY = 192
"""Added to a lane's number: up to when its writes to global memory are fenced against the async proxy."""


def learn(mine: Singles, singles: Singles) -> None:
    """``mine`` becomes the newest of both."""
    for key, stamp in singles.items():
        if mine.get(key, 0) < stamp:
            mine[key] = stamp


@dataclass(slots=True)
class Known:
    """One stamp for each column of the clocks, and newer ones of single lanes."""

    clock: Array
    singles: Singles = field(default_factory=dict[tuple[int, int], int])

    def copy(self) -> Known:
        """One that may be changed."""
        return Known(self.clock.copy(), dict(self.singles))

    def join(self, other: Known) -> None:
        """Learn all that ``other`` knows."""
        np.maximum(self.clock, other.clock, out=self.clock)
        learn(self.singles, other.singles)


class Release(Protocol):
    """What somebody has made known, worked out when it is asked for.

    Of releases of one ``chain`` each tells all that the earlier ones do.
    """

    @property
    def chain(self) -> int:
        """Which one it belongs to."""
        ...

    def known(self) -> Known:
        """What it tells; not to be changed."""
        ...


Pending = dict[tuple[int, int], Release]
"""What lanes of a warp have yet to learn, by lane and chain."""


@dataclass(slots=True)
class Snapshot:
    """What the lanes of one warp (``agent``, as the grid counts them) know at the stamp ``now``.

    ``known`` is what all of them do, ``extras`` and ``later`` what single lanes have learnt beyond that, ``met`` the
    stamps [lane, other lane] at which two lanes last met (None: never since all did, which was at ``together``).
    """

    agent: int
    now: int
    known: Known
    extras: dict[int, Known]
    later: Pending
    met: Array | None
    together: int
    clustered: bool

    def of_lane(self, lane: int) -> Known:
        """All that one lane knows, and what it and those it has met did: what it releases."""
        found = self.known.copy()
        if lane in self.extras:
            found.join(self.extras[lane])
        for (mine, _), release in self.later.items():
            if mine == lane:
                found.join(release.known())
        self._did(found.singles, lane, self.now)
        if self.met is not None:
            met = self.met[lane]
            for other in np.nonzero(met > self.together)[0].tolist():
                self._did(found.singles, other, int(met[other]))
        return found

    def _did(self, singles: Singles, lane: int, stamp: int) -> None:
        for kind in (0, VISIBLE) if self.clustered else (0,):
            key = (self.agent, lane + kind)
            singles[key] = max(stamp, singles.get(key, 0))
