# pyright: reportInvalidTypeForm=false
"""Row reductions of a product that is never written, on ``wgmma`` and the TMA (sm_90a).

The producer and the consumers' main loop are the matmul kernel's. A warp holds its 16 rows over all of a tile's
columns, so that its states need no other warp: they go to memory from the registers.
"""

from __future__ import annotations

from warploom.core.dtypes import u32
from warploom.kernels.matmul.features import MatmulFeatures
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.kernels.matmul.sm90_kernel import Extents, Sm90Product
from warploom.kernels.matmul.values import ResultTile
from warploom.kernels.matmul_reduce.rows import Reduced, RowValues
from warploom.kernels.matmul_reduce.states import ReduceOp, Reduction
from warploom.lang import Kernel, TensorMap, kernel
from warploom.tile.roles import consumer


@kernel(threads=lambda config, **_: config.threads, requires="sm_90a", drop_unused=True)
def matmul_reduce_sm90(
    k: Kernel,
    a_map: TensorMap,
    b_map: TensorMap,
    result: Reduced,
    k_tiles: u32,
    tiles_per_split: u32,
    tiles: u32,
    *,
    config: MatmulSm90,
    features: MatmulFeatures,
    op: ReduceOp,
) -> None:
    """For each tile along N, the state of every row of alpha · A·B + bias over the tile's columns.

    Operands and grid as for :func:`~warploom.kernels.matmul.sm90_kernel.matmul_sm90`, without batches and split K.
    """
    m, n, targets = result.m, result.n, (result.first, result.second)
    work = Sm90Product(k, config, features, (a_map, b_map), Extents(m, n, k_tiles, tiles_per_split, tiles))
    work.load()
    with consumer(k, config.consumers):
        # Exponentials take about as long as the products of 256 of K: both consumers' would fall into one time.
        whole_turns = (k_tiles > 1) & (k_tiles <= 4) if op == "logsumexp" else None
        work.prepare(computes=True, whole_turns=whole_turns)
        values = RowValues.of(k, Reduction(op), config.dtype, features, result)

        def finish(tile: ResultTile) -> None:
            at_tile = k.mul_wide(tile.col // config.tile_n, m)
            for sums in work.sums(tile):
                found = values.states(sums.fragment, tile.col, sums.part)
                for row, state in found.rows(sums.part):
                    with k.when(found.first_lane & (sums.row + row < m)):
                        at = at_tile + k.mul_wide(sums.row + row, 1)
                        for target, x in zip(targets, state, strict=False):
                            (target + at).store(x, dtype=x.dtype)

        work.each_tile(finish)
