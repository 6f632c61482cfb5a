# pyright: reportInvalidTypeForm=false
"""Attention with few queries for ``cp.async`` and ``mma.sync`` (sm_80 and newer), as fast as K and V can be read.

The query heads that share a key head are rows of one tile, each warp reads and multiplies its own keys, and nothing but
the ends of pieces makes warps wait for each other: their rings run on from piece to piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from warploom.core.dtypes import f32, u16, u32
from warploom.kernels.attention.decode import GAP, CacheForm, Decode
from warploom.kernels.attention.decode_feed import KEYS, VALUES, Feed, Queries, Turn
from warploom.kernels.attention.decode_rows import (
    CacheBatch,
    GroupRows,
    Lengths,
    Parts,
    PartSlots,
    ResultArrays,
    Results,
    TileNumbers,
    WorkSplit,
    spans,
)
from warploom.kernels.attention.decode_search import EarlyLengths, Search
from warploom.kernels.attention.features import AttentionFeatures
from warploom.lang import Compound, Kernel, SharedTile, Strided, StridedPointer, Traced, kernel
from warploom.tile.cache import Pages, PageTable, WarpRing
from warploom.tile.eight_bits import ProductAlongRows, ProductDownRows
from warploom.tile.mask import GroupMask, Visible
from warploom.tile.merge import WarpSums
from warploom.tile.operands import DEPTH
from warploom.tile.pipeline import operand_tile
from warploom.tile.product import MmaSync, load_left, scale, zero
from warploom.tile.shares import BlockCursor, Shares
from warploom.tile.softmax import OnlineSoftmax

LINE_WORDS = 32
"""Of a line of the L2."""


@kernel(threads=lambda config, **_: config.threads, drop_unused=True)
def attention_decode(
    k: Kernel,
    q: Strided[u16, 3],
    cache: CacheArrays,
    batch: CacheBatch,
    table: PageTable,
    results: ResultArrays,
    parts: Parts,
    split: WorkSplit,
    *,
    config: Decode,
    features: AttentionFeatures,
    form: CacheForm,
    row_strides: tuple[int, int],
) -> None:
    """O of tiles that one CTA sees all keys of, and for the others O and log-sum-exps of its pieces, in float32.

    Grid: CTAs that share all blocks. ``parts`` has two slots for each CTA, for a piece that goes on with a tile of the
    CTA before and for one that the next goes on with; with a given split as many for each tile as it has pieces.
    """
    c, f = config, features
    if c.overlap:
        line = (k.cta_x * c.threads + k.thread) * LINE_WORDS
        if form.lengths:
            with k.when(line < batch.size):
                k.prefetch(batch.lengths, line)
        if form.page_size:
            with k.when(line < (batch.size - 1) * table.entries.strides[0] + table.columns):
                k.prefetch(table.entries, line)
    early = EarlyLengths(k, batch.lengths, batch.size, c.threads) if c.overlap and form.foretold else None
    given = Lengths(k, form, batch, batch.lengths.load if early is None else early.of)
    span, heads = spans(given, c, f), batch.kv_heads // c.heads
    shares = Shares(k, span, batch.size, heads, ctas=split.ctas, split=split.blocks if form.split else None, gap=GAP)
    numbers = TileNumbers(given, span, f.group, c.tile_m)
    slots = PartSlots(k, numbers, heads, split.pieces if form.split else None)
    k_tile, v_tile = (operand_tile(k, c.dtype, c.keys, c.key_cols, name=x, stages=c.stages * c.num_warps) for x in "KV")
    known = zip((cache.key, cache.value), row_strides, strict=True)
    fed = zip((k_tile, v_tile), [replace(x, strides=(*x.strides, row)) for x, row in known], strict=True)
    named = Pages(form.page_size, table) if form.page_size else None
    ring = WarpRing(k, *fed, warps=c.num_warps, heads=c.heads, head_dim=c.key_cols, pages=named, once=c.of_sm90)
    q_tile = operand_tile(k, c.factors, c.tile_rows, c.head_dim, name="Q", stages=c.stages)
    products = Products(k, c, f, q_tile, ring, cache.scale if form.scaled else None)
    to = Results(k, c.dtype, results, f, form.scaled)
    queries = Queries(k, c, f.group, q)

    search = Search(k, shares)
    guess = None if early is None else (early, shares.read_by(spans(replace(given, keys=early.near), c, f)))
    ahead = Feed(k, ring, queries, q_tile, search.ahead)
    begin_share(k, c, search, shares, guess, ahead)
    if c.overlap:
        k.allow_next_launch()
    with k.when(search.first < search.end, uniform=True):
        Share(k, ahead, products, search.at).run(search, slots, to, parts)


attention_decode_sm90 = replace(attention_decode, name="attention_decode_sm90", requires="sm_90")
"""The same where it converts fp8, or overlaps with the second kernel, and keys leave the L2 first: from sm_90 on."""


class CacheArrays(Compound):
    """A parameter: K and V (sequence or page, key head), and the ``scale`` (sequence, key head) of an fp8 cache's K."""

    key: Strided[u16, 2]
    value: Strided[u16, 2]
    scale: Strided[f32, 2]


