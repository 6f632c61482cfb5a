"""The largest element of each row of A·B, both 16×16: one warp, one kernel. Check it: warploom check rowmax.py"""

import numpy as np

from warploom.lang import Global, Kernel, Launch, bf16, f32, kernel
from warploom.layout import mma_fragment, reduction_plan

A, B, C = (mma_fragment("m16n8k16", operand) for operand in "ABC")
PRODUCT = C.tile(1, 2)  # two m16n8 accumulators side by side: 16×16
PLAN = reduction_plan(PRODUCT, "col")


@kernel(threads=32)
def matmul_rowmax(k: Kernel, a: Global[bf16], b: Global[bf16], out: Global[f32]) -> None:
    a_tile = k.shared(bf16, (16, 16), name="a_tile", swizzle="auto")
    b_tile = k.shared(bf16, (16, 16), name="b_tile", swizzle="auto")
    row, col = k.lane // 2, k.lane % 2 * 8  # each lane copies 16 bytes: half a row
    for tile, source in ((a_tile, a), (b_tile, b)):
        k.cp_async(tile.address(row, col), source + (row * 16 + col))
    k.commit_group()
    k.wait_group(0)  # this lane's copies have arrived ...
    k.syncwarp()  # ... and now every lane's have, for every lane
    a_fragment = k.load_fragment(a_tile, A)
    product = k.accumulator(PRODUCT)
    for j in range(2):
        b_fragment = k.load_fragment(b_tile, B, col=8 * j)
        half = product.mutable_atom(0, j)
        k.mma(a_fragment.registers, b_fragment.registers, half, into=half)
    row_max = product.reduce("max", "col")
    with k.when((k.lane & sum(PLAN.lane_masks)) == 0):  # the first of the lanes that share a row
        for group, largest in enumerate(row_max):
            out.store(largest, PLAN.result_coordinate(group, k.lane))


@matmul_rowmax.example
def random_matrices(rng: np.random.Generator) -> Launch:
    a, b = (rng.standard_normal((16, 16)).astype(bf16.numpy) for _ in range(2))
    expected = (a.astype(np.float64) @ b.astype(np.float64)).max(axis=1)
    return Launch(grid=1, arguments=[a, b, np.full(16, np.nan, np.float32)], expect={"out": (expected, 1e-4)})


if __name__ == "__main__":
    from warploom.emulate import emulate

    launch = random_matrices(np.random.default_rng(0))
    emulate(matmul_rowmax.trace(), launch.grid, launch.arguments).raise_if_found()
    (expected, _), found = launch.expect["out"], launch.arguments[2]
    print("the largest element of each row:", found.round(2))
    print(f"largest error: {np.abs(found - expected).max():.1e}")
