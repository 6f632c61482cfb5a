# pyright: reportInvalidTypeForm=false
"""Attention backward for ``wgmma`` and the TMA (sm_90a) above head_dim 128: seven products in two kernels.

Accumulators of 64 rows of two gradients would take all registers there. So in the kernel of dK and dV the consumers
split by role: one forms Pᵀ and dV, the other dPᵀ, dSᵀ and dK of the same keys; P crosses through shared memory in
float32. The kernel of dQ forms both products once more, for query rows that stay: nothing is added across CTAs, so that
results have equal bits from run to run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from warploom.core.dtypes import f32, u32
from warploom.kernels.attention.backward_wide import CONSUMERS, KEYS, ROWS, STAGES, BackwardWideSm90
from warploom.kernels.attention.device.backward_shares import ShareSums
from warploom.kernels.attention.device.backward_sm90 import GradientMaps, GridKeyTile
from warploom.kernels.attention.device.scores import HeadArrays
from warploom.kernels.attention.problem import PLAIN, AttentionFeatures
from warploom.lang import Compound, Global, GlobalPointer, Kernel, Mutable, SharedTile, TensorMap, Traced, kernel
from warploom.lang.values import Number
from warploom.tile.accumulation import fetch_part, part_tile, store_part
from warploom.tile.epilogue import await_sent, column_values, row_values, send_rows
from warploom.tile.mask import Mask
from warploom.tile.pipeline import Boxes, Pipeline, operand_tile, ready, vector_tile
from warploom.tile.product import DEPTH, Wgmma, load_left, scale, zero
from warploom.tile.roles import WARPGROUP_ROWS, consumer, producer, threads_of, warps_of
from warploom.tile.scheduler import Divisor, RowTiles
from warploom.tile.softmax import ScoreChange, SoftmaxGradient, score_gradients


# -- dK and dV
@kernel(threads=threads_of(CONSUMERS), requires="sm_90a", drop_unused=True)
def attention_backward_keys_sm90(
    k: Kernel,
    maps: GradientMaps,
    options: HeadArrays,
    shares: Global[f32],
    q_len: u32,
    kv_len: u32,
    kv_heads: Divisor,
    order: RowTiles,
    *,
    config: BackwardWideSm90,
    features: AttentionFeatures = PLAIN,
    heads_inside: bool = True,
    share: int = 0,
) -> None:
    """dK and dV of 64 keys; a grid of (tiles of keys · planes) along x. Arguments as for the fused kernel."""
    heads = share or features.group
    tile = GridKeyTile.of(k, features, (config.tile_m, KEYS), order.tile(k.cta_x), (q_len, kv_len), kv_heads, heads)
    saved = ShareSums(k, shares, config) if share else None
    boxes = maps.boxes(lambda of: Boxes.of_heads(of, heads_inside))
    q_boxes, k_boxes, v_boxes, do_boxes, shift_boxes, delta_boxes, dk_boxes, dv_boxes = boxes
    streams = Streams.of(k, config, (k_boxes, v_boxes), (q_boxes, do_boxes), (shift_boxes, delta_boxes))

    with producer(k, CONSUMERS):
        streams.fill(k, tile)
    with consumer(k, CONSUMERS):
        with k.when(k.warpgroup == 1, uniform=True):
            ValueGradient(k, config, features, options, tile, streams).run(saved or dv_boxes)
        with k.otherwise():
            KeyGradient(k, config, features, tile, streams).run(saved or dk_boxes)


@dataclass(frozen=True)
class Streams:
    """The consumers' tiles: K and V come once, Q with shift and dO with delta block by block; P crosses between."""

    keys: Pipeline
    values: Pipeline
    queries: Pipeline
    gradients: Pipeline
    crossing: Pipeline

    @classmethod
    def of(cls, k: Kernel, config: BackwardWideSm90, *maps: tuple[Boxes, Boxes]) -> Streams:
        """``maps``: of K and V, Q and dO, shift and delta."""
        c, warps, ((k_map, v_map), (q_map, do_map), (shift_map, delta_map)) = config, warps_of(CONSUMERS), maps
        k_tile, v_tile = (operand_tile(k, c.dtype, KEYS, c.key_width, name=name) for name in ("K", "V"))
        q_tile, do_tile = (
            operand_tile(k, c.dtype, c.tile_m, cols, name=name, stages=c.stages)
            for name, cols in (("Q", c.width), ("dO", c.value_width))
        )
        shift_tile, delta_tile = (vector_tile(k, c.tile_m, name=x, stages=c.stages) for x in ("shift", "delta"))
        keys, values = Pipeline(k, (k_tile, k_map), readers=0), Pipeline(k, (v_tile, v_map), readers=0)
        queries = Pipeline(k, (q_tile, q_map), (shift_tile, shift_map), readers=warps)
        gradients = Pipeline(k, (do_tile, do_map), (delta_tile, delta_map), readers=warps)
        p_tile = part_tile(k, c.score_registers, name="P", stages=c.crossing_stages)
        crossing = Pipeline(k, p_tile, writers=warps_of(1), readers=warps_of(1))
        ready(k, keys, values, queries, gradients, crossing)
        return cls(keys, values, queries, gradients, crossing)

    def fill(self, k: Kernel, tile: GridKeyTile) -> None:
        """The producer: one thread loads K, then the blocks of Q, another V and dO."""
        for thread, own, stream in ((0, self.keys, self.queries), (32, self.values, self.gradients)):
            with k.when(k.thread == thread):
                own.at(0, filling=True).put(tile.place)
                with k.loop(tile.count) as turn:
                    block, head = tile.at(turn)
                    row = block * tile.tile[0]
                    stream.at(turn, filling=True).put((row, head, tile.batch), (row, tile.plane_of(head)))


