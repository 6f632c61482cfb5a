"""One operand of the product on its way: global memory → stages of shared memory → fragments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from warploom.core.dtypes import u16, u32, u64
from warploom.kernels.gemm.config import MMA_K, GemmConfig
from warploom.kernels.gemm.features import OperandFeatures
from warploom.lang import GlobalPointer, Kernel, Mutable, SharedTile, Traced
from warploom.lang.fragments import TileAddresses, TileReader
from warploom.lang.values import Number
from warploom.layout.catalogue import mma_fragment
from warploom.layout.fragments import FragmentLayout
from warploom.layout.linear import LinearMap
from warploom.layout.matrix_access import ldmatrix_plan
from warploom.layout.wmma import Order

SHAPE, WMMA_SHAPE = "m16n8k16", "m16n16k16"
A, B, C = (mma_fragment(SHAPE, operand) for operand in "ABC")

Registers = tuple[Traced, ...]
_LANE_BITS = 5
_LOW_HALVES = 0x5410  # prmt: the low 16 bits of two registers


@dataclass(frozen=True)
class Side:
    """What tells A from B: which warps share it, and its fragments."""

    name: Literal["A", "B"]
    config: GemmConfig

    @property
    def tile(self) -> int:
        """Extent of a CTA's tile along M (A) or N (B)."""
        return self.config.tile_m if self.name == "A" else self.config.tile_n

    @property
    def warp_tile(self) -> int:
        """Extent of a warp's part."""
        return self.config.warp_m if self.name == "A" else self.config.warp_n

    @property
    def fragment(self) -> FragmentLayout:
        """What one load fills: one A operand, or one or two B operands side by side."""
        return A if self.name == "A" else B.tile(1, 2) if self.config.wide_b else B

    @property
    def step(self) -> int:
        """Rows of A or columns of B in one such fragment, or in one of wmma."""
        return 16 if self.name == "A" or self.config.wide_b or self.config.wmma else 8

    def warp_index(self, k: Kernel) -> Traced:
        """Which part of the tile this warp multiplies; neighbouring warps differ in their columns."""
        n = self.config.warps_n
        return k.warp // n if self.name == "A" else k.warp % n

    def with_warps(self, lanes: LinearMap, along_cols: bool) -> LinearMap:
        """A lane map over the CTA's threads: the bits of this operand's warp index move along the tile's columns.

        Where they move along its rows, they are added as a number instead (any count of warps, any extent).
        """
        n_bits = (self.config.warps_n - 1).bit_length()
        m_bits = (self.config.warps_m - 1).bit_length()
        own = [(0, self.warp_tile << bit) if along_cols else (0, 0) for bit in range(m_bits + n_bits)]
        bits = own[:m_bits] if self.name == "A" else own[:n_bits]
        none = [(0, 0)]
        warps = none * n_bits + bits if self.name == "A" else bits + none * m_bits
        sizes = {"row": lanes.out_size("row"), "col": self.tile if along_cols else lanes.out_size("col")}
        return LinearMap({"lane": [*lanes.bases("lane"), *warps]}, sizes)


@dataclass(frozen=True)
class Source:
    """Where an operand's matrix begins, its leading stride, and how much of it there is from this tile on."""

    pointer: GlobalPointer
    stride: Number
    first: Traced
    """The tile's first row (A) or column (B)."""
    outer: Traced
    """M or N."""
    depth: Traced
    """K."""


