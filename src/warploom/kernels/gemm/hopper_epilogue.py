"""How a tile of C leaves an sm_90a GEMM kernel: through shared memory and the TMA, or from the registers."""

from __future__ import annotations

from warploom.core.dtypes import f32, u16, u32
from warploom.kernels.copy_plan import CopyPlan
from warploom.kernels.gemm.epilogue import Elements, Output
from warploom.kernels.gemm.features import GemmFeatures
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.hopper_consumer import Consumer
from warploom.kernels.gemm.hopper_parts import Place
from warploom.kernels.specialised import WARPGROUP, WARPGROUP_ROWS
from warploom.lang import Fragment, Kernel, Mutable, SharedTile, Traced
from warploom.lang.fragments import TileAddresses
from warploom.lang.hopper import TensorMapHandle
from warploom.layout.catalogue import mma_fragment
from warploom.layout.matrix_access import stmatrix_plan

PIECE = mma_fragment("m16n8k16", "C", 16).tile(1, 2)
"""16×16 of a warp's packed C: what one ``stmatrix.x4`` stores."""
_STORE = stmatrix_plan(PIECE, transposed=False)


class Store:
    """Stores the tiles of one consumer.

    A 16-bit C passes through :attr:`HopperGemmConfig.store_panels` panels per consumer, each free again when the bulk
    store that read it is done; rows and columns beyond C's edges are clipped by the TMA. Where its lines are not
    aligned, the consumer's threads copy the panels out.
    """

    def __init__(
        self, k: Kernel, config: HopperGemmConfig, features: GemmFeatures, c_map: TensorMapHandle | None
    ) -> None:
        self._k, self._config, self._features, self._map = k, config, features, c_map
        self._panels: SharedTile | None = None
        if features.out_dtype is not f32:
            stages = config.consumers * config.store_panels
            self._panels = k.shared(
                features.out_dtype, config.store_box, name="c_panels", swizzle="auto", stages=stages
            )

    def prepare(self, consumer: Consumer) -> None:
        """Form addresses that all tiles share."""
        k = self._k
        self._warp = k.warp & 3
        self._leader = (k.thread & (WARPGROUP - 1)) == 0
        if self._panels is None:
            return
        own = self._panels.stage(consumer.number * self._config.store_panels)
        self._own = own
        self._addresses = TileAddresses(k, own, _STORE.address, k.lane, self._warp * 16, "strided")
        self._addresses.prepare([(0, 16 * i) for i in range(self._config.store_box[1] // 16)])

    def run(self, consumer: Consumer, place: Place, output: Output) -> None:
        """Store the consumer's accumulators as its part of the tile at ``place``."""
        elements = Elements(self._k, self._config.dtype, self._features, output)
        for i, block in enumerate(consumer.blocks):
            row = place.row + consumer.first_row + i * WARPGROUP_ROWS
            if self._panels is None:
                self._store_registers(block, elements, output, row, place.col)
            else:
                self._store_panels(consumer, i, elements, output, row, place)

    def wait(self) -> None:
        """Until everything has left: shared memory goes with the CTA."""
        if self._map is not None:
            with self._k.when(self._leader):
                self._k.wait_bulk(0)

    # -- values
    def _pair(self, block: Fragment, first: int, elements: Elements, row: Traced, col: Traced) -> tuple[Traced, Traced]:
        """Elements ``first`` and ``first + 1`` (neighbouring columns), finished."""
        values = _read(block.registers[first]), _read(block.registers[first + 1])
        if self._features.epilogue.plain:
            return values
        at_row, at_col = block.layout.coordinates(self._k.lane, first, self._warp)
        return elements.finished(values, at_row + row, at_col + col)

    # -- through shared memory, panel by panel
    def _store_panels(
        self, consumer: Consumer, number: int, elements: Elements, output: Output, row: Traced, place: Place
    ) -> None:
        k, c = self._k, self._config
        block, barrier = consumer.blocks[number], consumer.number + (c.consumers + 1)
        cols = c.store_box[1]
        for panel in range(c.panels):
            buffer = (number * c.panels + panel) % c.store_panels
            if self._map is not None:
                with k.when(self._leader):
                    k.wait_bulk(c.store_panels - 1, reads_only=True)
            k.bar_sync(barrier, WARPGROUP)  # what was in the panel has left
            to = self._addresses.staged(buffer)
            for piece in range(cols // 16):
                packed = [
                    k.pack(*self._pair(block, first, elements, row, place.col), self._features.out_dtype)
                    for atom in range(2)
                    for first in self._atom_pairs(block, panel * (cols // 8) + 2 * piece + atom)
                ]
                k.stmatrix(to.address(0, 16 * piece), [packed[r] for r in _STORE.register_order])
            if self._map is not None:
                k.fence_async()
            k.bar_sync(barrier, WARPGROUP)  # every warp has written its rows
            if self._map is not None:
                self._send(buffer, row, place, panel)
            else:
                self._copy(self._own.stage(buffer), elements, output, row, place.col + panel * cols)

    @staticmethod
    def _atom_pairs(block: Fragment, atom: int) -> range:
        """First elements of the pairs of 64×8 atom ``atom``."""
        size = block.layout.atom_elements_per_thread
        return range(atom * size, (atom + 1) * size, 2)

    def _send(self, buffer: int, row: Traced, place: Place, panel: int) -> None:
        k = self._k
        assert self._map is not None
        at = (place.col + panel * self._config.store_box[1], row)
        where = (*at, place.batch) if self._features.batched else at
        k.tma_store(self._map, where, self._own.stage(buffer), when=self._leader)
        k.commit_bulk()

    def _copy(self, panel: SharedTile, elements: Elements, output: Output, row: Traced, col: Traced) -> None:
        """A panel to lines that the TMA does not reach: as many elements at a time as they are aligned to."""
        k, chunk = self._k, self._features.out_chunk
        plan = CopyPlan(*self._config.store_box, WARPGROUP // 32, True, chunk)
        lanes = plan.threads()
        who = k.thread & (WARPGROUP - 1)
        at: dict[str, Traced] = lanes.apply(lane=who)
        own_row, own_col = at["row"] + row, at["col"] + col
        addresses = TileAddresses(k, panel, lanes, who, 0, "strided")
        start = output.pointer + k.mul_wide(own_row, output.stride) + own_col
        kind, count = (u16, 1) if chunk == 1 else (u32, chunk // 2)
        for step_row, step_col in plan.steps:
            words = k.load("shared", addresses.address(step_row, step_col), kind, count, "", "weak")
            target = start.bytes(k.mul_wide(output.stride, 2 * step_row)) if step_row else start
            elements.store_where(target + step_col, own_row + step_row, own_col + step_col, words, kind)

    # -- from the registers: of f32 four lanes fill a sector of 32 bytes
    def _store_registers(self, block: Fragment, elements: Elements, output: Output, row: Traced, col: Traced) -> None:
        k = self._k
        for first in range(0, block.layout.elements_per_thread, 2):
            at_row, at_col = block.layout.coordinates(k.lane, first, self._warp)
            values = self._pair(block, first, elements, row, col)
            at_row, at_col = at_row + row, at_col + col
            target = output.pointer + (k.mul_wide(at_row, output.stride) + k.mul_wide(at_col, 1))
            elements.store(target, at_row, at_col, values)


def _read(register: Traced) -> Traced:
    return register.get() if isinstance(register, Mutable) else register