def begin_share(
    k: Kernel, config: Decode, search: Search, shares: Shares, guess: tuple[EarlyLengths, Shares] | None, ahead: Feed
) -> None:
    """Find the share of this CTA and start its first copies.

    ``guess``: lengths as they are before the launch before is done, and the shares by those. By them the L2 fetches the
    first block, while memory has little else to do, and copies begin; where that launch has changed the lengths, copies
    are made again.
    """
    if guess is None:
        if config.overlap:
            k.await_launch_before()
        search.run(shares)
        ahead.begin(search.end.get())
        return
    early, guessed = guess
    with k.when(early.few, uniform=True):
        early.read()
        search.run(guessed)
        ahead.fetch(search.end.get())
    k.await_launch_before()
    early.read_again()
    ahead.begin(search.end.get())
    with k.when(early.changed(), uniform=True):
        ahead.ring.drain()
        search.run(shares)
        ahead.begin(search.end.get())


class Share:
    """The blocks of a CTA, one after another; where a piece ends, its sums leave."""

    def __init__(self, k: Kernel, ahead: Feed, products: Products, at: BlockCursor) -> None:
        self._k, self._ahead, self._products, self._at = k, ahead, products, at
        self._stage, self._q_stage = (Turn(k, ahead.ring.stages, name) for name in ("stage", "q_stage"))
        self._begins, self._opened = k.register(u32, 1, "begins"), k.register(u32, at.block.get(), "opened")

    def run(self, share: Search, slots: PartSlots, results: Results, parts: Parts) -> None:
        """The blocks of a share that has some."""
        k, at, ahead = self._k, self._at, self._ahead
        first, end = share.first.get(), share.end.get()
        with k.loop(end, start=first) as number, k.when(number == at.number, uniform=True):
            ahead.ring.wait(KEYS)
            with k.when(self._begins != 0, uniform=True):
                self._begin()
            with k.otherwise():
                k.syncwarp()
            ahead.put(self._stage.before(), end)
            self._products.step(self._q_stage.now(), self._stage.now(), at)
            ends = at.ends_piece | (number + 1 == end)
            self._begins.set(k.select(ends, 1, 0))
            with k.when(ends, uniform=True):
                self._leave(slots, results, parts)
            at.advance()
            self._stage.advance()

    def _begin(self) -> None:
        """A piece: its query rows have arrived."""
        self._ahead.queries.convert(self._ahead.q_tile.stage(self._q_stage.now()))
        self._k.syncthreads()  # queries come from all warps, and all have read the sums of the piece before
        self._opened.set(self._at.block)
        self._products.begin(self._q_stage.now(), self._at)

    def _leave(self, slots: PartSlots, results: Results, parts: Parts) -> None:
        """The sums of a piece: to the results if it is a whole tile, else to its slot among the parts."""
        at = self._at
        self._products.sums.finish()
        opens = self._opened == at.span.begin
        slot = slots.of(at, opens)
        rows = self._ahead.queries.rows(at)
        self._products.collect(self._stage.now(), rows, opens & at.ends_tile, results, parts, slot)
        self._q_stage.advance()


