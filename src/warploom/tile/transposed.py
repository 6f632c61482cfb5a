"""A value for each row or column of an accumulator, and the way out of one whose columns are rows of a problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from warploom.lang import GlobalPointer
from warploom.lang.fragments import TileAddresses
from warploom.layout.catalogue import wgmma_operand
from warploom.layout.linear import LinearMap
from warploom.layout.matrix_access import stmatrix_plan
from warploom.tile.operands import DEPTH, A
from warploom.tile.roles import WARPGROUP

if TYPE_CHECKING:
    from warploom.lang import Fragment, Kernel, Mutable, SharedTile, Traced
    from warploom.lang.values import Number

_STORE = stmatrix_plan(A.transposed(), transposed=True)
_LANES = LinearMap(
    {"lane": (*_STORE.address.bases("lane"), *wgmma_operand().transposed().atom.bases("warp"))},
    {"row": DEPTH, "col": 4 * DEPTH},
)
"""Where the threads of a warpgroup store 16 columns of its 64 rows: as 16 rows, each of 64 columns."""


def column_values(vector: SharedTile | GlobalPointer, like: Fragment, lane: Traced) -> list[Traced]:
    """For each element of an accumulator the f32 that a vector in memory has for its column."""
    loaded: dict[int, list[Traced]] = {}
    found: list[Traced] = []
    for element in range(like.layout.elements_per_thread):
        first = like.layout.coordinates(0, element)[1]  # of lane 0: elements of one column share it
        pair = first & ~1
        if pair not in loaded:
            col = like.layout.coordinates(lane, element & ~1)[1]
            loaded[pair] = vector.load(col, 2) if isinstance(vector, GlobalPointer) else vector.load(0, col, 2)
        found.append(loaded[pair][first & 1])
    return found


def row_values(vector: GlobalPointer, like: Fragment, lane: Traced, first: Traced) -> list[Traced]:
    """For each element of an accumulator the f32 that a vector has for its row; row 0 is element ``first``."""
    loaded: dict[int, Traced] = {}
    found: list[Traced] = []
    for element in range(like.layout.elements_per_thread):
        row = like.layout.coordinates(0, element)[0]  # of lane 0: elements of one row share it
        if row not in loaded:
            loaded[row] = vector.load(like.layout.coordinates(lane, element)[0] + first)
        found.append(loaded[row])
    return found


class TransposedStore:
    """A warpgroup's way to store 64 rows of an accumulator as 64 columns of a shared tile (``stmatrix.trans``, sm_90).

    ``row``: of the tile, where they begin. A panel is as large as the tile has rows, so whole panels are rows too.
    """

    def __init__(self, k: Kernel, tile: SharedTile, row: Number = 0) -> None:
        self._k = k
        self._to = TileAddresses(k, tile, _LANES, k.thread & (WARPGROUP - 1), row, "strided")

    def prepare(self, rows: int) -> None:
        """Form the addresses for so many rows here, before a loop."""
        self._to.prepare([(row, 0) for row in range(0, rows, DEPTH)])

    def store(self, tile: SharedTile, packed: Sequence[Traced | Mutable]) -> None:
        """Store what :meth:`Wgmma.pack <warploom.tile.product.Wgmma.pack>` made of the accumulator to a stage."""
        to = self._to.on(tile)
        for step in range(0, len(packed), 4):
            piece = packed[step : step + 4]
            self._k.stmatrix(
                to.address(DEPTH * (step // 4), 0), [piece[r] for r in _STORE.register_order], transposed=True
            )
