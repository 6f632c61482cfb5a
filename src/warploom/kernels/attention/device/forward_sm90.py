# pyright: reportInvalidTypeForm=false
"""Attention forward for ``wgmma`` and the TMA (sm_90a): one thread a stream of tiles, consumers of 64 query rows each.

The kernel is persistent and its pipeline does not end with a tile: the first Q·Kᵀ of the next tile runs beside the last
P·V of this one, while the finished output leaves through the buffer that held this tile's Q.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar

from warploom.core.dtypes import f32, u32
from warploom.isa.async_copy import Eviction
from warploom.kernels.attention.device.scores import HeadArrays
from warploom.kernels.attention.forward_sm90 import ForwardSm90, ListForm
from warploom.kernels.attention.problem import PLAIN, AttentionFeatures
from warploom.kernels.source import named
from warploom.lang import Global, GlobalPointer, Kernel, SharedTile, Strided, StridedPointer, TensorMap, Traced, kernel
from warploom.lang.hopper import TensorMapHandle
from warploom.lang.parameters import Compound
from warploom.lang.values import Number
from warploom.tile.cache import PagedBoxes, PageRuns, Pages, PageTable
from warploom.tile.epilogue import store_row_values, store_rows
from warploom.tile.mask import Mask
from warploom.tile.pipeline import Boxes, Cursor, Pipeline, operand_tile, ready
from warploom.tile.planning import box_rows
from warploom.tile.product import MmaSync, StartedProduct, Wgmma, load_left
from warploom.tile.ragged import PieceList, sequence_boxes
from warploom.tile.roles import WARPGROUP_ROWS, Turns, consumer, producer, warps_of
from warploom.tile.scheduler import Claimed, Divisor, Persistent, RowTiles, Single, TileScheduler
from warploom.tile.softmax import Action, OnlineSoftmax, StaleSoftmax, nothing, put_ones

RAGGED_KEYS = 32
"""Keys that P·V of a sequence's last block leaves out at a time: each number of them is a branch."""


@kernel(threads=lambda config, **_: config.threads, requires="sm_90a", drop_unused=True)
def attention_sm90(
    k: Kernel,
    maps: TensorMaps,
    lse: Strided[f32, 2],
    options: HeadArrays,
    tiles: Global[u32],
    table: PageTable,
    q_len: u32,
    kv_len: u32,
    total_q: u32,
    page_pitch: u32,
    heads: Divisor,
    order: RowTiles,
    spacing: Divisor,
    *,
    config: ForwardSm90,
    features: AttentionFeatures = PLAIN,
    heads_inside: bool = True,
    listed: ListForm | None = None,
) -> None:
    """O = softmax(scale · Q·Kᵀ)·V; the CTAs of the grid share the tiles of queries in turns.

    Tensor maps of rank 4, boxes of 64 columns × tile rows. ``heads_inside``: the arrays are (batch, sequence, heads,
    head_dim), else (batch, heads, sequence, head_dim). A plane is a head of a batch; under a mask tiles differ in work,
    so their ``order`` counts. ``lse`` is (batch, heads, q_len).

    Where the list ``tiles`` names the pieces, the maps are ragged ones of (rows, heads, head_dim): what lies beyond a
    sequence reads as zero and is not written. ``lse`` is (heads, total_q) then; on a cache its strides tell, and
    queries that are not packed lie ``spacing`` rows from one sequence to the next.
    """
    if listed is None:
        boxes = maps.boxes(lambda of, eviction: Boxes.of_heads(of, heads_inside, eviction))
        rows = order.ordered(grouped=features.right is not None)
        run(k, config, boxes, GridQueries(k, config, features, lse, options, rows, heads, (q_len, kv_len)))
        return
    pages = Pages(listed.page_size, table) if listed.page_size else None
    in_pages = partial(PagedBoxes.of, rows=box_rows(pages.size, config.tile_n)) if pages else None
    apart = spacing if listed.cached and not listed.packed else None
    total = lse.strides[1] if listed.cached else total_q
    work = ListedQueries(k, config, features, lse, options, PieceList(k, tiles), total, pages, page_pitch, apart)
    run(k, config, maps.boxes(sequence_boxes, in_pages), work)


MakeBoxes = Callable[[TensorMapHandle, Eviction], Boxes]