class Gradient(ABC):
    """A consumer with one gradient of the tile's keys: a product of K or V with blocks, then one of those with others.

    ``streams``: K or V, what it is multiplied by, and what the gradient sums; ``depth`` of the first product, ``cols``
    of the gradient.
    """

    _of_values: ClassVar[bool]
    """Whether the gradient is V's, not K's."""
    _scale: float | None = None

    def __init__(
        self,
        k: Kernel,
        config: BackwardWideSm90,
        tile: GridKeyTile,
        streams: tuple[Pipeline, Pipeline, Pipeline],
        name: str,
        depth: int,
        cols: int,
    ) -> None:
        self._k, self._tile = k, tile
        self._own, self._stream, self._summed = streams
        self._cores = cores = Wgmma(k, config.dtype)
        self._block, self._sums = cores.accumulator(config.tile_m, f"s{name}"), cores.accumulator(cols, name)
        self._operand = cores.left(config.tile_m, f"p{name}")
        self._held = cores.left(min(config.held * DEPTH, depth), f"h{name}")
        (left,), first, second = self._own.tiles, self._stream.tiles[0], self._summed.tiles[0]
        self._form = cores.product(self._block, left, first, depth=depth)
        self._add = cores.product(self._sums, self._operand, second, transposed_b=True)

    @abstractmethod
    def _turn(self, turn: Traced, values: list[Traced]) -> None:
        """A block's product into the operand of the next, by the values of its columns."""

    def run(self, to: Boxes | ShareSums) -> None:
        """The gradient of all blocks, and on its way out through what was K or V, or to those of other shares."""
        k, count = self._k, self._tile.count
        zero(self._sums)
        self._own.at(0).wait()
        hold(k, self._held, self._own.tiles[0], 0)
        with k.when(count != 0, uniform=True):
            self._step(k.value(0, u32), first=True)
            with k.loop(count, start=1) as turn:
                self._step(turn)
            last = self._summed.at(count - 1)
            self._add.start(self._operand, last.wait()).wait()
            last.release()
        if self._scale is not None:
            scale(self._sums, self._scale)
        if isinstance(to, ShareSums):
            to.save(self._sums, self._tile.of_shares, value=self._of_values)
            return
        send_rows(k, self._own.tiles[0], self._sums, k.value(0, u32), to, self._tile.place)
        await_sent(k)

    def _step(self, turn: Traced, *, first: bool = False) -> None:
        """A block's product beside the sums of the block before."""
        k = self._k
        before, now = self._summed.at(turn - 1), self._stream.at(turn)
        added = None if first else self._add.start(self._operand, before.wait())
        tile, vector = now.wait_all()
        formed = self._form.start(self._own.tiles[0], tile, zero=True, held=self._held)
        with k.relies_on(
            "shared memory serves a warp's accesses in order, and the arrival that gives the stage back comes after"
            " these loads"
        ):
            values = column_values(vector, self._block, k.lane)
        if added is not None:
            added.wait()
            before.release()
        formed.wait()
        k.syncwarp()  # every lane has read its values
        now.release()
        self._turn(turn, values)


