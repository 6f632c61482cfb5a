"""What is known of others: a clock of stamps, and newer stamps of single lanes.

A clock has a row for each *plane*, which says in what sense something came before, and a column for each agent: a warp,
or a queue of transactions that complete together. Negative numbers in place of a column are names that no clock has
room for; they are known like single lanes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.ir.program import Program
from warploom.isa import effects as fx

Array = NDArray[Any]

ORDER, CONTROL, FAR, FENCED, FENCED_GLOBALLY = range(5)
"""The planes of a clock: memory accesses that happened before; how far control has come, which carries no memory
accesses along; accesses that are visible beyond their CTA; accesses to shared memory, and writes to global memory, that
are fenced against the async proxy."""

NOBODY = -1
"""In place of a column: a warp of another cluster, of which nothing can be known."""
LOADS, REDUCTIONS, MAPS, PUBLISHED = (-(number << 40) for number in range(1, 5))
"""Names from here downwards: loads of global memory by the mbarrier that they complete on, reductions by the thread
that starts them, tensor maps that were taken in, and mbarriers whose initialisation was published to the cluster."""

Singles = dict[tuple[int, int, int], int]
"""(plane, column or name, lane) → stamp: what is known of single lanes."""


def planes_of(program: Program) -> int:
    """The number of planes that a program can tell apart."""
    fenced = {e.space for _, e in program.effects if isinstance(e, fx.ProxyFence)}
    if fenced:
        return FENCED + 1 if fenced == {"shared"} else FENCED_GLOBALLY + 1
    return FAR + 1 if program.cluster != (1, 1, 1) else CONTROL + 1


def learn(mine: Singles, singles: Singles) -> None:
    """``mine`` becomes the newest of both."""
    for key, stamp in singles.items():
        if mine.get(key, 0) < stamp:
            mine[key] = stamp


@dataclass(slots=True)
class Known:
    """A clock (planes, columns), and newer stamps of single lanes. A clock may lack the newest columns: they are 0."""

    clock: Array
    singles: Singles = field(default_factory=dict[tuple[int, int, int], int])

    def copy(self) -> Known:
        """A mutable copy of this knowledge."""
        return Known(self.clock.copy(), dict(self.singles))

    def join(self, other: Known) -> None:
        """Learn all that ``other`` knows."""
        width = other.clock.shape[1]
        if width > self.clock.shape[1]:
            self.clock = np.pad(self.clock, ((0, 0), (0, width - self.clock.shape[1])))
        mine = self.clock[:, :width]
        np.maximum(mine, other.clock, out=mine)
        learn(self.singles, other.singles)

    def only(self, *planes: int) -> Known:
        """This knowledge in some planes alone."""
        found = Known(np.zeros_like(self.clock), {key: s for key, s in self.singles.items() if key[0] in planes})
        kept = [plane for plane in planes if plane < self.clock.shape[0]]
        found.clock[kept] = self.clock[kept]
        return found

    def has(self, plane: int, column: int, lane: int, stamp: int) -> bool:
        """Whether it includes what a lane of an agent did at a stamp."""
        if 0 <= column < self.clock.shape[1] and stamp <= self.clock[plane, column]:
            return True
        return stamp <= self.singles.get((plane, column, lane), 0)
