# pyright: reportInvalidTypeForm=false
"""What the pieces of a tile's keys come to: the second kernel of attention with few queries."""

from __future__ import annotations

from dataclasses import replace

from warploom.core.dtypes import f32, u32
from warploom.kernels.attention.decode import AT_ONCE, COMBINE_WARPS, GAP, CacheForm, Decode
from warploom.kernels.attention.device.decode import EarlyLengths
from warploom.kernels.attention.device.decode_rows import (
    CacheBatch,
    GroupRows,
    Lengths,
    PieceParts,
    ResultArrays,
    Results,
    TileNumbers,
    WorkSplit,
    spans,
)
from warploom.kernels.attention.problem import AttentionFeatures
from warploom.lang import Kernel, Mutable, Traced, kernel
from warploom.tile.merge import anchor, logarithm, weight
from warploom.tile.shares import BlockShares, ceiling
from warploom.tile.softmax import inverse_or_zero

QUAD = 4
THREADS, LENGTHS = 32 * COMBINE_WARPS, 4
"""Of a CTA, and lengths that each of them reads early."""


@kernel(threads=THREADS, drop_unused=True)
def attention_decode_combine(
    k: Kernel,
    batch: CacheBatch,
    parts: PieceParts,
    results: ResultArrays,
    split: WorkSplit,
    spread: u32,
    used: u32,
    by_tile: u32,
    *,
    config: Decode,
    features: AttentionFeatures,
    form: CacheForm,
) -> None:
    """O from the parts that :func:`attention_decode` left, always in the order of the keys.

    Grid: along x tiles or, without a given split or ``by_tile``, the CTAs of the first kernel, each of which begins one
    tile at most that others end. Along y the rows of a tile, of each of which 2^``spread`` warps put parts together: of
    each of its key heads the first ``used``.

    Lengths are final when this kernel begins: the first one lets it once it has waited for what writes them. So what
    there is to put together is found while the first one runs, and CTAs without any end then, but for one: the launch
    after this one waits for this one alone.
    """
    c, f = config, features
    early = EarlyLengths(k, batch.lengths, batch.size, THREADS, LENGTHS) if c.overlap and form.foretold else None
    if c.overlap:
        k.allow_next_launch()
    if early is not None:
        with k.when(early.few, uniform=True):
            early.read()
        with k.otherwise():
            k.await_launch_before()
    elif c.overlap:
        k.await_launch_before()
    given = Lengths(k, form, batch, batch.lengths.load if early is None else early.of)
    span, heads = spans(given, c, f), batch.kv_heads // c.heads
    if form.split:
        head, number = k.cta_x % heads, k.cta_x // heads
        sequence, at, tile = TileNumbers(given, span, f.group, c.tile_m).find(number)
        count = k.select(tile < at.tiles, ceiling(at.blocks, split.blocks), k.value(0, u32))
        slots = k.cta_x * split.pieces, k.cta_x * split.pieces + 1, 1
    else:
        shares = BlockShares(k, span, batch.size, heads, ctas=split.ctas, gap=GAP)
        shares.survey()
        begin = shares.start(k.select(by_tile != 0, k.cta_x, 0))  # other numbers than a tile's have no sequence
        place = shares.find(k.select(by_tile != 0, begin, shares.of(k.cta_x)[1] - 1))
        first, last = shares.ctas_of(place)
        count = k.select((by_tile != 0) | (first == k.cta_x), last - first + 1, 0)
        sequence, head, tile = place.sequence, place.head, place.tile
        slots = first * 2 + 1, first * 2 + 2, 2
    if early is not None:
        with k.when((count > 1) | (k.cta_x + k.cta_y == 0), uniform=True):
            k.await_launch_before()
    with k.when(count > 1, uniform=True):
        rows = GroupRows(k, sequence, span(sequence), head, tile, f.group, c.tile_m, c.heads)
        to = Results(k, c.dtype, results, f, form.scaled)
        Combination(k, c, parts, rows, slots, spread, used).store(count, to)


attention_decode_combine_sm90 = replace(
    attention_decode_combine, name="attention_decode_combine_sm90", requires="sm_90"
)
"""The same where it begins while the first kernel ends."""


