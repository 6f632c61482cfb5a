"""Which tile a CTA works on next: an order of tiles as an object, with the part of it that the host computes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from warploom.core.dtypes import u32

if TYPE_CHECKING:
    from warploom.lang import Kernel, Traced
    from warploom.lang.values import Number


class Persistent:
    """Work items 0 … ``total`` - 1 for the CTAs of a grid along x: item ``cta + turn · CTAs`` is a CTA's turn.

    With ``alternating``, every other round of items goes the other way: where they shrink from the first to the last,
    no CTA gets the longer one of every round.
    """

    def __init__(self, k: Kernel, total: Traced, *, alternating: bool = False) -> None:
        self._k, self._alternating = k, alternating
        rounds, rest = total // k.grid_x, total % k.grid_x
        more = k.select(self._place(rounds) < rest, k.value(1, u32), k.value(0, u32))
        self.count: Traced = rounds + more
        """How many items this CTA works on."""

    def item(self, turn: Number) -> Traced:
        """The number of this CTA's item ``turn``."""
        return self._place(turn) + self._k.value(turn, u32) * self._k.grid_x

    def _place(self, turn: Number) -> Traced:
        """This CTA's place within a round."""
        k = self._k
        if not self._alternating:
            return k.cta_x
        return k.select((k.value(turn, u32) & 1) == 0, k.cta_x, k.grid_x - 1 - k.cta_x)


class Single:
    """One work item for each CTA of a grid along x: what :class:`Persistent` is for kernels whose CTAs come and go."""

    def __init__(self, k: Kernel) -> None:
        self._k = k
        self.count: Traced = k.value(1, u32)
        """How many items this CTA works on."""

    def item(self, _turn: Number) -> Traced:
        """The number of this CTA's item."""
        return self._k.cta_x


@dataclass(frozen=True)
class RowTiles:
    """Tiles of row blocks × planes (one head of one batch) by number.

    ``together``: where work grows with the row block, that many planes form a group, whose tiles come from the longest
    to the shortest (:func:`planes_together`); None: plane by plane, from the first rows on.
    """

    k: Kernel
    rows: Traced
    planes: Traced
    together: Traced | None = None

    def tile(self, number: Traced) -> tuple[Traced, Traced]:
        """(row block, plane)."""
        if self.together is None:
            return number % self.rows, number // self.rows
        size = self.together * self.rows
        group, within = number // size, number % size
        first = group * self.together
        members = self.k.minimum(self.together, self.planes - first)  # the last group may be smaller
        return self.rows - 1 - within // members, first + within % members


@dataclass(frozen=True)
class GroupedTiles:
    """Tiles of a matrix of ``rows`` × ``cols`` tiles by number; ``height`` rows of them walk along N together.

    They share their columns of B in the L2. 0: row by row.
    """

    k: Kernel
    rows: Traced
    cols: Traced
    height: int

    def tile(self, number: Traced) -> tuple[Traced, Traced]:
        """(row, column)."""
        if self.height == 0:
            return number // self.cols, number % self.cols
        group, within = number // (self.cols * self.height), number % (self.cols * self.height)
        members = self.k.minimum(self.rows - group * self.height, self.height)  # the last group may be lower
        return group * self.height + within % members, within // members


# -- the host's part
L2_BYTES = 32 << 20
"""Of K and V that stay in the L2 while they are used: about two thirds of what H100 and H200 have (50 MB)."""
BYTES_PER_SECOND = 4.0e12
"""Of HBM3e; an H100's is slower, which only makes grouping better."""
FLOPS_PER_SECOND = 5.0e12
"""Of one multiprocessor at the clock that the power limit leaves."""
TILE_SECONDS = 1.4e-6
"""What a tile costs beside its blocks: Q, the end of the pipeline, the output. Fitted to full attention on an H200."""
HIDDEN_SHARE = 0.05
"""Of the time that traffic takes and work hides: enough to prefer less of it where the work is balanced alike."""
_MOST_TILES = 1 << 16


@dataclass(frozen=True)
class Work:
    """Row tiles that differ in work: ``blocks`` visited by each tile of a plane, in order of its rows.

    ``block_seconds``: one block of one tile on one multiprocessor; ``block_bytes``: what it reads, of planes that share
    it each its part; ``tile_bytes``: what a tile reads and writes once. ``persistent``: CTAs take tiles in rounds, else
    as multiprocessors become free.
    """

    planes: int
    blocks: tuple[int, ...]
    block_seconds: float
    block_bytes: float
    tile_bytes: float
    persistent: bool
    multiprocessors: int


@lru_cache(maxsize=1024)
def planes_together(work: Work) -> int:
    """How many planes form a group of :class:`RowTiles`: of the sizes tried that with the least estimated time.

    The long tiles should start first; but the longest tiles of all planes come before the second longest of any, and by
    then what it reads has left the L2. So a group is what the L2 holds, its tiles from the longest to the shortest.
    """
    if len(work.blocks) * work.planes > _MOST_TILES:  # too many to try: what one round of CTAs covers
        return min(work.planes, -(-work.multiprocessors // len(work.blocks)))
    return min(_sizes(work), key=lambda size: (estimated_seconds(work, size), size))


def estimated_seconds(work: Work, size: int) -> float:
    """Of the whole problem with groups of ``size`` planes."""
    busy, memory = _busiest(work, size), _traffic(work, size) / BYTES_PER_SECOND
    return max(busy, memory) + HIDDEN_SHARE * memory


def _sizes(work: Work) -> list[int]:
    planes, around = work.planes, range(1, 5)
    tried = {planes, *(1 << i for i in range(planes.bit_length())), *(-(-work.multiprocessors // n) for n in around)}
    return sorted(size for size in tried if 1 <= size <= planes)


def order(work: Work, size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(plane, row tile) of all tiles in the order they run; what :class:`RowTiles` computes from a tile's number."""
    rows = len(work.blocks)
    group, within = np.divmod(np.arange(rows * work.planes), size * rows)
    first = group * size
    members = np.minimum(size, work.planes - first)
    return first + within % members, rows - 1 - within // members


def _busiest(work: Work, size: int) -> float:
    """Seconds until the last multiprocessor is done."""
    blocks = np.asarray(work.blocks, np.float64)[order(work, size)[1]]
    seconds = TILE_SECONDS + work.block_seconds * blocks
    count = work.multiprocessors
    if not work.persistent:  # as good as balanced, but for the last tiles
        return float(seconds.sum() / count + seconds[-count:].max() / 2)
    rounds = np.zeros(-(-len(seconds) // count) * count)
    rounds[: len(seconds)] = seconds
    rounds = rounds.reshape(-1, count)
    rounds[1::2] = rounds[1::2, ::-1]  # every other round goes the other way
    return float(rounds.sum(axis=0).max())


def _traffic(work: Work, size: int) -> float:
    """Bytes read and written, at least once each; the shared ones as often as the L2 has lost them."""
    plane, rows = max(work.blocks) * work.block_bytes, len(work.blocks)
    once = work.planes * (plane + rows * work.tile_bytes)
    in_use = max(size, -(-work.multiprocessors // rows))
    if in_use * plane <= L2_BYTES:
        return once
    sharing = max(1.0, work.multiprocessors / size)  # tiles of one plane that run at one time
    return max(once, work.planes * (sum(work.blocks) * work.block_bytes / sharing + rows * work.tile_bytes))
