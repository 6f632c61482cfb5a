"""The ways out of a tile of sums: rows through shared memory, in whole lines."""

from __future__ import annotations

from warploom.core.dtypes import u32
from warploom.lang import Fragment, GlobalPointer, Kernel, SharedTile, Traced
from warploom.lang.fragments import TileAddresses
from warploom.lang.values import Number
from warploom.layout.catalogue import mma_fragment
from warploom.layout.matrix_access import stmatrix_plan
from warploom.layout.reduction import reduction_plan

PIECE = mma_fragment("m16n8k16", "C", 16).tile(1, 2)
"""16×16 of a warp's packed sums: what one ``stmatrix.x4`` stores."""
_STORE = stmatrix_plan(PIECE, transposed=False)


def store_rows(k: Kernel, tile: SharedTile, sums: Fragment, row: Number, *, cols: int | None = None) -> None:
    """A warp's 16 rows of an accumulator, rounded, into a shared tile from ``row`` on, by ``stmatrix`` (sm_90).

    ``cols``: as many of its columns, by default the tile's.
    """
    packed = sums.packed(tile.dtype)
    to = TileAddresses(k, tile, _STORE.address, k.lane, row, "strided")
    for d in range(-(-(cols or tile.layout.cols) // 16)):
        piece = (*packed.atom(0, 2 * d), *packed.atom(0, 2 * d + 1))
        k.stmatrix(to.address(0, 16 * d), [piece[r] for r in _STORE.register_order])


def store_pairs(k: Kernel, tile: SharedTile, sums: Fragment, row: Number) -> None:
    """A warp's rows of an accumulator, rounded, into a shared tile from ``row`` on, two columns at a time (sm_80)."""
    packed = sums.packed(tile.dtype)
    to = TileAddresses(k, tile, packed.layout.atom.restrict("lane"), k.lane, row, "strided")
    for register, pair in enumerate(packed.registers):
        k.store("shared", to.address(*packed.layout.coordinates(0, 2 * register)), u32, [pair], "", "weak")


def store_row_values(
    k: Kernel,
    to: GlobalPointer,
    values: list[Traced],
    sums: Fragment,
    first: Number,
    end: Number,
    *,
    warp: Number = 0,
) -> None:
    """One f32 for each row of an accumulator (a log-sum-exp, say), as ``sums.reduce(…, "col")`` orders them.

    Row 0 of the fragment is element ``first`` of ``to``; rows from ``end`` on are left out. Of the lanes that share a
    row the first one stores.
    """
    plan = reduction_plan(sums.layout, "col")
    first_lane = (k.lane & sum(plan.lane_masks)) == 0
    for group, value in enumerate(values):
        row = first + plan.result_coordinate(group, k.lane, warp)
        with k.when(first_lane & (row < end)):
            to.store(value, row)