class Operand:
    """A or B of one CTA: :meth:`load` issues the copies of a tile, :meth:`fragments` reads a k-step of it."""

    def __init__(self, k: Kernel, side: Side, features: OperandFeatures) -> None:
        self._k, self._side, self._features, config = k, side, features, side.config
        rows, cols = config.stored_shape(side.name, features.k_contiguous)
        self.tile: SharedTile = k.shared(
            config.dtype, (rows, cols), name=f"{side.name.lower()}_tile",
            swizzle="auto" if config.swizzle else None, stages=config.stages, padding=config.padding,
        )  # fmt: skip

        self._position: Mutable | None = None

    # -- global → shared
    def make_writer(self) -> None:
        """Prepare what each thread copies of a tile, and where to."""
        k, features, config = self._k, self._features, self._side.config
        # Copies through registers still store 16 bytes to shared memory.
        self._plan = config.copy_plan(self._side.name, features.k_contiguous, max(features.chunk, 2))
        if features.chunk == 1:
            self._plan = config.copy_plan(self._side.name, features.k_contiguous)
        lanes = self._plan.threads()
        at = lanes.apply(lane=k.thread)
        self._row, self._col = cast("Traced", at["row"]), cast("Traced", at["col"])
        self._writes = TileAddresses(k, self.tile, lanes, k.thread, 0, config.copy_addressing)
        self._writes.prepare(self._plan.steps)

    def aim(self, source: Source, first_tile: Number) -> None:
        """Point at a matrix: copies begin with its k-tile ``first_tile``."""
        k, features = self._k, self._features
        self._source = source
        row, col = (source.first, 0) if features.k_contiguous else (0, source.first)
        start = source.pointer + k.mul_wide(self._row + row, source.stride) + (self._col + col)
        start = GlobalPointer(k, start.address + k.mul_wide(first_tile, 1) * self._tile_bytes, u16)
        if self._position is None:
            self._position = k.register(u64, start.address, f"{self.tile.name}_source")
        else:
            self._position.set(start.address)

    @property
    def _tile_bytes(self) -> Traced:
        """Bytes from one k-tile to the next (u64)."""
        k, depth = self._k, self._side.config.tile_k
        if self._features.k_contiguous:
            return k.value(depth * 2, u64)
        return k.mul_wide(self._source.stride, depth * 2)

    def _from(self, row: int, col: int, start: Traced) -> GlobalPointer:
        """This thread's first element of a step of the copy."""
        pointer = GlobalPointer(self._k, start, u16)
        if row:
            pointer = pointer.bytes(self._k.mul_wide(self._source.stride, 2 * row))
        return pointer + col

    def load(self, index: Traced, stage: Number) -> None:
        """Copy the next tile, k-tile number ``index``, to a stage; tiles are copied in order."""
        assert self._position is not None
        start = self._position.get()
        writes = self._writes.staged(stage)
        for row, col in self._plan.steps:
            source, target = self._from(row, col, start), writes.address(row, col)
            if self._features.chunk == 1:
                self._through_registers(source, target, self._left(index, row, col))
            else:
                size = cast("Literal[4, 8, 16]", 2 * self._features.chunk)
                self._k.cp_async(target, source, size, valid_bytes=self._valid_bytes(index, row, col))
        self._position.set(start + self._tile_bytes)

    def _left(self, index: Traced, row: int, col: int) -> tuple[Traced | None, Traced | None]:
        """(whether the row exists, elements of it from this thread's column on); None where that needs no question."""
        features, source = self._features, self._source
        by_k = source.depth - index * self._side.config.tile_k if features.ragged_k else None
        by_outer = source.outer - source.first if features.ragged_outer else None
        rows, cols = (by_outer, by_k) if features.k_contiguous else (by_k, by_outer)
        exists = None if rows is None else self._row + row < rows
        if cols is None:
            return exists, None
        at = self._col + col
        left = self._k.select(at < cols, cols - at, self._k.value(0, u32))
        return exists, left

    def _valid_bytes(self, index: Traced, row: int, col: int) -> Traced | None:
        """Bytes of a chunk that exist; the others become zeros."""
        k, chunk = self._k, self._features.chunk
        exists, left = self._left(index, row, col)
        size: Traced | None = None
        if left is not None:
            # Lines of whole chunks leave all or nothing.
            size = k.minimum(left, chunk) * 2 if self._features.partial else k.select(
                left != 0, k.value(2 * chunk, u32), k.value(0, u32)
            )  # fmt: skip
        if exists is None:
            return size
        return k.select(exists, k.value(2 * chunk, u32) if size is None else size, k.value(0, u32))

    def _through_registers(
        self, source: GlobalPointer, target: Traced, left: tuple[Traced | None, Traced | None]
    ) -> None:
        """A chunk whose address is odd: element by element, then one store of 16 bytes."""
        k = self._k
        exists, count = left
        elements: list[Traced] = []
        for i in range(self._plan.chunk):
            condition = None if count is None else count > i
            if exists is not None:
                condition = exists if condition is None else condition & exists
            if condition is None:
                elements += source.load(i)
                continue
            element = k.register(u32, 0)
            with k.when(condition):
                element.set(source.load(i)[0])
            elements.append(element.get())
        words = [k.prmt(low, high, _LOW_HALVES) for low, high in zip(elements[::2], elements[1::2], strict=True)]
        k.store("shared", target, u32, words, "", "weak")

    # -- shared → registers
    def make_reader(self) -> None:
        """Prepare the addresses of the fragments."""
        k, side, config = self._k, self._side, self._side.config
        along_cols = not self._features.k_contiguous
        self._first_row = side.warp_index(k) * (0 if along_cols else side.warp_tile)
        self._reader: TileReader | None = None
        if not config.ldmatrix:
            self._first_col = side.warp_index(k) * (side.warp_tile if along_cols else 0)
            return
        # A register pairs two elements along K; ldmatrix pairs columns of the tile, .trans rows.
        k_axis_is_row = self._k_axis == "row"
        plan = ldmatrix_plan(self._in_tile(side.fragment), k_axis_is_row)
        lanes = side.with_warps(plan.address, along_cols)
        addresses = TileAddresses(k, self.tile, lanes, k.thread, self._first_row, config.addressing)
        self._reader = TileReader(k, plan, addresses)
        self._reader.prepare(
            self._place(outer, step) for outer in range(0, side.warp_tile, side.step) for step in range(config.k_steps)
        )

    @property
    def _k_axis(self) -> str:
        return "col" if self._features.k_contiguous else "row"

    def _in_tile(self, fragment: FragmentLayout) -> FragmentLayout:
        """A fragment of A (m, k) or B (k, n) in the rows and columns of the tile as it is stored."""
        drawn_k = "col" if self._side.name == "A" else "row"
        return fragment if drawn_k == self._k_axis else fragment.transposed()

    def _place(self, outer: int, step: int) -> tuple[int, int]:
        """(row, col) in the stored tile of a fragment at ``outer`` along M (N) and k-step ``step``."""
        return (outer, MMA_K * step) if self._features.k_contiguous else (MMA_K * step, outer)

    def fragments(self, step: int, stage: Number) -> list[Registers]:
        """The operands of k-step ``step``: of A one per 16 rows, of B one per 8 columns."""
        loads = self._side.warp_tile // self._side.step
        return [operand for index in range(loads) for operand in self.loaded(index, step, stage)]

    def loaded(self, index: int, step: int, stage: Number) -> list[Registers]:
        """The operands that load number ``index`` of k-step ``step`` fills: one, or with ``wide_b`` two of B."""
        side = self._side
        place = self._place(index * side.step, step)
        if side.config.wmma:
            return [self._opaque(*place, stage)]
        registers = (
            self._element_wise(*place, stage) if self._reader is None else self._reader.staged(stage).load(*place)
        )
        whole = (registers,) if side.name == "A" else (registers[:2], registers[2:])
        return [operand for operand in whole if operand]

    @property
    def order(self) -> Order:
        """The order that wmma finds the operand, A (m, k) or B (k, n), in: the tile has the matrix or its transpose."""
        return "row" if (self._side.name == "A") == self._features.k_contiguous else "col"

    def _opaque(self, row: int, col: int, stage: Number) -> Registers:
        """A fragment of wmma: rows at the tile's distance; which lane gets what is the hardware's to know."""
        layout, dtype = self.tile.layout, self._side.config.dtype
        matrix = self.tile.stage(stage).address(self._first_row + row, self._first_col + col)
        leading = layout.row_bytes // layout.element_bytes
        return self._k.wmma_load(self._side.name, matrix, leading, shape=WMMA_SHAPE, dtype=dtype, order=self.order)

    def _element_wise(self, row: int, col: int, stage: Number) -> Registers:
        """A fragment by loads of single elements through its map: the seeds' kernel 01a."""
        k, tile = self._k, self.tile.stage(stage)
        layout = self._in_tile(self._side.fragment)
        halves: list[Traced] = []
        for element in range(layout.elements_per_thread):
            at_row, at_col = layout.coordinates(k.lane, element)
            halves += tile.load(at_row + self._first_row + row, at_col + self._first_col + col, dtype=u16)
        return tuple(k.prmt(low, high, _LOW_HALVES) for low, high in zip(halves[::2], halves[1::2], strict=True))


def carried(k: Kernel, operands: list[Registers], name: str) -> list[list[Mutable]]:
    """Mutable registers that hold ``operands`` from one tile to the next."""
    return [[k.register(u32, r, f"{name}{i}_{j}") for j, r in enumerate(group)] for i, group in enumerate(operands)]
