"""What the roles of the sm_90a attention kernel share: shared memory, tensor maps, the order of tiles."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.dtypes import u32
from warploom.kernels.attention.features import AttentionFeatures
from warploom.kernels.attention.hopper_config import SUM_COLS, HopperConfig
from warploom.kernels.attention.mask import Mask
from warploom.kernels.mapped import PANEL_COLS
from warploom.kernels.specialised import WARPGROUP_ROWS
from warploom.lang import Kernel, SharedTile, Traced
from warploom.lang.hopper import TensorMapHandle
from warploom.lang.values import Number


@dataclass(frozen=True)
class Shape:
    """The launch's numbers."""

    q_len: Traced
    kv_len: Traced
    q_blocks: Traced
    kv_blocks: Traced
    heads: Traced
    tiles: Traced
    planes_together: Traced


@dataclass(frozen=True)
class Maps:
    """The tensor maps, and the order of a box's coordinates."""

    q: TensorMapHandle
    k: TensorMapHandle
    v: TensorMapHandle
    o: TensorMapHandle
    heads_inside: bool

    def place(self, panel: int, row: Number, head: Traced, batch: Traced) -> tuple[Number, ...]:
        """Coordinates of a box, innermost first."""
        if self.heads_inside:
            return panel * PANEL_COLS, head, row, batch
        return panel * PANEL_COLS, row, head, batch


class Parts:
    """Shared memory: tiles and mbarriers."""

    def __init__(self, k: Kernel, config: HopperConfig) -> None:
        self._k, self._config = k, config
        c = config
        self.q = self._tile("q_tile", WARPGROUP_ROWS, c.tile_cols, c.consumers * c.q_buffers)
        self.k = self._tile("k_tile", c.tile_n, c.tile_cols, c.stages)
        self.v = self._tile("v_tile", c.tile_n, c.value_cols, c.stages)
        self.q_full, self.q_free = k.mbarriers(c.q_buffers, "q_full"), k.mbarriers(c.q_buffers, "q_free")
        self.k_full, self.k_free = k.mbarriers(c.stages, "k_full"), k.mbarriers(c.stages, "k_free")
        self.v_full, self.v_free = k.mbarriers(c.stages, "v_full"), k.mbarriers(c.stages, "v_free")

    def _tile(self, name: str, rows: int, cols: int, stages: int) -> SharedTile:
        c = self._config
        return self._k.shared(c.dtype, (rows, cols), name=name, swizzle="auto", panel_cols=PANEL_COLS, stages=stages)

    def initialise(self) -> None:
        """Set up the mbarriers and what no copy brings; they are ready for every thread after this."""
        k, consumers = self._k, self._config.consumers
        if self._config.sum_column:
            self._put_ones()
        with k.when(k.thread == 0):
            for full in (self.q_full, self.k_full, self.v_full):
                full.init(1)
            if self._config.flat:  # else Q is loaded once
                self.q_free.init(consumers)
            for free in (self.k_free, self.v_free):
                free.init(4 * consumers)  # one arrival per consumer warp
            k.mbarrier_fence()
        k.syncthreads()

    def _put_ones(self) -> None:
        """Ones behind every row of V's stages, one thread a row; no copy ever lands there."""
        k, c = self._k, self._config
        pair = k.pack(1.0, 1.0, c.dtype)
        with k.when(k.thread < c.tile_n):
            for stage in range(c.stages):
                self.v.stage(stage).store([pair] * (SUM_COLS // 2), k.thread, c.tile_cols, dtype=u32)
            k.fence_async()


@dataclass(frozen=True)
class TilePlace:
    """One tile of query rows: where it lies and which key blocks it visits, after ``hidden`` that it passes over."""

    q_block: Traced
    head: Traced
    batch: Traced
    first: Traced | int
    count: Traced
    mask: Mask
    hidden: Traced | None = None


class Role:
    """What producer and consumers share: the order of tiles and of key blocks."""

    def __init__(
        self, k: Kernel, config: HopperConfig, features: AttentionFeatures, shape: Shape, maps: Maps, parts: Parts
    ) -> None:
        self._k, self._config, self._features = k, config, features
        self._shape, self._maps, self._parts = shape, maps, parts

    @property
    def _uneven(self) -> bool:
        """Whether tiles differ in work: then the longest of a group come first and rounds alternate their direction."""
        return self._features.window[1] is not None

    @property
    def _skips(self) -> bool:
        """Whether consumers pass over blocks: only where rows differ in the last key they see."""
        return self._config.skip_hidden and self._uneven

    def tile_count(self) -> Traced:
        """How many tiles this CTA works on."""
        k, s = self._k, self._shape
        if not self._config.flat:
            return k.value(1, u32)
        rounds, rest = s.tiles // k.grid_x, s.tiles % k.grid_x
        more = k.select(self._slot(rounds) < rest, k.value(1, u32), k.value(0, u32))
        return rounds + more

    def _slot(self, turn: Number) -> Traced:
        """This CTA's position within a round of tiles."""
        k = self._k
        if not self._uneven:
            return k.cta_x
        return k.select((k.value(turn, u32) & 1) == 0, k.cta_x, k.grid_x - 1 - k.cta_x)

    def tile(self, turn: Number, own_row: Traced | None = None, warp: Number = 0) -> TilePlace:
        """The CTA's tile number ``turn``; as the consumer sees it whose rows start ``own_row`` rows into the tile."""
        k, s, c = self._k, self._shape, self._config
        number = self._slot(turn) + k.value(turn, u32) * k.grid_x if c.flat else k.cta_x
        if self._uneven:  # later query blocks see more keys
            planes, in_group = s.tiles // s.q_blocks, s.planes_together * s.q_blocks
            group, within = number // in_group, number % in_group
            first_plane = group * s.planes_together
            size = k.minimum(s.planes_together, planes - first_plane)  # the last group may be smaller
            q_block, plane = s.q_blocks - 1 - within // size, first_plane + within % size
        else:
            q_block, plane = number % s.q_blocks, number // s.q_blocks
        head, batch = plane % s.heads, plane // s.heads
        lengths = s.q_len, s.kv_len
        row = q_block * c.tile_m
        mask = Mask(k, self._features, (c.tile_m, c.tile_n), row, lengths, 0 if own_row is None else own_row, warp)
        first, count = mask.blocks(s.kv_blocks)
        if own_row is None or not self._skips:
            return TilePlace(q_block, head, batch, first, count, mask)
        own = Mask(k, self._features, (WARPGROUP_ROWS, c.tile_n), k.value(row + own_row, u32), lengths, 0, warp)
        own_count = own.end(s.kv_blocks) - first
        return TilePlace(q_block, head, batch, first, own_count, own, count - own_count)
