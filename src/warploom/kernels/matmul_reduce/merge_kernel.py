# pyright: reportInvalidTypeForm=false
"""What follows a product whose tiles were reduced: states merged in the order of the columns."""

from __future__ import annotations

from warploom.core.dtypes import f32, u32
from warploom.kernels.matmul_reduce.states import MERGE_THREADS, ReduceOp, Reduction
from warploom.lang import Global, Kernel, Traced, kernel
from warploom.lang.reducers import State

AHEAD = 8
"""States that are loaded before they are merged: they come from memory, one tile after another."""


@kernel(threads=MERGE_THREADS, drop_unused=True)
def merge_tiles(
    k: Kernel,
    first: Global[u32],
    second: Global[u32],
    out: Global[f32],
    index: Global[u32],
    m: u32, tiles: u32,
    *,
    op: ReduceOp,
    with_index: bool = False,
) -> None:  # fmt: skip
    """One thread a row merges the states of all tiles, in order; grid ⌈m / 64⌉.

    ``out`` f32 (m): the results; ``index`` (m): the columns of the maxima.
    """
    reduction = Reduction(op)
    row = k.cta_x * MERGE_THREADS + k.thread
    with k.when(row < m):
        kept = [k.register(t, x) for t, x in zip(reduction.types, reduction.neutral, strict=True)]

        def load(tile: Traced) -> State:
            at = k.mul_wide(tile, m) + k.mul_wide(row, 1)
            return tuple((p + at).load(dtype=t) for p, t in zip((first, second), reduction.types, strict=False))

        def fold(states: list[State]) -> None:
            state: State = tuple(x.get() for x in kept)
            for other in states:
                state = reduction.merge(k, state, other)
            for register, x in zip(kept, state, strict=True):
                register.set(x)

        whole = tiles // AHEAD * AHEAD
        with k.loop(whole, step=AHEAD) as tile:
            fold([load(tile + i) for i in range(AHEAD)])
        with k.loop(tiles, start=whole) as tile:
            fold([load(tile)])
        state = tuple(x.get() for x in kept)
        result = reduction.result(k, state)
        out.store(result, row)
        if with_index:
            index.store(state[1], row)
