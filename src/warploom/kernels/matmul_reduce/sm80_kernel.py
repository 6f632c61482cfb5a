# pyright: reportInvalidTypeForm=false
"""Row reductions of a product that is never written (sm_80 and newer): the matmul kernel's sums, reduced in registers.

Each CTA reduces its tile's columns to one state per row and writes that; a second kernel merges the tiles' states in
the order of their columns.
"""

from __future__ import annotations

from warploom.core.dtypes import f32, u16, u32
from warploom.kernels.matmul.features import MatmulFeatures
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.sm80_kernel import Sm80Product
from warploom.kernels.matmul.values import ResultTile
from warploom.kernels.matmul_reduce.rows import Reduced, RowValues
from warploom.kernels.matmul_reduce.states import ReduceOp, Reduction
from warploom.lang import Kernel, Strided, Traced, kernel
from warploom.lang.reducers import State


@kernel(threads=lambda config, **_: config.threads, drop_unused=True)
def matmul_reduce_sm80(
    k: Kernel,
    a: Strided[u16, 2],
    b: Strided[u16, 2],
    result: Reduced,
    depth: u32,
    k_tiles: u32,
    tiles_per_split: u32,
    *,
    config: MatmulSm80,
    features: MatmulFeatures,
    op: ReduceOp,
) -> None:
    """For each tile along N, the state of every row of alpha · A·B + bias over the tile's columns.

    Operands and grid as for :func:`~warploom.kernels.matmul.sm80_kernel.matmul_sm80`, without batches and split K.
    """
    work = Sm80Product(k, config, features, (a, b), (result.m, result.n, depth))
    tile = work.own_tile(k_tiles, tiles_per_split)
    values = RowValues.of(k, Reduction(op), config.dtype, features, result)
    work.begin(tile)
    work.multiply(tile)
    rows = TileRows(k, config, values, work)
    rows.reduce(tile)
    rows.store(tile, result)


class TileRows:
    """The states of a tile's rows: from the accumulators to one per row of the CTA."""

    def __init__(self, k: Kernel, config: MatmulSm80, values: RowValues, work: Sm80Product) -> None:
        self._k, self._config, self._values, self._work = k, config, values, work
        self._reduction = values.reduction
        # The stages are not read any more: the states of the warps lie over them.
        parts = len(self._reduction.types) * config.warps_n
        self._states = k.shared(f32, (parts, config.tile_m), name="row_states", alias=work.ring.tiles[0])

    def reduce(self, tile: ResultTile) -> None:
        """Each warp's rows, reduced within the warp and left in shared memory."""
        k, c, (along_m, along_n) = self._k, self._config, self._work.warp
        found = self._values.states(self._work.sums, along_n * c.warp_n + tile.col)
        with k.when(found.first_lane):
            for row, state in found.rows():
                for part, x in enumerate(state):
                    self._states.store(x, along_n + part * c.warps_n, row + along_m * c.warp_m, dtype=x.dtype)
        k.syncthreads()  # a row's states come from all warps along N

    def store(self, tile: ResultTile, to: Reduced) -> None:
        """Merge the warps' states in the order of their columns; one thread a row writes them out."""
        k, c = self._k, self._config
        for start in range(0, c.tile_m, c.threads):
            local = k.thread + start
            row = local + tile.row
            exists = row < to.m
            if c.tile_m < start + c.threads:
                exists = exists & (local < c.tile_m)
            with k.when(exists):
                state = self._load(0, local)
                for warp in range(1, c.warps_n):
                    state = self._reduction.merge(k, state, self._load(warp, local))
                at = k.mul_wide(tile.col // c.tile_n, to.m) + k.mul_wide(row, 1)
                for target, x in zip((to.first, to.second), state, strict=False):
                    (target + at).store(x, dtype=x.dtype)

    def _load(self, warp: int, row: Traced) -> State:
        types, warps = self._reduction.types, self._config.warps_n
        return tuple(self._states.load(warp + i * warps, row, dtype=t) for i, t in enumerate(types))
