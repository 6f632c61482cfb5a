"""The online softmax by the maxima of the blocks before, and its row sums from a column of ones beside V.

    warploom check examples/softmax_tiles.py

The kernels of `warploom.attention` for Hopper have both; here a warp multiplies by `mma.sync`.
"""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

import numpy as np

from warploom.lang import Global, Kernel, Launch, bf16, f32, kernel, u32
from warploom.tile.copies import RowCopy, Rows
from warploom.tile.epilogue import OutputMatrix, Sums, store_registers
from warploom.tile.pipeline import operand_tile
from warploom.tile.product import MmaSync, load_left, zero
from warploom.tile.softmax import SUM_COLS, OnlineSoftmax, StaleSoftmax, nothing, put_ones

ROWS, KEYS, DIM, BLOCKS = 16, 32, 64, 4


@kernel(threads=32, requires="sm_90")
def by_old_maxima(k: Kernel, q: Global[bf16], key: Global[bf16], value: Global[bf16], out: Global[f32]) -> None:
    """O of 16 queries. Blocks whose scores outgrow the maxima so far are looked at once more."""
    q_tile, k_tile = (
        operand_tile(k, bf16, ROWS, DIM, name="Q"),
        operand_tile(k, bf16, KEYS, DIM, name="K", stages=BLOCKS),
    )
    v_tile = operand_tile(k, bf16, KEYS, DIM, name="V", stages=BLOCKS, spare_cols=SUM_COLS)
    RowCopy(k, q_tile, Rows(q, DIM), 32).load((0, 0))
    for tile, matrix in ((k_tile, key), (v_tile, value)):
        copy = RowCopy(k, tile, Rows(matrix, DIM, None, DIM), 32)
        for block in range(BLOCKS):
            copy.load((block * KEYS, 0), block)
    k.commit_group()
    put_ones(k, v_tile, DIM, bf16)
    k.wait_group(0)
    k.syncwarp()

    cores = MmaSync(k, bf16)
    s, o = cores.accumulator(ROWS, KEYS, "s"), cores.accumulator(ROWS, DIM + SUM_COLS, "o")
    held = k.registers(u32, DIM // 4, None, "q")
    load_left(k, held, q_tile, 0)  # once for all blocks
    scores, product = cores.product(s, held, k_tile), cores.product(o, s, v_tile, transposed_b=True)
    softmax = OnlineSoftmax(k, s, o, DIM**-0.5, bf16, column=True)
    stale = StaleSoftmax(k, softmax)

    def multiply(block: int) -> None:
        scores.start(held, k_tile.stage(block), zero=True)

    zero(o)
    multiply(0)
    softmax.first()
    for block in range(1, BLOCKS):
        product.start(cores.left(s), v_tile.stage(block - 1))
        multiply(block)
        rescale = stale.step(None, nothing, lambda block=block: multiply(block), nothing)
        rescale()  # O to the maxima of the block that comes next
    product.start(cores.left(s), v_tile.stage(BLOCKS - 1))
    softmax.keep()
    softmax.finish()
    none = k.value(0, u32)
    store_registers(Sums(k, o, none, none), OutputMatrix(k, out, DIM, f32, cols=k.value(DIM, u32)))


@by_old_maxima.example
def _(rng: np.random.Generator) -> Launch:
    q, key, value = (rng.standard_normal((n, DIM)).astype(np.float32) for n in (ROWS, BLOCKS * KEYS, BLOCKS * KEYS))
    key[2 * KEYS : 3 * KEYS] *= 32  # the third block outgrows the first two
    given = [x.astype(bf16.numpy) for x in (q, key, value)]
    q, key, value = (x.astype(np.float64) for x in given)
    s = q @ key.T / np.sqrt(DIM)
    p = np.exp(s - s.max(1, keepdims=True))
    expected = p / p.sum(1, keepdims=True) @ value
    return Launch(1, [*given, np.full((ROWS, DIM), np.nan, np.float32)], {"out": (expected, 0.01)})
