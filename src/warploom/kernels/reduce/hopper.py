# pyright: reportInvalidTypeForm=false
"""Row reductions of a product that is never written, on ``wgmma`` and TMA (sm_90a).

The producer and the consumers' main loop are the GEMM generator's. A warp holds its 16 rows over all of a tile's
columns, so that its states need no other warp: they go to memory from the registers, and the kernel that merges the
``mma.sync`` generator's tiles merges these.
"""

from __future__ import annotations

from warploom.core.dtypes import f32, u16, u32
from warploom.kernels.gemm.features import GemmFeatures
from warploom.kernels.gemm.hopper import each_tile
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.hopper_consumer import Consumer
from warploom.kernels.gemm.hopper_parts import Extents, Maps, Parts, Place, Producer, TileOrder
from warploom.kernels.reduce.rows import RowValues
from warploom.kernels.reduce.states import ReduceOp, Reduction
from warploom.kernels.specialised import WARPGROUP_ROWS
from warploom.lang import Global, Kernel, TensorMap, kernel


@kernel(
    threads=lambda config, **_: config.threads, cluster=lambda config, **_: config.cluster, requires="sm_90a",
    drop_unused=True,
)  # fmt: skip
def reduce_tiles_hopper(
    k: Kernel,
    a_map: TensorMap,
    b_map: TensorMap,
    first: Global[u32],
    second: Global[u32],
    bias: Global[u16],
    m: u32, n: u32, k_tiles: u32, tiles_per_split: u32, tiles: u32, alpha: u32,
    *,
    config: HopperGemmConfig,
    features: GemmFeatures,
    op: ReduceOp,
) -> None:  # fmt: skip
    """For each tile along N, the state of every row of alpha · A·B + bias over the tile's columns.

    Operands and grid as for the ``wgmma`` GEMM kernel, without batches and split K. ``first`` and ``second`` receive
    the parts of the states (32 bits each), (tiles along N, m).
    """
    config.require()
    parts = Parts(k, config, features)
    order = TileOrder(k, config, features, Extents(m, n, k_tiles, tiles_per_split, tiles))
    parts.initialise()
    with k.warps(0, 4, registers=config.producer_registers):
        Producer(k, config, features, Maps(a_map, b_map), parts, order).run()
    with k.warps(4, 4 * (config.consumers + 1), registers=config.consumer_registers):
        consumer = Consumer(k, config, features, parts, order)
        scale = k.bitcast(alpha, f32) if features.epilogue.scaled else None
        added = bias if features.epilogue.bias else None
        values = RowValues(k, Reduction(op), config.dtype, n, scale, added, features.ragged_n)

        def finish(place: Place) -> None:
            tile = k.mul_wide(place.col // config.tile_n, m)
            warp = k.warp & 3
            for i, block in enumerate(consumer.blocks):
                found = values.states(block, place.col, warp)
                top = place.row + consumer.first_row + i * WARPGROUP_ROWS
                for row, state in found.rows(warp):
                    with k.when(found.first_lane & (top + row < m)):
                        at = tile + k.mul_wide(top + row, 1)
                        for target, x in zip((first, second), state, strict=False):
                            (target + at).store(x, dtype=x.dtype)

        each_tile(k, config, order, consumer, finish)
    parts.leave()
