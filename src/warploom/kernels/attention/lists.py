"""The launches that list the tiles of sequences whose lengths only the GPU knows: packed ones, and those on a cache."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.arguments import fields
from warploom.core.dtypes import u32
from warploom.kernels.attention.problem import ArrayStrides, AttentionProblem, BackwardProblem, Packed
from warploom.kernels.source import KernelCall, KernelSource
from warploom.tile.planning import ENTRY_WORDS, divisors, heads_at_once, heads_together, most_pieces

LISTING_WARPS = 4
"""Warps of a CTA that lists tiles, each those of a sequence."""
LISTED_AT_ONCE = 2
"""Tiles of the longest sequence there may be, that one warp lists."""


@dataclass(frozen=True)
class ListedTiles:
    """Tiles of ``tile`` rows of a ``batch`` of sequences with ``rows`` in all, ``longest`` of one at most, by heads."""

    batch: int
    heads: int
    rows: int
    longest: int
    tile: int

    @property
    def most(self) -> int:
        """The most tiles that a head may have."""
        return most_pieces(self.rows, self.batch, self.tile)

    def call(
        self,
        source: KernelSource,
        scalars: dict[str, int],
        arrays: tuple[str, ...],
        together: int,
        words: str = "tiles",
    ) -> KernelCall:
        """The launch that lists them in ``words``; so many heads come ``together``."""
        grid = -(-self.batch // LISTING_WARPS), min(64, -(-self.longest // (self.tile * LISTED_AT_ONCE))), 1
        batch = {"sequences": self.batch, "heads": self.heads, "most": self.most, **divisors(together=together)}
        memory = {words: ENTRY_WORDS * (1 + self.most * self.heads)}
        return KernelCall(source, grid, scalars | fields("batch", **batch), (), arrays, memory)


# -- forward
def list_tiles(
    problem: AttentionProblem, tile_m: int, multiprocessors: int, *, overlap: bool = False
) -> tuple[KernelCall, ...]:
    """The launch that lists the tiles of packed sequences, if they are; the next one may ``overlap`` with it."""
    p, sequences = problem, problem.sequences
    if not isinstance(sequences, Packed):
        return ()
    by_row = p.features().by_row
    source = KernelSource.of(
        f"warploom.kernels.attention.device.tiles:list_tiles{'_sm90' if overlap else ''}",
        f"list_tiles_{tile_m}",
        tile_m=tile_m,
        by_row=by_row,
        used=sequences.used,
        overlap=overlap,
    )
    row_bytes = (p.head_dim + p.value_dim) * p.dtype.bytes // p.group
    least = heads_at_once(p.q_len // tile_m, multiprocessors) if by_row else 1
    together = heads_together(p.kv_len, row_bytes, p.heads, least)
    tiles = ListedTiles(p.batch, p.heads, p.q_len, p.q_len, tile_m)
    scalars = {"queries_total": p.q_len, "keys_total": p.kv_len}
    return (tiles.call(source, scalars, (*sequences.places("q", "k"), "tiles"), together),)


# -- on a cache
def cached_tiles(problem: AttentionProblem, tile_m: int) -> ListedTiles:
    """The tiles of queries on a cache."""
    p, rows = problem, problem.q_len if problem.cache.packed else problem.batch * problem.q_len
    return ListedTiles(p.batch, p.heads, rows, p.q_len, tile_m)


def cache_pitches(problem: AttentionProblem, operands: ArrayStrides) -> tuple[int, int]:
    """Rows from one sequence of Q to the next, and from one page, or one sequence, of a cache."""
    q, k = operands.strides["q"], operands.strides["k"]
    return (0 if problem.cache.packed else q[0] // q[2]), k[0] // k[2]


def list_cached_tiles(
    problem: AttentionProblem, operands: ArrayStrides, tile_m: int, multiprocessors: int
) -> KernelCall:
    """The launch that lists the tiles of sequences on a cache."""
    p, cache, tiles = problem, problem.cache, cached_tiles(problem, tile_m)
    by_row = p.features().by_row
    source = KernelSource.of(
        "warploom.kernels.attention.device.tiles:list_paged_tiles",
        f"list_paged_tiles_{tile_m}",
        tile_m=tile_m,
        by_row=by_row,
        packed=cache.packed,
    )
    q_pitch, k_pitch = cache_pitches(p, operands)
    keys = min(cache.pages * cache.page_size, p.batch * p.kv_len) if cache.page_size else p.batch * p.kv_len
    least = heads_at_once(tiles.rows // tile_m, multiprocessors) if by_row else 1
    together = heads_together(keys, 2 * p.head_dim * p.dtype.bytes // p.group, p.heads, least)
    scalars = {
        "packed_queries_total": p.q_len,
        **fields("queries", pitch=q_pitch, most=p.q_len),
        **fields("keys", pitch=1 if cache.page_size else k_pitch, most=p.kv_len),
    }
    return tiles.call(source, scalars, (*(["starts"] if cache.packed else ()), "lengths", "tiles"), together)


# -- backward
def list_gradient_tiles(
    problem: BackwardProblem, blocks: tuple[int, int], least_together: int, shares: int = 1
) -> tuple[KernelCall, ...]:
    """The launches that list blocks of queries ("blocks") and tiles of keys ("tiles"), each with its slots.

    ``blocks``: query rows of a block, and keys of a tile. Each launch also puts zeros into the gradients' rows of no
    sequence. There are none where all sequences are as long. Each of the ``shares`` of a key head's query heads has
    tiles of its own, one behind the other.
    """
    p, (rows, keys) = problem.forward, blocks
    if not p.listed:
        return ()
    queries = _Side("q", p.q_len, p.heads, rows, "blocks", {"dq": p.head_dim})
    others = _Side("k", p.kv_len, p.kv_heads, keys, "tiles", {"dk": p.head_dim, "dv": p.value_dim}, shares)
    of_queries = _list(p, queries, others, (rows, False))
    return of_queries, _list(p, others, queries, (rows, True), least_together)


@dataclass(frozen=True)
class _Side:
    """Queries or keys: whose sequences are cut into tiles of ``tile`` rows, of so many heads, in a list.

    ``gradients``: their names, and elements of a head. Of each head there are ``shares``.
    """

    name: str
    total: int
    heads: int
    tile: int
    words: str
    gradients: dict[str, int]
    shares: int = 1


def _list(p: AttentionProblem, own: _Side, other: _Side, slots: tuple[int, bool], least: int = 1) -> KernelCall:
    """The launch that lists a side's tiles; ``slots``: rows of a block of queries, and whether the side is keys."""
    assert isinstance(p.sequences, Packed)
    arrays = *p.sequences.places(own.name, other.name), own.words, *own.gradients
    source = KernelSource.of(
        "warploom.kernels.attention.device.tiles:list_gradient_tiles",
        f"list_tiles_{own.tile}_{own.words}",
        tile=own.tile,
        used=tuple(f"{side.name}_used" in arrays for side in (own, other)),
        slots=slots,
        clears=tuple(own.heads * cols * p.dtype.bytes // u32.bytes for cols in own.gradients.values()),
    )
    listed = own.heads * own.shares
    row_bytes = p.head_dim * p.dtype.bytes * (2 if own.name == "q" else 4 * p.group // own.shares)
    rows = -(-other.total // max(1, p.batch))  # of one sequence: all of its heads come before the next
    together = min(listed, max(least, heads_together(rows, row_bytes, listed)))
    together = -(-together // own.shares) * own.shares
    most_slots = most_pieces(p.q_len, p.batch, slots[0])
    scalars = {"own_total": own.total, "others_total": other.total, "most_slots": most_slots}
    tiles = ListedTiles(p.batch, listed, own.total, own.total, own.tile)
    return tiles.call(source, scalars, arrays, together, own.words)
