"""The host's part of the order of tiles: what to divide by, and how many planes form a group (:mod:`.scheduler`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from warploom.core.arguments import fields, strides


def divisors(**values: int) -> dict[str, int]:
    """The numbers of :class:`.scheduler.Divisor` parameters."""
    found: dict[str, int] = {}
    for name, value in values.items():
        found |= fields(name, value=value, inverse=((1 << 32) - 1) // value)
    return found


def row_tiles(rows: int, planes: int, together: int) -> dict[str, int]:
    """The numbers of a parameter ``order`` of type :class:`.scheduler.RowTiles`."""
    last = planes % together or together
    found = {"planes": planes, **divisors(rows=rows, group=together * rows, together=together, last=last)}
    return fields("order", **found)


def page_table(row: int, columns: int, pages: int) -> dict[str, int]:
    """The numbers of a parameter ``table`` of type :class:`.cache.PageTable`; ``row``: elements between its rows."""
    return {**fields("table", columns=columns, pages=pages), **strides(table_entries=[row])}


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
    """Planes that form a group (:class:`.scheduler.RowTiles`): of the sizes tried that with the least estimated time.

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
    """(plane, row tile) of all tiles in the order they run; as :class:`.scheduler.RowTiles` has it."""
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


ENTRY_WORDS = 8
"""Of a tile's entry in the list of a ragged batch (:class:`.ragged.PieceList`), and in front of the first."""


def most_pieces(rows: int, batch: int, tile_m: int) -> int:
    """Tiles of ``tile_m`` rows that sequences of so many rows in all may have."""
    return (rows + batch * (tile_m - 1)) // tile_m


def heads_at_once(tiles: int, multiprocessors: int) -> int:
    """Heads of so many tiles that run at a time: a smaller group shares the L2 with the next."""
    return -(-multiprocessors // max(1, tiles))


def heads_together(keys: int, row_bytes: int, heads: int, least: int = 1) -> int:
    """Heads that form a group: about as many as the L2 holds the keys of, and at least ``least``.

    ``row_bytes`` of each key are a head's. Groups are as large as each other, but for the last: a small one is an
    uneven load.
    """
    most = min(heads, max(least, round(L2_BYTES / max(1, keys * row_bytes))))
    return -(-heads // -(-heads // most))
