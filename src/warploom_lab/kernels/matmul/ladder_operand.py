"""The fragments of the matmul ladder's kernels: by wmma, element by element, or by ``ldmatrix``."""

from __future__ import annotations

from typing import Literal

from warploom.core.dtypes import u16
from warploom.kernels.matmul.features import OperandFeatures
from warploom.kernels.matmul.sm80 import DEPTH
from warploom.kernels.matmul.values import along
from warploom.lang import Kernel, SharedTile
from warploom.lang.fragments import TileAddresses, TileReader
from warploom.layout.catalogue import mma_fragment
from warploom.layout.matrix_access import ldmatrix_plan
from warploom.layout.wmma import StorageOrder
from warploom.tile.product import Registers, of_warps
from warploom_lab.kernels.matmul.ladder_config import RungGemm

SHAPE, WMMA_SHAPE = "m16n8k16", "m16n16k16"
A, B, C = (mma_fragment(SHAPE, operand) for operand in "ABC")
_LOW_HALVES = 0x5410  # prmt: the low 16 bits of two registers


class Operand:
    """A or B of one CTA: its shared :attr:`tile`, and what a warp loads of it."""

    def __init__(self, k: Kernel, name: Literal["A", "B"], config: RungGemm, own: OperandFeatures) -> None:
        self._k, self._config, self._along_k = k, config, own.k_contiguous
        self._name: Literal["A", "B"] = name
        c = config
        outer, self.extent = (c.tile_m, c.warp_m) if name == "A" else (c.tile_n, c.warp_n)
        self.tile: SharedTile = k.shared(
            c.dtype,
            along(own, outer, c.tile_k),
            name=name,
            swizzle="auto" if c.swizzle else None,
            stages=c.stages,
            padding=c.padding,
        )
        self.step = 16 if name == "A" or c.wmma else 8
        """Rows of A or columns of B in one fragment."""
        whole = A if name == "A" else B
        drawn_along_k = name == "A"  # A (m, k) or B (k, n), in the rows and columns of the tile as it is stored
        self._fragment = whole if drawn_along_k == own.k_contiguous else whole.transposed()
        index = k.warp // c.warps_n if name == "A" else k.warp % c.warps_n  # neighbouring warps differ in columns
        self._row = index * (self.extent if own.k_contiguous else 0)
        self._col = index * (0 if own.k_contiguous else self.extent)
        self._reader: TileReader | None = None
        if c.ldmatrix:
            plan = ldmatrix_plan(self._fragment, not own.k_contiguous)
            step = 0 if own.k_contiguous else self.extent
            lanes = of_warps(plan.address, (c.warps_m, c.warps_n), "AB".index(name), step)
            self._reader = TileReader(k, plan, TileAddresses(k, self.tile, lanes, k.thread, self._row, c.addressing))
            self._reader.prepare(self._at(o, s) for o in range(0, self.extent, self.step) for s in range(c.k_steps))

    @property
    def order(self) -> StorageOrder:
        """The order that wmma finds the operand, A (m, k) or B (k, n), in: the tile has the matrix or its transpose."""
        return "row" if (self._name == "A") == self._along_k else "col"

    def _at(self, outer: int, step: int) -> tuple[int, int]:
        """(row, col) in the tile as it is stored."""
        return (outer, DEPTH * step) if self._along_k else (DEPTH * step, outer)

    def fragments(self, tile: SharedTile, step: int) -> list[Registers]:
        """The operands of a k-step of a stage: of A one per 16 rows, of B one per 8 columns."""
        return [self.load(tile, index, step) for index in range(self.extent // self.step)]

    def load(self, tile: SharedTile, index: int, step: int) -> Registers:
        """Operand number ``index`` of a k-step."""
        place = self._at(index * self.step, step)
        if self._config.wmma:
            return self._opaque(tile, *place)
        if self._reader is not None:
            return self._reader.on(tile).load(*place)
        return self._element_wise(tile, *place)

    def _opaque(self, tile: SharedTile, row: int, col: int) -> Registers:
        """A fragment of wmma: rows at the tile's distance; which lane gets what is the hardware's to know."""
        matrix = tile.address(self._row + row, self._col + col)
        leading = tile.layout.row_bytes // tile.layout.element_bytes
        return self._k.wmma_load(
            self._name, matrix, leading, shape=WMMA_SHAPE, dtype=self._config.dtype, order=self.order
        )

    def _element_wise(self, tile: SharedTile, row: int, col: int) -> Registers:
        """A fragment by loads of single elements through its map: the seeds' kernel 01a."""
        k, layout = self._k, self._fragment
        halves = [
            tile.load(at_row + self._row + row, at_col + self._col + col, dtype=u16)
            for at_row, at_col in (layout.coordinates(k.lane, e) for e in range(layout.elements_per_thread))
        ]
        return tuple(k.prmt(low, high, _LOW_HALVES) for low, high in zip(halves[::2], halves[1::2], strict=True))
