# pyright: reportInvalidTypeForm=false
"""Tiles of sequences: where that of a CTA lies, by the grid or by a list; and the kernels that write such lists."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from warploom.core.dtypes import u32
from warploom.kernels.attention.lists import LISTING_WARPS
from warploom.kernels.attention.problem import AttentionFeatures
from warploom.lang import Global, GlobalPointer, Kernel, StridedPointer, Traced, kernel
from warploom.tile.ragged import (
    PieceList,
    RaggedBatch,
    RaggedTiles,
    RowRange,
    Sequences,
    Slot,
    Slots,
    Spaced,
    SpacedUsed,
)


# -- the tile of a CTA
@dataclass(frozen=True)
class Side:
    """The queries or the keys of one sequence: ``outer`` is its batch, or in packed arrays its first row.

    ``rows``: its length where tiles may reach beyond it, else None.
    """

    outer: Traced
    length: Traced
    rows: Traced | None

    @classmethod
    def packed(cls, rows: RowRange) -> Side:
        """Rows of packed arrays, which may end anywhere in a tile."""
        return cls(rows.begin, rows.count, rows.count)


@dataclass(frozen=True)
class Tensor:
    """An array with rows of heads, strides of (:attr:`Side.outer`, head), and the stride between its rows."""

    array: StridedPointer
    row: int

    @classmethod
    def of(cls, array: StridedPointer, row: int, *, packed: bool, head: int = 0) -> Tensor:
        """An array with strides of (batch, head); of ``packed`` sequences stride number ``head`` is that of heads."""
        return cls(replace(array, strides=(row, array.strides[head])) if packed else array, row)


@dataclass(frozen=True)
class TilePlace:
    """The sequence and the head of a CTA's tile; ``listed``: a list names the tile, else the grid.

    ``slot``: what a list says of the tile, if it has slots, ``slots`` of each head.
    """

    k: Kernel
    head: Traced
    queries: Side
    keys: Side
    listed: bool = False
    slot: Slot | None = None
    slots: Traced | None = None

    @property
    def number(self) -> Traced:
        """The number of the tile among those of its sequence."""
        return self.k.cta_x if self.slot is None else self.slot.number

    @property
    def lengths(self) -> tuple[Traced, Traced]:
        """Queries and keys of the sequence."""
        return self.queries.length, self.keys.length

    def vector(self, of: GlobalPointer, total_q: Traced) -> GlobalPointer:
        """The number of its first query in a vector (batch, heads, queries), of packed ones (heads, total_q)."""
        k, q, head = self.k, self.queries, self.head
        if self.listed:
            return of + (k.mul_wide(head, total_q) + k.mul_wide(q.outer, 1))
        return of + k.mul_wide(q.outer * k.special("nctaid.y") + head, q.length)

    def slot_of(self, block: Traced, head: Traced) -> Traced | None:
        """The number of a block of query rows among those of all heads, if a list gives it."""
        if self.slot is None or self.slots is None:
            return None
        return head * self.slots + self.slot.first + block


@contextmanager
def tile_of(
    k: Kernel,
    features: AttentionFeatures,
    lengths: tuple[Traced, Traced],
    tiles: GlobalPointer | None,
    slots: Traced | None = None,
) -> Iterator[TilePlace]:
    """The tile of this CTA: of a grid (tiles, heads, batches), or of a list of ``tiles`` that may be shorter.

    A listed tile's side begins at the tile's first row, as :class:`.ragged.Piece` has it.
    """
    if tiles is None:
        (q_len, kv_len), head, batch = lengths, k.cta_y, k.cta_z
        queries = Side(batch, q_len, q_len if features.ragged_q else None)
        yield TilePlace(k, head, queries, Side(batch, kv_len, kv_len if features.ragged_kv else None))
        return
    pieces = PieceList(k, tiles)
    with k.when(k.cta_x < pieces.count, uniform=True):
        if slots is None:
            piece = pieces.at(k.cta_x)
            yield TilePlace(k, piece.head, Side.packed(piece.queries), Side.packed(piece.keys), True)
        else:
            piece, slot = pieces.at(k.cta_x), pieces.slot(k.cta_x)
            sides = Side.packed(piece.queries), Side.packed(piece.keys)
            yield TilePlace(k, piece.head, *sides, True, slot, slots)


# -- lists of tiles
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


@kernel(threads=32 * LISTING_WARPS, drop_unused=True)
def list_gradient_tiles(
    k: Kernel,
    own: Sequences,
    others: Sequences,
    tiles: Global[u32],
    cleared: Global[u32],
    cleared_too: Global[u32],
    batch: RaggedBatch,
    most_slots: u32,
    *,
    tile: int,
    used: tuple[bool, bool],
    slots: tuple[int, bool],
    clears: tuple[int, ...],
) -> None:
    """The list of tiles of queries, or of keys, with ``slots`` as :class:`Slots` has them.

    ``clears``: words of a row of the gradients whose rows of no sequence become zero.
    """
    sides = own.cut(used[0]), others.cut(used[1])
    listed = RaggedTiles(k, *sides, batch, tile, False, Slots(*slots, most_slots))
    write(listed, tiles, zip((cleared, cleared_too), clears, strict=False))