class TensorMaps(Compound):
    """A parameter: Q, K, V and O as the TMA sees them."""

    q: TensorMap
    key: TensorMap
    value: TensorMap
    out: TensorMap

    def boxes(self, queries: MakeBoxes, keys: MakeBoxes | None = None) -> tuple[Boxes, ...]:
        """Their boxes at the places that tiles say; those of K and V may be others."""
        keys = keys or queries
        return queries(self.q, "first"), keys(self.key, "last"), keys(self.value, "last"), queries(self.out, "")


def run(k: Kernel, config: ForwardSm90, boxes: tuple[Boxes, ...], tiles: QueryTiles) -> None:
    """The kernel's roles: two threads load K and V, one or two Q, and store O; the consumers of its kind."""
    c, d, warps, (of_q, of_k, of_v, of_o) = config, config.head_dim, warps_of(config.consumers), boxes
    q_tile = operand_tile(k, c.dtype, WARPGROUP_ROWS, c.query_cols, name="Q", stages=c.q_stages * c.consumers)
    k_tile = operand_tile(k, c.dtype, c.tile_n, d, name="K", stages=c.stages)
    v_tile = operand_tile(k, c.dtype, c.tile_n, c.value_dim, name="V", stages=c.stages, spare_cols=c.spare_cols)
    queries = Pipeline(k, (q_tile, of_q), readers=0, parts=c.consumers)
    keys = Pipeline(k, (k_tile, of_k), readers=warps)
    values = Pipeline(k, (v_tile, of_v), readers=warps, cols=c.value_dim)
    # leaves through its Q's buffer
    output = Pipeline(k, q_tile, writers=warps_of(1), readers=0, parts=c.consumers, cols=c.value_dim, name="O")
    if c.sum_column:
        put_ones(k, v_tile, v_tile.layout.cols - c.spare_cols, c.dtype)
    ready(k, queries, keys, values, output, *tiles.claims)

    order = tiles.order
    kind: type[Consumer] = named(c.consumer)
    with producer(k, c.consumers):
        for thread, stream in ((0, keys), (32, values)):
            with k.when(k.thread == thread):
                blocks_in = stream.producer()
                with order.turns(claims=thread == 0) as turn:
                    tiles.feed(tiles.at(turn), blocks_in, claims=thread == 0)
        for number in range(min(2, c.consumers)):
            with k.when(k.thread == 64 + 32 * number):
                exchange(k, tiles, queries, output, of_o, range(number, c.consumers, 2))

    with consumer(k, c.consumers):
        kind(k, c, tiles, (queries, keys, values, output)).run()


def exchange(k: Kernel, tiles: QueryTiles, queries: Pipeline, output: Pipeline, boxes: Boxes, parts: range) -> None:
    """One thread: some consumers' Q of each tile in, and their O out of the same stage, where a next Q may follow."""
    stages, order = tiles.config.q_stages, tiles.order
    for turn in range(stages):
        with k.when(order.has(turn)):
            for part in parts:
                queries.at(turn, part).put(tiles.at(turn).q_place(part))
    with order.turns(asks=True) as turn:
        tile = tiles.at(turn)
        for part in parts:
            output.at(turn, part).send(boxes, tile.q_place(part))
            if tiles.config.persistent:
                with k.when(order.has(turn + stages)):
                    queries.at(turn + stages, part).put(tiles.at(turn + stages).q_place(part))


