# pyright: reportInvalidTypeForm=false
"""Row reductions of a product that is never written: the GEMM generator's main loop, then in-register reductions.

Each CTA reduces its tile's columns to one state per row and writes that; a second kernel merges the tiles' states in
the order of their columns.
"""

from __future__ import annotations

from warploom.core.dtypes import DType, f32, u16, u32
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.features import GemmFeatures
from warploom.kernels.gemm.forward import Gemm
from warploom.kernels.gemm.operand import Side
from warploom.kernels.reduce.rows import RowValues
from warploom.kernels.reduce.states import DOT_WARPS, MERGE_THREADS, ReduceOp, Reduction
from warploom.lang import Fragment, Global, GlobalPointer, Kernel, Traced, kernel
from warploom.lang.reducers import State

AHEAD = 8
"""States that the merging kernel loads before it merges them: they come from memory, one tile after another."""


@kernel(threads=lambda config, **_: config.threads, drop_unused=True)
def reduce_tiles(
    k: Kernel,
    a: Global[u16],
    b: Global[u16],
    first: Global[u32],
    second: Global[u32],
    bias: Global[u16],
    m: u32, n: u32, depth: u32, a_stride: u32, b_stride: u32, k_tiles: u32, tiles_per_split: u32, alpha: u32,
    *,
    config: GemmConfig,
    features: GemmFeatures,
    op: ReduceOp,
) -> None:  # fmt: skip
    """For each tile along N, the state of every row of alpha · A·B + bias over the tile's columns.

    Operands and grid as for the GEMM kernel, without batches and split K. ``first`` and ``second`` receive the parts
    of the states (32 bits each), (tiles along N, m).
    """
    config.require(a_k_contiguous=features.a.k_contiguous, b_k_contiguous=features.b.k_contiguous)
    work = Gemm(k, config, features)
    work.locate(m, n, k_tiles, tiles_per_split)
    work.prepare()
    work.aim((a, b), (a_stride, b_stride), (m, n, depth))
    scale = k.bitcast(alpha, f32) if features.epilogue.scaled else None
    added = bias if features.epilogue.bias else None
    values = RowValues(k, Reduction(op), config.dtype, n, scale, added, features.ragged_n)
    rows = TileRows(k, config, values, work, m)
    rows.reduce(work.multiply())
    rows.store((first, second))


class TileRows:
    """The states of a tile's rows: from the accumulators to one per row of the CTA."""

    def __init__(self, k: Kernel, config: GemmConfig, values: RowValues, work: Gemm, m: Traced) -> None:
        self._k, self._config, self._values, self._work, self._m = k, config, values, work, m
        self._reduction = values.reduction
        self._warp_row = Side("A", config).warp_index(k) * config.warp_m
        self._warp_n = Side("B", config).warp_index(k)
        # The stages are not read any more: the states of the warps lie over them.
        parts = len(self._reduction.types) * config.warps_n
        self._states = k.shared(f32, (parts, config.tile_m), name="row_states", alias=work.a.tile)

    def reduce(self, accumulator: Fragment) -> None:
        """Each warp's rows, reduced within the warp and left in shared memory."""
        k, c = self._k, self._config
        found = self._values.states(accumulator, self._warp_n * c.warp_n + self._work.first[1])
        with k.when(found.first_lane):
            for row, state in found.rows():
                for part, x in enumerate(state):
                    at = self._warp_n + part * c.warps_n
                    self._states.store(x, at, row + self._warp_row, dtype=x.dtype)
        k.syncthreads()  # a row's states come from all warps along N

    def store(self, targets: tuple[GlobalPointer, GlobalPointer]) -> None:
        """Merge the warps' states in the order of their columns; one thread a row writes them out."""
        k, c = self._k, self._config
        tile_col = self._work.first[1] // c.tile_n
        for start in range(0, c.tile_m, c.threads):
            local = k.thread + start
            row = local + self._work.first[0]
            exists = row < self._m
            if c.tile_m < start + c.threads:
                exists = exists & (local < c.tile_m)
            with k.when(exists):
                state = self._load(0, local)
                for warp in range(1, c.warps_n):
                    state = self._reduction.merge(k, state, self._load(warp, local))
                at = k.mul_wide(tile_col, self._m) + k.mul_wide(row, 1)
                for target, x in zip(targets, state, strict=False):
                    (target + at).store(x, dtype=x.dtype)

    def _load(self, warp: int, row: Traced) -> State:
        types, warps = self._reduction.types, self._config.warps_n
        return tuple(self._states.load(warp + i * warps, row, dtype=t)[0] for i, t in enumerate(types))


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
