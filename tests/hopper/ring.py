"""A two-role TMA ring with a 176-wide wgmma: the smallest kernel that needs everything Hopper adds to the core."""

# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from warploom.lang import Global, Kernel, TensorMap, bf16, f32, kernel
from warploom.layout.wgmma import MatrixDescriptor

TILE_M, TILE_N, TILE_K = 64, 176, 64
ROW_BYTES = 128  # one swizzled row: TILE_K elements of 16 bits


@kernel(threads=256, requires="sm_90a")
def ring_matmul(
    k: Kernel, a_map: TensorMap, b_map: TensorMap, out: Global[f32], *, steps: int, stages: int = 2
) -> None:
    """out[64, 176] = A[64, 64·steps] · B[176, 64·steps]ᵀ: warps 0–3 load, warps 4–7 multiply."""
    a_tile = k.shared(bf16, (TILE_M, TILE_K), name="a_tile", swizzle="auto", stages=stages)
    b_tile = k.shared(bf16, (TILE_N, TILE_K), name="b_tile", swizzle="auto", stages=stages)
    full = k.mbarriers(stages, "full")
    free = k.mbarriers(stages, "free")
    leader = k.thread == 0
    with k.when(leader):
        full.init(1)
        free.init(4)  # one arrival per consumer warp
        k.mbarrier_fence()
    k.syncthreads()
    with k.warps(0, 4, registers=40):
        ring = k.ring(stages, "load", phase=1)
        with k.when(k.warp == 0), k.loop(steps) as step:  # other warps could fall behind by a phase
            free.wait(ring.phase, ring.stage)
            full.expect(a_tile.layout.bytes + b_tile.layout.bytes, ring.stage, when=leader)
            for tile, tensor_map in ((a_tile, a_map), (b_tile, b_map)):
                k.tma_load(tile.stage(ring.stage), tensor_map, (step * TILE_K, 0), full, ring.stage, when=leader)
            ring.advance()
    with k.warps(4, 8, registers=232):
        ring = k.ring(stages, "use")
        shape = MatrixDescriptor(ROW_BYTES, stride=8 * ROW_BYTES)
        product = k.warpgroup_accumulator(TILE_N, "product")
        with k.loop(steps) as step:
            full.wait(ring.phase, ring.stage)
            k.wgmma_fence()
            for depth in range(0, TILE_K, 16):
                a = k.descriptor(a_tile.stage(ring.stage).at(2 * depth), shape)
                b = k.descriptor(b_tile.stage(ring.stage).at(2 * depth), shape)
                k.wgmma(product, a, b, accumulate=True if depth else step != 0)
            k.wgmma_commit()
            k.wgmma_wait(0, product)
            free.arrive(ring.stage, when=k.lane == 0)
            ring.advance()
        product.store_global(out, TILE_N)