class Products:
    """S, P and O of the query rows and each warp's keys, and O of all warps together.

    ``key_scale``, of each sequence and key head: what the keys of an fp8 cache are times. It multiplies S, in float32:
    queries keep their f16.
    """

    def __init__(
        self,
        k: Kernel,
        config: Decode,
        features: AttentionFeatures,
        q: SharedTile,
        ring: WarpRing,
        key_scale: StridedPointer | None,
    ) -> None:
        self._k, self._config, self._features, self._q, self._ring = k, config, features, q, ring
        c, f, (keys, values) = config, features, ring.tiles
        self._cores = cores = MmaSync(k, c.factors, ahead=True)
        self._s = s = cores.accumulator(c.tile_m, c.keys, "s")
        self._o = o = cores.accumulator(c.tile_m, -(-c.head_dim // 16) * 16, "o")
        self._held = k.registers(u32, 4 * -(-c.head_dim // DEPTH), None, "q") if c.holds_queries else []
        left = self._held or q
        if c.fp8:
            self._scores = ProductAlongRows(k, s, left, keys, c.head_dim, ring.head)
            self._product = ProductDownRows(k, o, values, c.keys, 0)
        else:
            self._scores = cores.product(s, left, keys, warp=(ring.head, 0), depth=c.head_dim)
            self._product = cores.product(o, s, values, transposed_b=True, depth=c.keys)
        self._softmax = OnlineSoftmax(k, s, o, f.softmax_scale(c.head_dim), c.factors, cap=f.softcap, lse=True)
        self._key_scale = key_scale
        self._factor = k.register(f32, None, "key_scale") if key_scale is not None else None
        self.sums = WarpSums(k, ring, o, self._softmax, c.head_dim, fp8=c.fp8)

    def begin(self, q_stage: Traced, at: BlockCursor) -> None:
        """Rows that have seen no key; what a warp has registers for of their queries is read now."""
        load_left(self._k, self._held, self._q.stage(q_stage), self._ring.head * self._config.tile_m)
        if self._factor is not None and self._key_scale is not None:
            head = at.head.get() * self._config.heads + self._ring.head
            self._factor.set(self._key_scale.at(at.sequence.get(), head).load())
        self._softmax.begin()
        zero(self._o)

    def step(self, q_stage: Traced, stage: Traced, at: BlockCursor) -> None:
        """Add a block."""
        keys, values = self._ring.at(stage, self._k.warp)
        self._scores.start(self._held or self._q.stage(q_stage), keys, zero=True)
        if self._factor is not None:
            scale(self._s, self._factor.get())
        self._softmax.step(lambda: self._mask(at))
        self._ring.wait(VALUES)
        self._k.syncwarp()
        self._product.start(self._cores.left(self._s), values)

    def _mask(self, at: BlockCursor) -> None:
        """-inf in place of scores that do not count."""
        k, c, f, span = self._k, self._config, self._features, at.span
        rows, visible = GroupRows.at(k, at, f.group, c), Visible(f.window, ragged=True)
        mask = GroupMask(k, visible, c.tile_n, (span.queries, span.keys), rows.query)
        mask.apply(self._s, at.block.get(), self._ring.first_key)

    def collect(
        self, stage: Traced, rows: GroupRows, whole: Traced, results: Results, parts: Parts, slot: Traced
    ) -> None:
        """O of all warps together: the result where ``whole`` says so, else a part for the second kernel."""
        k, c = self._k, self._config

        def leave(row: Traced, log: Traced, store: Callable[..., None]) -> None:
            with k.when(whole, uniform=True):
                own, of_all = results.counted(rows, row, log)
                store(
                    lambda col, x: results.store(rows, row, col, x, own), lambda: results.store_log(rows, row, of_all)
                )
            with k.otherwise():
                store(
                    lambda col, x: parts.output(c, slot, row).store(x, col), lambda: parts.log(c, slot, row).store(log)
                )

        self.sums.each(stage, rows.exists, leave)
