# pyright: reportInvalidTypeForm=false
"""Attention with few queries for ``cp.async`` and ``mma.sync`` (sm_80 and newer), as fast as K and V can be read.

The query heads that share a key head are rows of one tile, each warp reads and multiplies its own keys, and nothing but
the ends of pieces makes warps wait for each other: their rings run on from piece to piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

from warploom.core.dtypes import f32, s32, u16, u32
from warploom.isa.instruction import named
from warploom.kernels.attention.decode import GAP, CacheForm, Decode
from warploom.kernels.attention.device.decode_rows import (
    CacheBatch,
    GroupRows,
    Lengths,
    PartSlots,
    PieceParts,
    ResultArrays,
    Results,
    TileNumbers,
    WorkSplit,
    load_queries,
    queries_for_fp8,
    spans,
)
from warploom.kernels.attention.device.scores import HeadArrays
from warploom.kernels.attention.problem import AttentionFeatures
from warploom.lang import Compound, GlobalPointer, Kernel, SharedTile, Strided, StridedPointer, Traced, kernel
from warploom.lang.values import Number
from warploom.tile.cache import Pages, PageTable, WarpRing
from warploom.tile.eight_bits import ProductAlongRows, ProductDownRows
from warploom.tile.mask import GroupMask
from warploom.tile.merge import WarpSums
from warploom.tile.pipeline import operand_tile
from warploom.tile.product import DEPTH, MmaSync, load_left, scale, zero
from warploom.tile.shares import BlockCursor, BlockShares
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
    parts: PieceParts,
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
    shares = BlockShares(
        k, span, batch.size, heads, ctas=split.ctas, split=split.blocks if form.split else None, gap=GAP
    )
    numbers = TileNumbers(given, span, f.group, c.tile_m)
    slots = PartSlots(k, numbers, heads, split.pieces if form.split else None)
    k_tile, v_tile = (operand_tile(k, c.dtype, c.keys, c.key_cols, name=x, stages=c.stages * c.num_warps) for x in "KV")
    known = zip((cache.key, cache.value), row_strides, strict=True)
    fed = zip((k_tile, v_tile), [replace(x, strides=(*x.strides, row)) for x, row in known], strict=True)
    named = Pages(form.page_size, table) if form.page_size else None
    ring = WarpRing(k, *fed, warps=c.num_warps, heads=c.heads, head_dim=c.key_cols, pages=named, once=c.of_sm90)
    q_tile = operand_tile(k, c.factors, c.tile_rows, c.head_dim, name="Q", stages=c.stages)
    products = Products(k, c, f, results.options, q_tile, ring, cache.scale if form.scaled else None)
    to = Results(k, c.dtype, results, f, form.scaled)
    queries = Queries(k, c, f.group, q)

    search = ShareSearch(k, shares)
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
    k: Kernel,
    config: Decode,
    search: ShareSearch,
    shares: BlockShares,
    guess: tuple[EarlyLengths, BlockShares] | None,
    ahead: Feed,
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

    def run(self, share: ShareSearch, slots: PartSlots, results: Results, parts: PieceParts) -> None:
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

    def _leave(self, slots: PartSlots, results: Results, parts: PieceParts) -> None:
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
        options: HeadArrays,
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
        self._options = options.scores(f)
        change = self._options.change
        self._softmax = OnlineSoftmax(k, s, o, f.softmax_scale(c.head_dim), c.factors, change=change, lse=True)
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
        self._options.turn_to(lambda element: self._head(element, at))
        self._softmax.step(lambda: self._mask(at))
        self._ring.wait(VALUES)
        self._k.syncwarp()
        self._product.start(self._cores.left(self._s), values)

    def _head(self, element: int, at: BlockCursor) -> Traced:
        """The query head of a score."""
        k, c = self._k, self._config
        row, _ = self._s.layout.coordinates(k.lane, element, 0)
        return GroupRows.at(k, at, self._features.group, c).query_head(self._ring.head * c.tile_m + row)

    def _mask(self, at: BlockCursor) -> None:
        """-inf in place of scores that do not count."""
        k, c, f, span = self._k, self._config, self._features, at.span
        rows, visible = GroupRows.at(k, at, f.group, c), f.visible(ragged=True)
        mask = GroupMask(k, visible, c.tile_n, (span.queries, span.keys), rows.query)
        mask.apply(self._s, at.block.get(), self._ring.first_key)

    def collect(
        self, stage: Traced, rows: GroupRows, whole: Traced, results: Results, parts: PieceParts, slot: Traced
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


KEYS, VALUES = 0, 1
"""Tiles of the ring."""


class Turn:
    """Which of ``count`` stages is next, in a register."""

    def __init__(self, k: Kernel, count: int, name: str) -> None:
        self._k, self._count = k, count
        self._at = k.register(u32, 0, name)

    def now(self) -> Traced:
        """The number of the stage that is next."""
        return self._at.get()

    def before(self) -> Traced:
        """The one before it: the last to be filled again."""
        return self._k.select(self._at == 0, self._k.value(self._count - 1, u32), self._at - 1)

    def reset(self) -> None:
        """To the first."""
        self._at.set(0)

    def advance(self) -> None:
        """To the next."""
        self._at.set(self._k.select(self._at == self._count - 1, 0, self._at + 1))


@dataclass(frozen=True)
class Queries:
    """Query rows, strides of (sequence, query head, query)."""

    k: Kernel
    config: Decode
    group: int
    array: StridedPointer

    def rows(self, at: BlockCursor) -> GroupRows:
        """The query rows of a piece."""
        return GroupRows.at(self.k, at, self.group, self.config)

    def load(self, tile: SharedTile, at: BlockCursor) -> None:
        """Start their copies."""
        load_queries(self.k, tile, self.rows(at), self.array, self.config)

    def convert(self, tile: SharedTile) -> None:
        """Turn what has arrived into what fp8 keys are multiplied by."""
        if self.config.fp8:
            queries_for_fp8(self.k, tile, self.config)


class Feed:
    """The copies ahead of the products: the blocks of a share, and the query rows of each piece with its first."""

    def __init__(self, k: Kernel, ring: WarpRing, queries: Queries, q_tile: SharedTile, cursor: BlockCursor) -> None:
        self._k, self.ring, self.queries, self.q_tile, self._cursor = k, ring, queries, q_tile, cursor
        self._begins, self._q_stage = k.register(u32, 1, "asks"), Turn(k, ring.stages, "q_ahead")

    def begin(self, end: Traced) -> None:
        """Start the copies of the first blocks, one less than there are stages; none is under way."""
        self._begins.set(1)
        self._q_stage.reset()
        self._look_up()
        for number in range(self.ring.stages - 1):
            self.put(number, end)

    def _look_up(self) -> None:
        self.ring.look_up(self._cursor.sequence.get(), self._cursor.block.get())

    def put(self, stage: Number, end: Traced) -> None:
        """Start the copies of the next block, if it is below ``end``; query rows come with its keys."""
        at = self._cursor
        for tile, also in ((KEYS, self._put_queries), (VALUES, self._advance)):
            self.ring.put(tile, stage, self._place, at.span.keys, when=at.number < end, also=also)

    def _put_queries(self) -> None:
        with self._k.when(self._begins != 0, uniform=True):
            self.queries.load(self.q_tile.stage(self._q_stage.now()), self._cursor)
            self._q_stage.advance()

    def _advance(self) -> None:
        self._begins.set(self._k.select(self._cursor.ends_piece, 1, 0))
        self._cursor.advance()
        self._look_up()

    def fetch(self, end: Traced) -> None:
        """The L2 fetches the block at the cursor, if that is below ``end``."""
        with self._k.when(self._cursor.number < end, uniform=True):
            self.ring.fetch(self._place, self._cursor.span.keys)

    @property
    def _place(self) -> tuple[Traced, Traced, Traced]:
        at = self._cursor
        return at.sequence.get(), at.head.get(), at.block.get()


class EarlyLengths:
    """The lengths of ``few`` sequences in shared memory, ``each`` of a thread; of more they stay where they are.

    They are read before the launch before is done, which may be writing them: past the L1, which would keep what is not
    true any more. Once for each CTA: all CTAs want the same lines at about the same time. So they are a guess, by which
    copies may begin; when that launch is done they are read again, and compared while the copies are under way.
    """

    def __init__(self, k: Kernel, lengths: GlobalPointer, batch: Traced, threads: int, each: int = 1) -> None:
        self._k, self._lengths, self._batch = k, lengths, batch
        self._near, self._own = k.shared(s32, threads * each, name="lengths"), k.registers(s32, each, 0, "length")
        self._before = k.registers(s32, each, 0, "before")
        self._places = [k.thread + i * threads for i in range(each)]
        self.few = batch <= threads * each

    def read(self) -> None:
        """Read the lengths of few sequences, as they are now."""
        self._load()
        self._keep()

    def near(self, sequence: Traced) -> Traced:
        """One of few."""
        return self._near.load(0, sequence)

    def of(self, sequence: Traced) -> Traced:
        """One of any."""
        found = self._k.register(s32, 0)
        with self._k.when(self.few, uniform=True):
            found.set(self.near(sequence))
        with self._k.otherwise():
            found.set(self._lengths.load(sequence))
        return found.get()

    def read_again(self) -> None:
        """Once the launch before is done; :meth:`changed` waits for what comes back."""
        for before, own in zip(self._before, self._own, strict=True):
            before.set(own)
        self._load()

    def changed(self) -> Traced:
        """Whether they are others than :meth:`read` found, or too many for it: :meth:`of` gives the new ones then."""
        k, found = self._k, self._k.register(u32, 1, "others")
        with k.when(self.few, uniform=True):
            differ = reduce(or_, [own != before for own, before in zip(self._own, self._before, strict=True)])
            others = k.emit(named("bar.red.or.pred"), (k.constant(0, u32), differ))[0]
            found.set(k.select(others, 1, 0))
            with k.when(others, uniform=True):
                self._keep()
        return found != 0

    def _load(self) -> None:
        for place, own in zip(self._places, self._own, strict=True):
            with self._k.when(place < self._batch):
                own.set(self._lengths.load(place, order="relaxed"))

    def _keep(self) -> None:
        for place, own in zip(self._places, self._own, strict=True):
            self._near.store(own.get(), 0, place)
        self._k.syncthreads()


class ShareSearch:
    """The share of a CTA, from its ``first`` number to ``end``, and two positions at its start."""

    def __init__(self, k: Kernel, shares: BlockShares) -> None:
        self._k = k
        self.first, self.end = k.register(u32, 0, "first"), k.register(u32, 0, "end")
        self.at, self.ahead = shares.cursor("at"), shares.cursor("ahead")

    def run(self, shares: BlockShares) -> None:
        """Find the share of this CTA."""
        shares.survey()
        first, end = shares.of(self._k.cta_x)
        self.first.set(first)
        self.end.set(end)
        place = shares.find(first)
        self.at.move(place)
        self.ahead.move(place)