class Consumer:
    """One warpgroup: 64 query rows of every tile."""

    def __init__(
        self,
        k: Kernel,
        config: ForwardSm90,
        tiles: QueryTiles,
        pipelines: tuple[Pipeline, Pipeline, Pipeline, Pipeline],
    ) -> None:
        c, d, features = config, config.head_dim, tiles.features
        self._k, self._config, self._tiles, self._features = k, c, tiles, features
        self._queries, keys, values, self._out = pipelines
        self._keys, self._values = keys.consumer(packed=c.packed), values.consumer(packed=c.packed)
        self._me = k.warpgroup - 1
        self._row, self._warp = self._me * WARPGROUP_ROWS, k.warp & 3
        self._turns = Turns(k, self._me, c.consumers, on=c.turns)
        self._cores = cores = Wgmma(k, c.dtype)
        self._s, self._o = cores.accumulator(c.tile_n, "s"), cores.accumulator(c.output_cols, "o")
        self._p = cores.left(c.tile_n, "p")
        self._q = cores.left(d, "q") if c.q_in_registers else None
        left = self._queries.tiles[0] if self._q is None else self._q
        self._scores = cores.product(self._s, left, keys.tiles[0], depth=d)
        self._product = cores.product(self._o, self._p, values.tiles[0], transposed_b=True)
        self._options = tiles.options.scores(features)
        self._softmax = OnlineSoftmax(
            k,
            self._s,
            self._o,
            features.softmax_scale(d),
            c.dtype,
            change=self._options.change,
            column=c.sum_column,
            lse=features.lse,
            sink=bool(features.sink),
        )
        self._stale = StaleSoftmax(k, self._softmax)

    def run(self) -> None:
        """All tiles of this CTA.

        A tile's O leaves in the branch of the next tile's first step, so that ptxas mixes the two. What the next tile
        is stays in registers: to find it takes as long as a block's exponentials.
        """
        k, order = self._k, self._tiles.order
        with self._turns.taken(), order.any():
            if not self._config.persistent:
                tile = self._tile(0)
                self._begin(tile)
                self._blocks(tile)
                self._end(tile, self._sink(tile))
                return
            first = self._tiles.item(0)
            item = [k.register(u32, x, "item") for x in first]
            self._begin(self._tile(0, first))
            with order.turns(asks=True) as turn:
                tile = self._tile(turn, [x.get() for x in item])
                self._blocks(tile)
                sink = self._sink(tile)
                with k.when(order.has(turn + 1), uniform=True):
                    following = self._tiles.item(turn + 1)
                    self._step(self._tile(turn + 1, following), 0, before=tile)
                    self._store(tile, sink)
                    for kept, x in zip(item, following, strict=True):
                        kept.set(x)
                with k.otherwise():
                    self._end(tile, sink)

    def _blocks(self, tile: QueryTile) -> None:
        """All blocks of a tile after the first, whose P is there: O but for the last product."""
        with self._k.loop(tile.steps, start=1) as step:
            self._step(tile, step)
        if tile.idle is not None:
            with self._k.loop(tile.idle):
                self._leave(self._keys, self._turns)
                self._leave(self._values)

    def _end(self, tile: QueryTile, sink: Traced | None) -> None:
        """The last P·V of the CTA, which has nothing to run beside it, and its O on its way out."""
        self._softmax.keep()
        values, begins = self._values.wait(), tile.steps == 1
        self._product.start(self._p, values, zero=begins, until=self._until(tile, begins)).wait()
        self._store(tile, sink)

    def _tile(self, turn: Number, item: Sequence[Traced] | None = None) -> QueryTile:
        return self._tiles.at(turn, self._row, item)

    def _begin(self, tile: QueryTile) -> None:
        """The first scores of the CTA: there is nothing to run beside them."""
        self._open(tile)
        self._scores.start(self._left(tile), self._keys.tile, zero=True).wait()
        self._take_up(tile, 0, first=True)
        self._cores.pack(self._p, self._s)
        self._pass_over(tile, self._values)

    def _step(self, tile: QueryTile, step: Number, *, before: QueryTile | None = None) -> None:
        """Q·Kᵀ of a block beside P·V of the block before: for a tile's first step the last of the tile ``before``.

        The first P·V of a tile does not look at what O was.
        """
        blocks = self._k.value(step, u32) if before is None else before.steps
        first, begins = before is not None, blocks == 1
        if first:
            self._softmax.keep()
            self._open(tile)
        else:
            self._keys.wait()
        with self._turns:
            scores = self._scores.start(self._left(tile), self._keys.tile, zero=True)
            product = self._add_values(before or tile, begins)
        scores.wait()
        rescale = self._take_up(tile, step, first=first)
        product.wait(self._s)
        self._values.release()
        self._cores.pack(self._p, self._s)
        rescale()
        if first:
            self._pass_over(tile, self._values)

    def _add_values(self, tile: QueryTile, begins: Traced) -> StartedProduct:
        """P·V of a block, beside the scores of the next."""
        return self._product.start(self._p, self._values.wait(), zero=begins, until=self._until(tile, begins))

    def _until(self, tile: QueryTile, begins: Traced) -> tuple[Traced, int] | None:
        """Up to which key P·V of a block goes: where a tile ``begins``, up to the last one that some row sees.

        Where lengths are whole blocks, consumers' last keys are as far apart as their rows, and three consumers, which
        have no registers to spare, take all.
        """
        c, ragged = self._config, self._features.ragged_kv
        at_a_time = RAGGED_KEYS if ragged else WARPGROUP_ROWS
        spared = c.tile_n > at_a_time and (ragged or not c.packed)
        reach = tile.own.reach(tile.own_row, WARPGROUP_ROWS) if spared else None
        return None if reach is None else (self._k.select(begins, reach, c.tile_n), at_a_time)

    def _open(self, tile: QueryTile) -> None:
        """Wait for a tile's Q and the first K that this consumer sees."""
        self._pass_over(tile, self._keys, self._turns)
        self._keys.wait()
        q = self._queries.at(tile.turn, self._me).wait()
        if self._q is not None:
            load_left(self._k, self._q, q, self._warp * 16)

    def _left(self, tile: QueryTile) -> Sequence[Traced] | SharedTile:
        """Q: in registers, or where it lies."""
        return self._queries.at(tile.turn, self._me).tile if self._q is None else self._q

    def _take_up(self, tile: QueryTile, step: Number, *, first: bool) -> Action:
        """S into P, and K's stage given back; returns what brings O to the new maxima."""
        block = tile.own.block(step)
        self._options.turn_to(tile.head)

        def mask() -> None:
            tile.own.apply(self._s, block, row=tile.own_row, warp=self._warp)

        if first:
            self._keys.release()
            self._softmax.first(mask)
            return nothing
        return self._stale.step(tile.own.cuts(block), mask, lambda: self._recompute(tile), self._keys.release)

    def _recompute(self, tile: QueryTile) -> None:
        """A warp's scores of the block once more: each warp decides for itself, so by ``mma.sync``."""
        q, keys, warp = self._left(tile), self._keys.tile, (self._warp, 0)
        alone = MmaSync(self._k, self._config.dtype)
        with self._k.relies_on(
            "warps issue in order, and mma.sync, which comes before the stage is given back, has"
            " waited for what ldmatrix read"
        ):
            alone.product(self._s, q, keys, warp=warp, depth=self._config.head_dim).start(q, keys, zero=True)
        self._k.syncwarp()  # one lane gives back what all have read

    def _pass_over(self, tile: QueryTile, cursor: Cursor, turns: Turns | None = None) -> None:
        """Blocks that only other consumers' rows see: given back as they arrive, and with their scores the turns."""
        if tile.masked is None:
            return
        with self._k.loop(tile.masked):
            self._leave(cursor, turns)

    def _leave(self, cursor: Cursor, turns: Turns | None = None) -> None:
        """A block given back unread, and with its scores the turn."""
        cursor.wait()
        cursor.release()
        if turns is not None:
            turns.pass_over()

    def _sink(self, tile: QueryTile) -> Traced | None:
        """The sink of a tile's head, if there is one: on its way while the last products run."""
        return self._tiles.options.sink(self._features, tile.head)

    def _store(self, tile: QueryTile, sink: Traced | None) -> None:
        """O / l, on its way out; rows beyond the last are clipped by the TMA."""
        k = self._k
        logs = self._softmax.finish(sink)
        k.syncwarp()  # every lane has read its Q
        out = self._out.at(tile.turn, self._me)
        store_rows(k, out.tile, self._o, self._warp * 16, cols=self._config.value_dim)
        out.written()
        if logs:
            plane, row, end = self._tiles.lse_of(tile)
            store_row_values(k, plane, logs, self._s, row + self._row, end, warp=self._warp)


