# pyright: reportInvalidTypeForm=false
"""Attention backward for ``wgmma`` and the TMA (sm_90a): five products in one pass over the rows of a tile of keys.

Scores are formed transposed, keys along the rows, so that Pᵀ and dSᵀ are the register operands of dV and dK; dS goes to
shared memory for dQᵀ = Kᵀ·dSᵀ, whose sums over all tiles of keys meet in global memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from warploom.core.dtypes import f32, u32
from warploom.kernels.attention.backward_sm90 import CONSUMERS, KEYS, STAGES, BackwardSm90
from warploom.kernels.attention.features import PLAIN, AttentionFeatures
from warploom.lang import Global, GlobalPointer, Kernel, SharedTile, TensorMap, Traced, kernel
from warploom.lang.hopper import TensorMapHandle
from warploom.lang.values import Number
from warploom.layout.catalogue import wgmma_accumulator
from warploom.tile.accumulation import Turns, add_part, load_part, part_size, part_tile, store_part
from warploom.tile.epilogue import send_rows
from warploom.tile.gradient import SoftmaxGradient
from warploom.tile.mask import SeenBy, Visible, key_tiles
from warploom.tile.pipeline import Boxes, Pipeline, operand_tile, ready
from warploom.tile.product import Started, Wgmma, scale, zero
from warploom.tile.roles import WARPGROUP, WARPGROUP_ROWS, consumer, producer, threads_of
from warploom.tile.scheduler import Divisor, RowTiles
from warploom.tile.transposed import TransposedStore, column_values

SHARED, OWN = 1, 2
"""Named barriers: of both consumers, and from here on of each."""


@kernel(threads=threads_of(CONSUMERS), requires="sm_90a", drop_unused=True)
def attention_backward_sm90(
    k: Kernel,
    q_map: TensorMap,
    k_map: TensorMap,
    v_map: TensorMap,
    do_map: TensorMap,
    shift_map: TensorMap,
    delta_map: TensorMap,
    dk_map: TensorMap,
    dv_map: TensorMap,
    total: Global[f32],
    turns: Global[u32],
    q_len: u32,
    kv_len: u32,
    kv_heads: u32,
    planes: u32,
    together: u32,
    *,
    config: BackwardSm90,
    features: AttentionFeatures = PLAIN,
    heads_inside: bool = True,
) -> None:
    """dK and dV of a tile of keys, and what it adds to dQ; a grid of (tiles of keys · planes) along x.

    Tensor maps of rank 4, boxes of 64 columns × tile rows; shift and delta as :mod:`.backward_rows_kernel` forms them.
    ``planes`` = key heads · batches, of which ``together`` form a group (:class:`RowTiles`). ``total``: for each block
    of query rows the parts of both consumers, as their threads hold them; ``turns``: for each part how many tiles of
    keys are in it.
    """
    c, f = config, features
    tile = KeyTile.of(k, (c.tile_m, KEYS), f, (q_len, kv_len), (kv_heads, planes, together), by_heads=c.by_heads)

    inputs, results = (
        [Boxes.of_heads(of, heads_inside) for of in maps] for maps in ((q_map, k_map, v_map, do_map), (dk_map, dv_map))
    )
    maps = *inputs, vectors(shift_map), vectors(delta_map), *results
    differentiate(k, c, f, tile, maps, (total, Turns(k, turns)))


def vectors(of: TensorMapHandle) -> Boxes:
    """Shift or delta, at (element, plane)."""
    return Boxes(of, lambda _, row, plane: (row, plane))


def differentiate(
    k: Kernel,
    config: BackwardSm90,
    features: AttentionFeatures,
    tile: KeyTile,
    maps: tuple[Boxes, ...],
    sums_of: tuple[GlobalPointer, Turns],
) -> None:
    """dK and dV of a tile of keys, and what it adds to dQ.

    ``maps``: Q, K, V, dO, shift, delta, dK and dV at the places that the tile says.
    """
    c, f = config, features
    (q_map, k_map, v_map, do_map, shift_map, delta_map, dk_map, dv_map), (total, turns) = maps, sums_of
    q_tile = operand_tile(k, c.dtype, c.tile_m, c.width, name="Q", stages=STAGES)
    do_tile = operand_tile(k, c.dtype, c.tile_m, c.value_width, name="dO", stages=STAGES)
    k_tile = operand_tile(k, c.dtype, KEYS, c.width, name="K")
    v_tile = operand_tile(k, c.dtype, KEYS, c.value_width, name="V")
    ds_tile = operand_tile(k, c.dtype, c.tile_m, KEYS, name="dS", stages=STAGES)
    shift_tile = k.shared(f32, c.vector, name="shift", panel_cols=c.vector, stages=STAGES)
    delta_tile = k.shared(f32, c.vector, name="delta", panel_cols=c.vector, stages=STAGES)
    warps = 4 * CONSUMERS
    keys = Pipeline(k, (k_tile, k_map), (v_tile, v_map), readers=0)
    queries = Pipeline(k, (q_tile, q_map), (shift_tile, shift_map), readers=warps)
    gradients = Pipeline(k, (do_tile, do_map), (delta_tile, delta_map), readers=warps)
    shared = Pipeline(k, ds_tile, writers=warps, readers=warps)
    parts = part_tile(k, c.total_registers, name="dQ", stages=CONSUMERS)
    sums = Pipeline(k, parts, writers=4, readers=1, parts=CONSUMERS)
    ready(k, keys, queries, gradients, shared, sums)

    with producer(k, CONSUMERS), tile.present():
        with k.when(k.thread == 0):
            keys.at(0, filling=True).put(tile.place, tile.place)
        for thread, stream in ((0, queries), (96, gradients)):
            with k.when(k.thread == thread), k.loop(tile.count) as turn:
                block, head = tile.at(turn)
                place = tile.rows(block, head)
                stream.at(turn, filling=True).put(place, tile.values(block, head, c.vector))
        for me in range(CONSUMERS):
            with k.when(k.thread == 32 * (me + 1)):
                add(k, c, tile, sums, total, turns, me)

    with consumer(k, CONSUMERS), tile.present():
        work = Consumer(k, c, f, tile, (keys, queries, gradients, shared, sums))
        work.run()
        work.store(dk_map, dv_map)


@dataclass(frozen=True)
class KeyTile:
    """The keys of this CTA: tile ``number`` of a key head, and the query rows that see them."""

    k: Kernel
    features: AttentionFeatures
    tile: tuple[int, int]
    number: Traced
    kv_head: Traced
    batch: Traced
    kv_heads: Traced
    lengths: tuple[Traced, Traced]
    mask: SeenBy
    of_head: Divisor | None = None
    """How many blocks of a query head come before those of the next; None where all heads of a block do."""

    @classmethod
    def of(
        cls,
        k: Kernel,
        tile: tuple[int, int],
        features: AttentionFeatures,
        lengths: tuple[Traced, Traced],
        counts: tuple[Traced, Traced, Traced],
        *,
        by_heads: bool = False,
    ) -> KeyTile:
        """The CTA's of tiles of (query rows, keys); ``counts``: key heads, planes, and planes together."""
        kv_heads, planes, together = counts
        tiles = (lengths[1] + (tile[1] - 1)) // tile[1]
        left, plane = RowTiles.of(k, tiles, planes, together).tile(k.cta_x)
        number = tiles - 1 - left  # the first keys have the most query rows, and CTAs wait for those of lower numbers
        mask = SeenBy(k, visible(features), tile, number * tile[1], lengths)
        place = number, plane % kv_heads, plane // kv_heads
        of_head = Divisor.of(k, k.maximum(mask.blocks, 1)) if by_heads else None
        return cls(k, features, tile, *place, kv_heads, lengths, mask, of_head)

    @property
    def place(self) -> tuple[Number, ...]:
        """Where its K and V lie."""
        return self.number * self.tile[1], self.kv_head, self.batch

    def present(self) -> AbstractContextManager[None]:
        """Where this CTA has such a tile."""
        return nullcontext()

    def rows(self, block: Traced, head: Traced) -> tuple[Number, ...]:
        """Where Q and dO of a block of query rows lie."""
        rows = block * self.tile[0]
        return rows, head, self.batch

    def values(self, block: Traced, head: Traced, vector: int) -> tuple[Traced, Traced]:
        """Where shift and delta of a block lie, each with ``vector`` places."""
        return block * vector, self.plane_of(head)

    def plane_of(self, head: Traced) -> Traced:
        """The number of a query head among those of all batches."""
        return self.batch * (self.kv_heads * self.features.group) + head

    def part(self, turn: Traced, me: Number) -> Traced:
        """The number of a consumer's part of a block of dQ."""
        block, head = self.at(turn)
        blocks = (self.lengths[0] + (self.tile[0] - 1)) // self.tile[0]
        return (self.plane_of(head) * blocks + block) * CONSUMERS + me

    def before(self, turn: Traced) -> Traced:
        """How many tiles of keys add to a block of dQ before this one."""
        block, _ = self.at(turn)
        return self.number - key_tiles(self.k, visible(self.features), self.tile, block, self.lengths)[0]

    @property
    def count(self) -> Traced:
        """How many blocks of query rows see the keys, of all the query heads that share them."""
        return self.mask.blocks * self.features.group

    def at(self, turn: Traced) -> tuple[Traced, Traced]:
        """(block of query rows, query head) of number ``turn``."""
        group = self.features.group
        if group == 1:
            return self.mask.block(turn), self.kv_head
        own, step = (turn % group, turn // group) if self.of_head is None else self.of_head.divide(turn)
        return self.mask.block(step), self.kv_head * group + own


def visible(features: AttentionFeatures) -> Visible:
    """The mask of a problem."""
    return Visible(features.window, features.ragged_kv)


def add(
    k: Kernel, config: BackwardSm90, tile: KeyTile, sums: Pipeline, total: GlobalPointer, turns: Turns, me: int
) -> None:
    """One thread: a consumer's parts of dQ, as they come, into the sums over all tiles of keys.

    The first tile stores its own, so that nobody has to zero them; the others add in turn, or as they come.
    """
    with k.loop(tile.count) as turn:
        ready_part, number = sums.at(turn, me), tile.part(turn, me)
        to = total + k.mul_wide(number, part_size(config.total_registers))
        part, before = ready_part.wait(), tile.before(turn)
        turns.await_turn(number, before if config.in_turn else k.minimum(before, 1))
        add_part(k, to, part, before == 0)
        k.wait_bulk(0, reads_only=True)
        ready_part.release()
        with nullcontext() if config.in_turn else k.when(before == 0):
            k.wait_bulk(0)
            turns.pass_on(number)


class Consumer:
    """One warpgroup: 64 of the tile's keys."""

    def __init__(
        self,
        k: Kernel,
        config: BackwardSm90,
        features: AttentionFeatures,
        tile: KeyTile,
        pipelines: tuple[Pipeline, Pipeline, Pipeline, Pipeline, Pipeline],
    ) -> None:
        c, d = config, config.head_dim
        self._k, self._config, self._tile = k, c, tile
        self._keys, self._queries, self._gradients, self._shared, self._sums = pipelines
        self._k_tile, self._v_tile = self._keys.tiles
        self._me = me = k.warpgroup - 1
        self._row, self._scale = me * WARPGROUP_ROWS, features.softmax_scale(d)
        self._cores = cores = Wgmma(k, c.dtype)
        self._s, self._dp = cores.accumulator(c.tile_m, "s"), cores.accumulator(c.tile_m, "dp")
        self._dk, self._dv = cores.accumulator(c.sum_cols, "dk"), cores.accumulator(c.value_sum_cols, "dv")
        self._dq = cores.accumulator(c.total_cols, "dq")
        self._p, self._g = cores.left(c.tile_m, "p"), cores.left(c.tile_m, "ds")
        q_tile, do_tile, ds_tile = (x.tiles[0] for x in (self._queries, self._gradients, self._shared))
        self._form_s = cores.product(self._s, self._k_tile, q_tile, row=self._row, depth=d)
        self._form_dp = cores.product(self._dp, self._v_tile, do_tile, row=self._row, depth=c.value_dim)
        self._add_dv = cores.product(self._dv, self._p, do_tile, transposed_b=True)
        self._add_dk = cores.product(self._dk, self._g, q_tile, transposed_b=True)
        row, col = (self._row, 0) if c.total_cols == c.tile_m else (0, me * c.total_cols)
        self._form_dq = cores.product(self._dq, self._k_tile, ds_tile, row=row, col=col, transposed_a=True)
        self._share = TransposedStore(k, ds_tile, me * c.tile_m)
        self._share.prepare(c.tile_m)
        self._softmax = SoftmaxGradient(k, self._s, self._scale, cap=features.softcap)

    def run(self) -> None:
        """dK / scale and dV, and the parts of dQ."""
        k = self._k
        count = k.shfl_idx(self._tile.count, 0)  # tells ptxas that loops by it are uniform: else it spills descriptors
        zero(self._dk)
        zero(self._dv)
        self._keys.at(0).wait()
        with k.when(count != 0, uniform=True):
            self._block(k.value(0, u32), first=True)
            with k.loop(count, start=1) as turn:
                self._block(turn)
            self._start_dq(self._shared.at(count - 1).wait()).wait()
            self._add(count - 1)

    def _block(self, turn: Traced, *, first: bool = False) -> None:
        """A block of query rows, and dQ of the one before: by then the other consumer has shared its dS.

        So neither waits for the other, and while one computes the other multiplies. Nothing that a product needs
        stands behind a slow access to shared memory, which products keep busy: shift is loaded as soon as it is there,
        and dQ goes out beside dV and dK.
        """
        k, cores = self._k, self._cores
        queries, gradients = self._queries.at(turn), self._gradients.at(turn)
        shared = self._shared.at(turn, filling=True)
        q, shifts = queries.wait_all()
        s = self._form_s.start(self._k_tile, q, zero=True)
        shift = column_values(shifts, self._s, k.lane)
        do, deltas = gradients.wait_all()
        dp = self._form_dp.start(self._v_tile, do, zero=True)
        s.wait()
        block, mask = self._tile.at(turn)[0], self._tile.mask
        self._softmax.probabilities(shift, lambda: mask.apply(self._s, block, row=self._row, warp=k.warp & 3))
        cores.pack(self._p, self._s)
        self._softmax.uncap(shift)
        before = None if first else self._shared.at(turn - 1).wait()  # waits hold the exponentials above that for dP
        ds = shared.claim()
        delta = column_values(deltas, self._dp, k.lane)
        dp.wait()
        cores.pack(self._g, self._softmax.scores(self._dp, delta))
        self._share.store(ds, self._g)
        shared.written()
        dq = None if before is None else self._start_dq(before)
        dv = self._add_dv.start(self._p, do)
        dk = self._add_dk.start(self._g, q)
        if dq is not None:
            dq.wait()
            self._shared.at(turn - 1).release()
            self._add(turn - 1)
        dv.wait()
        k.syncwarp()  # every lane has read shift and delta; one gives the stages back
        gradients.release()
        dk.wait()
        queries.release()

    def _start_dq(self, ds: SharedTile) -> Started:
        """dQ of a block, whose dS both consumers have shared."""
        return self._form_dq.start(self._k_tile, ds, zero=True)

    def _add(self, turn: Traced) -> None:
        """dQ of a block on its way to the sums."""
        sums = self._sums.at(turn, self._me, filling=True)
        store_part(self._k, sums.claim(), self._dq)
        sums.written()

    def store(self, dk: Boxes, dv: Boxes) -> None:
        """dV and dK on their way out, through the consumer's own rows of V and K."""
        k, (row, *rest) = self._k, self._tile.place
        place, barrier = (row + self._row, *rest), self._me + OWN
        send_rows(k, self._v_tile, self._dv, self._me, dv, place, barrier=barrier)
        scale(self._dk, self._scale)
        k.bar_sync(SHARED, CONSUMERS * WARPGROUP)  # both are done with all of K
        send_rows(k, self._k_tile, self._dk, self._me, dk, place, barrier=barrier)


@kernel(threads=CONSUMERS * WARPGROUP, requires="sm_90a", drop_unused=True)
def attention_backward_dq_sm90(
    k: Kernel,
    dq_map: TensorMap,
    total: Global[f32],
    q_len: u32,
    kv_len: u32,
    *,
    config: BackwardSm90,
    features: AttentionFeatures = PLAIN,
    heads_inside: bool = True,
) -> None:
    """dQ from the sums, scaled and rounded; grid (blocks of query rows, heads, batches)."""
    block, head, batch = k.cta_x, k.cta_y, k.cta_z
    number = ((batch * k.special("nctaid.y") + head) * k.grid_x + block) * CONSUMERS + k.warpgroup
    row = block * config.tile_m
    to = Boxes.of_heads(dq_map, heads_inside), (row, head, batch)
    round_sums(k, config, features, (total, number), (block, (q_len, kv_len)), to)


def round_sums(
    k: Kernel,
    config: BackwardSm90,
    features: AttentionFeatures,
    sums_of: tuple[GlobalPointer, Traced],
    place: tuple[Traced, tuple[Traced, Traced]],
    to: tuple[Boxes, tuple[Number, ...]],
) -> None:
    """A block of dQ from its sums by their number; ``place``: the block and the lengths of its sequence.

    ``to``: dQ, and the block's place there.
    """
    c, me, (total, number), (block, lengths), (dq, at) = config, k.warpgroup, sums_of, place, to
    tile = operand_tile(k, c.dtype, c.tile_m, c.width, name="dQ")
    cores = Wgmma(k, c.dtype)
    factor: Traced = k.value(features.softmax_scale(c.head_dim), f32)
    values = load_part(k, total + k.mul_wide(number, part_size(c.total_registers)), c.total_registers)
    first, end = key_tiles(k, visible(features), (c.tile_m, KEYS), block, lengths)
    values = [k.select(first < end, x, k.value(0.0, f32)) for x in values]  # without a tile that adds nobody stores
    sums = k.fragment(wgmma_accumulator(c.total_cols), f32, [x * factor for x in values])
    packed = cores.left(c.total_cols, "dq")
    cores.pack(packed, sums)
    TransposedStore(k, tile, me * c.total_cols).store(tile, packed)  # of panels, or of rows
    k.fence_async()
    k.syncthreads()
    with k.when(k.thread == 0):
        for panel in tile.layout.panels:
            k.tma_store(dq.tensor_map, dq.order(panel.first_col, *at), tile, offset=panel.byte_offset)
        k.commit_bulk()
        k.wait_bulk(0, reads_only=True)
