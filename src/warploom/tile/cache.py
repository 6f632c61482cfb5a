# pyright: reportInvalidTypeForm=false
"""Keys and values of a cache, side by side or in pages: copied by each warp for itself, or by the TMA.

The TMA copies boxes of rows that lie side by side, where a block table says. The tensor map is a ragged one
(:meth:`TensorMapSpec.ragged`) whose sequences are pages: what a page holds behind the last key reads as zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Any

from warploom.core.dtypes import s32, u32
from warploom.core.errors import TraceError
from warploom.isa.async_copy import Eviction
from warploom.lang.parameters import Compound, Strided, StridedPointer
from warploom.tile.copies import TileCopy
from warploom.tile.pipeline import Boxes
from warploom.tile.planning import CopyPlan, box_rows
from warploom.tile.ragged import sequence_boxes

if TYPE_CHECKING:
    from warploom.isa.async_copy import Eviction
    from warploom.isa.effects import MemoryOrder
    from warploom.lang import GlobalPointer, Kernel, SharedTile, Traced
    from warploom.lang.hopper import TensorMapHandle
    from warploom.lang.values import Number


LANES, LINE = 32, 128
"""Lanes of a warp, and bytes of a line of the L2."""
FETCHED = LINE, 64
"""Bytes that the L2 may fetch for a copy: no more than what is read at about the same time."""


class PageTable(Compound):
    """A parameter: the table whose row b names the pages of sequence b in order, and of how many ``pages`` there are.

    The host gives the numbers (:func:`.planning.page_table`).
    """

    entries: Strided[s32, 1]
    columns: u32
    pages: u32


@dataclass(frozen=True)
class Pages:
    """The pages of sequences: the ``table`` names those that hold a sequence's keys, ``size`` keys each.

    No page is read that does not exist, whatever the table says.
    """

    size: int
    table: PageTable

    def of(self, k: Kernel, sequence: Traced, key: Traced) -> Traced:
        """The page of a key; for keys beyond the table that of its last entry."""
        return self.page(k, self.entry(k, sequence, key))

    def entry(self, k: Kernel, sequence: Traced, key: Traced, order: MemoryOrder = "weak") -> Traced:
        """The table's entry for a key, which may name no page."""
        entry = k.minimum(key // self.size, self.table.columns - 1)
        return k.bitcast(self.table.entries.at(sequence).load(entry, order=order), u32)

    def page(self, k: Kernel, entry: Traced) -> Traced:
        """The page that an entry names: apart from its load, which may take long."""
        return k.minimum(entry, self.table.pages - 1)


class WarpRing:
    """Rings of blocks of keys, one for each warp, which waits for nobody else's copies.

    ``fed``: shared tiles of (keys, head_dim), ``warps`` of them for each stage of a ring, and what they are copied
    from: strides of sequences, or pages, heads and keys; that of keys is known while tracing. ``heads`` neighbouring
    warps copy the same keys of as many heads, those behind them the next keys of a block: what lies side by side is
    read at about the same time. Keys that a sequence has not are zeros, whatever memory holds in their place.
    ``once``: nobody reads these keys again soon, so the L2 drops them first (sm_90).

    The ring counts the blocks that a kernel puts and waits for as they are traced: a loop waits for as many as it puts.
    """

    def __init__(
        self,
        k: Kernel,
        *fed: tuple[SharedTile, StridedPointer],
        warps: int,
        heads: int,
        head_dim: int,
        pages: Pages | None = None,
        once: bool = False,
    ) -> None:
        self._k, self._sources, self._pages = k, [source for _, source in fed], pages
        self.tiles = tuple(tile for tile, _ in fed)
        if warps % heads:
            raise TraceError(f"{warps} warps do not divide among {heads} heads: take a multiple of them")
        self._warps, self.heads, self.parts = warps, heads, warps // heads
        """``parts``: of a block's keys, one after another, each the keys of ``heads`` warps."""
        self.stages, self._ahead = self.tiles[0].stages // warps, 0
        self._keys, cols = self.tiles[0].layout.rows, self.tiles[0].layout.cols
        self._run = self._keys if pages is None else gcd(pages.size, self._keys)
        """Keys of a warp that lie side by side."""
        self._lines = -(-2 * head_dim // LINE)
        """Lines of the L2 that a row takes, if it begins with one."""
        self._prefetched = next((n for n in FETCHED if n <= 2 * head_dim * heads), FETCHED[-1])
        self._eviction: Eviction = "first" if once else ""
        plan = CopyPlan(self._keys, cols, 1, False)
        self._copies = [TileCopy(k, tile, plan, source.strides[2], valid_cols=head_dim) for tile, source in fed]
        for copy in self._copies:
            copy.prepare()
        self._named = [] if pages is None else k.registers(u32, self._keys // self._run, None, "page")

    @property
    def head(self) -> Traced:
        """The number of this warp's head among the heads of the ring."""
        return self._k.warp % self.heads

    def first_key(self, block: Traced) -> Traced:
        """The first of this warp's keys in a block."""
        return (block * self.parts + self._k.warp // self.heads) * self._keys

    def at(self, stage: Number, warp: Number) -> tuple[SharedTile, ...]:
        """A warp's tiles of a stage."""
        return tuple(tile.stage(stage * self._warps + warp) for tile in self.tiles)

    def _runs(self, block: Traced) -> list[Traced]:
        """The first key of each run of this warp's keys."""
        first = self.first_key(block)
        return [first + i for i in range(0, self._keys, self._run)]

    def look_up(self, sequence: Traced, block: Traced) -> None:
        """Read which pages the block that is put next lies in, ahead of the copies that need to know."""
        if self._pages is not None:
            for page, key in zip(self._named, self._runs(block), strict=True):
                page.set(self._pages.entry(self._k, sequence, key))

    def put(
        self,
        tile: int,
        stage: Number,
        place: tuple[Traced, Traced, Traced],
        keys: Traced,
        *,
        when: Traced | None = None,
        also: Callable[[], None] | None = None,
    ) -> None:
        """Start a tile's copies of block (sequence, which heads, block), looked up; the sequence has ``keys``.

        The tiles of a block follow each other. ``also`` is done behind them: its own copies arrive with these. Where
        ``when`` does not hold, there is neither, and :meth:`wait` counts the same.
        """
        k, (sequence, head, block) = self._k, place
        if self._ahead == self.stages:
            raise TraceError(f"each of {self.stages} stages has a block: wait for one before the next")
        with nullcontext() if when is None else k.when(when, uniform=True):
            source, copy, first = self._sources[tile], self._copies[tile], self.first_key(block)
            exist = k.maximum(keys, first) - first
            rows = self._rows(source, sequence, head, self._runs(block), [page.get() for page in self._named])
            runs, to = [copy.start_of_run(row) for row in rows], stage * self._warps + k.warp
            copy.load_runs(runs, to, exist, prefetch=self._prefetched, eviction=self._eviction)
            if also is not None:
                also()
        k.commit_group()
        self._ahead += tile == len(self.tiles) - 1

    def wait(self, tile: int) -> None:
        """A tile of the oldest block that was not waited for: this lane's copies are here. Its last tile ends a block.

        Those of other lanes are here behind ``k.syncwarp()``.
        """
        k, last = self._k, len(self.tiles) - 1
        if not self._ahead:
            raise TraceError("wait has no block to wait for: put one first")
        self._ahead -= 1
        k.wait_group(self._ahead * len(self.tiles) + last - tile)
        self._ahead += tile != last

    def drain(self) -> None:
        """Whatever was put is here, and counts no more."""
        self._k.wait_group(0)
        self._ahead = 0

    def fetch(self, place: tuple[Traced, Traced, Traced], keys: Traced) -> None:
        """The L2 fetches a block, not looked up: a guess, where a launch that is not done may be writing the table."""
        k, (sequence, head, block) = self._k, place
        for first in range(0, self._keys * self._lines, LANES):
            line = k.lane + first
            key = self.first_key(block) + line // self._lines
            with k.when(key < keys):
                named = [] if self._pages is None else [self._pages.entry(k, sequence, key, "relaxed")]
                for source in self._sources:
                    (row,) = self._rows(source, sequence, head, [key], named)
                    k.prefetch(row, line % self._lines * (LINE // 2))

    def _rows(
        self, source: StridedPointer, sequence: Traced, head: Traced, keys: list[Traced], named: list[Traced]
    ) -> list[GlobalPointer]:
        """Pointers to this warp's head at the first key of each run; ``named``: the table's entries of their pages."""
        k, (outer, of_head, of_key) = self._k, source.strides
        start = source + k.mul_wide(head * self.heads + self.head, of_head)
        if self._pages is None:
            start = start + k.mul_wide(sequence, outer)
            return [start + k.mul_wide(key, of_key) for key in keys]
        return [
            start + (k.mul_wide(self._pages.page(k, page), outer) + k.mul_wide(key % self._pages.size, of_key))
            for page, key in zip(named, keys, strict=True)
        ]


@dataclass(frozen=True)
class PageRun:
    """Keys side by side: from ``row`` of a page on, whose first is number ``begin`` of all and which has ``count``."""

    row: Number
    begin: Traced
    count: Traced


@dataclass(frozen=True)
class PagedBoxes(Boxes):
    """Boxes of ``rows`` keys each; the place of a tile is its head, and a :class:`PageRun` for each of its boxes."""

    rows: int = 0

    @classmethod
    def of(cls, tensor_map: TensorMapHandle, eviction: Eviction = "", *, rows: int) -> PagedBoxes:
        """Boxes of pages as one ragged array (rows of all pages, heads, columns)."""
        return cls(tensor_map, sequence_boxes(tensor_map).order, eviction, rows)

    def parts(self, place: Sequence[Any]) -> Sequence[tuple[int, Sequence[Number]]]:
        """One box for each run of keys in ``place``: (first row within the tile, its place)."""
        head, *runs = place
        return [(number * self.rows, (run.row, head, run.begin, run.count)) for number, run in enumerate(runs)]


class PageRuns:
    """The places of blocks of ``block`` keys in pages, read from the table ahead of the copies that need them.

    ``pitch``: rows of a cache, as one array, from the first of a page to that of the next.
    """

    def __init__(self, k: Kernel, pages: Pages, pitch: Traced, block: int) -> None:
        self._k, self._pages, self._pitch, self._block = k, pages, pitch, block
        self._rows = box_rows(pages.size, block)
        self._named = k.registers(u32, block // self._rows, None, "page")

    def look_up(self, sequence: Traced, block: Traced) -> None:
        """Read which pages a block lies in; nobody waits for that before :meth:`at`."""
        for page, key in zip(self._named, self._keys(block), strict=True):
            page.set(self._pages.of(self._k, sequence, key))

    def at(self, block: Traced, keys: Traced) -> list[PageRun]:
        """The runs of the block looked up last, of a sequence of so many keys."""
        k, size = self._k, self._pages.size
        found: list[PageRun] = []
        for page, key in zip(self._named, self._keys(block), strict=True):
            row: Number = 0 if self._rows == size else key % size
            first = key - row
            left = k.select(keys > first, keys - first, 0)
            found.append(PageRun(row, page * self._pitch, k.minimum(left, size)))
        return found

    def _keys(self, block: Traced) -> list[Traced]:
        """The first key of each run."""
        return [block * self._block + i for i in range(0, self._block, self._rows)]
