# pyright: reportInvalidTypeForm=false
"""Attention backward for ``wgmma`` and the TMA (sm_90a): five products in one pass over the rows of a tile of keys.

Scores are formed transposed, keys along the rows, so that Pᵀ and dSᵀ are the register operands of dV and dK; dS goes to
shared memory for dQᵀ = Kᵀ·dSᵀ, whose sums over all tiles of keys meet in global memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from warploom.core.dtypes import f32, u32
from warploom.kernels.attention.backward_sm90 import ADDERS, CONSUMERS, KEYS, STAGES, BackwardSm90
from warploom.kernels.attention.device.backward_shares import ShareSums
from warploom.kernels.attention.device.scores import HeadArrays
from warploom.kernels.attention.device.tiles import tile_of
from warploom.kernels.attention.problem import PLAIN, AttentionFeatures
from warploom.lang import Fragment, Global, GlobalPointer, Kernel, Mutable, SharedTile, TensorMap, Traced, kernel
from warploom.lang.hopper import TensorMapHandle
from warploom.lang.parameters import Compound
from warploom.lang.values import Number
from warploom.layout.catalogue import wgmma_accumulator
from warploom.tile.accumulation import WARPS, PartSums, add_parts, load_part, part_tile, store_part
from warploom.tile.epilogue import TransposedStore, await_sent, column_values, send_rows, send_tile
from warploom.tile.mask import SeenBy, key_tiles
from warploom.tile.pipeline import Boxes, Cursor, Pipeline, operand_tile, ready, vector_tile
from warploom.tile.product import StartedProduct, Wgmma, scale, zero
from warploom.tile.ragged import Piece, PieceList, Slot, sequence_boxes
from warploom.tile.roles import WARPGROUP, WARPGROUP_ROWS, Meeting, consumer, producer, threads_of, warps_of
from warploom.tile.scheduler import Divisor, Persistent, RowTiles, Single
from warploom.tile.softmax import SoftmaxGradient


@kernel(threads=threads_of(CONSUMERS), requires="sm_90a", drop_unused=True)
def attention_backward_sm90(
    k: Kernel,
    maps: GradientMaps,
    options: HeadArrays,
    tiles: Global[u32],
    sums: PartSums,
    shares: Global[f32],
    q_len: u32,
    kv_len: u32,
    slots: u32,
    kv_heads: Divisor,
    order: RowTiles,
    *,
    config: BackwardSm90,
    features: AttentionFeatures = PLAIN,
    heads_inside: bool = True,
    listed: bool = False,
    share: int = 0,
) -> None:
    """dK and dV of tiles of keys, and what they add to dQ; a grid along x has, or shares, (tiles · planes) of them.

    Tensor maps of rank 4, boxes of 64 columns × tile rows; shift and delta as :mod:`.device.backward_rows` forms them.
    A plane is a key head of a batch; ``order`` says which tiles come first. ``sums``: for each block of query rows the
    parts of both consumers, as their threads hold them. Of packed sequences the tiles are ``listed`` in ``tiles``, the
    maps of tensors are ragged ones, and each head has ``slots`` for blocks. With a ``share`` a plane is so many of the
    query heads of a key head, of which there are ``kv_heads`` in a batch, and dK and dV go to ``shares``.
    """
    c, f, of_heads = config, features, share or features.group
    pieces = PieceList(k, tiles) if listed else None
    if pieces is None:
        turns_of = Persistent(k, order.count) if c.persistent else Single(k)
    else:
        turns_of = Persistent(k, pieces.count) if c.persistent else Single(k, pieces.count)

    def at(turn: Number) -> KeyTile:
        if pieces is not None:
            number = turns_of.item(turn)
            return ListedKeyTile.of(k, c, f, pieces, number, slots, of_heads)
        place = order.tile(turns_of.item(turn))
        how = {"by_heads": c.by_heads, "rising": c.rising}
        return GridKeyTile.of(k, f, (c.tile_m, KEYS), place, (q_len, kv_len), kv_heads, of_heads, **how)

    boxes = maps.boxes(sequence_boxes if listed else lambda of: Boxes.of_heads(of, heads_inside))
    saved = ShareSums(k, shares, c) if share else None
    differentiate(k, c, f, KeyTiles(k, turns_of, at), boxes, options, sums, saved)


class GradientMaps(Compound):
    """A parameter: what a backward pass reads and stores as the TMA sees it."""

    q: TensorMap
    key: TensorMap
    value: TensorMap
    dout: TensorMap
    shift: TensorMap
    delta: TensorMap
    dk: TensorMap
    dv: TensorMap

    def boxes(self, of: Callable[[TensorMapHandle], Boxes]) -> tuple[Boxes, ...]:
        """Their boxes at the places that a tile says; ``of`` tensors with rows of heads, others at (element, plane)."""
        return tuple(
            Boxes(x, lambda _, row, plane: (row, plane)) if name in ("shift", "delta") else of(x)
            for name, x in zip(self.fields(), self.values, strict=True)
        )


def differentiate(
    k: Kernel,
    config: BackwardSm90,
    features: AttentionFeatures,
    tiles: KeyTiles,
    maps: tuple[Boxes, ...],
    options: HeadArrays,
    dq: PartSums,
    saved: ShareSums | None,
) -> None:
    """dK and dV of tiles of keys, and what they add to dQ; each role forms the tiles, and keeps what it needs of one.

    ``maps``: Q, K, V, dO, shift, delta, dK and dV at the places that a tile says; ``dq``: its sums; ``saved``: those of
    dK and dV, where there are shares.
    """
    c, f = config, features
    q_map, k_map, v_map, do_map, shift_map, delta_map, dk_map, dv_map = maps
    q_tile = operand_tile(k, c.dtype, c.tile_m, c.width, name="Q", stages=STAGES, tight=True)
    do_tile = operand_tile(k, c.dtype, c.tile_m, c.value_width, name="dO", stages=STAGES, tight=True)
    k_tile = operand_tile(k, c.dtype, KEYS, c.width, name="K", stages=c.key_stages, tight=True)
    v_tile = operand_tile(k, c.dtype, KEYS, c.value_width, name="V", stages=c.key_stages, tight=True)
    ds_tile = operand_tile(k, c.dtype, c.tile_m, KEYS, name="dS", stages=STAGES)
    shift_tile, delta_tile = (vector_tile(k, c.vector, name=name, stages=STAGES) for name in ("shift", "delta"))
    warps, again = warps_of(CONSUMERS), CONSUMERS if c.persistent else 0
    keys, values = Pipeline(k, (k_tile, k_map), readers=again), Pipeline(k, (v_tile, v_map), readers=again)
    queries = Pipeline(k, (q_tile, q_map), (shift_tile, shift_map), readers=warps)
    gradients = Pipeline(k, (do_tile, do_map), (delta_tile, delta_map), readers=warps)
    shared = Pipeline(k, ds_tile, writers=warps, readers=warps)
    parts = part_tile(k, c.total_registers, name="dQ", stages=CONSUMERS * c.total_stages, warps=c.total_warps)
    sums = Pipeline(k, parts, writers=warps_of(1), readers=1, parts=CONSUMERS)
    ready(k, keys, values, queries, gradients, shared, sums)

    with producer(k, CONSUMERS):
        for thread, own, stream in ((0, keys, queries), (96, values, gradients)):
            with k.when(k.thread == thread):
                uses = Uses(tiles)
                with tiles.each() as number:
                    tile = tiles.at(number)
                    own.at(number, filling=True).put(tile.place)
                    with k.loop(tile.count) as turn:
                        block, head = tile.at(turn)
                        place = tile.rows(block, head)
                        stream.at(uses.at(turn), filling=True).put(place, tile.values(block, head, c.vector))
                    uses.end(tile.count)
        for adder in range(ADDERS):
            with k.when(k.thread == 32 * (adder + 1)):
                add(k, c, tiles, sums, dq, adder)

    with consumer(k, CONSUMERS):
        work = KeyConsumer(k, c, f, options, Uses(tiles), (keys, values, queries, gradients, shared, sums))
        with tiles.each() as number:
            work.run(tiles.at(number), number, (dk_map, dv_map) if saved is None else saved)
        if saved is None:
            await_sent(k)


def add(k: Kernel, config: BackwardSm90, tiles: KeyTiles, sums: Pipeline, dq: PartSums, adder: int) -> None:
    """One thread: its parts of dQ, as they come, into the sums over all tiles of keys.

    In turn the first tile stores its own, and the others add in the order of their keys; else whoever comes first
    stores, and the others add as they come: so nobody has to zero the sums. While the part is formed there is time to
    look whose turn it is.
    """
    c, uses, turns = config, Uses(tiles), dq.turns
    own, step = (range(CONSUMERS), ADDERS) if c.alternating else ((adder,), 1)

    def send(to: GlobalPointer, stages: list[Cursor], parts: list[SharedTile], first: Traced) -> None:
        add_parts(k, to, parts, first)
        k.wait_bulk(0, reads_only=True)
        for stage in stages:
            stage.release()

    with tiles.each() as at:
        tile = tiles.at(at)
        start = (uses.at(k.value(0, u32)) + adder) % ADDERS if c.alternating else 0
        with k.loop(tile.count, start=start, step=step) as turn:
            stages, number = [sums.at(uses.at(turn), me) for me in own], tile.part(turn, own[0])
            to = dq.total + k.mul_wide(number, c.total_size)
            if c.in_turn:
                first = turns.await_turn(number, tile.before(turn))
                for i, stage in enumerate(stages):
                    send(to + i * c.total_size, [stage], [stage.wait()], first)
            else:
                stored = turns.stored(number)
                parts = [stage.wait() for stage in stages]
                first = turns.claim(number, stored)
                send(to, stages, parts, first)
            with nullcontext() if c.in_turn else k.when(first):
                k.wait_bulk(0)
                turns.pass_on(number)
        uses.end(tile.count)


class Halves:
    """dQᵀ of a block, head_dim × query rows, by halves: a consumer forms 64 of head_dim × all rows, or × half of them.

    Of head_dim below 128 the 64 of both overlap: the first consumer keeps its first rows, the second its last.
    """

    def __init__(self, k: Kernel, config: BackwardSm90) -> None:
        self._k, self._config = k, config

    def start(self, me: Traced) -> tuple[Number, Number]:
        """Where a consumer's half begins: the column of K, and the query row."""
        c = self._config
        return (me * (c.width - WARPGROUP_ROWS), 0) if c.halves_head else (0, me * c.total_cols)

    def store(self, part: SharedTile, sums: Fragment, me: Traced) -> None:
        """Store what a consumer keeps of its half, for the sums over all tiles of keys."""
        k, c = self._k, self._config
        if c.total_warps == WARPS:
            store_part(k, part, sums)
            return
        first = me * (WARPS - c.total_warps) if c.halves_head else 0
        with k.when((k.warp & 3) - first < c.total_warps, uniform=True):
            store_part(k, part, sums, first)

    def load(self, total: GlobalPointer, number: Traced, stored: Traced) -> list[Mutable]:
        """Load what this warp of both consumers' has of the sums, the first of them by its number; 0 where none are."""
        k, c = self._k, self._config
        warps = c.total_warps if c.halves_head else WARPS
        part, warp = k.warp // warps, k.warp % warps
        values = k.registers(f32, c.total_registers, 0.0, "sum")
        source = total + k.mul_wide(number + part, c.total_size)
        with k.when(stored & (part < CONSUMERS) & (warp < c.total_warps), uniform=True):
            for value, x in zip(values, load_part(k, source, len(values), warp=warp, warps=c.total_warps), strict=True):
                value.set(x)
        return values


