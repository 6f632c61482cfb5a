# pyright: reportInvalidTypeForm=false
"""What follows a product whose tiles were reduced: states merged in the order of the columns."""

from __future__ import annotations

from warploom.core.dtypes import f32, u32
from warploom.kernels.matmul_reduce.states import MERGE_ROWS, MERGE_WARPS, ReduceOp, Reduction
from warploom.lang import Global, Kernel, Traced, kernel
from warploom.lang.reducers import State

AHEAD = 8
"""States that are loaded before they are merged: they come from memory, one tile after another."""


@kernel(threads=32 * MERGE_WARPS, drop_unused=True)
def merge_tiles(
    k: Kernel,
    first: Global[u32],
    second: Global[u32],
    out: Global[f32],
    index: Global[u32],
    m: u32,
    tiles: u32,
    *,
    op: ReduceOp,
    with_index: bool = False,
) -> None:
    """A lane a row merges the states of a warp's share of the tiles, and warp 0 those of the shares; grid ⌈m / 32⌉.

    ``out`` f32 (m): the results; ``index`` (m): the columns of the maxima.
    """
    reduction = Reduction(op)
    row = k.cta_x * MERGE_ROWS + k.lane
    parts = range(len(reduction.types))
    shares = k.shared(f32, (len(parts) * MERGE_WARPS, MERGE_ROWS))
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

    with k.when(row < m):
        share = (tiles + (MERGE_WARPS - 1)) // MERGE_WARPS
        begin = k.minimum(k.warp * share, tiles)
        end = k.minimum(begin + share, tiles)
        whole = begin + (end - begin) // AHEAD * AHEAD
        with k.loop(whole, start=begin, step=AHEAD) as tile:
            fold([load(tile + i) for i in range(AHEAD)])
        with k.loop(end, start=whole) as tile:
            fold([load(tile)])
        for part in parts:
            shares.store(kept[part], k.warp + part * MERGE_WARPS, k.lane, dtype=reduction.types[part])
    k.syncthreads()
    with k.when((k.warp == 0) & (row < m)):
        fold(
            [
                tuple(shares.load(warp + part * MERGE_WARPS, k.lane, dtype=reduction.types[part]) for part in parts)
                for warp in range(1, MERGE_WARPS)
            ]
        )
        state = tuple(x.get() for x in kept)
        out.store(reduction.result(k, state), row)
        if with_index:
            index.store(state[1], row)
