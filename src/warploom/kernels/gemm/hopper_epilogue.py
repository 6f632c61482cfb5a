"""How a tile of C leaves an sm_90a GEMM kernel: through shared memory and the TMA, or from the registers."""

from __future__ import annotations

from warploom.core.dtypes import f16, f32, u16, u32
from warploom.kernels.gemm.epilogue import Elements, Output
from warploom.kernels.gemm.features import GemmFeatures
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.hopper_consumer import Consumer
from warploom.kernels.gemm.hopper_fragments import WarpConsumer
from warploom.kernels.gemm.hopper_parts import Place
from warploom.kernels.specialised import WARPGROUP, WARPGROUP_ROWS
from warploom.lang import Fragment, Kernel, Mutable, SharedTile, Traced
from warploom.lang.fragments import TileAddresses
from warploom.lang.hopper import TensorMapHandle
from warploom.layout.catalogue import mma_fragment
from warploom.layout.matrix_access import stmatrix_plan
from warploom.tile.copy_plan import CopyPlan

PIECE = mma_fragment("m16n8k16", "C", 16).tile(1, 2)
"""16×16 of a warp's packed C: what one ``stmatrix.x4`` stores."""
_STORE = stmatrix_plan(PIECE, transposed=False)


class Store:
    """Stores the tiles of one consumer; with ``mma.sync`` each of its warps stores its own part, and waits for none.

    A 16-bit C passes through :attr:`HopperGemmConfig.store_panels` panels, boxes of C, of whoever stores. Each is free
    again when the bulk store that read it is done; rows and columns beyond C's edges are clipped by the TMA. Where its
    lines are not aligned, the threads copy the panels out.
    """

    def __init__(
        self, k: Kernel, config: HopperGemmConfig, features: GemmFeatures, c_map: TensorMapHandle | None
    ) -> None:
        self._k, self._config, self._features, self._map = k, config, features, c_map
        self._panels: SharedTile | None = None
        if features.out_dtype is not f32:
            stages = config.storers * config.store_panels
            self._panels = k.shared(
                features.out_dtype, config.store_box, name="c_panels", swizzle="auto", stages=stages
            )

    def prepare(self, consumer: Consumer | WarpConsumer) -> None:
        """Form addresses that all tiles share."""
        k, c = self._k, self._config
        self._warp: Traced = k.value(0, u32) if c.mma_sync else k.warp & 3
        """Which rows of an accumulator this warp holds."""
        self._who = k.lane if c.mma_sync else k.thread & (WARPGROUP - 1)
        self._leader = self._who == 0
        self._barrier = consumer.number + (c.consumers + 1)
        if self._panels is None:
            return
        number = k.warp - 4 if c.mma_sync else consumer.number
        own = self._panels.stage(number * c.store_panels)
        self._own = own
        self._addresses = TileAddresses(k, own, _STORE.address, k.lane, self._warp * 16, "strided")
        rows, cols = self._own_rows, c.store_box[1]
        self._addresses.prepare([(row, col) for row in range(0, rows, 16) for col in range(0, cols, 16)])

    @property
    def _own_rows(self) -> int:
        """Rows of a panel that one warp writes."""
        return self._config.store_box[0] // (1 if self._config.mma_sync else WARPGROUP // 32)

    def run(self, consumer: Consumer | WarpConsumer, place: Place, output: Output) -> None:
        """Store the consumer's accumulators as its part of the tile at ``place``."""
        elements = Elements(self._k, self._config.dtype, self._features, output)
        for i, block in enumerate(consumer.blocks):
            row = place.row + consumer.first_row + i * WARPGROUP_ROWS
            col = place.col + consumer.first_col
            if self._panels is None:
                self._store_registers(block, elements, output, row, col)
            else:
                self._store_panels(block, i, elements, output, (row, col, place.batch))

    def wait(self) -> None:
        """Until everything has left: shared memory goes with the CTA."""
        if self._map is not None:
            with self._k.when(self._leader):
                self._k.wait_bulk(0)

    # -- values
    def _pair(self, block: Fragment, first: int, elements: Elements, row: Traced, col: Traced) -> tuple[Traced, Traced]:
        """Elements ``first`` and ``first + 1`` (neighbouring columns), finished."""
        if block.dtype is f16:
            values = self._k.unpack(_read(block.registers[first // 2]), f16)
        else:
            values = _read(block.registers[first]), _read(block.registers[first + 1])
        if self._features.epilogue.plain:
            return values
        at_row, at_col = block.layout.coordinates(self._k.lane, first, self._warp)
        return elements.finished(values, at_row + row, at_col + col)

    def _packed(self, block: Fragment, first: int, elements: Elements, row: Traced, col: Traced) -> Traced:
        """The same in the output's type, packed."""
        if block.dtype is self._features.out_dtype and self._features.epilogue.plain:
            return _read(block.registers[first // 2])
        return self._k.pack(*self._pair(block, first, elements, row, col), self._features.out_dtype)

    # -- through shared memory, panel by panel
    def _store_panels(
        self, block: Fragment, number: int, elements: Elements, output: Output, at: tuple[Traced, Traced, Traced]
    ) -> None:
        """Block ``number`` to its place: row and column in C, and batch."""
        k, c = self._k, self._config
        row, col, batch = at
        below, beside = c.store_boxes
        for box in range(below * beside):
            i, j = divmod(box, beside)
            buffer = (number * below * beside + box) % c.store_panels
            if self._map is not None:
                with k.when(self._leader):
                    k.wait_bulk(c.store_panels - 1, reads_only=True)
            self._meet()  # what was in the panel has left
            self._fill(block, self._addresses.staged(buffer), (i, j), elements, row, col)
            if self._map is not None:
                k.fence_async()
            self._meet()  # every warp has written its rows
            box_row, box_col = row + i * c.store_box[0], col + j * c.store_box[1]
            if self._map is not None:
                self._send(buffer, box_row, box_col, batch)
            else:
                self._copy(self._own.stage(buffer), elements, output, box_row, box_col)

    def _meet(self) -> None:
        """All threads that write a panel."""
        if self._config.mma_sync:
            self._k.syncwarp()
        else:
            self._k.bar_sync(self._barrier, WARPGROUP)

    def _fill(
        self, block: Fragment, to: TileAddresses, box: tuple[int, int], elements: Elements, row: Traced, col: Traced
    ) -> None:
        """This warp's rows of a box of the block, which begins at (row, col) of C, into a panel."""
        k, (height, width) = self._k, self._config.store_box
        for own_row in range(0, self._own_rows, 16):
            for own_col in range(0, width, 16):
                i = (box[0] * height + own_row) // block.layout.atom_shape[0]
                j = (box[1] * width + own_col) // 8
                packed = [
                    self._packed(block, first, elements, row, col)
                    for atom in (j, j + 1)
                    for first in range(*block.layout.atom_elements(i, atom).indices(1 << 20))[::2]
                ]
                k.stmatrix(to.address(own_row, own_col), [packed[r] for r in _STORE.register_order])

    def _send(self, buffer: int, row: Traced, col: Traced, batch: Traced) -> None:
        k = self._k
        assert self._map is not None
        where = (col, row, batch) if self._features.batched else (col, row)
        k.tma_store(self._map, where, self._own.stage(buffer), when=self._leader)
        k.commit_bulk()

    def _copy(self, panel: SharedTile, elements: Elements, output: Output, row: Traced, col: Traced) -> None:
        """A panel to lines that the TMA does not reach: as many elements at a time as they are aligned to."""
        k, chunk = self._k, self._features.out_chunk
        rows, cols = self._config.store_box
        warps = 1 if self._config.mma_sync else WARPGROUP // 32
        width = min(cols, 32 * warps * chunk)  # a warp is narrower than a row of single elements
        plan = CopyPlan(rows, width, warps, True, chunk)
        lanes, who = plan.threads(), self._who
        at: dict[str, Traced] = lanes.apply(lane=who)
        own_row, own_col = at["row"] + row, at["col"] + col
        addresses = TileAddresses(k, panel, lanes, who, 0, "strided")
        start = output.pointer + k.mul_wide(own_row, output.stride) + own_col
        kind, count = (u16, 1) if chunk == 1 else (u32, chunk // 2)
        steps = [(step_row, left + step_col) for step_row, step_col in plan.steps for left in range(0, cols, width)]
        for step_row, step_col in steps:
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
