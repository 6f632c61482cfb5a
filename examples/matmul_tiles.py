"""C = A·Bᵀ on words of tiles: for every GPU from sm_80 on, and with roles, the TMA and wgmma for sm_90a.

    warploom check examples/matmul_tiles.py
    warploom inspect examples/matmul_tiles.py:on_sm90

The first two have the shape of the production kernels in `warploom.kernels.matmul`, for one type and whole tiles.
"""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from warploom.lang import Global, Kernel, Launch, TensorMap, Traced, bf16, f32, kernel, u32
from warploom.lang.values import Number
from warploom.layout.tensor_map import TensorMapSpec
from warploom.tile.copies import CopyRing, Place, Rows, accumulate
from warploom.tile.epilogue import OutputMatrix, Panels, Staging, Sums, store_registers
from warploom.tile.pipeline import Boxes, Pipeline, operand_tile, ready
from warploom.tile.product import MmaSync, Wgmma
from warploom.tile.roles import Turns, consumer, producer, threads_of, warps_of
from warploom.tile.scheduler import GroupedTiles, Persistent

M, N, DEPTH = 64, 64, 64  # a tile of C, and the depth of a stage
TOGETHER = 8  # rows of tiles that walk along N together, so that they share B in the L2


@kernel(threads=128)
def on_sm80(k: Kernel, a: Global[bf16], b: Global[bf16], c: Global[bf16], n: u32, depth: u32) -> None:
    """One CTA for each tile of C; four warps of 32×32, whose sums leave together as whole lines."""
    a_tile, b_tile = (operand_tile(k, bf16, 64, DEPTH, name=name, stages=3) for name in "AB")
    copies = CopyRing(k, (a_tile, Rows(a, depth)), (b_tile, Rows(b, depth)), threads=128)
    tile_row, tile_col = k.cta_y * M, k.cta_x * N
    warp_row, warp_col = k.warp // 2, k.warp % 2
    cores = MmaSync(k, bf16)
    sums = cores.accumulator(32, 32, "c")
    product = cores.product(sums, a_tile, b_tile, warp=(warp_row, warp_col))

    def places(step: Traced) -> Sequence[Place]:
        return (tile_row, step * DEPTH), (tile_col, step * DEPTH)

    copies.begin(depth // DEPTH, places)
    accumulate(k, copies, product, depth // DEPTH, places)
    first = tile_row + warp_row * 32, tile_col + warp_col * 32
    staging = Staging(k, a_tile.stage(0), (2, 2))  # nobody reads the stages any more
    staging.store(Sums(k, sums, *first), OutputMatrix(k, c, n, bf16), (tile_row, tile_col))


@kernel(threads=threads_of(1), requires="sm_90a")
def on_sm90(
    k: Kernel, a: TensorMap, b: TensorMap, c_map: TensorMap, c: Global[bf16], m: u32, n: u32, depth: u32
) -> None:
    """Persistent, any grid along x: a thread that loads, a warpgroup that multiplies; negative sums become 0."""
    a_tile, b_tile = (operand_tile(k, bf16, 64, DEPTH, name=name, stages=3) for name in "AB")
    ring = Pipeline(k, (a_tile, Boxes(a, along_k)), (b_tile, Boxes(b, along_k)), readers=warps_of(1), name="ring")
    panels = Panels(k, bf16, 64, 1, 1, Boxes(c_map, lambda _, col, row: (col, row)))
    ready(k, ring)
    rows, cols = m // M, n // N
    order, tiles = Persistent(k, rows * cols), GroupedTiles(k, rows, cols, TOGETHER)

    with producer(k, 1), k.when(k.thread == 0):
        put = ring.producer()
        with k.loop(order.count) as turn:
            row, col = tiles.tile(order.item(turn))
            with k.loop(depth // DEPTH) as step:
                put.put((row * M, step * DEPTH), (col * N, step * DEPTH))

    with consumer(k, 1):
        cores = Wgmma(k, bf16)
        sums = cores.accumulator(N, "c")
        product = cores.product(sums, a_tile, b_tile)
        get = ring.consumer()
        panels.prepare(k.value(0, u32))
        with k.loop(order.count) as turn:
            row, col = tiles.tile(order.item(turn))
            product.start(*get.wait_all(), zero=True).wait()
            get.release()
            with k.loop(depth // DEPTH, start=1):
                product.start(*get.wait_all()).wait()
                get.release()
            panels.store(Sums(k, sums, row * M, col * N, value=relu(k)), 0, OutputMatrix(k, c, n, bf16))
        panels.wait()


@kernel(threads=threads_of(2), requires="sm_90a")
def in_turns(k: Kernel, a: TensorMap, b: TensorMap, c: Global[f32], m: u32) -> None:
    """C of 64 columns and a depth of 64: of two consumers one multiplies while the other stores its rows."""
    a_tile = operand_tile(k, bf16, M, DEPTH, name="A", stages=2)
    b_tile = operand_tile(k, bf16, N, DEPTH, name="B")
    rows = Pipeline(k, (a_tile, Boxes(a)), readers=warps_of(1), parts=2)  # of each consumer its own
    right = Pipeline(k, (b_tile, Boxes(b)), readers=0)
    ready(k, rows, right)
    with producer(k, 2), k.when(k.thread == 0):
        right.producer().put((0,))
        with k.loop(m // (2 * M)) as step:
            for part in range(2):
                rows.at(step, part, filling=True).put(((2 * step + part) * M,))
    with consumer(k, 2):
        me = k.warpgroup - 1
        turns, cores = Turns(k, me, 2), Wgmma(k, bf16)
        sums = cores.accumulator(N, "c")
        product, columns = cores.product(sums, a_tile, b_tile), right.at(0).wait()
        with turns.taken(), k.loop(m // (2 * M)) as step:
            get = rows.at(step, me)
            with turns:
                product.start(get.wait(), columns, zero=True).wait()
            get.release()
            store_registers(Sums(k, sums, (2 * step + me) * M, k.value(0, u32)), OutputMatrix(k, c, N, f32))


def along_k(col: Number, row: Number, depth: Number) -> tuple[Number, ...]:
    """The coordinates of the box that begins ``col`` columns into the tile at (row, depth), innermost first."""
    return depth + col, row


def relu(k: Kernel) -> Any:
    """An epilogue: what is stored for two neighbouring sums."""
    return lambda pair, row, col: tuple(k.maximum(x, 0.0) for x in pair)


# -- each kernel runs once: warploom check
def matrices(rng: np.random.Generator) -> list[Any]:
    """A (128, 192), B (192, 192) and their product."""
    a, b = (rng.standard_normal(shape).astype(bf16.numpy) for shape in ((128, 192), (192, 192)))
    return [a, b, a.astype(np.float64) @ b.astype(np.float64).T]


def boxes(x: Any, cols: int = DEPTH) -> tuple[Any, TensorMapSpec]:
    """A matrix as the TMA sees it: boxes of 64 rows, swizzled over their 128 bytes."""
    return x, TensorMapSpec(bf16, x.shape[::-1], x.strides[:1], (cols, 64), 2 * cols)


@on_sm80.example
def _(rng: np.random.Generator) -> Launch:
    a, b, expected = matrices(rng)
    out = np.full(expected.shape, np.nan, bf16.numpy)
    return Launch((3, 2), [a, b, out, 192, 192], {"c": (expected, 0.25)})  # half a unit of bf16 at 64


@on_sm90.example
def _(rng: np.random.Generator) -> Launch:
    a, b, expected = matrices(rng)
    out = np.full(expected.shape, np.nan, bf16.numpy)
    arguments = [boxes(a), boxes(b), boxes(out), out, 128, 192, 192]
    return Launch(4, arguments, {"c_map": (np.maximum(expected, 0), 0.25)})


@in_turns.example
def _(rng: np.random.Generator) -> Launch:
    a, b = (rng.standard_normal((rows, DEPTH)).astype(bf16.numpy) for rows in (6 * M, N))
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    return Launch(1, [boxes(a), boxes(b), np.full(expected.shape, np.nan, np.float32), 6 * M], {"c": (expected, 1e-3)})