class KeyConsumer:
    """One warpgroup: 64 of the tile's keys."""

    def __init__(
        self,
        k: Kernel,
        config: BackwardSm90,
        features: AttentionFeatures,
        options: HeadArrays,
        uses: Uses,
        pipelines: tuple[Pipeline, ...],
    ) -> None:
        c, d = config, config.head_dim
        self._k, self._config, self._uses = k, c, uses
        self._keys, self._values, self._queries, self._gradients, self._shared, self._sums = pipelines
        (self._k_tile,), (self._v_tile,) = self._keys.tiles, self._values.tiles
        self._me = me = k.warpgroup - 1
        self._row, self._scale = me * WARPGROUP_ROWS, features.softmax_scale(d)
        self._cores = cores = Wgmma(k, c.dtype)
        self._s, self._dp = cores.accumulator(c.tile_m, "s"), cores.accumulator(c.tile_m, "dp")
        self._dk, self._dv = cores.accumulator(c.sum_cols, "dk"), cores.accumulator(c.value_sum_cols, "dv")
        self._dq = cores.accumulator(c.total_cols, "dq")
        self._p, self._g = cores.left(c.tile_m, "p"), cores.left(c.tile_m, "ds")
        q_tile, do_tile, ds_tile = (x.tiles[0] for x in (self._queries, self._gradients, self._shared))
        self._form_s = cores.product(self._s, self._k_tile, q_tile, depth=d)
        self._form_dp = cores.product(self._dp, self._v_tile, do_tile, depth=c.value_dim)
        self._add_dv = cores.product(self._dv, self._p, do_tile, transposed_b=True)
        self._add_dk = cores.product(self._dk, self._g, q_tile, transposed_b=True)
        self._form_dq = cores.product(self._dq, self._k_tile, ds_tile, transposed_a=True)
        self._both, self._alone = Meeting(k, CONSUMERS), k.named_barriers(CONSUMERS)
        self._halves = Halves(k, c)
        self._share = TransposedStore(k, ds_tile, me * c.tile_m)
        self._share.prepare(c.tile_m)
        self._options = options.scores(features)
        self._softmax = SoftmaxGradient(k, self._s, self._scale, self._options.change)

    def run(self, tile: KeyTile, number: Traced, results: tuple[Boxes, Boxes] | ShareSums) -> None:
        """dK and dV of the tile that is this CTA's ``number``, and its parts of dQ."""
        k = self._k
        self._tile, self._number = tile, number
        self._k_tile, self._v_tile = self._keys.at(number).tile, self._values.at(number).tile
        count = k.uniform(tile.count)  # else ptxas spills descriptors in loops by it
        zero(self._dk)
        zero(self._dv)
        with k.when(count != 0, uniform=True):
            self._block(k.value(0, u32), first=True)
            self._give_back()
            with k.loop(count, start=1) as turn:
                self._block(turn)
            last = self._shared.at(self._uses.at(count - 1))
            self._start_dq(self._me, last.wait()).wait()
            last.release()
        with k.otherwise():  # K and V come all the same, and dK and dV leave through their rows
            self._give_back()
            self._keys.at(number).wait()
            self._values.at(number).wait()
        if isinstance(results, ShareSums):
            self._save(count, results)
        else:
            self._store(count, *results)
        self._uses.end(count)

    def _block(self, turn: Traced, *, first: bool = False) -> None:
        """A block of query rows, and dQ of the one before: by then the other consumer has shared its dS.

        So neither waits for the other, and while one computes the other multiplies. Nothing that a product needs
        stands behind a slow access to shared memory, which products keep busy: shift is loaded as soon as it is there,
        and dQ goes out beside dV and dK.
        """
        k, cores, use = self._k, self._cores, self._uses.at(turn)
        me = k.uniform(self._me)  # formed anew: descriptors of every k-step kept over the loop take registers
        row = me * WARPGROUP_ROWS
        queries, gradients = self._queries.at(use), self._gradients.at(use)
        shared = self._shared.at(use, filling=True)
        if first:
            self._keys.at(self._number).wait()
        q, shifts = queries.wait_all()
        s = self._form_s.at(row).start(self._k_tile, q, zero=True)
        shift = column_values(shifts, self._s, k.lane)
        if first:
            self._values.at(self._number).wait()
        do, deltas = gradients.wait_all()
        dp = self._form_dp.at(row).start(self._v_tile, do, zero=True)
        s.wait()
        (block, head), mask = self._tile.at(turn), self._tile.mask
        self._options.turn_to(head)
        self._softmax.probabilities(shift, lambda: mask.apply(self._s, block, row=self._row, warp=k.warp & 3))
        cores.pack(self._p, self._s)
        self._softmax.apply_slopes(shift)
        before = None if first else self._shared.at(use - 1).wait()  # waits hold the exponentials above that for dP
        ds = shared.claim()
        delta = column_values(deltas, self._dp, k.lane)
        dp.wait()
        cores.pack(self._g, self._softmax.scores(self._dp, delta))
        self._share.store(ds, self._g)
        shared.written()
        dq = None if before is None else self._start_dq(me, before)
        dv = self._add_dv.start(self._p, do)
        dk = self._add_dk.start(self._g, q)
        if dq is not None:
            dq.wait()
            self._shared.at(use - 1).release()
            self._add(turn - 1)
        dv.wait()
        k.syncwarp()  # every lane has read shift and delta; one gives the stages back
        gradients.release()
        dk.wait()
        queries.release()

    def _start_dq(self, me: Traced, ds: SharedTile) -> StartedProduct:
        """A consumer's half of dQ of a block whose dS both have shared."""
        return self._form_dq.at(*self._halves.start(me)).start(self._k_tile, ds, zero=True)

    def _add(self, turn: Traced) -> None:
        """dQ of a block on its way to the sums."""
        sums = self._sums.at(self._uses.at(turn), self._me, filling=True)
        self._halves.store(sums.claim(), self._dq, self._me)
        sums.written()

    def _store(self, count: Traced, dk: Boxes, dv: Boxes) -> None:
        """dV, the last dQ and dK on their way out; those of keys through the consumer's own rows of V and K."""
        k, (row, *rest) = self._k, self._tile.place
        place, barrier = (row + self._row, *rest), self._me + self._alone
        send_rows(k, self._v_tile, self._dv, self._me, dv, place, barrier=barrier)
        with k.when(count != 0, uniform=True):
            self._add(count - 1)
        scale(self._dk, self._scale)
        self._both.sync()  # they are done with all of K
        send_rows(k, self._k_tile, self._dk, self._me, dk, place, barrier=barrier)

    def _save(self, count: Traced, shares: ShareSums) -> None:
        """dV, the last dQ and dK of a share."""
        k, number = self._k, self._tile.of_shares * CONSUMERS + self._me
        shares.save(self._dv, number, value=True)
        with k.when(count != 0, uniform=True):
            self._add(count - 1)
        scale(self._dk, self._scale)
        shares.save(self._dk, number, value=False)

    def _give_back(self) -> None:
        """K and V of the tile before, once dK and dV have left through them: with two stages nobody waits for that."""
        k = self._k
        if self._config.persistent:
            with k.when(self._number != 0, uniform=True):
                await_sent(k)
                with k.when((k.warp & 3) == 0, uniform=True):
                    self._keys.at(self._number - 1).release()
                    self._values.at(self._number - 1).release()


