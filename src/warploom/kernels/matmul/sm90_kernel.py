# pyright: reportInvalidTypeForm=false
"""The matrix product for ``wgmma`` and the TMA (sm_90a): persistent, one thread loads, consumers have 64 rows or more.

The ring of k-tiles runs on over the ends of tiles: the next tile's first k-tiles arrive while this one is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

from warploom.core.dtypes import f32, u32
from warploom.kernels.matmul.features import PLAIN, MatmulFeatures, OperandFeatures
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.kernels.matmul.values import EpilogueValue, Output, Result, ResultTile, along
from warploom.kernels.source import named
from warploom.lang import Kernel, TensorMap, Traced, kernel
from warploom.lang.hopper import TensorMapHandle
from warploom.lang.values import Number
from warploom.tile.epilogue import Panels, Sums, store_registers
from warploom.tile.pipeline import Boxes, Pipeline, operand_tile, ready
from warploom.tile.product import Wgmma
from warploom.tile.roles import WARPGROUP_ROWS, Turns, consumer, producer, warps_of
from warploom.tile.scheduler import GroupedTiles, Persistent


@kernel(threads=lambda config, **_: config.threads, requires="sm_90a", drop_unused=True)
def matmul_sm90(
    k: Kernel,
    a_map: TensorMap,
    b_map: TensorMap,
    c_map: TensorMap,
    result: Result,
    k_tiles: u32,
    tiles_per_split: u32,
    tiles: u32,
    *,
    config: MatmulSm90,
    features: MatmulFeatures = PLAIN,
) -> None:
    """C = epilogue(A·B); tensor maps of rank 2, batched ones 3, of A and B as they are stored.

    A 16-bit C whose lines are aligned leaves through ``c_map``. ``tiles`` are those of all parts of a split K and of
    all batches, which the CTAs of the grid share in turns. Parameters that a configuration does not use are left out.
    """
    extents = Extents(result.m, result.n, k_tiles, tiles_per_split, tiles)
    kind: type[Sm90Product] = named(config.product)
    multiply(k, kind(k, config, features, (a_map, b_map), extents), Output(k, features, config.dtype, result), c_map)


def multiply(
    k: Kernel,
    work: Sm90Product,
    output: Output,
    c_map: TensorMapHandle,
    transform: Callable[[Sums], None] | None = None,
    whole_turns: Traced | None = None,
) -> None:
    """The kernel's roles: one thread loads, the consumers multiply and store.

    ``transform`` changes a consumer's sums before they are stored, and takes long; the epilogue is its own then.
    ``whole_turns`` as for :meth:`Sm90Product.prepare`.
    """
    c, f = work.config, work.features
    boxes = Boxes(c_map, _result_order(f)) if f.bulk_out else None
    panels = None if f.out_dtype is f32 else Panels(k, f.out_dtype, c.panel_cols, c.panels, c.consumers, boxes)

    def finish(tile: ResultTile) -> None:
        target, value = output.of(tile.matrix, tile.batch)
        for number, sums in enumerate(work.sums(tile, None if transform else value)):
            if transform is not None:
                transform(sums)
            if panels is None:
                store_registers(sums, target)
            else:
                panels.store(sums, number, target, (tile.batch,))

    work.load()
    with consumer(k, c.consumers):
        work.prepare(computes=transform is not None, whole_turns=whole_turns)
        if panels is not None:
            panels.prepare(work.me)
        work.each_tile(finish)
        if panels is not None:
            panels.wait()


@dataclass(frozen=True)
class Extents:
    """The launch's numbers: C is ``m`` × ``n``; K has ``k_tiles``, ``tiles_per_split`` in a part of a split K."""

    m: Traced
    n: Traced
    k_tiles: Traced
    tiles_per_split: Traced
    tiles: Traced


def _operand_order(features: MatmulFeatures, own: OperandFeatures) -> Callable[..., tuple[Number, ...]]:
    """The order of the coordinates of A's or B's boxes; a matrix that all batches share is number 0."""

    def order(col: Number, outer: Number, depth: Number, batch: Number) -> tuple[Number, ...]:
        where = (depth + col, outer) if own.k_contiguous else (outer + col, depth)
        return (*where, batch if own.batched else 0) if features.batched else where

    return order


def _result_order(features: MatmulFeatures) -> Callable[..., tuple[Number, ...]]:
    """The order of the coordinates of C's boxes."""
    return lambda _, col, row, batch: (col, row, batch) if features.batched else (col, row)


