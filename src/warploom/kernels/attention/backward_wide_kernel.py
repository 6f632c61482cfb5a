# pyright: reportInvalidTypeForm=false
"""Attention backward for ``wgmma`` and the TMA (sm_90a) above head_dim 128: seven products in two kernels.

Accumulators of 64 rows of two gradients would take all registers there. So in the kernel of dK and dV the consumers
split by role: one forms Pᵀ and dV, the other dPᵀ, dSᵀ and dK of the same keys; P crosses through shared memory in
float32. The kernel of dQ forms both products once more, for query rows that stay: nothing is added across CTAs, so that
results have equal bits from run to run.
"""

from __future__ import annotations

from collections.abc import Callable

from warploom.core.dtypes import f32, u32
from warploom.kernels.attention.backward_sm90_kernel import KeyTile, vectors, visible
from warploom.kernels.attention.backward_wide import CONSUMERS, KEYS, ROWS, STAGES, BackwardWideSm90
from warploom.kernels.attention.features import PLAIN, AttentionFeatures
from warploom.lang import Fragment, Global, GlobalPointer, Kernel, TensorMap, Traced, kernel
from warploom.tile.accumulation import fetch_part, part_tile, store_part
from warploom.tile.epilogue import send_rows
from warploom.tile.gradient import SoftmaxGradient, score_gradients
from warploom.tile.mask import Mask
from warploom.tile.pipeline import Boxes, Pipeline, operand_tile, ready
from warploom.tile.product import Wgmma, zero
from warploom.tile.roles import WARPGROUP_ROWS, consumer, producer, threads_of
from warploom.tile.scheduler import RowTiles
from warploom.tile.transposed import column_values, row_values

WARPS = 4
"""Of a warpgroup."""


# -- dK and dV
@kernel(threads=threads_of(CONSUMERS), requires="sm_90a", drop_unused=True)
def attention_backward_keys_sm90(
    k: Kernel,
    q_map: TensorMap,
    k_map: TensorMap,
    v_map: TensorMap,
    do_map: TensorMap,
    shift_map: TensorMap,
    delta_map: TensorMap,
    dk_map: TensorMap,
    dv_map: TensorMap,
    q_len: u32,
    kv_len: u32,
    kv_heads: u32,
    planes: u32,
    together: u32,
    *,
    config: BackwardWideSm90,
    features: AttentionFeatures = PLAIN,
    heads_inside: bool = True,
) -> None:
    """dK and dV of 64 keys; a grid of (tiles of keys · planes) along x. Arguments as for the fused kernel."""
    c, warps = config, WARPS * CONSUMERS
    tile = KeyTile.of(k, (c.tile_m, KEYS), features, (q_len, kv_len), (kv_heads, planes, together))
    k_tile, v_tile = (operand_tile(k, c.dtype, KEYS, c.key_width, name=name) for name in ("K", "V"))
    q_tile, do_tile = (
        operand_tile(k, c.dtype, c.tile_m, cols, name=name, stages=STAGES)
        for name, cols in (("Q", c.width), ("dO", c.value_width))
    )
    shift_tile, delta_tile = (
        k.shared(f32, c.tile_m, name=name, panel_cols=c.tile_m, stages=STAGES) for name in ("shift", "delta")
    )
    q_boxes, k_boxes, v_boxes, do_boxes, dk_boxes, dv_boxes = (
        Boxes.of_heads(of, heads_inside) for of in (q_map, k_map, v_map, do_map, dk_map, dv_map)
    )
    keys, values = Pipeline(k, (k_tile, k_boxes), readers=0), Pipeline(k, (v_tile, v_boxes), readers=0)
    queries = Pipeline(k, (q_tile, q_boxes), (shift_tile, vectors(shift_map)), readers=warps)
    gradients = Pipeline(k, (do_tile, do_boxes), (delta_tile, vectors(delta_map)), readers=warps)
    crossing = Pipeline(k, part_tile(k, c.score_registers, name="P", stages=STAGES), writers=WARPS, readers=WARPS)
    ready(k, keys, values, queries, gradients, crossing)

    with producer(k, CONSUMERS):
        for thread, own, stream in ((0, keys, queries), (32, values, gradients)):
            with k.when(k.thread == thread):
                own.at(0, filling=True).put(tile.place)
                with k.loop(tile.count) as turn:
                    block, head = tile.at(turn)
                    rows = block * c.tile_m, head, tile.batch
                    stream.at(turn, filling=True).put(rows, (block * c.tile_m, tile.plane_of(head)))

    scale = features.softmax_scale(c.head_dim)
    with consumer(k, CONSUMERS):
        with k.when(k.warpgroup == 1, uniform=True):
            half = Half(k, c, tile, keys, (queries, gradients), "v")
            softmax = SoftmaxGradient(k, half.block, scale, cap=features.softcap)

            def probabilities(turn: Traced, shift: list[Traced]) -> None:
                block = tile.at(turn)[0]
                softmax.probabilities(shift, lambda: tile.mask.apply(half.block, block, warp=k.warp & 3))
                half.pack(half.block)
                softmax.uncap(shift)
                to = crossing.at(turn, filling=True)
                store_part(k, to.claim(), half.block)
                to.written()

            half.run(probabilities)
            half.send(dv_boxes, barrier=1)
        with k.otherwise():
            other = Half(k, c, tile, values, (gradients, queries), "k")

            def scores(turn: Traced, delta: list[Traced]) -> None:
                part = crossing.at(turn)
                p = fetch_part(k, part.wait())
                k.syncwarp()  # every lane has read its P
                part.release()
                other.pack(score_gradients(p, other.block, delta))

            other.run(scores)
            for element in range(other.sums.layout.elements_per_thread):
                other.sums.scale(element, scale)
            other.send(dk_boxes, barrier=2)