@kernel(threads=CONSUMERS * WARPGROUP, requires="sm_90a", drop_unused=True)
def attention_backward_dq_sm90(
    k: Kernel,
    dq_map: TensorMap,
    total: Global[f32],
    blocks: Global[u32],
    q_len: u32,
    kv_len: u32,
    slots: u32,
    *,
    config: BackwardSm90,
    features: AttentionFeatures = PLAIN,
    heads_inside: bool = True,
    listed: bool = False,
) -> None:
    """dQ from the sums, scaled and rounded; grid (blocks of query rows, heads, batches).

    Of packed sequences the blocks are ``listed`` in ``blocks``, with a CTA for each that there may be.
    """
    c, block = config, k.value(0, u32) if listed else k.cta_x
    with tile_of(k, features, (q_len, kv_len), blocks if listed else None, slots) as at:
        queries = at.queries
        if at.slot is not None:
            number = (at.head * slots + at.slot.first + at.slot.number) * CONSUMERS
            to = sequence_boxes(dq_map), (0, at.head, queries.outer, queries.length)
        else:
            number = ((queries.outer * k.special("nctaid.y") + at.head) * k.grid_x + block) * CONSUMERS
            row = block * c.tile_m
            to = Boxes.of_heads(dq_map, heads_inside), (row, at.head, queries.outer)
        lengths, me = at.lengths, k.warpgroup
        tile = operand_tile(k, c.dtype, c.tile_m, c.width, name="dQ")
        cores = Wgmma(k, c.dtype)
        factor: Traced = k.value(features.softmax_scale(c.head_dim), f32)
        first, end = key_tiles(k, features.mask, (c.tile_m, KEYS), block, lengths)
        values = Halves(k, c).load(total, number, first < end)  # of a block that no tile of keys sees nobody stores any
        sums = k.fragment(wgmma_accumulator(c.total_cols), f32, [x * factor for x in values])
        packed = cores.left(c.total_cols, "dq")
        cores.pack(packed, sums)
        TransposedStore(k, tile, me * c.total_cols).store(tile, packed)  # of panels, or of rows
        send_tile(k, tile, *to)