class Combination:
    """The parts of some rows of a tile: their weights by the log-sum-exps, then their sum.

    ``slots``: of the first part, of the second, and from there on from one to the next. Each row has 2^``spread``
    warps, which take :data:`AT_ONCE` parts in turn.
    """

    def __init__(
        self,
        k: Kernel,
        config: Decode,
        parts: PieceParts,
        rows: GroupRows,
        slots: tuple[Traced, Traced, int],
        spread: Traced,
        used: Traced,
    ) -> None:
        self._k, self._config, self._parts, self._rows, self._slots = k, config, parts, rows, slots
        self._members = k.value(1, u32) << spread
        self._member = k.warp & (self._members - 1)
        self._here = k.value(COMBINE_WARPS, u32) >> spread
        """Rows of this CTA."""
        self._spread, self._first, self._used = spread, k.cta_y * self._here, used
        self._row, self._exists = self._find(k.warp >> spread)
        quads = -(-config.head_dim // (32 * QUAD))
        self._cols = [(k.lane + 32 * i) * QUAD for i in range(quads)]
        self._sums = k.shared(f32, (COMBINE_WARPS, 32 * QUAD * quads), name="sums")
        self._logs = k.shared(f32, (1, COMBINE_WARPS), name="logs")

    def _find(self, number: Traced) -> tuple[Traced, Traced]:
        """Row ``number`` of this CTA's, and whether there is one."""
        number = self._first + number
        row = number
        if self._config.heads > 1:
            row = number // self._used * self._config.tile_m + number % self._used
        return row, (number < self._used * self._config.heads) & self._rows.exists(row)

    def _slot(self, part: Traced) -> Traced:
        first, then, stride = self._slots
        return self._k.select(part == 0, first, then + (part - 1) * stride)

    def _log(self, part: Traced) -> Traced:
        return self._parts.log(self._config, self._slot(part), self._row).load()

    def _load(self, into: list[list[Mutable]], first: Traced, count: Traced) -> None:
        """Some columns of the parts from ``first`` on; beyond the last part and column those of the last."""
        k, last = self._k, self._config.head_dim - QUAD
        for i, part in enumerate(into):
            source = self._parts.output(self._config, self._slot(k.minimum(first + i, count - 1)), self._row)
            for number, col in enumerate(self._cols):
                loaded = source.load(k.minimum(col, last), QUAD)
                for register, value in zip(part[QUAD * number :], loaded, strict=False):
                    register.set(value)

    def store(self, count: Traced, results: Results) -> None:
        """Sum so many parts and store the rows."""
        k, d = self._k, self._config.head_dim
        with k.when(self._exists, uniform=True):
            top, sums = self._sum(count)
            for number, col in enumerate(self._cols):
                self._sums.store([x.get() for x in sums[QUAD * number :][:QUAD]], k.warp, col)
            with k.when(k.lane == 0):
                self._logs.store(top, 0, k.warp)
        k.syncthreads()
        quads = d // QUAD
        with k.loop(self._here * quads, start=k.thread, step=THREADS) as item:
            own, col = item // quads, item % quads * QUAD
            (row, exists), warp = self._find(own), own << self._spread
            with k.when(exists):
                found = k.registers(f32, QUAD, 0.0)
                with k.loop(self._members) as member:
                    for x, y in zip(found, self._sums.load(warp + member, col, QUAD), strict=True):
                        x += y
                factor, log = results.counted(self._rows, row, self._logs.load(0, warp))
                results.store(self._rows, row, col, [x.get() for x in found], factor)
                with k.when(col == 0):
                    results.store_log(self._rows, row, log)

    def _sum(self, count: Traced) -> tuple[Traced, list[Mutable]]:
        """The log-sum-exp of the warp's row and its share of O, so many columns of a lane."""
        k = self._k
        held = [k.registers(f32, QUAD * len(self._cols), 0.0) for _ in range(AT_ONCE)]
        sums = k.registers(f32, QUAD * len(self._cols), 0.0)
        self._load(held, self._member * AT_ONCE, count)  # while the weights are found
        top, total = self._weigh(count)
        at, factor = anchor(k, top), inverse_or_zero(k, total)
        step = self._members * AT_ONCE
        with k.loop(count, start=self._member * AT_ONCE, step=step) as first:
            for i, part in enumerate(held):
                weighed = weight(k, self._log(k.minimum(first + i, count - 1)), at) * factor
                counts = k.select(first + i < count, weighed, k.value(0.0, f32))
                for x, y in zip(sums, part, strict=True):
                    x.set(k.fma(y, counts, x))
            with k.when(first + step < count, uniform=True):
                self._load(held, first + step, count)
        return logarithm(k, top, total), sums

    def _weigh(self, count: Traced) -> tuple[Traced, Traced]:
        """The largest log-sum-exp, and the sum of all weights; every warp finds them for itself."""
        k = self._k
        top, total = k.register(f32, -float("inf"), "top"), k.register(f32, 0.0, "total")
        with k.loop(count, start=k.lane, step=32) as part:
            top.set(k.maximum(top, self._log(part)))
        for distance in (16, 8, 4, 2, 1):
            top.set(k.maximum(top, k.shfl_xor(top.get(), distance)))
        at = anchor(k, top.get())
        with k.loop(count, start=k.lane, step=32) as part:
            total += weight(k, self._log(part), at)
        for distance in (16, 8, 4, 2, 1):
            total += k.shfl_xor(total.get(), distance)
        return top.get(), total.get()
