"""Backward with few key heads: which CTA walks which of the query heads that share keys, and who sums what they have.

Where there are fewer tiles of keys than the multiprocessors could work on, the query heads of a key head are divided
into shares. Each CTA leaves dK and dV of its share in memory, in float32, and a last kernel sums the shares in their
order and rounds the sums once: so they have equal bits from run to run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from warploom.core.dtypes import f32
from warploom.kernels.attention.problem import ArrayStrides, AttentionProblem, BackwardProblem
from warploom.kernels.source import KernelCall, KernelSource
from warploom.tile.planning import panel_cols
from warploom.tile.roles import WARPGROUP_ROWS

T = TypeVar("T")
WGMMA_RATE, MMA_RATE = 3.7e12, 1.8e12
"""FLOP/s of one multiprocessor of all that multiply; these figures are fitted to 30 grouped problems on an H200."""
_TILE_SECONDS = 6e-6
"""The time of a CTA beside its blocks: K and V, the first block and the last, the gradients on their way out."""
_LATE = 0.25
"""The share of the longest tile's time by which the last multiprocessor is done after the mean one."""
_BYTES_PER_SECOND = 2.0e12
"""The rate at which dK and dV of shares are written beside the products, and read again."""
_LAUNCH_SECONDS = 3e-6
_WORTH = 0.96
"""The share of the estimated time without shares that one with shares may take."""


@dataclass(frozen=True)
class HeadShares:
    """The ``group`` query heads of a key head in shares of ``heads``; ``tile``: query rows of a block, a CTA's keys."""

    group: int
    heads: int
    tile: tuple[int, int]

    @classmethod
    def of(
        cls, problem: BackwardProblem, tile: tuple[int, int], ctas: int, *, rate: float, whole: bool = False
    ) -> HeadShares:
        """The quickest shares by an estimate; one of all heads where others gain little, or where it is ``whole``.

        So many ``ctas`` run at a time, each at a ``rate`` of FLOP/s.
        """
        group = problem.forward.group
        sizes = [heads for heads in range(group, 0, -1) if group % heads == 0]
        if len(sizes) == 1 or whole or not problem.forward.kv_len:
            return cls(group, group, tile)
        p = problem.forward.of_long_ones
        found = {heads: cls(group, heads, tile)._seconds(p, ctas, rate) for heads in sizes}
        best = min(sizes, key=found.__getitem__)
        return cls(group, best if found[best] < _WORTH * found[group] else group, tile)

    @property
    def count(self) -> int:
        """Shares of a key head."""
        return self.group // self.heads

    @property
    def argument(self) -> dict[str, int]:
        """The kernels' argument that says how many heads a share has; none where a CTA walks all heads."""
        return {"share": self.heads} if self.count > 1 else {}

    def stored(self, of: tuple[T, ...]) -> tuple[T, ...]:
        """Tensor maps or arrays of the kernel of dK and dV, the last two of them its own where it has all heads."""
        return of if self.count == 1 else of[:-2]

    def workspace(self, problem: BackwardProblem, words: int) -> dict[str, int]:
        """The memory for dK and dV of the shares, so many ``words`` of a tile of keys."""
        p = problem.forward
        tiles = math.prod(p.grid(self.tile[1], p.kv_heads * self.count, p.kv_len))
        return {"shares": tiles * words} if self.count > 1 else {}

    def sums(self, problem: BackwardProblem, operands: ArrayStrides, config: Any) -> tuple[KernelCall, ...]:
        """The launch that sums those of ``wgmma``, where there are any: a CTA for 64 keys of a head."""
        if self.count == 1:
            return ()
        p = problem.forward
        source = KernelSource.of(
            "warploom.kernels.attention.device.backward_shares:attention_backward_shares_sm90",
            f"{'packed' if p.listed else 'attention'}_backward_shares_{config.dims}",
            config=config,
            shares=(self.count, self.tile[1]),
            heads_inside=operands.heads_inside,
            listed=p.listed,
        )
        maps = (
            operands.mapped("dk", p, WARPGROUP_ROWS, panel_cols(config.width, tight=True)),
            operands.mapped("dv", p, WARPGROUP_ROWS, panel_cols(config.value_width, tight=True)),
        )
        tiles, heads, batches = p.grid(self.tile[1], p.kv_heads, p.kv_len)
        grid = tiles * (self.tile[1] // WARPGROUP_ROWS), heads, batches
        arrays = "dk", "dv", *(["tiles"] if p.listed else []), "shares"
        return (KernelCall(source, grid, {}, maps, arrays),)

    def _seconds(self, p: AttentionProblem, ctas: int, rate: float) -> float:
        """The estimated time of the kernel of dK and dV and of the sums.

        CTAs begin from the longest on: where the last of ``rounds`` rounds begins, as many tiles come one after
        another, none of which is shorter.
        """
        rows, keys = self.tile
        block = 4 * rows * keys * (p.head_dim + p.value_dim) / rate
        tiles = np.sort(p.visiting_blocks(rows, keys))[::-1] * (self.heads * block) + _TILE_SECONDS
        alike = p.kv_heads * p.batch * self.count
        rounds = np.arange(-(-len(tiles) * alike // ctas))
        last = (rounds + 1) * tiles[rounds * ctas // alike]
        mean = float(tiles.sum()) * alike / ctas
        busiest = max(mean + _LATE * float(tiles[0]), float(last.max()))
        if self.count == 1:
            return busiest
        moved = 2 * len(tiles) * alike * keys * (p.head_dim + p.value_dim) * f32.bytes
        return busiest + moved / _BYTES_PER_SECOND + _LAUNCH_SECONDS
