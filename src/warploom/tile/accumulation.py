# pyright: reportInvalidTypeForm=false
"""Sums of many CTAs in global memory: f32 as the threads of a warp or warpgroup hold them, each thread's side by side.

By a warpgroup and a bulk copy 16 bytes of each thread, by a warp's own additions 4 bytes. Whoever reads them holds the
same elements in the same registers, so that no other order is ever needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from warploom.core.dtypes import f32, u32
from warploom.lang.parameters import Compound, Global
from warploom.tile.planning import part_size
from warploom.tile.roles import WARP, WARPGROUP

if TYPE_CHECKING:
    from warploom.lang import Fragment, GlobalPointer, Kernel, SharedTile, Traced
    from warploom.lang.values import Number

WORDS = 4
"""Elements that a thread moves at once: 16 bytes."""
WARPS = WARPGROUP // WARP


def part_tile(k: Kernel, registers: int, *, name: str, stages: int, warps: int = WARPS) -> SharedTile:
    """Room for parts of so many warps with so many accumulator registers a thread."""
    rows = part_size(registers, warps) // WORDS
    return k.shared(f32, (rows, WORDS), name=name, panel_cols=WORDS, stages=stages)


def store_part(k: Kernel, tile: SharedTile, sums: Fragment, first: Number = 0) -> None:
    """A warpgroup's accumulator, from warp ``first`` on, into a tile, for a bulk copy to take to global memory."""
    at, registers = (k.thread & (WARPGROUP - 1)) - first * WARP, len(sums.registers)
    for i in range(0, registers, WORDS):
        tile.store(sums.registers[i : i + WORDS], i * tile.layout.rows // registers + at)


def save_part(k: Kernel, to: GlobalPointer, sums: Fragment) -> None:
    """Store a warpgroup's accumulator to its part in global memory, from the registers."""
    mine = to + (k.thread & (WARPGROUP - 1)) * WORDS
    for i in range(0, len(sums.registers), WORDS):
        mine.store(sums.registers[i : i + WORDS], i * WARPGROUP)


def fetch_part(k: Kernel, tile: SharedTile) -> list[Traced]:
    """Load the sums that the corresponding thread of another warpgroup put into a tile by :func:`store_part`."""
    at = k.thread & (WARPGROUP - 1)
    return [x for row in range(0, tile.layout.rows, WARPGROUP) for x in tile.load(row + at, 0, WORDS)]


def load_part(k: Kernel, source: GlobalPointer, registers: int, *, warp: Traced, warps: int) -> list[Traced]:
    """Load the sums of warp ``warp`` of the ``warps`` of a part from global memory, in the order of its registers."""
    mine = source + (warp * WARP + k.lane) * WORDS
    return [x for i in range(0, registers, WORDS) for x in mine.load(i * warps * WARP, WORDS)]


def reduce_warp_part(k: Kernel, to: GlobalPointer, sums: Fragment, first: Traced | None = None) -> None:
    """Add a warp's accumulator to its part in global memory, from the registers; where ``first`` holds, store it."""
    mine = to + k.lane
    if first is not None:
        with k.when(first, uniform=True):
            _store(mine, sums)
        with k.otherwise():
            _reduce(k, mine, sums)
        return
    _reduce(k, mine, sums)


def _reduce(k: Kernel, to: GlobalPointer, sums: Fragment) -> None:
    for i, x in enumerate(sums.registers):
        k.reduce_add(to, x, i * WARP)


def save_warp_part(k: Kernel, to: GlobalPointer, sums: Fragment) -> None:
    """Store a warp's accumulator to its part in global memory, from the registers."""
    _store(to + k.lane, sums)


def _store(to: GlobalPointer, sums: Fragment) -> None:
    for i, x in enumerate(sums.registers):
        to.store(x, i * WARP)


def load_warp_part(k: Kernel, source: GlobalPointer, registers: int) -> list[Traced]:
    """A warp's part from global memory, in the order of its registers."""
    mine = source + k.lane
    return [mine.load(i * WARP) for i in range(registers)]


class PartTurns(Compound):
    """A parameter: CTAs add to the same part one after another, in their own order: sums are equal from run to run.

    ``counters``: 0 at first; one for each part.
    """

    counters: Global[u32]

    def await_turn(self, part: Number, turn: Traced) -> Traced:
        """Called by one thread: waits until ``turn`` CTAs have added; tells whether it is the first, which stores."""
        self.k.wait_at_least(self.counters, turn, part)
        return turn == 0

    def stored(self, part: Number) -> Traced:
        """Sums in no order: whether the first has stored, so that there is nothing to :meth:`claim`."""
        return self.counters.load(part, order="acquire") >= 2

    def claim(self, part: Number, stored: Traced) -> Traced:
        """Called by one thread, for sums in no order: tells whether it is the first, which stores; others wait for it.

        Its part is there, so that whoever is first waits for nobody.
        """
        k, before = self.k, self.k.register(u32, 2, "before")
        with k.when(~stored):
            before.set(k.atomic("max", self.counters, 1, part, order="acquire"))
            with k.when(before == 1):
                k.wait_at_least(self.counters, 2, part)
        return before == 0

    def pass_on(self, part: Number) -> None:
        """Called by the thread that added, once its sums are in global memory: the next CTA, or all others, may add."""
        self.k.fence("gpu")
        self.k.atomic("add", self.counters, 1, part)


class PartSums(Compound):
    """A parameter: the parts' ``total`` in global memory, and whose turn it is to add to one."""

    total: Global[f32]
    turns: PartTurns


def add_parts(k: Kernel, to: GlobalPointer, tiles: Sequence[SharedTile], first: Traced) -> None:
    """Called by one thread: adds tiles to global memory one behind the other, as a bulk group; stores if ``first``."""
    size = tiles[0].layout.rows * tiles[0].layout.cols
    for adds, branch in ((False, k.when(first)), (True, k.otherwise())):
        with branch:
            for i, tile in enumerate(tiles):
                k.bulk_store(to + i * size, tile, adds=adds)
    k.commit_bulk()
