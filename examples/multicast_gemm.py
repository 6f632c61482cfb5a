"""A·Bᵀ on Hopper with clusters of two CTAs: both need the same tile of B, and each loads half of it for both.

    warploom check examples/multicast_gemm.py

One warp loads, four multiply. A stage of the ring is full when the CTA's own tile of A and both halves of B have
arrived. It is empty when the consumers of *both* CTAs have read it, because the next half of B overwrites it in both.
"""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from warploom.lang import Global, Kernel, Launch, TensorMap, bf16, f32, kernel, u32
from warploom.layout import SharedLayout, Swizzle
from warploom.layout.tensor_map import TensorMapSpec

CLUSTER = 2
TILE_M, TILE_N, TILE_K = 64, 128, 64  # of one CTA; a row of TILE_K elements fills a swizzled row of 128 bytes
HALF_N = TILE_N // CLUSTER
ROW_BYTES = 2 * TILE_K


@kernel(threads=160, requires="sm_90a", cluster=CLUSTER)
def multicast_gemm(
    k: Kernel, a_map: TensorMap, b_map: TensorMap, out: Global[f32], columns: u32, steps: u32, *, stages: int = 2
) -> None:
    """out[m, n] = A[m, 64·steps] · B[n, 64·steps]ᵀ in f32, rows of ``columns`` = n; grid (m / 64, n / 128)."""
    a_tile = k.shared(bf16, (TILE_M, TILE_K), swizzle="auto", stages=stages)
    b_tile = k.shared(bf16, (TILE_N, TILE_K), swizzle="auto", stages=stages)
    full = k.mbarriers(stages)
    empty = k.mbarriers(stages)
    with k.when(k.thread == 0):
        full.init(1)
        empty.init(4 * CLUSTER)  # an arrival of each consumer warp of each CTA
        k.mbarrier_fence()
    k.cluster_sync()  # from here on every CTA's mbarriers may be arrived at
    row, col = k.cta_x * TILE_M, k.cta_y * TILE_N
    with k.warps(0, 4):
        ring = k.ring(stages, "use")
        product = k.warpgroup_accumulator(TILE_N, "product")
        with k.loop(steps) as step:
            full.wait(ring.phase, ring.stage)
            k.wgmma_fence()
            for depth in range(0, TILE_K, 16):
                a = k.wgmma_operand(a_tile.stage(ring.stage), col=depth)
                b = k.wgmma_operand(b_tile.stage(ring.stage), col=depth)
                k.wgmma(product, a, b, accumulate=True if depth else step != 0)
            k.wgmma_commit()
            k.wgmma_wait(0, product)
            empty.arrive_cluster(ring.stage)
            ring.advance()
        product.store_global(out + (row * columns + col), columns)
    with k.warps(4, 5):
        ring = k.ring(stages, "load", phase=1)
        mine = k.cluster_rank * HALF_N  # this CTA's half of B's tile
        leader = k.elect()
        with k.loop(steps) as step:
            empty.wait(ring.phase, ring.stage)
            full.expect(a_tile.layout.bytes + b_tile.layout.bytes, ring.stage, when=leader)
            a, b = a_tile.stage(ring.stage), b_tile.stage(ring.stage)
            k.tma_load(a, a_map, (step * TILE_K, row), full, ring.stage, when=leader)
            at = (step * TILE_K, col + mine)
            k.tma_load(b, b_map, at, full, ring.stage, when=leader, offset=mine * ROW_BYTES, multicast=0b11)
            ring.advance()
    k.cluster_sync()  # the last arrivals at this CTA's mbarriers must find them


def tensor_maps(a: Any, b: Any) -> tuple[TensorMapSpec, TensorMapSpec]:
    """How the TMA sees both operands, contiguous matrices: a box fills the tile of A, or half of B's."""
    maps = [
        SharedLayout(rows, TILE_K, 2, Swizzle.for_row_bytes(ROW_BYTES)).tensor_map(
            bf16, (x.shape[1], x.shape[0]), (2 * x.shape[1],)
        )
        for x, rows in ((a, TILE_M), (b, HALF_N))
    ]
    return maps[0], maps[1]


@multicast_gemm.example
def example(numbers: np.random.Generator) -> Launch:
    """Four steps, so that each of the two stages is used twice; two clusters along M."""
    m, n, depth = 4 * TILE_M, TILE_N, 4 * TILE_K
    a, b = (numbers.standard_normal((rows, depth)).astype(ml_dtypes.bfloat16) for rows in (m, n))
    out = np.full((m, n), np.nan, np.float32)
    a_map, b_map = tensor_maps(a, b)
    grid = (m // TILE_M, n // TILE_N)
    exact = a.astype(np.float64) @ b.astype(np.float64).T
    return Launch(grid, [(a, a_map), (b, b_map), out, n, depth // TILE_K], expect={"out": (exact, 1e-3)})
