"""The operands of ``mma.sync``: their fragments, and how a warp loads them from a shared tile by ``ldmatrix``."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from warploom.core.dtypes import u32
from warploom.lang import Kernel, SharedTile, Traced
from warploom.lang.fragments import TileAddresses, TileReader
from warploom.lang.values import Number
from warploom.layout.catalogue import mma_fragment
from warploom.layout.fragments import FragmentLayout
from warploom.layout.linear import LinearMap
from warploom.layout.matrix_access import ldmatrix_plan

DEPTH = 16
"""Of one instruction, in 16-bit elements."""
A, B, C = (mma_fragment("m16n8k16", operand) for operand in "ABC")
B_PAIR = B.tile(1, 2)
"""Two B operands side by side: what one ``ldmatrix.x4`` fills."""

Registers = Sequence[Traced]


def of_warps(lanes: LinearMap, warps: tuple[int, int], axis: int, step: int) -> LinearMap:
    """A map of a warp's lanes as one of all threads of ``warps`` along rows and columns, powers of two, row by row.

    The next warp along ``axis`` (0: along the rows) begins ``step`` columns further on.
    """
    bits = [(count - 1).bit_length() for count in warps[::-1]]  # neighbours differ in columns
    moved = [(0, step << i if own == 1 - axis else 0) for own, count in enumerate(bits) for i in range(count)]
    sizes = {"row": lanes.out_size("row"), "col": max(lanes.out_size("col"), step * warps[axis])}
    return LinearMap({"lane": [*lanes.bases("lane"), *moved]}, sizes)


@dataclass(frozen=True)
class Part:
    """The columns of a tile that a warp has: ``lanes`` of thread ``who``, from ``row`` on, find the first of them."""

    lanes: LinearMap
    who: Traced
    row: Number
    period: int
    within: int

    @classmethod
    def of(cls, k: Kernel, tile: SharedTile, lanes: LinearMap, extent: int, index: Number) -> Part:
        """Part ``index`` of those ``extent`` columns wide: a piece of a panel, whole panels, or pieces of 16 in turn.

        The constant 0 is the only part: it begins where the tile does, which may be wider.

        Whole panels are rows (a panel is as large as so many rows); which piece of a panel it is are further bits of
        the lanes' map, and of ``who``.
        """
        panel = tile.layout.panels[0].cols
        only = isinstance(index, int) and index == 0
        if only or extent % panel == 0 or tile.layout.cols < 2 * extent:
            return cls(lanes, k.lane, index * (extent // panel * tile.layout.rows), panel, panel)
        within, period = (extent, panel) if panel % extent == 0 else (16, 16 * (tile.layout.cols // extent))
        bits = (period // within).bit_length() - 1
        moved = [*lanes.bases("lane"), *((0, within << bit) for bit in range(bits))]
        number = k.value(index, u32)
        piece = k.lane + (number & ((1 << bits) - 1)) * 32
        spread = LinearMap({"lane": moved}, {"row": lanes.out_size("row"), "col": panel})
        return cls(spread, piece, (number >> bits) * tile.layout.rows, period, within)

    def col(self, outer: int) -> int:
        """Where column ``outer`` of the part lies, counted from the first."""
        return outer // self.within * self.period + outer % self.within


class WarpOperand:
    """The fragments of one operand of a warp in a shared tile: ``extent`` of its outer dimension, number ``index``.

    ``fragment`` is what one load fills, drawn as the operand (A as m×k, B as k×n). ``flipped``: the tile stores its
    transpose. ``first``: of the rows, where they run along K, the one that K begins at.
    """

    def __init__(
        self,
        k: Kernel,
        tile: SharedTile,
        fragment: FragmentLayout,
        extent: int,
        index: Number,
        flipped: bool,
        first: Number = 0,
    ) -> None:
        self._extent, self._along_k = extent, (fragment is A) != flipped  # rows of the tile run along K
        whole = fragment.transposed() if flipped else fragment
        self.width = fragment.shape[1] if fragment is B else DEPTH
        """Outer positions that one load brings."""
        plan = ldmatrix_plan(whole, not self._along_k)
        self._part = None if self._along_k else Part.of(k, tile, plan.address, extent, index)
        lanes, who, row = plan.address, k.lane, index * extent
        if self._part is not None:
            lanes, who, row = self._part.lanes, self._part.who, self._part.row + first
        self._reader = TileReader(k, plan, TileAddresses(k, tile, lanes, who, row, "strided"))

    def prepare(self, depth: int) -> None:
        """Form the addresses of all loads of a tile of that depth here, before a loop."""
        self._reader.prepare(self._at(o, d) for o in range(0, self._extent, self.width) for d in range(0, depth, DEPTH))

    def _at(self, outer: int, depth: int) -> tuple[int, int]:
        return (outer, depth) if self._part is None else (depth, self._part.col(outer))

    def on(self, tile: SharedTile) -> WarpOperand:
        """The same fragments in another stage of the tile."""
        other = copy(self)
        other._reader = self._reader.on(tile)
        return other

    def load(self, outer: int, depth: int) -> Registers:
        """What one ``ldmatrix`` from there on brings."""
        return self._reader.load(*self._at(outer, depth))

    def step(self, depth: int) -> list[Registers]:
        """What every ``ldmatrix`` of a k-step brings."""
        return [self.load(outer, depth) for outer in range(0, self._extent, self.width)]