@dataclass(frozen=True)
class QueryTile:
    """``tile_m`` query rows of one head, a CTA's turn. A consumer sees ``own`` of its keys, after ``masked`` blocks.

    ``queries``: where its first row lies: the row, and what else the boxes' places have; ``keys``: what theirs have
    beside the row. ``own_row``: where the consumer's rows begin among those that ``own`` is about. ``idle``: how many
    of its blocks, after the first, a consumer passes over that has no rows.
    """

    turn: Number
    queries: tuple[Number, ...]
    keys: tuple[Number, ...]
    tile_n: int
    mask: Mask
    own: Mask
    own_row: Number = 0
    masked: Traced | None = None
    idle: Traced | None = None

    @property
    def steps(self) -> Traced:
        """Blocks that the consumer works on."""
        return self.own.blocks if self.idle is None else self.own.blocks - self.idle

    @property
    def head(self) -> Number:
        """The query head."""
        return self.queries[1]

    def q_place(self, consumer: int) -> tuple[Number, ...]:
        """Where Q and O of a consumer lie."""
        return self.queries[0] + consumer * WARPGROUP_ROWS, *self.queries[1:]

    def kv_place(self, block: Traced) -> tuple[Number, ...]:
        """Where a block of its K and V lies."""
        return block * self.tile_n, *self.keys


