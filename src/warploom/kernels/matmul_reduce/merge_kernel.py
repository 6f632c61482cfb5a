# pyright: reportInvalidTypeForm=false
"""What follows a product whose tiles were reduced: states merged in the order of the columns, and targets' logits."""

from __future__ import annotations

from warploom.core.dtypes import DType, f32, u16, u32
from warploom.kernels.matmul_reduce.states import DOT_WARPS, MERGE_THREADS, ReduceOp, Reduction
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
    subtracted: Global[f32],
    m: u32, tiles: u32,
    *,
    op: ReduceOp,
    with_index: bool = False,
    subtract: bool = False,
) -> None:  # fmt: skip
    """One thread a row merges the states of all tiles, in order; grid ⌈m / 64⌉.

    ``out`` f32 (m): the results; ``index`` (m): the columns of the maxima; ``subtract``: the result is
    ``subtracted`` - taken off (a target's logit).
    """
    reduction = Reduction(op)
    row = k.cta_x * MERGE_THREADS + k.thread
    with k.when(row < m):
        kept = [k.register(t, x) for t, x in zip(reduction.types, reduction.neutral, strict=True)]

        def load(tile: Traced) -> State:
            at = k.mul_wide(tile, m) + k.mul_wide(row, 1)
            return tuple((p + at).load(dtype=t)[0] for p, t in zip((first, second), reduction.types, strict=False))

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
        if subtract:
            result = result - subtracted.load(row)[0]
        out.store(result, row)
        if with_index:
            index.store(state[1], row)


@kernel(threads=32 * DOT_WARPS, drop_unused=True)
def target_logits(
    k: Kernel,
    x: Global[u16],
    w: Global[u16],
    target: Global[u32],
    out: Global[f32],
    m: u32, n: u32, depth: u32, x_stride: u32, w_stride: u32,
    *,
    dtype: DType,
    target_words: int,
) -> None:  # fmt: skip
    """out[i] = x[i] · w[target[i]]: one warp a row, grid ⌈m / 4⌉.

    ``x`` (m, depth) and ``w`` (n, depth) have contiguous rows at ``x_stride`` and ``w_stride`` elements; ``target``
    (m) has ``target_words`` 32-bit words each. A target outside 0 … n-1 gives NaN.
    """
    row = k.cta_x * DOT_WARPS + k.warp
    with k.when(row < m, uniform=True):
        chosen = target.load(row * target_words)[0]
        valid = chosen < n
        if target_words == 2:
            valid = valid & (target.load(row * target_words + 1)[0] == 0)
        safe = k.select(valid, chosen, k.value(0, u32))
        left, right = x + k.mul_wide(row, x_stride), w + k.mul_wide(safe, w_stride)
        total = k.register(f32, 0.0)
        with k.loop(depth, start=k.lane, step=32) as i:
            pair = [k.unpack((p + i).load()[0], dtype)[0] for p in (left, right)]
            total.set(k.fma(pair[0], pair[1], total.get()))
        k.syncwarp()
        value = total.get()
        for mask in (1, 2, 4, 8, 16):
            value = value + k.shfl_xor(value, mask)
        with k.when(k.lane == 0):
            out.store(k.select(valid, value, k.value(float("nan"), f32)), row)
