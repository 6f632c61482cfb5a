"""The consumers of the sm_90a GEMM kernels: warpgroups that multiply, and take turns where each has its own tile."""

from __future__ import annotations

from warploom.core.dtypes import u32
from warploom.kernels.descriptors import WgmmaOperand
from warploom.kernels.gemm.features import GemmFeatures
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.hopper_parts import Parts, Place, TileOrder
from warploom.kernels.specialised import WARPGROUP, WARPGROUP_ROWS
from warploom.lang import Fragment, Kernel, Traced

STEP = 16
"""The depth of one ``wgmma``."""


class Turns:
    """A consumer warpgroup's place among the others: its stages of the ring, and its turns at the tensor cores."""

    def __init__(self, k: Kernel, config: HopperGemmConfig) -> None:
        self._k, self._config = k, config
        self.number: Traced = k.warpgroup - 1
        self._ring = k.ring(config.stages, "use")

    def skip(self, place: Place) -> None:
        """Pass over the stages of a tile that the other consumer multiplies."""
        ring = self._ring
        total = ring.stage.get() + place.count
        rounds = total // self._config.stages
        ring.phase.set((ring.phase.get() + rounds) & 1)
        ring.stage.set(total - rounds * self._config.stages)

    def begin_turns(self) -> None:
        """The first turn is consumer 0's."""
        k = self._k
        if self._config.pingpong:
            with k.when(self.number == 1, uniform=True):
                k.bar_arrive(1, 2 * WARPGROUP)

    def end_turns(self, tiles: Traced) -> None:
        """Take the turn that is left over after so many tiles."""
        k = self._k
        if self._config.pingpong:
            with k.when(self.number == (tiles & 1), uniform=True):
                k.bar_sync(self.number + 1, 2 * WARPGROUP)

    def _take_turn(self) -> None:
        if self._config.pingpong:
            self._k.bar_sync(self.number + 1, 2 * WARPGROUP)

    def _pass_turn(self) -> None:
        if self._config.pingpong:
            self._k.bar_arrive(2 - self.number, 2 * WARPGROUP)


class Consumer(Turns):
    """One warpgroup that multiplies by ``wgmma``: :attr:`blocks` accumulators of 64 rows."""

    def __init__(
        self, k: Kernel, config: HopperGemmConfig, features: GemmFeatures, parts: Parts, order: TileOrder
    ) -> None:
        super().__init__(k, config)
        self._features, self._parts, self._order = features, parts, order
        self.first_row: Traced = k.value(0, u32) if config.pingpong else self.number * config.consumer_rows
        """Where this warpgroup's rows begin in the tile."""
        self.first_col: Traced = k.value(0, u32)
        self.blocks: list[Fragment] = [k.warpgroup_accumulator(config.tile_n, f"c{i}") for i in range(config.blocks)]
        a, b = parts.a, parts.b
        self._a = WgmmaOperand(k, a.tile, a.descriptor, a.outer_bytes(self.first_row))
        self._b = WgmmaOperand(k, b.tile, b.descriptor)
        self._read = k.register(u32, 0, "read_stage")

    def multiply(self, place: Place) -> None:
        """The tile's sums in :attr:`blocks`; its stages are given back. A tile has at least one k-tile."""
        k, c = self._k, self._config
        self._take_turn()
        self._issue(first=True)
        if not c.in_flight:
            self._finish_oldest(0)
        with k.loop(place.count, 1) as _:
            self._issue(first=False)
            self._finish_oldest(1 if c.in_flight else 0)
        self._pass_turn()
        if c.in_flight:
            k.wgmma_wait(0, *self.blocks)
            self._release()
        else:
            k.wgmma_wait(0, *self.blocks)

    def skip(self, place: Place) -> None:
        """Pass over the stages of a tile that the other consumer multiplies."""
        super().skip(place)
        self._read.set(self._ring.stage)

    def _issue(self, *, first: bool) -> None:
        """One k-tile's products, as one group."""
        k, c, ring = self._k, self._config, self._ring
        self._parts.full.wait(ring.phase, ring.stage)
        k.wgmma_fence()
        stage = ring.stage.get()
        for depth in range(0, c.tile_k, STEP):
            b = self._b.at(stage, self._parts.b.depth_bytes(depth))
            for i, block in enumerate(self.blocks):
                rows = self._parts.a.outer_bytes(WARPGROUP_ROWS * i)
                a = self._a.at(stage, rows + self._parts.a.depth_bytes(depth))
                k.wgmma(
                    block, a, b, inputs=c.dtype, accumulate=not first or depth > 0,
                    transposed_a=not self._parts.a.k_contiguous, transposed_b=not self._parts.b.k_contiguous,
                )  # fmt: skip
        k.wgmma_commit()
        ring.advance()

    def _finish_oldest(self, pending: int) -> None:
        """Wait until all but ``pending`` of the k-tiles are multiplied, and give the oldest's stage back."""
        self._k.wgmma_wait(pending)
        self._release()

    def _release(self) -> None:
        """This warp is done with the oldest stage that it has not given back."""
        k = self._k
        self._parts.release(self._read)
        following = self._read.get() + 1
        self._read.set(k.select(following == self._config.stages, k.value(0, u32), following))