@dataclass(frozen=True)
class KeyTiles:
    """The tiles of this CTA by their numbers among them."""

    k: Kernel
    order: Persistent | Single
    at: Callable[[Number], KeyTile]

    @contextmanager
    def each(self) -> Iterator[Traced]:
        """Their numbers, one after another."""
        if isinstance(self.order, Single):
            with self.order.any():
                yield self.k.value(0, u32)
        else:
            with self.k.loop(self.order.count) as number:
                yield number


class Uses:
    """A count of a ring's uses by the tiles before, where there may be any."""

    def __init__(self, tiles: KeyTiles) -> None:
        self._before = None if isinstance(tiles.order, Single) else tiles.k.register(u32, 0, "uses")

    def at(self, turn: Traced) -> Traced:
        """The number of the use that is number ``turn`` of this tile."""
        return turn if self._before is None else turn + self._before

    def end(self, count: Traced) -> None:
        """The tile is done, after so many."""
        if self._before is not None:
            self._before.set(self._before + count)


@dataclass(frozen=True)
class KeyTile(ABC):
    """Tile ``number`` of the keys of a head, and the query rows that see them, of ``share`` query heads.

    ``walker``: which share of a batch's query heads. ``of_head``: how many blocks of a query head come before those of
    the next; None where all heads of a block do.
    """

    k: Kernel
    features: AttentionFeatures
    tile: tuple[int, int]
    number: Traced
    kv_head: Traced
    lengths: tuple[Traced, Traced]
    mask: SeenBy
    of_head: Divisor | None
    walker: Traced
    share: int

    @property
    @abstractmethod
    def place(self) -> tuple[Number, ...]:
        """Where its K and V lie."""

    @abstractmethod
    def rows(self, block: Traced, head: Traced) -> tuple[Number, ...]:
        """Where Q and dO of a block of query rows lie."""

    @abstractmethod
    def values(self, block: Traced, head: Traced, vector: int) -> tuple[Traced, Traced]:
        """Where shift and delta of a block lie, each with ``vector`` places."""

    @abstractmethod
    def part(self, turn: Traced, me: Number) -> Traced:
        """The number of a consumer's part of a block of dQ."""

    def before(self, turn: Traced) -> Traced:
        """The number of tiles of keys that add to a block of dQ before this one."""
        block, _ = self.at(turn)
        return self.number - key_tiles(self.k, self.features.mask, self.tile, block, self.lengths)[0]

    @property
    def count(self) -> Traced:
        """The number of blocks of query rows that see the keys, of all its query heads."""
        return self.mask.blocks * self.share

    @property
    @abstractmethod
    def of_shares(self) -> Traced:
        """The number of the tile among those of all shares of all batches."""

    def at(self, turn: Traced) -> tuple[Traced, Traced]:
        """(block of query rows, query head) of number ``turn``."""
        share = self.share
        if share == 1:
            return self.mask.block(turn), self.walker
        own, step = (turn % share, turn // share) if self.of_head is None else self.of_head.divide(turn)
        return self.mask.block(step), self.walker * share + own


def key_head(walker: Traced, features: AttentionFeatures, share: int) -> Traced:
    """The key head of a share of so many query heads, by its number."""
    return walker // (features.group // share) if share < features.group else walker


@dataclass(frozen=True)
class GridKeyTile(KeyTile):
    """A tile of sequences of one length; a batch has so many ``walkers``."""

    batch: Traced
    walkers: Traced

    @classmethod
    def of(
        cls,
        k: Kernel,
        features: AttentionFeatures,
        tile: tuple[int, int],
        at: tuple[Traced, Traced],
        lengths: tuple[Traced, Traced],
        walkers: Divisor,
        share: int,
        *,
        by_heads: bool = False,
        rising: bool = False,
    ) -> GridKeyTile:
        """A tile of so many query rows and keys at (tiles after it, plane), a plane being a walker of a batch."""
        left, plane = at
        tiles = (lengths[1] + (tile[1] - 1)) // tile[1]
        number = tiles - 1 - left  # the first keys have the most query rows, and CTAs wait for those of lower numbers
        mask = SeenBy(k, features.mask, tile, number * tile[1], lengths, rising=rising)
        batch, walker = walkers.divide(plane)
        head = key_head(walker, features, share)
        of_head = Divisor.of(k, k.maximum(mask.blocks, 1)) if by_heads else None
        return cls(k, features, tile, number, head, lengths, mask, of_head, walker, share, batch, walkers.value)

    @property
    def place(self) -> tuple[Number, ...]:
        """Where its K and V lie."""
        return self.number * self.tile[1], self.kv_head, self.batch

    def rows(self, block: Traced, head: Traced) -> tuple[Number, ...]:
        """Where Q and dO of a block of query rows lie."""
        rows = block * self.tile[0]
        return rows, head, self.batch

    def values(self, block: Traced, head: Traced, vector: int) -> tuple[Traced, Traced]:
        """Where shift and delta of a block lie, each with ``vector`` places."""
        return block * vector, self.plane_of(head)

    def plane_of(self, head: Traced) -> Traced:
        """The number of a query head among those of all batches."""
        return self.batch * (self.walkers * self.share) + head

    @property
    def of_shares(self) -> Traced:
        """The number of the tile among those of all shares of all batches."""
        tiles = (self.lengths[1] + (self.tile[1] - 1)) // self.tile[1]
        return (self.batch * self.walkers + self.walker) * tiles + self.number

    def part(self, turn: Traced, me: Number) -> Traced:
        """The number of a consumer's part of a block of dQ."""
        block, head = self.at(turn)
        blocks = (self.lengths[0] + (self.tile[0] - 1)) // self.tile[0]
        return (self.plane_of(head) * blocks + block) * CONSUMERS + me


@dataclass(frozen=True)
class ListedKeyTile(KeyTile):
    """A tile of a list, which says where its sequence lies, and which of the ``slots`` of each head it has."""

    piece: Piece
    slot: Slot
    slots: Traced
    entry: Traced

    @classmethod
    def of(
        cls,
        k: Kernel,
        config: BackwardSm90,
        features: AttentionFeatures,
        listed: PieceList,
        entry: Traced,
        slots: Traced,
        share: int,
    ) -> ListedKeyTile:
        """The tile of an entry."""
        piece, slot = listed.at(entry), listed.slot(entry)
        tile, first = (config.tile_m, KEYS), slot.number * KEYS
        lengths = piece.keys.count, piece.queries.count + first
        mask = SeenBy(k, features.mask, tile, first, lengths, rising=config.rising)
        of_head = Divisor.of(k, k.maximum(mask.blocks, 1)) if config.by_heads else None
        head, places = key_head(piece.head, features, share), (piece, slot, slots, entry)
        return cls(k, features, tile, slot.number, head, lengths, mask, of_head, piece.head, share, *places)

    @property
    def place(self) -> tuple[Number, ...]:
        """Where its K and V lie."""
        first = self.number * KEYS
        return first, self.kv_head, self.piece.queries.begin - first, self.lengths[1]

    def rows(self, block: Traced, head: Traced) -> tuple[Number, ...]:
        """Where Q and dO of a block of query rows lie."""
        return block * self.tile[0], head, self.piece.keys.begin, self.lengths[0]

    def values(self, block: Traced, head: Traced, vector: int) -> tuple[Traced, Traced]:
        """Where shift and delta of a block lie."""
        return (self.slot.first + block) * vector, head

    @property
    def of_shares(self) -> Traced:
        """The number of the tile among those of all shares: its place in the list."""
        return self.entry

    def part(self, turn: Traced, me: Number) -> Traced:
        """The number of a consumer's part of a block of dQ."""
        block, head = self.at(turn)
        return (head * self.slots + self.slot.first + block) * CONSUMERS + me
