"""Attention of packed sequences: what is asked, how arrays of them lie, and the launch that lists their tiles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from warploom.core.arguments import fields
from warploom.core.dtypes import DType
from warploom.core.targets import Target
from warploom.kernels.attention.problem import (
    MOST_POSITIONS,
    AttentionConfig,
    AttentionFeatures,
    AttentionProblem,
    HeadSizes,
    ScoreOptions,
    Window,
    stride_scalars,
)
from warploom.kernels.settings import violated
from warploom.kernels.source import KernelCall, KernelSource, MappedArray
from warploom.tile.order import ENTRY_WORDS, divisors, heads_at_once, heads_together, most_pieces

TYPICAL_LENGTH = 4096
"""Of a sequence, where a configuration is chosen by lengths: which ones come, the host does not know."""
LISTING_WARPS = 4
"""Warps of a CTA that lists tiles, each those of a sequence."""
LISTED_AT_ONCE = 2
"""Tiles of the longest sequence there may be, that one warp lists."""
MOST_TILES = 1 << 31


@dataclass(frozen=True)
class PackedProblem(HeadSizes, ScoreOptions):
    """What is asked: Q and O (total_q, heads, head_dim), K and V (total_k, kv_heads, head_dim), and options.

    ``used``: whether the queries' and the keys' sequences use only a first part of their rows. The other options are
    those of :class:`AttentionProblem`.
    """

    batch: int
    heads: int
    kv_heads: int
    total_q: int
    total_k: int
    head_dim: int
    dtype: DType
    window: Window = (None, None)
    used: tuple[bool, bool] = (False, False)
    v_dim: int = 0

    @property
    def typical(self) -> AttentionProblem:
        """A problem of one length that asks for the same: what a configuration is chosen by, whatever the lengths."""
        n = TYPICAL_LENGTH
        heads = self.heads, self.kv_heads
        return AttentionProblem(1, *heads, n, n, self.head_dim, self.dtype, v_dim=self.v_dim, **self.asked)

    @property
    def features(self) -> AttentionFeatures:
        """What a kernel must be able to do: lengths are any."""
        return replace(self.typical.features(1, 1), ragged_q=True, ragged_kv=True)

    @property
    def group(self) -> int:
        """Query heads of a head of keys."""
        return self.heads // self.kv_heads

    @property
    def flops(self) -> int:
        """Of the two products, were every sequence as long as the mean and seen whole: for estimates."""
        return 2 * self.heads * (self.head_dim + self.value_dim) * self.total_q * -(-self.total_k // max(1, self.batch))

    def places(self, *sides: str) -> tuple[str, ...]:
        """The arrays that say where sequences of "q" and "k" lie."""
        used = dict(zip("qk", self.used, strict=True))
        return tuple(x for side in sides for x in (f"{side}_starts", *([f"{side}_used"] if used[side] else [])))

    @property
    def arrays(self) -> tuple[str, ...]:
        """Those that a kernel takes."""
        vectors = {"lse": self.lse, "sinks": self.sinks}
        return "q", "k", "v", "out", *(name for name, given in vectors.items() if given), "tiles"

    def tiles(self, tile_m: int) -> int:
        """Tiles of so many queries that there may be."""
        return most_pieces(self.total_q, self.batch, tile_m) * self.heads

    def listed(self, tile_m: int, multiprocessors: int, *, overlap: bool = False) -> KernelCall:
        """The launch that lists the tiles of all sequences; the next one may ``overlap`` with it."""
        by_row = self.features.by_row
        source = KernelSource.of(
            f"warploom.kernels.attention.device.packed:list_tiles{'_sm90' if overlap else ''}",
            f"list_tiles_{tile_m}",
            tile_m=tile_m,
            by_row=by_row,
            used=self.used,
            overlap=overlap,
        )
        row_bytes = (self.head_dim + self.value_dim) * self.dtype.bytes // self.group
        least = heads_at_once(self.total_q // tile_m, multiprocessors) if by_row else 1
        together = heads_together(self.total_k, row_bytes, self.heads, least)
        tiles = ListedTiles(self.batch, self.heads, self.total_q, self.total_q, tile_m)
        scalars = {"queries_total": self.total_q, "keys_total": self.total_k}
        return tiles.call(source, scalars, (*self.places("q", "k"), "tiles"), together)


@dataclass(frozen=True)
class PackedOperands:
    """How arrays (rows, heads, cols) of packed sequences lie: strides (row, head) in elements, by their names."""

    strides: Mapping[str, tuple[int, ...]]

    def rows(self, *names: str) -> tuple[int, ...]:
        """The strides between rows."""
        return tuple(self.strides[name][0] for name in names)

    def scalars(self, *names: str) -> dict[str, int]:
        """The strides by the kernels' names of them."""
        return stride_scalars({name: self.strides[name] for name in names})

    def heads(self, *names: str) -> dict[str, int]:
        """Those between heads alone, as kernels take them that know the others while tracing."""
        return stride_scalars({name: self.strides[name][1:] for name in names})

    def mapped(self, name: str, problem: PackedProblem, rows: int, cols: int) -> MappedArray:
        """How the TMA sees an array: in boxes of so many rows of a sequence and columns of a head."""
        p = problem
        size = (p.total_k, p.kv_heads) if name in ("k", "v", "dk", "dv") else (p.total_q, p.heads)
        shape = *size, p.value_dim if name in ("v", "dv", "out", "dout") else p.head_dim
        return MappedArray(p.dtype, shape, (*self.strides[name], 1), (rows, 1, cols), ragged=True)


def violations(config: AttentionConfig, problem: PackedProblem, target: Target | None = None) -> list[str]:
    """The constraints that a problem violates; empty if the configuration's kernel takes it."""
    return config.check(target) or problem.typical.differences(config) + violated(
        [
            (problem.tiles(config.tile_m) * ENTRY_WORDS < MOST_TILES, "the tiles do not fit into 32 bits"),
            (
                max(problem.total_q, problem.total_k) < MOST_POSITIONS,
                f"{problem.total_q} and {problem.total_k} rows reach {MOST_POSITIONS}",
            ),
        ]
    )


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
        """How many a head may have."""
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
