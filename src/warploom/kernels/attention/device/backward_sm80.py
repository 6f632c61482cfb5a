# pyright: reportInvalidTypeForm=false
"""Attention backward for ``cp.async`` and ``mma.sync`` (sm_80 and newer): warps own keys, and stream the query rows.

As on sm_90a scores are formed transposed, so that Pᵀ and dSᵀ are the register operands of dV and dK, and dS goes to
shared memory for dQ, whose sums over all tiles of keys meet in global memory. Where registers do not hold dV and dK of
all columns, a group of warps owns keys together: each forms the scores of a part of the query rows, and sums a part of
the columns, over its own rows first, then over those whose Pᵀ and dSᵀ the others have put into shared memory.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

from warploom.core.dtypes import f32, u16, u32
from warploom.kernels.attention.backward_sm80 import STAGES, BackwardSm80
from warploom.kernels.attention.device.scores import HeadArrays
from warploom.kernels.attention.device.tiles import Side, Tensor, TilePlace, tile_of
from warploom.kernels.attention.problem import PLAIN, AttentionFeatures
from warploom.lang import Fragment, Global, GlobalPointer, Kernel, SharedTile, Strided, StridedPointer, Traced, kernel
from warploom.lang.parameters import Compound
from warploom.lang.values import Number
from warploom.tile.accumulation import PartSums, load_warp_part, reduce_warp_part, save_warp_part
from warploom.tile.copies import CopyRing, RowCopy, Rows
from warploom.tile.epilogue import column_values, store_pairs
from warploom.tile.mask import SeenBy, key_tiles
from warploom.tile.pipeline import operand_tile
from warploom.tile.product import MmaSync, MmaSyncProduct, scale, zero
from warploom.tile.ragged import RowRange
from warploom.tile.softmax import SoftmaxGradient


@kernel(threads=lambda config, **_: config.threads, drop_unused=True)
def attention_backward_sm80(
    k: Kernel,
    arrays: GradientArrays,
    options: HeadArrays,
    tiles: Global[u32],
    sums: PartSums,
    shares: Global[f32],
    q_len: u32,
    kv_len: u32,
    slots: u32,
    *,
    config: BackwardSm80,
    features: AttentionFeatures = PLAIN,
    row_strides: tuple[int, ...],
    listed: bool = False,
    share: int = 0,
) -> None:
    """dK and dV of a tile of keys, and what it adds to dQ; grid (tiles of keys, key heads, batches).

    Strides of batches and heads; those between positions are known while tracing. ``sums``: for each block of query
    rows the parts of all warps, as their threads hold them; turns count the tiles of keys that are in it. Of packed
    sequences the tiles are ``listed`` in ``tiles``, with a CTA for each that there may be, and each head has ``slots``
    for blocks. With a ``share`` the grid has the shares of so many query heads in the place of key heads, and dK and dV
    go to ``shares``.
    """
    known = zip(arrays.tensors, row_strides, strict=True)
    tensors = [Tensor.of(x, row, packed=listed, head=1) for x, row in known]
    with tile_of(k, features, (q_len, kv_len), tiles if listed else None, slots) as place:
        c, first = config, place.number * config.keys
        if listed:  # the list has the keys from the tile's first one on, as what is cut into tiles
            own = place.queries
            keys = RowRange(own.outer - first, own.length + first)
            place = replace(place, queries=place.keys, keys=Side.packed(keys))
        saved = WarpShares(k, shares, c, share) if share else None
        KeyGradients(k, c, features, place, first, tensors, (arrays.shift, arrays.delta), options, sums, saved).run()


class GradientArrays(Compound):
    """A parameter: what the kernels of dK and dV read and store; :mod:`.device.backward_rows` forms shift and delta."""

    q: Strided[u16, 2]
    key: Strided[u16, 2]
    value: Strided[u16, 2]
    dout: Strided[u16, 2]
    shift: Global[f32]
    delta: Global[f32]
    dk: Strided[u16, 2]
    dv: Strided[u16, 2]

    @property
    def tensors(self) -> list[StridedPointer]:
        """The arrays with rows of a head_dim."""
        return [x for x in self.values if isinstance(x, StridedPointer)]


@dataclass(frozen=True)
class WarpShares:
    """dK and dV of shares of ``heads`` query heads in memory: of each tile those of its warps, as threads hold them."""

    k: Kernel
    shares: GlobalPointer
    config: BackwardSm80
    heads: int = 0

    def parts(self, plane: Traced) -> tuple[GlobalPointer, GlobalPointer]:
        """This warp's of dK and of dV, of the CTA's tile of keys and a share with this number among those of all."""
        k, (of_keys, of_values) = self.k, self.config.key_registers
        number = (plane * k.grid_x + k.cta_x) * self.config.num_warps + k.warp
        first = self.shares + k.mul_wide(number, 32 * (of_keys + of_values))
        return first, first + 32 * of_keys


@dataclass(frozen=True)
class Strip:
    """Query rows of a block whose scores a warp forms at a time: their number, and the products on them."""

    number: Number
    form_s: MmaSyncProduct
    form_dp: MmaSyncProduct
    add_dv: MmaSyncProduct
    add_dk: MmaSyncProduct


class KeyGradients:
    """dK and dV of a tile of keys, and what it adds to dQ, by all threads of the CTA."""

    def __init__(
        self,
        k: Kernel,
        config: BackwardSm80,
        features: AttentionFeatures,
        place: TilePlace,
        first: Traced,
        tensors: list[Tensor],
        vectors: tuple[GlobalPointer, GlobalPointer],
        options: HeadArrays,
        sums: PartSums,
        saved: WarpShares | None,
    ) -> None:
        """The CTA's keys from ``first`` on; ``tensors``: of :class:`GradientArrays`; ``vectors``: shift and delta."""
        c, f, (q, key, value, dout, *self._results) = config, features, tensors
        self._saved, self._heads = saved, f.group if saved is None else saved.heads
        self._k, self._config, self._features, self._vectors = k, c, f, vectors
        self._place, self._first = place, first
        self._group, self._number = owned(k, c)
        self._part = self._number % c.parts if c.parts > 1 else 0
        self._k_tile = operand_tile(k, c.dtype, c.keys, c.width, name="K")
        self._v_tile = operand_tile(k, c.dtype, c.keys, c.value_width, name="V")
        q_tile = operand_tile(k, c.dtype, c.tile_m, c.width, name="Q", stages=STAGES)
        do_tile = operand_tile(k, c.dtype, c.tile_m, c.value_width, name="dO", stages=STAGES)
        self._ds_tile = operand_tile(k, c.dtype, c.keys, c.tile_m, name="dS", panel=c.strip)
        self._p_tile = self._ds_tile
        if c.parts > 1:  # else nobody reads P of others
            self._p_tile = operand_tile(k, c.dtype, c.keys, c.tile_m, name="P", panel=c.strip)
        for copy in self._copies(key, value):
            copy.load((first, 0))
        queries = (q_tile, self._queries_of(q, c.head_dim)), (do_tile, self._queries_of(dout, c.value_dim))
        self._ring = CopyRing(k, *queries, threads=c.threads)
        self._multiply(q_tile, do_tile)
        self._options = options.scores(f)
        self._softmax = SoftmaxGradient(k, self._s, f.softmax_scale(c.head_dim), self._options.change)
        self._mask = SeenBy(k, f.mask, (c.tile_m, c.keys), first, place.lengths)
        self._sums = QuerySums(k, c, f, place, sums)

    def _copies(self, keys: Tensor, values: Tensor) -> list[RowCopy]:
        """The copies of the tiles of K and V: from there, or to the gradients."""
        k, c = self._k, self._config
        rows = self._keys_of(keys, c.head_dim), self._keys_of(values, c.value_dim)
        return [RowCopy(k, x, of, c.threads) for x, of in zip((self._k_tile, self._v_tile), rows, strict=True)]

    def _keys_of(self, of: Tensor, cols: int) -> Rows:
        """The sequence's rows in an array of keys."""
        p, shares = self._place, self._features.group // self._heads
        head = p.head // shares if shares > 1 else p.head
        return Rows(of.array.at(p.keys.outer, head), of.row, p.keys.rows, cols)

    def _queries_of(self, of: Tensor, cols: int) -> Rows:
        """Its rows in an array of queries, of the first of the heads that share the keys; places name the others."""
        p, (_, plane) = self._place, of.array.strides
        outer, rows, group = p.queries.outer, p.queries.rows, self._heads
        return Rows(of.array.at(outer, p.head * group), of.row, rows, cols, plane=plane)

    def _multiply(self, q_tile: SharedTile, do_tile: SharedTile) -> None:
        """The accumulators, and the five products."""
        k, c = self._k, self._config
        self._cores = cores = MmaSync(k, c.dtype)
        s, dp = cores.accumulator(c.warp_keys, c.strip, "s"), cores.accumulator(c.warp_keys, c.strip, "dp")
        dk = cores.accumulator(c.warp_keys, c.sum_cols, "dk")
        dv = cores.accumulator(c.warp_keys, c.value_sum_cols, "dv")
        dq = cores.accumulator(*c.dq_tile, "dq")
        steps = range(c.tile_m // c.parts // c.strip)
        self._strips = [
            Strip(
                number := self._part * len(steps) + step,
                cores.product(s, self._k_tile, q_tile, warp=(self._group, number), depth=c.head_dim),
                cores.product(dp, self._v_tile, do_tile, warp=(self._group, number), depth=c.value_dim),
                self._adding(dv, s, do_tile, number),
                self._adding(dk, s, q_tile, number),
            )
            for step in steps
        ]
        others = [(self._part + part) % c.parts * len(steps) + step for part in range(1, c.parts) for step in steps]
        self._add_others = [
            (self._adding(dv, self._p_tile, do_tile, number), self._adding(dk, self._ds_tile, q_tile, number))
            for number in others
        ]
        cols = c.dq_warps[1]
        place = k.warp // cols, k.warp % cols
        self._form_dq = cores.product(dq, self._ds_tile, self._k_tile, warp=place, transposed_a=True, transposed_b=True)
        self._s, self._dp, self._dk, self._dv, self._dq = s, dp, dk, dv, dq

    def _adding(self, sums: Fragment, a: Fragment | SharedTile, b: SharedTile, strip: Number) -> MmaSyncProduct:
        """The warp's part of dV or dK (+)= a strip of Pᵀ or dSᵀ, from registers or its tile, times one of dO or Q."""
        c = self._config
        row = self._group + strip * (c.keys // c.warp_keys)  # a strip is a panel, as large as so many rows
        return self._cores.product(
            sums, a, b, warp=(row, self._number), depth=c.strip, transposed_b=True, first=strip * c.strip
        )

    def run(self) -> None:
        """All blocks of query rows that see the keys, of all heads that share them."""
        zero(self._dk)
        zero(self._dv)
        ready = self._hold if self._config.held else None
        self._ring.each(self._mask.blocks * self._heads, self._places, self._block, ready=ready)
        self._store()

    def _hold(self) -> None:
        """Some of the warp's fragments of K and V, which every block needs."""
        for strip in self._strips:
            strip.form_s.hold(self._k_tile, self._config.held)
            strip.form_dp.hold(self._v_tile, self._config.held)

    def _block_of(self, turn: Traced) -> tuple[Traced, Traced]:
        """(block of query rows, member of the group of heads)."""
        group = self._heads
        if group == 1:
            return self._mask.block(turn), self._k.value(0, u32)
        return self._mask.block(turn // group), turn % group

    def _places(self, turn: Traced) -> list[tuple[Traced | int, ...]]:
        """Where Q and dO of a turn lie."""
        at, member = self._block_of(turn)
        return 2 * [(at * self._config.tile_m, 0, member)]

    def _block(self, turn: Traced, queries: SharedTile, gradients: SharedTile) -> None:
        """Add a block of query rows to dK and dV, and to its dQ."""
        k, place = self._k, self._place
        at, member = self._block_of(turn)
        number = self._slot(at, head := place.head * self._heads + member)
        self._options.turn_to(head)
        for strip in self._strips:
            self._add_strip(strip, (at, number), queries, gradients)
        k.syncthreads()
        for add_dv, add_dk in self._add_others:
            add_dv.start(self._p_tile, gradients)
            add_dk.start(self._ds_tile, queries)
        self._form_dq.start(self._ds_tile, self._k_tile, zero=True)
        self._sums.add(number, at, self._dq)

    def _slot(self, block: Traced, head: Traced) -> Traced:
        """The number of a block of query rows of a query head among those of all."""
        k, place = self._k, self._place
        listed = place.slot_of(block, head)
        if listed is not None:
            return listed
        plane = place.queries.outer * (k.special("nctaid.y") * self._heads) + head
        rows = self._config.tile_m
        return plane * ((place.queries.length + (rows - 1)) // rows) + block

    def _add_strip(
        self, strip: Strip, block: tuple[Traced, Traced], queries: SharedTile, gradients: SharedTile
    ) -> None:
        """Form a strip's scores, and add its rows to dK and dV; ``block``: which it is of, and that one's slot."""
        k, c, s, dp = self._k, self._config, self._s, self._dp
        (at, slot), row, col = block, self._group * c.warp_keys, strip.number * c.strip
        shift, delta = (of + (k.mul_wide(slot, c.tile_m) + k.mul_wide(col, 1)) for of in self._vectors)
        exponents, changes = column_values(shift, s, k.lane), column_values(delta, dp, k.lane)  # under way meanwhile
        strip.form_s.start(self._k_tile, queries, zero=True)
        strip.form_dp.start(self._v_tile, gradients, zero=True)  # before the softmax: it has time beside dP
        self._softmax.probabilities(exponents, lambda: self._mask.apply(s, at, row=row, col=col))
        if c.parts > 1:
            self._share(self._p_tile, s, strip)
        strip.add_dv.start(self._cores.left(s), gradients)
        self._softmax.apply_slopes(exponents)
        ds = self._softmax.scores(dp, changes)
        self._share(self._ds_tile, ds, strip)
        strip.add_dk.start(self._cores.left(ds), queries)

    def _share(self, tile: SharedTile, values: Fragment, strip: Strip) -> None:
        """A strip's Pᵀ or dSᵀ to the other warps; of those of a group that form the same scores one stores them."""
        k, c = self._k, self._config
        with nullcontext() if c.parts == c.share else k.when(k.warp % c.share < c.parts, uniform=True):
            store_pairs(k, tile, values, self._group * c.warp_keys, strip.number)

    def _store(self) -> None:
        """dK and dV, through the tiles of K and V, or to those of other shares."""
        k, c, dk = self._k, self._config, self._dk
        k.wait_group(0)  # K and V travel with the first block, or alone where nobody sees the keys
        if self._saved is not None:
            scale(dk, self._features.softmax_scale(c.head_dim))
            parts = self._saved.parts(k.cta_z * k.special("nctaid.y") + k.cta_y)
            for part, sums in zip(parts, (dk, self._dv), strict=True):
                save_warp_part(k, part, sums)
            return
        k.syncthreads()  # every warp is done with K
        scale(dk, self._features.softmax_scale(c.head_dim))
        round_keys(k, c, (self._k_tile, self._v_tile), (dk, self._dv))
        for copy in self._copies(*self._results):
            copy.store((self._first, 0))


def owned(k: Kernel, config: BackwardSm80) -> tuple[Traced, Number]:
    """(the group of keys, the part of the columns) whose dK and dV this warp sums."""
    return (k.warp, 0) if config.share == 1 else (k.warp // config.share, k.warp % config.share)


def round_keys(
    k: Kernel, config: BackwardSm80, tiles: tuple[SharedTile, SharedTile], sums: tuple[Fragment, Fragment]
) -> None:
    """All warps' dK and dV, rounded, into tiles of the keys, for all threads to read."""
    group, number = owned(k, config)
    for tile, own in zip(tiles, sums, strict=True):
        store_pairs(k, tile, own, group * config.warp_keys, number)
    k.syncthreads()


@dataclass(frozen=True)
class QuerySums:
    """dQ of the blocks of query rows, summed over all tiles of keys in global memory."""

    k: Kernel
    config: BackwardSm80
    features: AttentionFeatures
    place: TilePlace
    to: PartSums

    def add(self, number: Traced, block: Traced, dq: Fragment) -> None:
        """Add every warp's part of a block."""
        k, c, f, turns = self.k, self.config, self.features, self.to.turns
        part = (number * c.num_warps + k.warp) * c.dq_registers
        to = self.to.total + k.mul_wide(part, 32)
        if not c.in_turn:
            reduce_warp_part(k, to, dq)
            return
        before = self.place.number - key_tiles(k, f.mask, (c.tile_m, c.keys), block, self.place.lengths)[0]
        with k.when(k.thread == 0):
            turns.await_turn(number, before)
        k.syncthreads()
        reduce_warp_part(k, to, dq, before == 0)
        k.syncthreads()
        with k.when(k.thread == 0):
            turns.pass_on(number)


@kernel(threads=lambda config, **_: config.threads, drop_unused=True)
def attention_backward_dq_sm80(
    k: Kernel,
    dq: Strided[u16, 2],
    total: Global[f32],
    blocks: Global[u32],
    q_len: u32,
    kv_len: u32,
    slots: u32,
    *,
    config: BackwardSm80,
    features: AttentionFeatures = PLAIN,
    row_strides: tuple[int, ...],
    listed: bool = False,
) -> None:
    """dQ from the sums, scaled and rounded; grid (blocks of query rows, heads, batches).

    Of packed sequences the blocks are ``listed`` in ``blocks``, with a CTA for each that there may be.
    """
    c, f, block = config, features, k.value(0, u32) if listed else k.cta_x
    with tile_of(k, f, (q_len, kv_len), blocks if listed else None, slots) as at:
        if at.slot is not None:
            number = at.head * slots + at.slot.first + at.slot.number
        else:
            number = (at.queries.outer * k.special("nctaid.y") + at.head) * k.grid_x + block
        to = Tensor.of(dq, *row_strides, packed=listed)
        rows = Rows(to.array.at(at.queries.outer, at.head), to.row, at.queries.rows, c.head_dim)
        tile = operand_tile(k, c.dtype, c.tile_m, c.width, name="dQ")
        cores = MmaSync(k, c.dtype)
        layout = cores.accumulator(*c.dq_tile, "dq").layout
        part = (number * c.num_warps + k.warp) * c.dq_registers
        values = load_warp_part(k, total + k.mul_wide(part, 32), c.dq_registers)
        if c.in_turn:  # where no tile of keys adds anything, nobody has stored the first sum either
            seen = key_tiles(k, f.mask, (c.tile_m, c.keys), block, at.lengths)
            values = [k.select(seen[0] < seen[1], x, k.value(0.0, f32)) for x in values]
        factor: Traced = k.value(f.softmax_scale(c.head_dim), f32)
        cols = c.dq_warps[1]
        sums = k.fragment(layout, f32, [x * factor for x in values])
        store_pairs(k, tile, sums, k.warp // cols * c.dq_tile[0], k.warp % cols)
        k.syncthreads()
        RowCopy(k, tile, rows, c.threads).store((block * c.tile_m, 0))


@kernel(threads=lambda config, **_: config.threads, drop_unused=True)
def attention_backward_shares_sm80(
    k: Kernel,
    dk: Strided[u16, 2],
    dv: Strided[u16, 2],
    shares: Global[f32],
    kv_len: u32,
    *,
    config: BackwardSm80,
    features: AttentionFeatures = PLAIN,
    row_strides: tuple[int, ...],
    count: int,
) -> None:
    """dK and dV from those of ``count`` shares, rounded; grid (tiles of keys, key heads, batches)."""
    c, cores, saved = config, MmaSync(k, config.dtype), WarpShares(k, shares, config)
    sums = cores.accumulator(c.warp_keys, c.sum_cols, "dk"), cores.accumulator(c.warp_keys, c.value_sum_cols, "dv")
    for own in sums:
        zero(own)
    with k.loop(count) as share:
        parts = saved.parts((k.cta_z * k.special("nctaid.y") + k.cta_y) * count + share)
        for part, own in zip(parts, sums, strict=True):
            for total, x in zip(own.mutable, load_warp_part(k, part, len(own.registers)), strict=True):
                total.set(total.get() + x)
    tiles = (
        operand_tile(k, c.dtype, c.keys, c.width, name="K"),
        operand_tile(k, c.dtype, c.keys, c.value_width, name="V"),
    )
    round_keys(k, c, tiles, sums)
    rows = kv_len if features.ragged_kv else None
    for tile, to, row, cols in zip(tiles, (dk, dv), row_strides, (c.head_dim, c.value_dim), strict=True):
        of = Tensor.of(to, row, packed=False)
        RowCopy(k, tile, Rows(of.array.at(k.cta_z, k.cta_y), of.row, rows, cols), c.threads).store(
            (k.cta_x * c.keys, 0)
        )