@dataclass(frozen=True)
class QueryTiles(ABC):
    """The tiles of a CTA by its turns; ``lse``: where log-sum-exps go."""

    k: Kernel
    config: ForwardSm90
    features: AttentionFeatures
    lse: StridedPointer
    options: HeadArrays
    may_lack_keys: ClassVar[bool] = False

    @cached_property
    def order(self) -> TileScheduler:
        """Which tiles this CTA takes: first asked for before the roles part."""
        return self.schedule()

    @cached_property
    def claims(self) -> tuple[Pipeline, ...]:
        """The pipelines that the order needs set up."""
        return ()

    @abstractmethod
    def schedule(self) -> TileScheduler:
        """A new :attr:`order`."""

    @abstractmethod
    def item(self, turn: Number) -> tuple[Traced, ...]:
        """The numbers that tell the tile of a turn from others."""

    @abstractmethod
    def place(self, item: Sequence[Traced]) -> tuple[tuple[Number, ...], tuple[Number, ...], tuple[Traced, Traced]]:
        """``queries`` and ``keys`` of an item's :class:`QueryTile`, and how long their sequences are."""

    @abstractmethod
    def lse_of(self, tile: QueryTile) -> tuple[GlobalPointer, Number, Traced]:
        """Where its log-sum-exps go: element 0, the tile's first row's, and one past the last."""

    def feed(self, tile: QueryTile, blocks_in: Cursor, *, claims: bool) -> None:
        """One thread: the blocks of a tile's K or V into its ring; who ``claims`` tiles does so before the last few."""
        order, blocks = self.order, tile.mask.blocks
        last: Number = 0
        if claims and order.is_claimed:
            last = blocks - self.k.minimum(blocks, self.config.stages)
            self.feed_part(tile, blocks_in, 0, last)
            order.claim(tile.turn + 1)
        self.feed_part(tile, blocks_in, last, blocks)

    def feed_part(self, tile: QueryTile, blocks_in: Cursor, first: Number, end: Traced) -> None:
        """The blocks from number ``first`` up to ``end``."""
        with self.k.loop(end, start=first) as step:
            blocks_in.put(tile.kv_place(tile.mask.block(step)))

    def kv_head(self, head: Traced) -> Traced:
        """Whose keys a head sees."""
        return head // self.features.group if self.features.group > 1 else head

    def at(self, turn: Number, own_row: Traced | None = None, item: Sequence[Traced] | None = None) -> QueryTile:
        """The tile of a turn, by its :meth:`item` where that is known.

        ``own_row``: as the consumer sees it whose 64 rows begin there in the tile.
        """
        c, f = self.config, self.features
        queries, keys, lengths = self.place(self.item(turn) if item is None else item)
        visible, lacking = f.mask, self.may_lack_keys
        mask = Mask(self.k, visible, (c.tile_m, c.tile_n), queries[0], lengths, may_lack_keys=lacking)
        if own_row is None or not c.skip_masked or f.right is None:
            return QueryTile(turn, queries, keys, c.tile_n, mask, mask, 0 if own_row is None else own_row)
        own = Mask(
            self.k,
            visible,
            (WARPGROUP_ROWS, c.tile_n),
            queries[0] + own_row,
            lengths,
            begin=mask.begin,
            may_lack_keys=lacking,
        )
        return QueryTile(turn, queries, keys, c.tile_n, mask, own, masked=mask.blocks - own.blocks)