class ValueGradient(Gradient):
    """dV = Pᵀ·dO; P goes to the other consumer as well."""

    _of_values = True

    def __init__(
        self,
        k: Kernel,
        config: BackwardWideSm90,
        features: AttentionFeatures,
        options: HeadArrays,
        tile: GridKeyTile,
        streams: Streams,
    ) -> None:
        x, c = streams, config
        super().__init__(k, c, tile, (x.keys, x.queries, x.gradients), "v", c.head_dim, c.value_sum_cols)
        self._crossing = streams.crossing
        self._options = options.scores(features)
        scale = features.softmax_scale(config.head_dim)
        self._softmax = SoftmaxGradient(k, self._block, scale, self._options.change)

    def _turn(self, turn: Traced, values: list[Traced]) -> None:
        k, (block, head) = self._k, self._tile.at(turn)
        self._options.turn_to(head)
        self._softmax.probabilities(values, lambda: self._tile.mask.apply(self._block, block, warp=k.warp & 3))
        self._cores.pack(self._operand, self._block)
        self._softmax.apply_slopes(values)
        to = self._crossing.at(turn, filling=True)
        store_part(k, to.claim(), self._block)
        to.written(for_loads=True)


class KeyGradient(Gradient):
    """dK = scale · dSᵀ·Q, with dS of dP and the other consumer's P."""

    _of_values = False

    def __init__(
        self, k: Kernel, config: BackwardWideSm90, features: AttentionFeatures, tile: GridKeyTile, streams: Streams
    ) -> None:
        x, c = streams, config
        super().__init__(k, c, tile, (x.values, x.gradients, x.queries), "k", c.value_dim, c.sum_cols)
        self._crossing, self._scale = streams.crossing, features.softmax_scale(config.head_dim)

    def _turn(self, turn: Traced, values: list[Traced]) -> None:
        part = self._crossing.at(turn)
        p = fetch_part(self._k, part.wait())
        self._k.syncwarp()  # every lane has read its P
        part.release()
        self._cores.pack(self._operand, score_gradients(p, self._block, values))


def hold(k: Kernel, registers: list[Mutable], tile: SharedTile, row: Number) -> None:
    """The first columns of 64 rows of a tile into registers of a warpgroup, as operand A."""
    if registers:
        load_left(k, registers, tile, row + (k.warp & 3) * 16)
        k.syncwarp()  # results leave through the tile


