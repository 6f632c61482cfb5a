"""A·Bᵀ on Hopper as one CTA: a warp loads by TMA, a warpgroup multiplies by wgmma, and the TMA stores the result.

    warploom check examples/wgmma_pipeline.py

The smallest kernel that synchronises every asynchronous unit. Six of its lines only synchronise.
"""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

import ml_dtypes
import numpy as np

from warploom.lang import Kernel, Launch, TensorMap, bf16, kernel, u32
from warploom.layout.tensor_map import TensorMapSpec
from warploom.layout.wgmma import MatrixDescriptor

TILE = 64  # rows of A, rows of B, and depth of a step: 64 elements of 16 bits fill a swizzled row of 128 bytes
ROW_BYTES = 2 * TILE


@kernel(threads=160, requires="sm_90a")
def product(k: Kernel, a_map: TensorMap, b_map: TensorMap, c_map: TensorMap, steps: u32, *, stages: int = 2) -> None:
    """C[64, 64] = A[64, 64·steps] · B[64, 64·steps]ᵀ, all bf16."""
    a_tile = k.shared(bf16, (TILE, TILE), name="a_tile", swizzle="auto", stages=stages)
    b_tile = k.shared(bf16, (TILE, TILE), name="b_tile", swizzle="auto", stages=stages)
    c_tile = k.shared(bf16, (TILE, TILE), name="c_tile", swizzle="auto")
    full, empty = k.mbarriers(stages, "full"), k.mbarriers(stages, "empty")
    with k.when(k.thread == 0):
        full.init(1)
        empty.init(4)  # one arrival of each warp that multiplies
        k.mbarrier_fence()
    k.syncthreads()
    with k.warps(0, 4):
        ring = k.ring(stages, "use")
        operand = MatrixDescriptor(ROW_BYTES, stride=8 * ROW_BYTES)
        c = k.warpgroup_accumulator(TILE, "c")
        with k.loop(steps) as step:
            full.wait(ring.phase, ring.stage)
            k.wgmma_fence()
            for depth in range(0, TILE, 16):
                a, b = (k.descriptor(t.stage(ring.stage).at(2 * depth), operand) for t in (a_tile, b_tile))
                k.wgmma(c, a, b, accumulate=True if depth else step != 0)
            k.wgmma_commit()
            k.wgmma_wait(0, c)
            empty.arrive(ring.stage, when=k.lane == 0)
            ring.advance()
        for pair, value in enumerate(c.packed(bf16).registers):
            row, col = c.layout.coordinates(k.lane, 2 * pair, k.warp)
            c_tile.store(value, row, col, dtype=u32)  # two neighbours of a row in one register
        k.fence_async()
        k.bar_sync(1, 128)
        k.tma_store(c_map, (0, 0), c_tile, when=k.thread == 0)
        k.commit_bulk()
        k.wait_bulk(0)
    with k.warps(4, 5):
        ring, leader = k.ring(stages, "load", phase=1), k.elect()
        with k.loop(steps) as step:
            empty.wait(ring.phase, ring.stage)
            full.expect(a_tile.layout.bytes + b_tile.layout.bytes, ring.stage, when=leader)
            for tile, tensor_map in ((a_tile, a_map), (b_tile, b_map)):
                k.tma_load(tile.stage(ring.stage), tensor_map, (step * TILE, 0), full, ring.stage, when=leader)
            ring.advance()


@product.example
def example(numbers: np.random.Generator) -> Launch:
    """Five steps, so that each of the two stages is used again."""
    a, b = (numbers.standard_normal((TILE, 5 * TILE)).astype(ml_dtypes.bfloat16) for _ in range(2))
    c = np.zeros((TILE, TILE), ml_dtypes.bfloat16)
    maps = [(x, TensorMapSpec(bf16, x.shape[::-1], x.strides[:1], (TILE, TILE), ROW_BYTES)) for x in (a, b, c)]
    return Launch(
        1, [*maps, 5], expect={"c_map": (a.astype(np.float64) @ b.astype(np.float64).T, 0.25)}
    )  # half a unit of bf16 at 64