class Half:
    """A consumer with one gradient of the tile's keys: a product of K or V with blocks, then one of those with others.

    ``streams``: of what K or V is multiplied by, and of what the gradient sums.
    """

    def __init__(
        self, k: Kernel, config: BackwardWideSm90, tile: KeyTile, own: Pipeline, streams: tuple[Pipeline, Pipeline],
        name: str,
    ) -> None:  # fmt: skip
        self._k, self._tile, self._own = k, tile, own
        self._stream, self._summed = streams
        self._cores = cores = Wgmma(k, config.dtype)
        # P is of the rows of K, and dV has those of V
        depth, cols = (config.head_dim, config.value_sum_cols) if name == "v" else (config.value_dim, config.sum_cols)
        self.block, self.sums = cores.accumulator(config.tile_m, f"s{name}"), cores.accumulator(cols, name)
        """The block's product, transposed, and the gradient."""
        self._operand = cores.left(config.tile_m, f"p{name}")
        (left,), first, second = own.tiles, self._stream.tiles[0], self._summed.tiles[0]
        self._form = cores.product(self.block, left, first, depth=depth)
        self._add = cores.product(self.sums, self._operand, second, transposed_b=True)

    def pack(self, values: Fragment) -> None:
        """What the gradient's next product takes."""
        self._cores.pack(self._operand, values)

    def run(self, middle: Callable[[Traced, list[Traced]], None]) -> None:
        """The sums; ``middle(turn, values)`` turns a block's product into an operand, by the columns' values."""
        k, count = self._k, self._tile.count
        zero(self.sums)
        self._own.at(0).wait()
        with k.when(count != 0, uniform=True):
            self._step(k.value(0, u32), middle, first=True)
            with k.loop(count, 1) as turn:
                self._step(turn, middle)
            last = self._summed.at(count - 1)
            self._add.start(self._operand, last.wait()).wait()
            last.release()

    def _step(self, turn: Traced, middle: Callable[[Traced, list[Traced]], None], *, first: bool = False) -> None:
        """A block's product beside the sums of the block before."""
        k = self._k
        before, now = self._summed.at(turn - 1), self._stream.at(turn)
        added = None if first else self._add.start(self._operand, before.wait())
        tile, vector = now.wait_all()
        formed = self._form.start(self._own.tiles[0], tile, zero=True)
        values = column_values(vector, self.block, k.lane)
        if added is not None:
            added.wait()
            before.release()
        formed.wait()
        k.syncwarp()  # every lane has read its values
        now.release()
        middle(turn, values)

    def send(self, boxes: Boxes, *, barrier: int) -> None:
        """The gradient on its way out, through what was K or V."""
        send_rows(
            self._k, self._own.tiles[0], self.sums, self._k.value(0, u32), boxes, self._tile.place, barrier=barrier
        )


