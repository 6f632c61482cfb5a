# pyright: reportInvalidTypeForm=false
"""Attention forward of packed sequences: the list of tiles, and the kernels of one length on the pieces it names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from warploom.core.dtypes import f32, u16, u32
from warploom.kernels.attention.device.forward_sm80 import QueryRows, attend
from warploom.kernels.attention.device.forward_sm90 import TensorMaps, Tile, Tiles, run
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.packed import LISTING_WARPS
from warploom.kernels.attention.problem import AttentionFeatures
from warploom.lang import Global, GlobalPointer, Kernel, Strided, StridedPointer, Traced, kernel
from warploom.lang.values import Number
from warploom.tile import ragged
from warploom.tile.copies import Rows
from warploom.tile.pipeline import Pipeline
from warploom.tile.ragged import PieceList, RaggedBatch, RaggedTiles, Sequences, sequence_boxes
from warploom.tile.scheduler import Claimed, Persistent, Single, TileScheduler


@kernel(threads=32 * LISTING_WARPS, drop_unused=True)
def list_tiles(
    k: Kernel,
    queries: Sequences,
    keys: Sequences,
    tiles: Global[u32],
    batch: RaggedBatch,
    *,
    tile_m: int,
    by_row: bool,
    used: tuple[bool, bool],
    overlap: bool = False,
) -> None:
    """The list of tiles. ``overlap``: the kernel that works on it begins meanwhile, and waits before it reads."""
    if overlap:
        k.allow_next_launch()
    write(RaggedTiles(k, queries.cut(used[0]), keys.cut(used[1]), batch, tile_m, by_row), tiles)


def write(ragged: RaggedTiles, tiles: GlobalPointer, clears: Iterable[tuple[GlobalPointer, int]] = ()) -> None:
    """The list by a warp for each sequence; CTAs along y share the tiles of one.

    ``clears``: arrays whose rows of no sequence become zero, and words of a row.
    """
    k = ragged.k
    sequence = k.cta_x * LISTING_WARPS + k.warp
    with k.when(sequence < ragged.batch.sequences, uniform=True):
        ragged.write(PieceList(k, tiles), sequence, k.cta_y, k.special("nctaid.y"))
        for array, words in clears:
            ragged.clear(array, words, sequence, k.cta_y, k.special("nctaid.y"))


list_tiles_sm90 = replace(list_tiles, name="list_tiles_sm90", requires="sm_90")
"""The same where launches overlap: GPUs do that from sm_90 on."""


@kernel(threads=lambda config, **_: config.threads, requires="sm_90a", drop_unused=True)
def attention_packed_sm90(
    k: Kernel,
    maps: TensorMaps,
    lse: Global[f32],
    sinks: Global[f32],
    tiles: Global[u32],
    total_q: u32,
    *,
    config: ForwardSm90,
    features: AttentionFeatures,
) -> None:
    """O = softmax(scale · Q·Kᵀ)·V of the listed pieces. ``lse`` is (heads, total_q), ``sinks`` (heads,).

    The tensor maps are ragged ones of (total, heads, head_dim): what lies beyond a sequence reads as zero and is not
    written.
    """
    run(
        k,
        config,
        maps.boxes(sequence_boxes),
        PackedTiles(k, config, features, lse, sinks, PieceList(k, tiles), total_q),
    )


@dataclass(frozen=True)
class PackedTiles(Tiles):
    """Those of a list; the first query of each is row 0 of its piece."""

    pieces: PieceList
    total_q: Traced
    may_lack_keys: ClassVar[bool] = True

    @cached_property
    def claims(self) -> tuple[Pipeline, ...]:
        """What the threads of a persistent kernel tell each other where later tiles of a sequence take longer."""
        return (Claimed.telling(self.k),) if self.config.persistent and self.features.by_row else ()

    def schedule(self) -> TileScheduler:
        """The tiles that are listed, once the list is there; the kernel's memory is set up meanwhile."""
        self.k.await_launch_before()
        count = self.pieces.count
        if self.claims:
            return Claimed(self.k, count, self.pieces.claimed, *self.claims)
        return Persistent(self.k, count, alternating=True) if self.config.persistent else Single(self.k, count)

    def item(self, turn: Number) -> tuple[Traced, ...]:
        """(head, first query, queries, first key, keys)."""
        piece = self.pieces.at(self.order.item(turn))
        q, k = piece.queries, piece.keys
        return piece.head, *(self.k.value(x, u32) for x in (q.begin, q.count, k.begin, k.count))

    def place(self, item: Sequence[Traced]) -> tuple[tuple[Number, ...], tuple[Number, ...], tuple[Traced, Traced]]:
        """(row, head, begin, rows) of queries, (head, begin, rows) of keys."""
        head, begin, rows, first, keys = item
        return (0, head, begin, rows), (self.kv_head(head), first, keys), (rows, keys)

    def at(self, turn: Number, own_row: Traced | None = None, item: Sequence[Traced] | None = None) -> Tile:
        """The tile of a turn. A consumer whose rows are all beyond the sequence works on one block."""
        tile = super().at(turn, own_row, item)
        if own_row is None or self.config.consumers == 1:
            return tile
        *_, rows = tile.queries
        return replace(tile, idle=self.k.select(own_row >= rows, tile.own.blocks - 1, 0))

    def lse_of(self, tile: Tile) -> tuple[GlobalPointer, Number, Traced]:
        """Of (heads, total_q)."""
        k, (row, head, begin, rows) = self.k, tile.queries
        return self.lse + (k.mul_wide(head, self.total_q) + k.mul_wide(begin, 1)), row, k.value(rows, u32)


@kernel(threads=lambda config, **_: config.threads, drop_unused=True)
def attention_packed_sm80(
    k: Kernel,
    q: Strided[u16, 1],
    key: Strided[u16, 1],
    value: Strided[u16, 1],
    out: Strided[u16, 1],
    lse: Global[f32],
    sinks: Global[f32],
    tiles: Global[u32],
    total_q: u32,
    *,
    config: ForwardSm80,
    features: AttentionFeatures,
    row_strides: tuple[int, int, int, int],
) -> None:
    """As :func:`attention_packed_sm90`; a CTA for each tile there may be. Strides of heads."""
    pieces = PieceList(k, tiles)
    with k.when(k.cta_x < pieces.count, uniform=True):
        piece = pieces.at(k.cta_x)
        head, queries, keys = piece.head, piece.queries, piece.keys
        kv_head = head // features.group if features.group > 1 else head

        def plane(of: StridedPointer, at: ragged.RowRange, head: Traced, number: int) -> Rows:
            start = of + (k.mul_wide(at.begin, row_strides[number]) + of.offset(head))
            return Rows(start, row_strides[number], at.count, config.head_dim if number < 2 else config.value_dim)

        at = QueryRows(
            0,
            (queries.count, keys.count),
            lambda: plane(q, queries, head, 0),
            lambda: plane(key, keys, kv_head, 1),
            lambda: plane(value, keys, kv_head, 2),
            lambda: plane(out, queries, head, 3),
            lambda: lse + (k.mul_wide(head, total_q) + k.mul_wide(queries.begin, 1)),
            lambda: sinks.load(head),
            may_lack_keys=True,
        )
        attend(k, config, features, at)
