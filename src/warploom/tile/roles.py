"""Roles of warpgroups: one that keeps the tiles coming, others that multiply; and whose turn it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warploom.lang import Kernel, Traced
    from warploom.lang.values import Number

WARP = 32
WARPGROUP = 128
"""Threads of a warpgroup."""
WARPGROUP_ROWS = 64
"""Rows of the product that one ``wgmma`` of a warpgroup makes."""

# Per thread, by the number of consumers: together at most what the CTA is launched with (65536 / threads, in eights).
_CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}
_PRODUCER_REGISTERS = {1: 40, 2: 24, 3: 32}


def threads_of(consumers: int) -> int:
    """Threads of a CTA with one producer warpgroup and so many consumers."""
    return WARPGROUP * (consumers + 1)


def warps_of(warpgroups: int) -> int:
    """Warps of so many warpgroups: as often each gives back what it has read."""
    return WARPGROUP // 32 * warpgroups


def producer(k: Kernel, consumers: int) -> AbstractContextManager[None]:
    """``with producer(k, 2):`` what warps 0 to 3 do, which load for so many consumers; few registers."""
    return k.warps(0, 4, registers=_PRODUCER_REGISTERS[consumers])


def consumer(k: Kernel, consumers: int) -> AbstractContextManager[None]:
    """``with consumer(k, 2):`` what the warpgroups after the first do; most of the registers."""
    return k.warps(4, 4 * (consumers + 1), registers=_CONSUMER_REGISTERS[consumers])


class Meeting:
    """A named barrier at which whole warpgroups meet and see what each other stored: ``meeting.sync()``."""

    def __init__(self, k: Kernel, warpgroups: int) -> None:
        self._k, self._threads, self._number = k, warpgroups * WARPGROUP, k.named_barriers()

    def sync(self) -> None:
        """Wait for the others."""
        self._k.bar_sync(self._number, self._threads)


class Turns:
    """Warpgroups take turns at the tensor cores: one multiplies while another computes. ``with turns:`` is one turn.

    ``me`` of ``count`` takes its turn after ``me - 1``; number 0 begins. Named barriers ``first``, ``first + 1`` …,
    by default new ones, serve one warpgroup each. With a single warpgroup, or ``on`` False, turns cost nothing.
    """

    def __init__(self, k: Kernel, me: Traced, count: int, *, on: bool = True, first: int = 0) -> None:
        self._k, self._me, self._count, self._on = k, me, count, on and count > 1
        self._first = first or (k.named_barriers(count) if self._on else 0)

    @contextmanager
    def taken(self, following: Number = 0) -> Iterator[None]:
        """Around all turns. Number 0's first turn is there at once; at the end ``following`` takes back the one left.

        That is whoever's turn it would be next: number 0 again where everybody takes as many.
        """
        k = self._k
        if self._on:
            with k.when(self._me == self._count - 1, uniform=True):
                k.bar_arrive(self._first, 2 * WARPGROUP)
        yield
        if self._on:
            with k.when(self._me == following, uniform=True):
                k.bar_sync(self._me + self._first, 2 * WARPGROUP)

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.hand_on()

    def take(self) -> None:
        """Wait for this warpgroup's turn."""
        if self._on:
            self._k.bar_sync(self._me + self._first, 2 * WARPGROUP)

    def hand_on(self) -> None:
        """The turn is the next warpgroup's."""
        if self._on:
            k, last = self._k, self._me == self._count - 1
            following = 1 - self._me if self._count == 2 else k.select(last, 0, self._me + 1)
            k.bar_arrive(following + self._first, 2 * WARPGROUP)

    def pass_over(self) -> None:
        """A turn with nothing to multiply."""
        with self:
            pass
