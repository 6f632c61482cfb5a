"""Algorithm 4: attention over one 16×16 tile, its softmax in registers alone. Check it: warploom check fused_softmax.py

The two kernels differ in where they divide by the running sum: in every tile, with the members of each quad in the
shuffles' masks, as the paper has it; or once at the end, as FlashAttention does. The code they share is
``warploom.kernels.reduce.softmax_tile``.
"""

# pyright: reportInvalidTypeForm=false
import numpy as np

from warploom.kernels.reduce.reference import softmax_reference
from warploom.kernels.reduce.softmax_tile import SoftmaxTileConfig, softmax_tile
from warploom.lang import Global, Kernel, Launch, bf16, f32, kernel, u16, u32

BLOCKS = 4


@kernel(threads=32)
def normalised_in_every_tile(
    k: Kernel, q: Global[u16], keys: Global[u16], values: Global[u16],
    out: Global[f32], maxima: Global[f32], sums: Global[f32], blocks: u32,
) -> None:  # fmt: skip
    config = SoftmaxTileConfig(normalise="tile", member_mask="quad")
    softmax_tile.function(k, q, keys, values, out, maxima, sums, blocks, config=config)


@kernel(threads=32)
def normalised_at_the_end(
    k: Kernel, q: Global[u16], keys: Global[u16], values: Global[u16],
    out: Global[f32], maxima: Global[f32], sums: Global[f32], blocks: u32,
) -> None:  # fmt: skip
    config = SoftmaxTileConfig(normalise="end", member_mask="full")
    softmax_tile.function(k, q, keys, values, out, maxima, sums, blocks, config=config)


@normalised_in_every_tile.example
@normalised_at_the_end.example
def random_tiles(rng: np.random.Generator) -> Launch:
    q, keys, values = (rng.standard_normal((n, 16)).astype(bf16.numpy) for n in (16, 16 * BLOCKS, 16 * BLOCKS))
    results = [np.full(shape, np.nan, np.float32) for shape in ((16, 16), (16,), (16,))]
    right = softmax_reference(q, keys, values)
    rounding = 1.25 * 2.0**-9 * float(np.abs(values.astype(np.float64)).max())  # of P to bf16, then sums in f32
    expect = {"out": (right.output, rounding), "maxima": (right.maximum, 1e-5), "sums": (right.total, 1e-4)}
    return Launch(1, [*(x.view(np.uint16) for x in (q, keys, values)), *results, BLOCKS], expect)
