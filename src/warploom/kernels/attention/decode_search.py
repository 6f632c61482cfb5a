"""Where the share of a CTA begins: found while the launch before is running, and looked at again once that is done."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from warploom.core.dtypes import s32, u32
from warploom.isa.barriers import bar_reduce

if TYPE_CHECKING:
    from warploom.lang import GlobalPointer, Kernel, Traced
    from warploom.tile.shares import Shares


class EarlyLengths:
    """The lengths of ``few`` sequences in shared memory, ``each`` of a thread; of more they stay where they are.

    They are read before the launch before is done, which may be writing them: past the L1, which would keep what is not
    true any more. Once for each CTA: all CTAs want the same lines at about the same time. So they are a guess, by which
    copies may begin; when that launch is done they are read again, and compared while the copies are under way.
    """

    def __init__(self, k: Kernel, lengths: GlobalPointer, batch: Traced, threads: int, each: int = 1) -> None:
        self._k, self._lengths, self._batch = k, lengths, batch
        self._near, self._own = k.shared(s32, threads * each, name="lengths"), k.registers(s32, each, 0, "length")
        self._before = k.registers(s32, each, 0, "before")
        self._places = [k.thread + i * threads for i in range(each)]
        self.few = batch <= threads * each

    def read(self) -> None:
        """Of few: as they are now."""
        self._load()
        self._keep()

    def near(self, sequence: Traced) -> Traced:
        """One of few."""
        return self._near.load(0, sequence)

    def of(self, sequence: Traced) -> Traced:
        """One of any."""
        found = self._k.register(s32, 0)
        with self._k.when(self.few, uniform=True):
            found.set(self.near(sequence))
        with self._k.otherwise():
            found.set(self._lengths.load(sequence))
        return found.get()

    def read_again(self) -> None:
        """Once the launch before is done; :meth:`changed` waits for what comes back."""
        for before, own in zip(self._before, self._own, strict=True):
            before.set(own)
        self._load()

    def changed(self) -> Traced:
        """Whether they are others than :meth:`read` found, or too many for it: :meth:`of` gives the new ones then."""
        k, found = self._k, self._k.register(u32, 1, "others")
        with k.when(self.few, uniform=True):
            differ = reduce(or_, [own != before for own, before in zip(self._own, self._before, strict=True)])
            others = k.emit(bar_reduce("or"), (k.constant(0, u32), differ))[0]
            found.set(k.select(others, 1, 0))
            with k.when(others, uniform=True):
                self._keep()
        return found != 0

    def _load(self) -> None:
        for place, own in zip(self._places, self._own, strict=True):
            with self._k.when(place < self._batch):
                own.set(self._lengths.load(place, order="relaxed"))

    def _keep(self) -> None:
        for place, own in zip(self._places, self._own, strict=True):
            self._near.store(own.get(), 0, place)
        self._k.syncthreads()


class Search:
    """The share of a CTA, from its ``first`` number to ``end``, and two positions at its start."""

    def __init__(self, k: Kernel, shares: Shares) -> None:
        self._k = k
        self.first, self.end = k.register(u32, 0, "first"), k.register(u32, 0, "end")
        self.at, self.ahead = shares.cursor("at"), shares.cursor("ahead")

    def run(self, shares: Shares) -> None:
        """Find it."""
        shares.survey()
        first, end = shares.of(self._k.cta_x)
        self.first.set(first)
        self.end.set(end)
        place = shares.find(first)
        self.at.move(place)
        self.ahead.move(place)
