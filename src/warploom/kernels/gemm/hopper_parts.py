"""What the roles of the sm_90a GEMM kernels share: shared memory, the order of tiles, the producer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from warploom.core.dtypes import u32
from warploom.kernels.descriptors import GROUP_BYTES
from warploom.kernels.gemm.features import GemmFeatures
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.mapped import PANEL_BYTES, PANEL_COLS
from warploom.lang import Kernel, SharedTile, Traced
from warploom.lang.hopper import TensorMapHandle
from warploom.lang.values import Number
from warploom.layout.wgmma import MatrixDescriptor

Position = TypeVar("Position", int, Traced)


@dataclass(frozen=True)
class Extents:
    """The launch's numbers: C is ``m`` × ``n``; K has ``k_tiles``, ``tiles_per_split`` of them per part."""

    m: Traced
    n: Traced
    k_tiles: Traced
    tiles_per_split: Traced
    tiles: Traced
    """Tiles of all parts of all batches."""


@dataclass(frozen=True)
class Place:
    """One tile: its first row and column in C, its matrix (batch · splits + part) and batch, and its k-tiles."""

    row: Traced
    col: Traced
    matrix: Traced
    batch: Traced
    first: Number
    count: Traced


class SharedOperandTile:
    """A or B in shared memory: a ring of stages, rows along K or panels along the outer dimension."""

    def __init__(self, k: Kernel, name: str, outer: int, config: HopperGemmConfig, k_contiguous: bool) -> None:
        self.k_contiguous, self._outer, self.depth = k_contiguous, outer, config.tile_k
        panels = -(-outer // PANEL_COLS)
        shape = (outer, config.tile_k) if k_contiguous else (config.tile_k, panels * PANEL_COLS)
        self.tile: SharedTile = k.shared(
            config.dtype, shape, name=name, swizzle="auto", panel_cols=PANEL_COLS, stages=config.stages
        )

    @property
    def descriptor(self) -> MatrixDescriptor:
        """The constant part of its matrix descriptors."""
        leading = 0 if self.k_contiguous else self.depth * PANEL_BYTES
        return MatrixDescriptor(PANEL_BYTES, stride=GROUP_BYTES, leading=leading)

    def outer_bytes(self, first: Position) -> Position:
        """Where row ``first`` (a multiple of 64) of the outer dimension begins."""
        return first * PANEL_BYTES  # a panel of 64 columns and 64 rows is as large as 64 rows of one panel

    def depth_bytes(self, depth: int) -> int:
        """Where the step that begins at ``depth`` begins."""
        return 2 * depth if self.k_contiguous else depth * PANEL_BYTES

    def boxes(
        self, outer: Traced, depth: Number, part: Traced | int = 0, parts: int = 1
    ) -> list[tuple[Traced | int, tuple[Number, Number]]]:
        """(byte offset in a stage, coordinates innermost first) of the copies that fill one of ``parts`` of a stage."""
        if self.k_contiguous:
            first = part * (self._outer // parts)
            return [(first * PANEL_BYTES, (depth, outer + first))]
        count = len(self.tile.layout.panels) // parts
        panels = [part * count + i for i in range(count)]
        return [(i * (self.depth * PANEL_BYTES), (outer + i * PANEL_COLS, depth)) for i in panels]


class Parts:
    """Shared memory: the ring of A and B, and its mbarriers."""

    def __init__(self, k: Kernel, config: HopperGemmConfig, features: GemmFeatures) -> None:
        self._k, self._config = k, config
        c = config
        self.a = SharedOperandTile(k, "a_tile", c.tile_m, c, features.a.k_contiguous)
        self.b = SharedOperandTile(k, "b_tile", c.tile_n, c, features.b.k_contiguous)

    @property
    def stage_bytes(self) -> int:
        """What the TMA brings into a stage."""
        return self.a.tile.layout.bytes + self.b.tile.layout.bytes

    def initialise(self) -> None:
        """Set up the mbarriers, behind all tiles; they are ready for every thread after this."""
        k, c = self._k, self._config
        self.full, self.free = k.mbarriers(c.stages, "full"), k.mbarriers(c.stages, "free")
        with k.when(k.thread == 0):
            self.full.init(1)
            readers = 4 * (1 if c.pingpong else c.consumers)
            self.free.init(readers * c.cluster)  # one arrival per warp that reads a stage, here or in the other CTA
            k.mbarrier_fence()
        if c.cluster > 1:
            k.cluster_sync()
        else:
            k.syncthreads()

    def release(self, stage: Number, when: Traced | None = None) -> None:
        """This warp has read a stage: whoever writes into it next may. ``when``: a condition on the whole warp."""
        one = self._k.lane == 0
        if self._config.cluster > 1:
            self.free.arrive_cluster(stage, when=True if when is None else when)
        else:
            self.free.arrive(stage, when=one if when is None else one & when)

    def leave(self) -> None:
        """At the end of the kernel: no CTA goes while another arrives at its mbarriers."""
        if self._config.cluster > 1:
            self._k.cluster_sync()


class TileOrder:
    """Which tiles a CTA works on, in which order."""

    def __init__(self, k: Kernel, config: HopperGemmConfig, features: GemmFeatures, extents: Extents) -> None:
        self._k, self._config, self._features, self._extents = k, config, features, extents
        e = extents
        height = config.tile_m * config.cluster
        self._rows = (e.m + (height - 1)) // height  # of tiles, or of clusters of them
        self._cols = (e.n + (config.tile_n - 1)) // config.tile_n

    def count(self) -> Traced:
        """How many tiles this CTA works on."""
        k, c = self._k, self._config
        if not c.persistent:
            return k.value(1, u32)
        clusters = k.grid_x // c.cluster
        return (self._extents.tiles // c.cluster - k.cta_x // c.cluster + (clusters - 1)) // clusters

    def place(self, turn: Number) -> Place:
        """The CTA's tile number ``turn``."""
        k, c, e = self._k, self._config, self._extents
        number = k.cta_x // c.cluster
        if c.persistent:
            number = number + k.value(turn, u32) * (k.grid_x // c.cluster)
        matrix = batch = k.value(0, u32)
        if self._features.batched or c.split_k > 1:
            per_matrix = self._rows * self._cols
            matrix, number = number // per_matrix, number % per_matrix
            batch = matrix // c.split_k
        row, col = self._walk(number)
        if c.cluster > 1:
            row = row * c.cluster + k.cluster_rank
        first: Number = 0
        count = e.k_tiles
        if c.split_k > 1:
            first = matrix % c.split_k * e.tiles_per_split
            count = k.minimum(e.tiles_per_split, e.k_tiles - first)
        return Place(row * c.tile_m, col * c.tile_n, matrix, batch, first, count)

    def _walk(self, number: Traced) -> tuple[Traced, Traced]:
        """(row, col) of a tile: ``block_stride`` rows of tiles walk along N together and share B in the L2."""
        k, height = self._k, self._config.block_stride
        if height == 0:
            return number // self._cols, number % self._cols
        group, within = number // (self._cols * height), number % (self._cols * height)
        group_rows = k.minimum(self._rows - group * height, height)  # the last group may be lower
        return group * height + within % group_rows, within // group_rows


@dataclass(frozen=True)
class Maps:
    """The tensor maps of A and B; batched ones have a coordinate more."""

    a: TensorMapHandle
    b: TensorMapHandle


class Producer:
    """One thread that keeps the tiles of A and B coming."""

    def __init__(
        self, k: Kernel, config: HopperGemmConfig, features: GemmFeatures, maps: Maps, parts: Parts, order: TileOrder
    ) -> None:
        self._k, self._config, self._features = k, config, features
        self._maps, self._parts, self._order = maps, parts, order

    def run(self) -> None:
        """Load every k-tile of this CTA's tiles as stages become free."""
        k, c = self._k, self._config
        with k.when(k.thread == 0):
            ring = k.ring(c.stages, "load", phase=1)
            with k.loop(self._order.count()) as turn:
                place = self._order.place(turn)
                with k.loop(place.count) as step:
                    self._parts.free.wait(ring.phase, ring.stage)
                    self._parts.full.expect(self._parts.stage_bytes, ring.stage)
                    depth = (step + place.first) * c.tile_k
                    self._load(self._parts.a, self._maps.a, place.row, depth, place, ring.stage)
                    self._load(self._parts.b, self._maps.b, place.col, depth, place, ring.stage)
                    ring.advance()

    def _load(
        self,
        operand: SharedOperandTile,
        tensor_map: TensorMapHandle,
        outer: Traced,
        depth: Traced,
        place: Place,
        stage: Number,
    ) -> None:
        k, features = self._k, self._features
        own = features.a if operand is self._parts.a else features.b
        shared = operand is self._parts.b and self._config.cluster > 1
        part, parts = (k.cluster_rank, self._config.cluster) if shared else (0, 1)
        everyone = (1 << self._config.cluster) - 1 if shared else None
        for offset, (inner, line) in operand.boxes(outer, depth, part, parts):
            at = (inner, line, place.batch if own.batched else 0) if features.batched else (inner, line)
            tile = operand.tile.stage(stage)
            k.tma_load(tile, tensor_map, at, self._parts.full, stage, offset=offset, multicast=everyone)
