"""Launches that follow each other: which earlier ones are over when a kernel begins, and which it can wait for.

A launch begins when all earlier ones of its stream are over. A *programmatic* one may begin while the one before it
runs: ``griddepcontrol.wait`` waits until that one is over and what it wrote is visible. Until then nothing is, whatever
``griddepcontrol.launch_dependents`` allows. Launches of different streams run at the same time.

Sources: PTX ISA, "griddepcontrol"; CUDA C++ Programming Guide, "Programmatic Dependent Launch", "Streams".
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.ir.program import Program

Array = NDArray[Any]
_NONE = frozenset[int]()


@dataclass(frozen=True)
class QueuedLaunch:
    """A launch on a stream; ``after``: numbers of launches, on other streams too, whose end it waits for (events)."""

    program: Program
    grid: int | Sequence[int]
    arguments: Sequence[Any] | Mapping[str, Any]
    stream: Hashable = 0
    programmatic: bool = False
    after: Sequence[int] = ()


@dataclass(frozen=True)
class EarlierLaunches:
    """The launches before one, by their numbers: the stamps at which they ended, and the names of their kernels.

    Some are ``over`` when it begins, some are ``awaited`` by ``griddepcontrol.wait``; others may run all the time.
    """

    ends: tuple[int, ...] = ()
    kernels: tuple[str, ...] = ()
    over: frozenset[int] = _NONE
    awaited: frozenset[int] = _NONE

    @property
    def begun(self) -> int:
        """The last stamp of the launches before."""
        return self.ends[-1] if self.ends else 0

    @property
    def names(self) -> dict[tuple[str, int, int], int]:
        """The first names of the clocks' columns: of the launches that may still run."""
        open_ones = [number for number in range(len(self.ends)) if number not in self.over]
        return {("launch", 0, number): place for place, number in enumerate(open_ones)}

    @cached_property
    def places(self) -> Array:
        """The column, behind those of the warps, of each launch; -1 of those that are over."""
        return np.array([self.names.get(("launch", 0, number), -1) for number in range(len(self.ends))], np.int64)

    def number_of(self, stamps: Array) -> Array:
        """The numbers of the launches that stamps are of; those of the launch itself get the next number."""
        return np.searchsorted(self.ends, stamps)

    @property
    def waits(self) -> dict[int, int]:
        """The columns, behind those of the warps, of the launches that are awaited, and their last stamps."""
        return {int(self.places[number]): self.ends[number] for number in self.awaited - self.over}


class StreamOrder:
    """The order of launches on streams: which earlier launches are over when a launch begins, and when it ends."""

    def __init__(self, launches: Sequence[QueuedLaunch]) -> None:
        self.launches = launches
        self.before: list[EarlierLaunches] = []
        self._over: list[frozenset[int]] = []  # at the end of each launch, itself included
        self._ends: list[int] = []

    def _of_stream(self, number: int) -> list[int]:
        """The launches before one on its stream."""
        return [i for i in range(number) if self.launches[i].stream == self.launches[number].stream]

    def begin(self) -> EarlierLaunches:
        """Begin the next launch, and return the launches before it with those that are over."""
        number = len(self.before)
        launch, earlier = self.launches[number], self._of_stream(number)
        waited_for = {i for event in launch.after for i in (*self._of_stream(event), event)}
        over = _NONE.union(*(self._over[i] for i in waited_for))
        awaited = _NONE
        if launch.programmatic and earlier:
            over |= self.before[earlier[-1]].over
            awaited = self._over[earlier[-1]]
        else:
            over = over.union(*(self._over[i] for i in earlier))
        kernels = tuple(launch.program.name for launch in self.launches[:number])
        self.before.append(EarlierLaunches(tuple(self._ends), kernels, over, awaited))
        return self.before[-1]

    def end(self, stamp: int, waited: bool) -> None:
        """The launch has ended, with this last stamp; ``waited``: some thread of it has waited for those before."""
        before = self.before[-1]
        self._over.append(before.over | (before.awaited if waited else _NONE) | {len(self._ends)})
        self._ends.append(stamp)