@dataclass(frozen=True)
class GridQueries(QueryTiles):
    """The tiles of sequences of one length, which the grid counts."""

    rows: RowTiles
    heads: Divisor
    lengths: tuple[Traced, Traced]

    def schedule(self) -> TileScheduler:
        """All tiles that there are."""
        if self.config.persistent:
            return Persistent(self.k, self.rows.count, alternating=self.rows.grouped)
        return Single(self.k)

    def item(self, turn: Number) -> tuple[Traced, ...]:
        """(row, head, batch)."""
        block, plane = self.rows.tile(self.order.item(turn))
        batch, head = self.heads.divide(plane)
        return block * self.config.tile_m, head, batch

    def place(self, item: Sequence[Traced]) -> tuple[tuple[Number, ...], tuple[Number, ...], tuple[Traced, Traced]]:
        """(row, head, batch) of queries, (head, batch) of keys."""
        row, head, batch = item
        return (row, head, batch), (self.kv_head(head), batch), self.lengths

    def lse_of(self, tile: QueryTile) -> tuple[GlobalPointer, Number, Traced]:
        """The place in (batch, heads, q_len)."""
        (row, head, batch), q_len = tile.queries, self.lengths[0]
        return self.lse + self.k.mul_wide(batch * self.heads.value + head, q_len), row, q_len


@dataclass(frozen=True)
class ListedQueries(QueryTiles):
    """The tiles of a list; the first query of each is row 0 of its piece.

    ``pages``: those of the keys, if they lie in pages, which are ``pitch`` rows apart. ``spacing``: rows from one
    sequence of Q to the next, where log-sum-exps are (batch, heads, queries), else (heads, total_q).
    """

    pieces: PieceList
    total_q: Traced
    pages: Pages | None
    pitch: Traced
    spacing: Divisor | None
    may_lack_keys: ClassVar[bool] = True

    @cached_property
    def claims(self) -> tuple[Pipeline, ...]:
        """The pipeline by which threads tell each other tiles, where later ones of a sequence take longer."""
        return (Claimed.telling(self.k),) if self.config.persistent and self.features.by_row else ()

    def schedule(self) -> TileScheduler:
        """The tiles that are listed, once the list is there; the kernel's memory is set up meanwhile."""
        self.k.await_launch_before()
        count = self.pieces.count
        if self.claims:
            return Claimed(self.k, count, self.pieces.claimed, *self.claims)
        return Persistent(self.k, count, alternating=True) if self.config.persistent else Single(self.k, count)

    def item(self, turn: Number) -> tuple[Traced, ...]:
        """(head, first query, queries, first key, keys)."""
        piece = self.pieces.at(self.order.item(turn))
        q, k = piece.queries, piece.keys
        return piece.head, *(self.k.value(x, u32) for x in (q.begin, q.count, k.begin, k.count))

    def place(self, item: Sequence[Traced]) -> tuple[tuple[Number, ...], tuple[Number, ...], tuple[Traced, Traced]]:
        """(row, head, begin, rows) of queries, (head, begin, rows) of keys."""
        head, begin, rows, first, keys = item
        return (0, head, begin, rows), (self.kv_head(head), first, keys), (rows, keys)

    def at(self, turn: Number, own_row: Traced | None = None, item: Sequence[Traced] | None = None) -> QueryTile:
        """The tile of a turn. A consumer whose rows are all beyond the sequence works on one block."""
        tile = super().at(turn, own_row, item)
        if own_row is None or self.config.consumers == 1:
            return tile
        *_, rows = tile.queries
        return replace(tile, idle=self.k.select(own_row >= rows, tile.own.blocks - 1, 0))

    def feed_part(self, tile: QueryTile, blocks_in: Cursor, first: Number, end: Traced) -> None:
        """The blocks from number ``first`` up to ``end``; a block's pages are read while the one before is awaited."""
        if self.pages is None:
            super().feed_part(tile, blocks_in, first, end)
            return
        head, sequence, keys = (self.k.value(x, u32) for x in tile.keys)
        runs = PageRuns(self.k, self.pages, self.pitch, self.config.tile_n)
        runs.look_up(sequence, tile.mask.block(first))
        with self.k.loop(end, start=first) as step:
            blocks_in.put((head, *runs.at(tile.mask.block(step), keys)))
            runs.look_up(sequence, tile.mask.block(step + 1))

    def lse_of(self, tile: QueryTile) -> tuple[GlobalPointer, Number, Traced]:
        """The place in (heads, total_q), or in (batch, heads, queries)."""
        k, (row, head, begin, rows) = self.k, tile.queries
        if self.spacing is None:
            return self.lse + (k.mul_wide(head, self.total_q) + k.mul_wide(begin, 1)), row, k.value(rows, u32)
        sequence, first = self.spacing.divide(k.value(begin, u32))
        return self.lse.at(sequence, head) + first, row, k.value(rows, u32)