class Sm90Product:
    """A·B tile by tile: :meth:`load` is the producer's part, :meth:`each_tile` that of the consumers."""

    def __init__(
        self,
        k: Kernel,
        config: MatmulSm90,
        features: MatmulFeatures,
        maps: tuple[TensorMapHandle, TensorMapHandle],
        extents: Extents,
    ) -> None:
        self._k, self.config, self.features, self._extents = k, config, features, extents
        c, e = config, extents
        self._tiles = GroupedTiles(
            k, (e.m + (c.tile_m - 1)) // c.tile_m, (e.n + (c.tile_n - 1)) // c.tile_n, c.block_stride
        )
        self._order = Persistent(k, e.tiles)
        operands = zip("AB", (features.a, features.b), (c.tile_m, c.tile_n), maps, strict=True)
        fed = [
            (
                operand_tile(k, c.dtype, *along(own, outer, c.tile_k), name=name, stages=c.stages),
                Boxes(own_map, _operand_order(features, own)),
            )
            for name, own, outer, own_map in operands
        ]
        self._ring = Pipeline(k, *fed, readers=warps_of(1 if c.pingpong else c.consumers), name="ring")
        ready(k, self._ring)

    def tile(self, turn: Number) -> ResultTile:
        """The CTA's tile of a turn."""
        k, c, e = self._k, self.config, self._extents
        number, matrix, batch = self._order.item(turn), None, k.value(0, u32)
        if self.features.batched or c.split_k > 1:
            per_matrix = self._tiles.rows * self._tiles.cols
            matrix, number = number // per_matrix, number % per_matrix
            batch = matrix // c.split_k
        row, col = self._tiles.tile(number)
        first: Number = 0
        count = e.k_tiles
        if matrix is not None and c.split_k > 1:
            first = matrix % c.split_k * e.tiles_per_split
            count = k.minimum(e.tiles_per_split, e.k_tiles - first)
        return ResultTile(row * c.tile_m, col * c.tile_n, matrix, batch, first, count)

    def load(self) -> None:
        """The producer: the k-tiles of this CTA's tiles, as stages become empty."""
        k, c = self._k, self.config
        with producer(k, c.consumers), k.when(k.thread == 0):
            ring = self._ring.producer()
            with k.loop(self._order.count) as turn:
                tile = self.tile(turn)
                with k.loop(tile.count) as step:
                    depth = (step + tile.first) * c.tile_k
                    ring.put((tile.row, depth, tile.batch), (tile.col, depth, tile.batch))

    # -- the consumers
    def prepare(self, *, computes: bool = False, whole_turns: Traced | None = None) -> None:
        """Set up what a consumer keeps for all of its tiles.

        ``computes``: what finishes a tile computes for long before it stores. ptxas moves the release of a tile's last
        stage below arithmetic, and the ring would wait for it, but not into a branch. ``whole_turns``: whether a turn
        lasts until its products are done; by default the next one's begin while the last are under way.
        """
        k, c = self._k, self.config
        self._computes, self._whole_turns = computes, whole_turns
        self.me: Traced = k.warpgroup - 1
        self._row = k.value(0, u32) if c.pingpong else self.me * c.consumer_rows
        cores = self._cores = Wgmma(k, c.dtype)
        self._blocks = [cores.accumulator(c.tile_n, f"c{i}") for i in range(c.consumer_rows // WARPGROUP_ROWS)]
        self._product = cores.product(
            self._blocks,
            *self._ring.tiles,
            row=self._row,
            transposed_a=not self.features.a.k_contiguous,
            transposed_b=not self.features.b.k_contiguous,
        )
        self._stages = self._ring.consumer(ahead=True)
        self._turns = Turns(k, self.me, c.consumers, on=c.pingpong)

    def each_tile(self, finish: Callable[[ResultTile], None]) -> None:
        """Multiply and ``finish`` every tile; with ``pingpong`` every other one, and the other consumer the rest."""
        k, count = self._k, self._order.count
        if not self.config.pingpong:
            with k.loop(count) as turn:
                tile = self.tile(turn)
                self._multiply(tile)
                finish(tile)
            return
        with self._turns.taken(following=count & 1):
            with k.when(self.me == 1, uniform=True):
                self._stages.skip(self.tile(0).count)  # the other consumer multiplies it
            with k.loop(count, start=self.me, step=2) as turn:
                tile = self.tile(turn)
                self._multiply(tile)
                always = k.when(tile.count > 0, uniform=True) if self._computes else nullcontext()
                with always:
                    finish(tile)
                self._stages.skip(self.tile(turn + 1).count)

    def _multiply(self, tile: ResultTile) -> None:
        """The tile's sums; each k-tile is waited for while the next one's products run."""
        k, whole = self._k, self._whole_turns
        self._turns.take()
        self._start(zero=True)
        with k.loop(tile.count, start=1):
            self._start(zero=False)
            self._cores.wait(1)
            self._stages.release()
        with nullcontext() if whole is None else k.when(~whole, uniform=True):
            self._turns.hand_on()
        self._cores.wait(0, *self._blocks)
        self._stages.release()
        if whole is not None:
            with k.when(whole, uniform=True):
                self._turns.hand_on()

    def _start(self, *, zero: bool) -> None:
        self._product.start(*self._stages.wait_all(), zero=zero)
        self._stages.advance()

    def sums(self, tile: ResultTile, value: EpilogueValue | None = None) -> list[Sums]:
        """This consumer's accumulators, 64 rows each, as values of C."""
        k = self._k
        rows = [tile.row + self._row + i * WARPGROUP_ROWS for i in range(len(self._blocks))]
        return [Sums(k, x, row, tile.col, k.warp & 3, value) for x, row in zip(self._blocks, rows, strict=True)]
