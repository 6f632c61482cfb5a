# pyright: reportInvalidTypeForm=false
"""Attention of many queries on a cache: the list of their tiles, and the kernel of packed sequences on its pages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from warploom.core.dtypes import f32, u32
from warploom.kernels.attention.device.forward_sm90 import TensorMaps, Tile, run
from warploom.kernels.attention.device.packed import PackedTiles, write
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.packed import LISTING_WARPS
from warploom.kernels.attention.problem import AttentionFeatures
from warploom.lang import Global, GlobalPointer, Kernel, Strided, StridedPointer, Traced, kernel
from warploom.lang.values import Number
from warploom.tile.cache import Pages, PageTable
from warploom.tile.paged import PagedBoxes, PageRuns
from warploom.tile.panels import box_rows
from warploom.tile.pipeline import Cursor
from warploom.tile.ragged import PieceList, RaggedBatch, RaggedTiles, Sequences, Spaced, SpacedUsed, sequence_boxes
from warploom.tile.scheduler import Divisor


@kernel(threads=32 * LISTING_WARPS, requires="sm_90", drop_unused=True)
def list_paged_tiles(
    k: Kernel,
    packed_queries: Sequences,
    queries: Spaced,
    keys: SpacedUsed,
    tiles: Global[u32],
    batch: RaggedBatch,
    *,
    tile_m: int,
    by_row: bool,
    packed: bool,
) -> None:
    """The list of tiles of sequences on a cache; their queries are ``packed`` or as many of each.

    With a block table the keys' pitch is 1: where a sequence's keys begin is its row of the table.
    """
    k.allow_next_launch()
    write(RaggedTiles(k, packed_queries if packed else queries, keys, batch, tile_m, by_row), tiles)


@kernel(threads=lambda config, **_: config.threads, requires="sm_90a", drop_unused=True)
def attention_paged_sm90(
    k: Kernel,
    maps: TensorMaps,
    lse: Strided[f32, 2],
    sinks: Global[f32],
    tiles: Global[u32],
    table: PageTable,
    page_pitch: u32,
    spacing: Divisor,
    *,
    config: ForwardSm90,
    features: AttentionFeatures,
    page_size: int,
    packed: bool,
) -> None:
    """O = softmax(scale · Q·Kᵀ)·V of the listed pieces, whose keys lie in pages, or with ``page_size`` 0 side by side.

    The tensor maps are ragged ones of (rows, heads, head_dim). Where queries are not ``packed``, ``spacing`` is their
    rows from one sequence to the next.
    """
    in_pages = partial(PagedBoxes.of, rows=box_rows(page_size, config.tile_n)) if page_size else None
    found = Pages(page_size, table) if page_size else None
    listed, apart = PieceList(k, tiles), None if packed else spacing
    work = PagedTiles(k, config, features, lse, sinks, listed, lse.strides[1], found, page_pitch, apart)
    run(k, config, maps.boxes(sequence_boxes, in_pages), work)


@dataclass(frozen=True)
class PagedTiles(PackedTiles):
    """Those of a list whose keys begin at a row of the block table; ``spacing``: of sequences of Q (None: packed)."""

    lse: StridedPointer
    pages: Pages | None
    pitch: Traced
    spacing: Divisor | None

    def feed_part(self, tile: Tile, blocks_in: Cursor, first: Number, end: Traced) -> None:
        """Which pages a block lies in is read while the block before it is waited for."""
        if self.pages is None:
            super().feed_part(tile, blocks_in, first, end)
            return
        head, sequence, keys = (self.k.value(x, u32) for x in tile.keys)
        runs = PageRuns(self.k, self.pages, self.pitch, self.config.tile_n)
        runs.look_up(sequence, tile.mask.block(first))
        with self.k.loop(end, start=first) as step:
            blocks_in.put((head, *runs.at(tile.mask.block(step), keys)))
            runs.look_up(sequence, tile.mask.block(step + 1))

    def lse_of(self, tile: Tile) -> tuple[GlobalPointer, Number, Traced]:
        """Of (heads, queries) where they are packed, else of (batch, heads, queries)."""
        if self.spacing is None:
            return super().lse_of(tile)
        k, (row, head, begin, rows) = self.k, tile.queries
        sequence, first = self.spacing.divide(k.value(begin, u32))
        return self.lse.at(sequence, head) + first, row, k.value(rows, u32)