# -- dQ
@kernel(threads=threads_of(CONSUMERS), requires="sm_90a", drop_unused=True)
def attention_backward_queries_sm90(
    k: Kernel,
    q_map: TensorMap,
    k_map: TensorMap,
    v_map: TensorMap,
    do_map: TensorMap,
    dq_map: TensorMap,
    shift: Global[f32],
    delta: Global[f32],
    q_len: u32,
    kv_len: u32,
    heads: u32,
    planes: u32,
    together: u32,
    *,
    config: BackwardWideSm90,
    features: AttentionFeatures = PLAIN,
    heads_inside: bool = True,
) -> None:
    """dQ of 128 rows, 64 for each consumer; a grid of (tiles of rows · planes) along x, as the forward pass has it."""
    c, f, warps = config, features, WARPS * CONSUMERS
    block, plane = RowTiles.of(k, (q_len + (ROWS - 1)) // ROWS, planes, together).tile(k.cta_x)
    row, head, batch = block * ROWS, plane % heads, plane // heads
    kv_head = head // f.group if f.group > 1 else head
    q_tile = operand_tile(k, c.dtype, ROWS, c.width, name="Q")
    do_tile = operand_tile(k, c.dtype, ROWS, c.value_width, name="dO")
    k_tile = operand_tile(k, c.dtype, c.tile_n, c.width, name="K", stages=STAGES)
    v_tile = operand_tile(k, c.dtype, c.tile_n, c.value_width, name="V", stages=STAGES)
    q_boxes, k_boxes, v_boxes, do_boxes, dq_boxes = (
        Boxes.of_heads(of, heads_inside) for of in (q_map, k_map, v_map, do_map, dq_map)
    )
    rows = Pipeline(k, (q_tile, q_boxes), (do_tile, do_boxes), readers=0)
    keys = Pipeline(k, (k_tile, k_boxes), readers=warps)
    values = Pipeline(k, (v_tile, v_boxes), readers=warps)
    ready(k, rows, keys, values)
    mask = Mask(k, visible(f), (ROWS, c.tile_n), row, (q_len, kv_len))

    with producer(k, CONSUMERS):
        with k.when(k.thread == 0):
            rows.at(0, filling=True).put((row, head, batch), (row, head, batch))
        for thread, stream in ((0, keys), (32, values)):
            with k.when(k.thread == thread), k.loop(mask.blocks) as turn:
                stream.at(turn, filling=True).put((mask.block(turn) * c.tile_n, kv_head, batch))

    with consumer(k, CONSUMERS):
        me = k.warpgroup - 1
        first = me * WARPGROUP_ROWS
        vectors = [of + k.mul_wide(plane, (q_len + (ROWS - 1)) // ROWS * ROWS) for of in (shift, delta)]
        work = Rows(k, c, f, mask, (rows, keys, values), vectors, (row + first, first))
        work.run()
        send_rows(k, q_tile, work.sums, me, dq_boxes, (row + first, head, batch), barrier=me + 1)


class Rows:
    """A consumer of the kernel of dQ: 64 query rows; ``first``: the first of them among all, and in the tile."""

    def __init__(
        self,
        k: Kernel,
        config: BackwardWideSm90,
        features: AttentionFeatures,
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
        self._g = cores.left(c.tile_n, "ds")
        (q_tile, do_tile), (k_tile,), (v_tile,) = (stream.tiles for stream in pipelines)
        self._form_s = cores.product(self._s, q_tile, k_tile, row=self._row, depth=d)
        self._form_dp = cores.product(self._dp, do_tile, v_tile, row=self._row, depth=c.value_dim)
        self._add = cores.product(self.sums, self._g, k_tile, transposed_b=True)
        self._scale = features.softmax_scale(d)
        self._softmax = SoftmaxGradient(k, self._s, self._scale, cap=features.softcap)
        warp_row = first[0] + (k.warp & 3) * 16
        self._shift, self._delta = (row_values(vector, self._s, k.lane, warp_row) for vector in vectors)

    def run(self) -> None:
        """dQ of all blocks of keys that the rows see."""
        k, count = self._k, self._mask.blocks
        zero(self.sums)
        self._rows.at(0).wait()
        self._step(k.value(0, u32), first=True)
        with k.loop(count, 1) as turn:
            self._step(turn)
        last = self._keys.at(count - 1)
        self._add.start(self._g, last.tile).wait()
        last.release()
        for element in range(self.sums.layout.elements_per_thread):
            self.sums.scale(element, self._scale)

    def _step(self, turn: Traced, *, first: bool = False) -> None:
        """Both products of a block of keys beside dQ of the one before."""
        q_tile, do_tile = self._rows.tiles
        before, keys, values = self._keys.at(turn - 1), self._keys.at(turn), self._values.at(turn)
        added = None if first else self._add.start(self._g, before.tile)
        s = self._form_s.start(q_tile, keys.wait(), zero=True)
        dp = self._form_dp.start(do_tile, values.wait(), zero=True)
        if added is not None:
            added.wait()
            before.release()
        s.wait()
        block = self._mask.block(turn)
        self._softmax.probabilities(
            self._shift, lambda: self._mask.apply(self._s, block, row=self._row, warp=self._k.warp & 3, hidden=0.0)
        )
        self._softmax.uncap(self._shift)
        dp.wait()
        values.release()
        self._cores.pack(self._g, self._softmax.scores(self._dp, self._delta))
