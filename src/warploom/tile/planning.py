"""Arithmetic of tiles that configurations and the host compute without the language.

How wide the panels of a shared tile are and how high boxes, who copies what of a tile, and the host's part of the order
of tiles: what to divide by, and how many planes form a group (:mod:`.scheduler`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from warploom.core.arguments import fields, strides

if TYPE_CHECKING:
    from warploom.layout.linear import LinearMap


PANEL_COLS = 64
"""16-bit elements in a row of 128 bytes: the widest that the TMA and ``wgmma`` swizzle."""


def panel_cols(cols: int, *, tight: bool = False) -> int:
    """16-bit elements in a row of a panel of a tile that is ``cols`` wide: the TMA's box, and the swizzle's width.

    ``tight``: 32 where the second of two panels of 64 would hold 32 columns of zeros.
    """
    if tight and PANEL_COLS < cols <= PANEL_COLS * 3 // 2:
        return PANEL_COLS // 2
    return min(PANEL_COLS, max(16, 1 << (cols - 1).bit_length()))


def padded_cols(cols: int, *, tight: bool = False) -> int:
    """``cols`` rounded up to whole panels."""
    panel = panel_cols(cols, tight=tight)
    return -(-cols // panel) * panel


def box_rows(page_size: int, block: int) -> int:
    """Keys of a box: those that lie side by side in pages wherever a block of so many begins."""
    return gcd(page_size, block)


def part_size(registers: int, warps: int = 4) -> int:
    """Elements of the part of so many warps with so many accumulator registers a thread (:mod:`.accumulation`)."""
    return registers * warps * 32


CHUNK_BYTES = 16
SEGMENT_BYTES = 128
"""A row is copied in segments of one bank cycle: eight threads, 16 bytes each."""


@dataclass(frozen=True)
class CopyPlan:
    """The division of a ``rows × cols`` tile of 16-bit elements among the threads that copy it.

    ``cooperative``: the CTA's threads walk the tile together (the seeds' kernel 8); else each warp copies its own
    contiguous ``rows / warps`` rows. A thread copies ``chunk`` neighbouring elements per step (8 are 16 bytes).
    """

    rows: int
    cols: int
    warps: int
    cooperative: bool
    chunk: int = 8

    @property
    def chunks(self) -> int:
        """Threads side by side on one row segment."""
        return min(SEGMENT_BYTES, self.cols * 2) // (2 * self.chunk)

    @property
    def rows_per_step(self) -> int:
        """Rows that one step of the copy covers (of the CTA, or of each warp)."""
        return (32 * self.warps if self.cooperative else 32) // self.chunks

    @property
    def own_rows(self) -> int:
        """Rows that the group of threads is responsible for."""
        return self.rows if self.cooperative else self.rows // self.warps

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """Displacements (row, col) of every step, in elements, rows outermost."""
        columns = range(0, self.cols, self.chunks * self.chunk)
        return tuple((row, col) for row in range(0, self.own_rows, self.rows_per_step) for col in columns)

    def threads(self) -> LinearMap:
        """The map from the copying thread (``lane``: its bits in the CTA or the warp) to its first (row, col)."""
        from warploom.layout.shared import copy_positions

        count = 32 * self.warps if self.cooperative else 32
        return copy_positions(count, self.chunks * self.chunk, self.chunk).rename({"thread": "lane"})

    def problems(self) -> list[str]:
        """Why the tile cannot be copied this way; empty if it can."""
        found: list[str] = []
        who = "CTA" if self.cooperative else "warp"
        if self.own_rows % self.rows_per_step:
            found.append(
                f"{self.own_rows} rows are no multiple of the {self.rows_per_step} rows a {who} copies per step"
            )
        if self.cols % (self.chunks * self.chunk):
            found.append(f"{self.cols} columns are no multiple of a {2 * self.chunks * self.chunk}-byte row segment")
        return found


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
"""Bytes of K and V that stay in the L2 while they are used: about two thirds of an H100's or H200's 50 MB."""
BYTES_PER_SECOND = 4.0e12
"""The bandwidth of HBM3e; an H100's is lower, which only makes grouping better."""
FLOPS_PER_SECOND = 5.0e12
"""The rate of one multiprocessor at the clock that the power limit leaves."""
TILE_SECONDS = 1.4e-6
"""The time of a tile beside its blocks: Q, the end of the pipeline, the output. Fitted to attention on an H200."""
HIDDEN_SHARE = 0.05
"""The share of hidden traffic's time that counts: enough to prefer less of it where the work is balanced alike."""
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
    """The time estimated for the whole problem with groups of ``size`` planes."""
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
"""Words of a tile's entry in the list of a ragged batch (:class:`.ragged.PieceList`), and in front of the first."""


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
