"""C = A·B with mma.sync: four warps, each with its part of the tile, fed by two stages of cp.async.

    warploom check examples/warp_gemm.py

Between rowmax.py (one warp) and wgmma_pipeline.py (Hopper's units): a GEMM's inner loop on every GPU from sm_80 on.
"""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

import numpy as np

from warploom.lang import Global, GlobalPointer, Kernel, Launch, SharedTile, Traced, bf16, f32, kernel, u32
from warploom.layout import mma_fragment

M, N, DEPTH = 64, 64, 32  # a CTA's tile of C, and the columns of A in a stage
A, B, C = (mma_fragment("m16n8k16", operand) for operand in "ABC")
PART = C.tile(2, 4)  # of a warp: 32×32, as 2×4 accumulators


@kernel(threads=128)
def product(k: Kernel, a: Global[bf16], b: Global[bf16], c: Global[f32], n: u32, depth: u32) -> None:
    """Row-major C[64·grid_y, n] = A[64·grid_y, depth] · B[depth, n]; n = 64·grid_x, depth a multiple of 32."""
    a_tile = k.shared(bf16, (M, DEPTH), swizzle="auto", stages=2)
    b_tile = k.shared(bf16, (DEPTH, N), swizzle="auto", stages=2)
    a_rows, b_cols = a + k.cta_y * M * depth, b + k.cta_x * N  # this CTA's
    warp_row, warp_col = k.warp // 2 * 32, k.warp % 2 * 32

    def load(step: Traced) -> None:
        copy(k, a_tile.stage(step & 1), a_rows + step * DEPTH, depth)
        copy(k, b_tile.stage(step & 1), b_cols + step * DEPTH * n, n)

    reader = k.reader(a_tile, A, row=warp_row)  # of the warp's rows: addresses are formed here, once
    reader.prepare((0, inner) for inner in range(0, DEPTH, 16))
    part = k.accumulator(PART)
    load(k.value(0, u32))
    k.commit_group()
    with k.loop(depth // DEPTH) as step:
        with k.when(step + 1 < depth // DEPTH, uniform=True):
            load(step + 1)
        k.commit_group()  # empty in the last round, so that the count below holds
        k.wait_group(1)  # all but the newest: this thread's part of this stage is here ...
        k.syncthreads()  # ... and everybody's, for everybody
        rows, b_stage = reader.staged(step & 1), b_tile.stage(step & 1)
        for inner in range(0, DEPTH, 16):
            a_parts = [rows.load(16 * i, inner) for i in range(2)]
            for j in range(4):
                b_part = k.load_fragment(b_stage, B, inner, warp_col + 8 * j).registers
                for i in range(2):
                    k.mma(a_parts[i], b_part, part.mutable_atom(i, j), into=part.mutable_atom(i, j))
        k.syncthreads()  # the stage has been read: the next round fills it again
    part.store_global(c + (k.cta_y * M + warp_row) * n + (k.cta_x * N + warp_col), n)


def copy(k: Kernel, tile: SharedTile, source: GlobalPointer, stride: u32) -> None:
    """The 128 threads copy a tile from rows ``stride`` apart, 16 bytes at a time."""
    rows, cols = tile.layout.rows, tile.layout.cols
    for first in range(0, rows * cols // 8, 128):
        chunk = first + k.thread
        row, col = chunk // (cols // 8), chunk % (cols // 8) * 8
        k.cp_async(tile.address(row, col), source + (row * stride + col))


@product.example
def random_matrices(rng: np.random.Generator) -> Launch:
    m, n, depth = 128, 128, 160
    a, b = rng.standard_normal((m, depth)).astype(bf16.numpy), rng.standard_normal((depth, n)).astype(bf16.numpy)
    expected = a.astype(np.float64) @ b.astype(np.float64)
    out = np.full((m, n), np.nan, np.float32)
    return Launch((n // N, m // M), [a, b, out, n, depth], expect={"c": (expected, 1e-3)})
