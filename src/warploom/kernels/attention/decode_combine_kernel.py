# pyright: reportInvalidTypeForm=false
"""What the pieces of a tile's keys come to: the second kernel of attention with few queries."""

from __future__ import annotations

from dataclasses import replace

from warploom.core.dtypes import f32, s32, u16, u32
from warploom.kernels.attention.decode import COMBINE_THREADS, CacheForm, Decode
from warploom.kernels.attention.decode_rows import Begun, Lengths, Parts, Results, Rows, Scales, TileNumbers, spans
from warploom.kernels.attention.features import AttentionFeatures
from warploom.lang import Global, Kernel, Traced, kernel
from warploom.tile.merge import anchor, inverse, logarithm, weight
from warploom.tile.shares import Place, ceiling

WARPS = COMBINE_THREADS // 32
QUAD = 4
AT_ONCE = 2
"""Parts that a warp has loads of under way."""


@kernel(threads=COMBINE_THREADS, drop_unused=True)
def attention_decode_combine(
    k: Kernel,
    lengths: Global[s32],
    starts: Global[s32],
    parts: Global[f32],
    logs: Global[f32],
    begun: Global[u32],
    v_scale: Global[f32],
    sinks: Global[f32],
    out: Global[u16],
    lse: Global[f32],
    o_batch: u32, o_head: u32, o_row: u32,
    lse_batch: u32, lse_head: u32,
    v_scale_batch: u32, v_scale_head: u32,
    batch: u32, kv_heads: u32, q_len: u32, capacity: u32,
    split: u32, pieces: u32,
    *,
    config: Decode,
    features: AttentionFeatures,
    form: CacheForm,
) -> None:  # fmt: skip
    """O from the parts that :func:`attention_decode` left, always in the order of the keys.

    Grid: along y the rows of a tile, along x the CTAs of the first kernel: each may have begun one tile that others
    ended. With a given split tiles along x.
    """
    c, f, row = config, features, k.cta_y
    given = Lengths(k, lengths if form.lengths else None, starts if form.packed else None, q_len, capacity)
    span = spans(given, c, f)
    results = Results(
        k, c.dtype, out, (o_batch, o_head, o_row), lse if f.lse else None, (lse_batch, lse_head, k.value(1, u32)),
        sinks if f.sinks else None, Scales(k, v_scale, v_scale_batch, v_scale_head) if form.scaled else None,
    )  # fmt: skip

    def combine(rows: Rows, first: Traced, then: Traced, stride: int, count: Traced) -> None:
        """Parts ``first``, ``then``, ``then + stride`` …, so many."""
        with k.when(rows.exists(row), uniform=True):
            Combination(k, c, Parts(c, parts, logs), row, (first, then, stride)).store(count, rows, results)

    def wait() -> None:
        if c.overlap:
            k.await_launch_before()

    if form.split:
        wait()
        head, number = k.cta_x % kv_heads, k.cta_x // kv_heads
        sequence, at, tile = TileNumbers(given, span, batch, f.group, c.tile_m).find(number)
        found = Place(sequence, at, head, tile, at.begin, at.begin)
        count = ceiling(at.blocks, split)
        with k.when((count > 1) & (tile < at.tiles), uniform=True):
            first = k.cta_x * pieces
            combine(Rows.at(k, found, f.group, c.tile_m), first, first + 1, 1, count)
        return
    wait()
    count = Begun(k, begun).count(k.cta_x)
    with k.when(count != 0, uniform=True):
        own, sequence, head, tile = Begun(k, begun).tile(k.cta_x)
        rows = Rows(k, sequence, span(sequence), head, tile, f.group, c.tile_m)
        combine(rows, k.cta_x * 2 + own, k.cta_x * 2 + 2, 2, count)


attention_decode_combine_sm90 = replace(
    attention_decode_combine, name="attention_decode_combine_sm90", requires="sm_90"
)
"""The same where it begins while the first kernel ends."""


class Combination:
    """The parts of one row: their weights by the log-sum-exps, then their sum, a warp every so-many-th part.

    ``slots``: of the first part, of the second, and from there on from one to the next.
    """

    def __init__(self, k: Kernel, config: Decode, parts: Parts, row: Traced, slots: tuple[Traced, Traced, int]) -> None:
        self._k, self._config, self._parts, self._row, self._slots = k, config, parts, row, slots
        self._quads = -(-config.head_dim // (32 * QUAD))
        self._sums = k.shared(f32, (WARPS, 32 * QUAD * self._quads), name="sums")

    def _slot(self, part: Traced) -> Traced:
        first, then, stride = self._slots
        return self._k.select(part == 0, first, then + (part - 1) * stride)

    def _log(self, part: Traced) -> Traced:
        return self._parts.log(self._k, self._slot(part), self._row).load()[0]

    def store(self, count: Traced, rows: Rows, results: Results) -> None:
        """Sum so many parts and store the row."""
        k, d = self._k, self._config.head_dim
        top, total = self._weigh(count)
        at, factor = anchor(k, top), inverse(k, total)
        sums = [k.registers(f32, QUAD, 0.0) for _ in range(self._quads)]
        with k.loop(count, k.warp * AT_ONCE, WARPS * AT_ONCE) as first:
            for part in [first + i for i in range(AT_ONCE)]:
                known = k.minimum(part, count - 1)
                counts = k.select(part < count, weight(k, self._log(known), at) * factor, k.value(0.0, f32))
                source = self._parts.output(k, self._slot(known), self._row)
                for number, quad in enumerate(sums):
                    col = (k.lane + 32 * number) * QUAD
                    with k.when(col < d):
                        for x, y in zip(quad, source.load(col, QUAD), strict=True):
                            x.set(k.fma(y, counts, x))
        for number, quad in enumerate(sums):
            col = (k.lane + 32 * number) * QUAD
            with k.when(col < d):
                self._sums.store([x.get() for x in quad], k.warp, col)
        k.syncthreads()
        own, log = results.counted(rows, self._row, logarithm(k, top, total))
        with k.when(k.thread < d // 2):
            col = k.thread * 2
            found = self._sums.load(0, col, 2)
            for warp in range(1, WARPS):
                found = [x + y for x, y in zip(found, self._sums.load(warp, col, 2), strict=True)]
            results.store(rows, self._row, col, found, own)
        with k.when(k.thread == 0):
            results.store_log(rows, self._row, log)

    def _weigh(self, count: Traced) -> tuple[Traced, Traced]:
        """The largest log-sum-exp, and the sum of all weights; every warp finds them for itself."""
        k = self._k
        top, total = k.register(f32, -float("inf"), "top"), k.register(f32, 0.0, "total")
        with k.loop(count, k.lane, 32) as part:
            top.set(k.maximum(top, self._log(part)))
        for distance in (16, 8, 4, 2, 1):
            top.set(k.maximum(top, k.shfl_xor(top.get(), distance)))
        at = anchor(k, top.get())
        with k.loop(count, k.lane, 32) as part:
            total += weight(k, self._log(part), at)
        for distance in (16, 8, 4, 2, 1):
            total += k.shfl_xor(total.get(), distance)
        return top.get(), total.get()