# -- dQ
@kernel(threads=threads_of(CONSUMERS), requires="sm_90a", drop_unused=True)
def attention_backward_queries_sm90(
    k: Kernel,
    maps: QueryMaps,
    shift: Global[f32],
    delta: Global[f32],
    options: HeadArrays,
    q_len: u32,
    kv_len: u32,
    heads: Divisor,
    order: RowTiles,
    *,
    config: BackwardWideSm90,
    features: AttentionFeatures = PLAIN,
    heads_inside: bool = True,
) -> None:
    """dQ of 128 rows, 64 for each consumer; a grid of (tiles of rows · planes) along x, as the forward pass has it."""
    c, f, warps = config, features, warps_of(CONSUMERS)
    block, plane = order.tile(k.cta_x)
    (batch, head), row = heads.divide(plane), block * ROWS
    kv_head = head // f.group if f.group > 1 else head
    q_tile = operand_tile(k, c.dtype, ROWS, c.width, name="Q")
    do_tile = operand_tile(k, c.dtype, ROWS, c.value_width, name="dO")
    k_tile = operand_tile(k, c.dtype, c.tile_n, c.width, name="K", stages=c.stages)
    v_tile = operand_tile(k, c.dtype, c.tile_n, c.value_width, name="V", stages=STAGES)
    q_boxes, k_boxes, v_boxes, do_boxes, dq_boxes = (Boxes.of_heads(of, heads_inside) for of in maps.values)
    own = Pipeline(k, (q_tile, q_boxes), (do_tile, do_boxes), readers=0)
    keys = Pipeline(k, (k_tile, k_boxes), readers=warps)
    values = Pipeline(k, (v_tile, v_boxes), readers=warps)
    ready(k, own, keys, values)
    mask = Mask(k, f.mask, (ROWS, c.tile_n), row, (q_len, kv_len))

    with producer(k, CONSUMERS):
        with k.when(k.thread == 0):
            own.at(0, filling=True).put((row, head, batch), (row, head, batch))
        for thread, stream in ((0, keys), (32, values)):
            with k.when(k.thread == thread), k.loop(mask.blocks) as turn:
                stream.at(turn, filling=True).put((mask.block(turn) * c.tile_n, kv_head, batch))

    with consumer(k, CONSUMERS):
        me = k.warpgroup - 1
        first = me * WARPGROUP_ROWS
        vectors = [of + k.mul_wide(plane, (q_len + (ROWS - 1)) // ROWS * ROWS) for of in (shift, delta)]
        change = options.scores(f, head).change
        work = QueryGradient(k, c, f, change, mask, (own, keys, values), vectors, (row + first, first))
        work.run()
        send_rows(k, q_tile, work.sums, me, dq_boxes, (row + first, head, batch))
        await_sent(k)


class QueryMaps(Compound):
    """A parameter: what the kernel of dQ reads and stores as the TMA sees it."""

    q: TensorMap
    key: TensorMap
    value: TensorMap
    dout: TensorMap
    dq: TensorMap


class QueryGradient:
    """A consumer of the kernel of dQ: 64 query rows; ``first``: the first of them among all, and in the tile."""

    def __init__(
        self,
        k: Kernel,
        config: BackwardWideSm90,
        features: AttentionFeatures,
        change: ScoreChange | None,
        mask: Mask,
        pipelines: tuple[Pipeline, Pipeline, Pipeline],
        vectors: list[GlobalPointer],
        first: tuple[Traced, Traced],
    ) -> None:
        c, d = config, config.head_dim
        self._k, self._mask, self._row = k, mask, first[1]
        self._rows, self._keys, self._values = pipelines
        self._cores = cores = Wgmma(k, c.dtype)
        self._s, self._dp = cores.accumulator(c.tile_n, "s"), cores.accumulator(c.tile_n, "dp")
        self.sums = cores.accumulator(c.sum_cols, "dq")
        """dQ."""
        self._g, self._held = cores.left(c.tile_n, "ds"), cores.left(min(c.held_queries * DEPTH, d), "q")
        (q_tile, do_tile), (k_tile,), (v_tile,) = (stream.tiles for stream in pipelines)
        self._form_s = cores.product(self._s, q_tile, k_tile, row=self._row, depth=d)
        self._form_dp = cores.product(self._dp, do_tile, v_tile, row=self._row, depth=c.value_dim)
        self._add = cores.product(self.sums, self._g, k_tile, transposed_b=True)
        self._scale = features.softmax_scale(d)
        self._softmax = SoftmaxGradient(k, self._s, self._scale, change)
        warp_row = first[0] + (k.warp & 3) * 16
        self._shift, self._delta = (row_values(vector, self._s, k.lane, warp_row) for vector in vectors)

    def run(self) -> None:
        """dQ of all blocks of keys that the rows see."""
        k, count = self._k, self._mask.blocks
        zero(self.sums)
        self._rows.at(0).wait()
        hold(k, self._held, self._rows.tiles[0], self._row)
        self._step(k.value(0, u32), first=True)
        with k.loop(count, start=1) as turn:
            self._step(turn)
        last = self._keys.at(count - 1)
        self._add.start(self._g, last.tile).wait()
        last.release()
        scale(self.sums, self._scale)

    def _step(self, turn: Traced, *, first: bool = False) -> None:
        """Both products of a block of keys beside dQ of the one before."""
        q_tile, do_tile = self._rows.tiles
        before, keys, values = self._keys.at(turn - 1), self._keys.at(turn), self._values.at(turn)
        added = None if first else self._add.start(self._g, before.tile)
        row = self._row
        if self._held:  # registers are short: known to be uniform, descriptors take none
            row = self._k.uniform(self._k.warpgroup - 1) * WARPGROUP_ROWS
        s = self._form_s.at(row).start(q_tile, keys.wait(), zero=True, held=self._held)
        dp = self._form_dp.at(row).start(do_tile, values.wait(), zero=True)
        if added is not None:
            added.wait()
            before.release()
        s.wait()
        block = self._mask.block(turn)
        self._softmax.probabilities(
            self._shift, lambda: self._mask.apply(self._s, block, row=self._row, warp=self._k.warp & 3, masked=0.0)
        )
        self._softmax.apply_slopes(self._shift)
        dp.wait()
        values.release()
        self._cores.pack(self._g, self._softmax.scores(self._dp, self._delta))
