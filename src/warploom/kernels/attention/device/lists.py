# pyright: reportInvalidTypeForm=false
"""The kernels that list the tiles of sequences whose lengths only the GPU knows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from warploom.core.dtypes import u32
from warploom.kernels.attention.lists import LISTING_WARPS
from warploom.lang import Global, GlobalPointer, Kernel, kernel
from warploom.tile.ragged import PieceList, RaggedBatch, RaggedTiles, Sequences, Slots, Spaced, SpacedUsed


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
