"""Words of tiles for gradients: a softmax's, a product's transpose, and sums that many CTAs add to.

    warploom check examples/gradient_tiles.py

Each kernel shows one word of `warploom.tile`; the gradients of `warploom.attention` are made of these.
"""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from typing import Any

import numpy as np

from warploom.lang import Fragment, Global, Kernel, Launch, SharedTile, TensorMap, bf16, f32, kernel, u32
from warploom.layout.tensor_map import TensorMapSpec
from warploom.tile.accumulation import (
    PartTurns,
    add_parts,
    fetch_part,
    load_part,
    load_warp_part,
    part_size,
    part_tile,
    reduce_warp_part,
    store_part,
)
from warploom.tile.copies import RowCopy, Rows
from warploom.tile.epilogue import (
    OutputMatrix,
    Sums,
    TransposedStore,
    await_sent,
    column_values,
    copy_out,
    row_values,
    send_rows,
    send_tile,
    store_registers,
    store_row_values,
    store_rows,
)
from warploom.tile.mask import SeenBy, Visible, key_tiles
from warploom.tile.pipeline import Boxes, Pipeline, operand_tile, ready, vector_tile
from warploom.tile.product import MmaSync, Wgmma
from warploom.tile.roles import Meeting
from warploom.tile.softmax import SoftmaxGradient

ROWS, KEYS, DIM = 16, 32, 64
LOG2_E = float(np.log2(np.e))
Array = np.ndarray[Any, Any]


@kernel(threads=32)
def score_gradient(
    k: Kernel,
    q: Global[bf16],
    key: Global[bf16],
    d_out: Global[bf16],
    value: Global[bf16],
    log: Global[f32],
    delta: Global[f32],
    ds: Global[f32],
) -> None:
    """dS = P∘(dO·Vᵀ - delta) of 16 queries and 32 keys, where P = exp(S - log) of S = Q·Kᵀ / √DIM."""
    tiles = [operand_tile(k, bf16, n, DIM, name=name) for name, n in zip("QKOV", 2 * (ROWS, KEYS), strict=True)]
    for tile, matrix in zip(tiles, (q, key, d_out, value), strict=True):
        RowCopy(k, tile, Rows(matrix, DIM), 32).load((0, 0))
    k.commit_group()
    k.wait_group(0)
    k.syncwarp()
    cores, first = MmaSync(k, bf16), k.value(0, u32)
    s, dp = cores.accumulator(ROWS, KEYS, "s"), cores.accumulator(ROWS, KEYS, "dp")
    cores.product(s, *tiles[:2]).start(*tiles[:2], zero=True)
    cores.product(dp, *tiles[2:]).start(*tiles[2:], zero=True)
    softmax = SoftmaxGradient(k, s, DIM**-0.5)
    softmax.probabilities([x * -LOG2_E for x in row_values(log, s, k.lane, first)])
    gradient = softmax.scores(dp, row_values(delta, s, k.lane, first))
    store_registers(Sums(k, gradient, first, first), OutputMatrix(k, ds, KEYS, f32))


@kernel(threads=160, requires="sm_90")
def attention_received(
    k: Kernel, q: TensorMap, key: TensorMap, log: TensorMap, out: Global[f32], q_len: u32, kv_len: u32
) -> None:
    """CTA j: for each of 64 keys the sum of its probabilities, of the queries that see it under a causal mask.

    Scores are transposed: keys are rows. ``log`` goes on to a multiple of 16 queries with inf, which makes P = 0.
    """
    first, warp_row = k.cta_x * 64, k.warp * 16
    k_tile, q_tile = operand_tile(k, bf16, 64, DIM, name="K"), operand_tile(k, bf16, 16, DIM, name="Q", stages=2)
    log_tile = vector_tile(k, 16, name="log", stages=2)
    keys = Pipeline(k, (k_tile, Boxes(key)), readers=0)
    queries = Pipeline(k, (q_tile, Boxes(q)), (log_tile, Boxes(log, lambda _, row: (row,))), readers=4)
    ready(k, keys, queries)
    seen = SeenBy(k, Visible((None, 0), ragged=True), (16, 64), first, (q_len, kv_len))
    with k.warps(4, 5), k.when(k.lane == 0):
        keys.producer().put((first,))
        put = queries.producer()
        with k.loop(seen.blocks) as step:
            put.put(*2 * [(seen.block(step) * 16,)])
    with k.warps(0, 4):
        cores = MmaSync(k, bf16)
        s, totals = cores.accumulator(16, 16, "s"), k.registers(f32, 2, 0.0, "totals")
        scores = cores.product(s, k_tile, q_tile, warp=(k.warp, 0))
        softmax = SoftmaxGradient(k, s, DIM**-0.5)
        own, get = keys.consumer().wait(), queries.consumer()
        with k.loop(seen.blocks) as step:
            block, (rows, logs) = seen.block(step), get.wait_all()
            scores.start(own, rows, zero=True)
            shift = [x * -LOG2_E for x in column_values(logs, s, k.lane)]
            k.fence_async()  # before the TMA fills the stage again
            k.syncwarp()  # every lane has read it
            get.release()
            softmax.probabilities(shift, lambda block=block: seen.apply(s, block, row=warp_row))
            for total, part in zip(totals, s.reduce("add", "col"), strict=True):
                total += part
        store_row_values(k, out, [total.get() for total in totals], s, first + warp_row, kv_len)


# -- the product of a CTA's slices of A and B, in three ways
def product_of(
    k: Kernel, a: TensorMap, b: TensorMap, first: Any = 0, warpgroups: int = 1
) -> tuple[Wgmma, Fragment, SharedTile]:
    """A·Bᵀ of 64×64 elements from column ``first`` on, and A's tile, which nobody reads any more.

    ``warpgroups``: each has 64 columns.
    """
    tiles = [operand_tile(k, bf16, 64, DIM, name=name, stages=warpgroups) for name in "AB"]
    arrived = Pipeline(
        k, *((x, Boxes(of, lambda col, at: (at + col, 0))) for x, of in zip(tiles, (a, b), strict=True)), readers=0
    )
    ready(k, arrived)
    with k.when(k.thread == 0):
        for stage in range(warpgroups):
            arrived.at(stage, filling=True).put(*2 * [(first + stage * DIM,)])
    cores = Wgmma(k, bf16)
    sums = cores.accumulator(64, "c")
    mine = arrived.at(0 if warpgroups == 1 else k.warpgroup)
    cores.product(sums, *tiles).start(*mine.wait_all(), zero=True).wait()
    return cores, sums, tiles[0]


@kernel(threads=128, requires="sm_90a")
def sent(k: Kernel, a: TensorMap, b: TensorMap, c: TensorMap) -> None:
    """C = A·Bᵀ, rounded, out by the TMA."""
    _, sums, tile = product_of(k, a, b)
    send_rows(k, tile, sums, k.value(0, u32), Boxes(c), (0,))
    await_sent(k)


@kernel(threads=128, requires="sm_90a")
def transposed(k: Kernel, a: TensorMap, b: TensorMap, c: TensorMap, turned: Global[bf16]) -> None:
    """C = A·Bᵀ, rounded, out by the TMA, and then Cᵀ from the same tile: 64 rows of sums are 64 of its columns."""
    cores, sums, tile = product_of(k, a, b)
    store_rows(k, tile, sums, k.warp * 16)
    send_tile(k, tile, Boxes(c), (0,))
    k.syncthreads()  # it has left
    packed = cores.left(64, "packed")
    cores.pack(packed, sums)
    TransposedStore(k, tile).store(tile, packed)
    k.syncthreads()  # every warp has stored its columns
    copy_out(OutputMatrix(k, turned, 64, bf16), tile, k.value(0, u32), k.value(0, u32), k.thread, 128)


@kernel(threads=128, requires="sm_90a")
def added_in_turn(k: Kernel, a: TensorMap, b: TensorMap, total: Global[f32], turns: PartTurns, c: Global[f32]) -> None:
    """C = A·Bᵀ: CTA i adds the product of slice i of K after CTA i - 1, so equal in every run; the last has it all."""
    _, sums, _ = product_of(k, a, b, k.cta_x * DIM)
    count = len(sums.registers)
    tile = part_tile(k, count, name="part", stages=1)
    store_part(k, tile, sums)
    k.fence_async()  # for the bulk copy
    k.syncthreads()
    with k.when(k.thread == 0):
        add_parts(k, total, [tile], turns.await_turn(0, k.cta_x))
        k.wait_bulk(0)
        turns.pass_on(0)
    with k.when(k.cta_x == k.grid_x - 1, uniform=True):
        k.syncthreads()
        for register, x in zip(sums.mutable, load_part(k, total, count, warp=k.warp, warps=4), strict=True):
            register.set(x)
        store_registers(Sums(k, sums, k.value(0, u32), k.value(0, u32)), OutputMatrix(k, c, 64, f32))


@kernel(threads=256, requires="sm_90a")
def added_across(k: Kernel, a: TensorMap, b: TensorMap, c: Global[f32]) -> None:
    """C = A·Bᵀ: each of two warpgroups has half of K, and the first takes the other's sums through shared memory."""
    _, sums, _ = product_of(k, a, b, warpgroups=2)
    tile, both = part_tile(k, len(sums.registers), name="part", stages=1), Meeting(k, 2)
    with k.when(k.warpgroup == 1, uniform=True):
        store_part(k, tile, sums)
    both.sync()
    with k.when(k.warpgroup == 0, uniform=True):
        for register, x in zip(sums.mutable, fetch_part(k, tile), strict=True):
            register += x
        store_registers(Sums(k, sums, k.value(0, u32), k.value(0, u32)), OutputMatrix(k, c, 64, f32))


@kernel(threads=32)
def added_by_warps(
    k: Kernel, a: Global[bf16], b: Global[bf16], total: Global[f32], turns: PartTurns, c: Global[f32], m: u32
) -> None:
    """C = A·Bᵀ: CTA (i, j) adds slice i of K to rows 16·j … of sums that begin as 0, in any order.

    A has zeros beyond its diagonal, which ends in the last row's last column: slices of zeros are left out.
    """
    number, block = k.cta_x, k.cta_y
    first, end = key_tiles(k, Visible((None, 0)), (16, DIM), block, (m, k.grid_x * DIM))
    with k.when((number >= first) & (number < end), uniform=True):
        tiles = [operand_tile(k, bf16, rows, DIM, name=name) for name, rows in (("A", 16), ("B", 32))]
        for tile, matrix, row in zip(tiles, (a, b), (block * 16, 0), strict=True):
            RowCopy(k, tile, Rows(matrix, k.grid_x * DIM), 32).load((row, number * DIM))
        k.commit_group()
        k.wait_group(0)
        k.syncwarp()
        cores = MmaSync(k, bf16)
        sums = cores.accumulator(16, 32, "c")
        cores.product(sums, *tiles).start(*tiles, zero=True)
        count = len(sums.registers)
        part = total + block * (32 * count)
        reduce_warp_part(k, part, sums)
        k.syncwarp()  # every lane has added
        with k.when(k.lane == 0):
            turns.pass_on(block)
        with k.when(number == end - 1, uniform=True):
            with k.when(k.lane == 0):
                turns.await_turn(block, end - first)
            k.syncwarp()
            for register, x in zip(sums.mutable, load_warp_part(k, part, count), strict=True):
                register.set(x)
            store_registers(Sums(k, sums, block * 16, k.value(0, u32)), OutputMatrix(k, c, 32, f32))


# -- each kernel runs once: warploom check
@score_gradient.example
def _(rng: np.random.Generator) -> Launch:
    q, d_out = (rng.standard_normal((ROWS, DIM)).astype(bf16.numpy) for _ in range(2))
    key, value = (rng.standard_normal((KEYS, DIM)).astype(bf16.numpy) for _ in range(2))
    s, dp = (x.astype(np.float64) @ y.astype(np.float64).T for x, y in ((q, key), (d_out, value)))
    log = np.logaddexp.reduce(s / np.sqrt(DIM), axis=1)
    p = np.exp(s / np.sqrt(DIM) - log[:, None])
    delta = (p * dp).sum(1)
    given = [q, key, d_out, value, log.astype(np.float32), delta.astype(np.float32)]
    expected = p * (dp - delta[:, None])
    return Launch(1, [*given, np.full((ROWS, KEYS), np.nan, np.float32)], {"ds": (expected, 1e-4)})


@attention_received.example
def _(rng: np.random.Generator) -> Launch:
    q, key = (rng.standard_normal((n, DIM)).astype(bf16.numpy) for n in (40, 100))
    s = q.astype(np.float64) @ key.astype(np.float64).T / np.sqrt(DIM)
    s[~np.tri(40, 100, 60, bool)] = -np.inf  # the last query sees the last key
    log = np.logaddexp.reduce(s, axis=1)
    padded = np.pad(log, (0, 8), constant_values=np.inf).astype(np.float32)
    given = [boxes(q, 16), boxes(key), (padded, TensorMapSpec(f32, padded.shape, (), (16,), 0))]
    expected = np.exp(s - log[:, None]).sum(0)
    return Launch(2, [*given, np.full(100, np.nan, np.float32), 40, 100], {"out": (expected, 1e-4)})


def matrices(rng: np.random.Generator, depth: int) -> tuple[list[Any], Array]:
    """A and B of 64 rows as the TMA sees them, and A·Bᵀ."""
    a, b = (rng.standard_normal((64, depth)).astype(bf16.numpy) for _ in range(2))
    return [boxes(a), boxes(b)], a.astype(np.float64) @ b.astype(np.float64).T


def boxes(x: Array, rows: int = 64) -> tuple[Array, TensorMapSpec]:
    """A matrix as the TMA sees it: boxes of so many rows, swizzled over their 128 bytes."""
    return x, TensorMapSpec(bf16, x.shape[::-1], x.strides[:1], (DIM, rows), 2 * DIM)


@sent.example
def _(rng: np.random.Generator) -> Launch:
    given, c = matrices(rng, DIM)
    return Launch(1, [*given, boxes(np.full((64, 64), np.nan, bf16.numpy))], {"c": (c, 0.125)})


@transposed.example
def _(rng: np.random.Generator) -> Launch:
    given, c = matrices(rng, DIM)
    out = [np.full((64, 64), np.nan, bf16.numpy) for _ in range(2)]
    return Launch(1, [*given, boxes(out[0]), out[1]], {"c": (c, 0.125), "turned": (c.T, 0.125)})


@added_in_turn.example
def _(rng: np.random.Generator) -> Launch:
    given, c = matrices(rng, 3 * DIM)
    total, counters = np.full(part_size(32), np.nan, np.float32), np.zeros(1, np.uint32)
    return Launch(3, [*given, total, counters, np.full((64, 64), np.nan, np.float32)], {"c": (c, 1e-3)})


@added_across.example
def _(rng: np.random.Generator) -> Launch:
    given, c = matrices(rng, 2 * DIM)
    return Launch(1, [*given, np.full((64, 64), np.nan, np.float32)], {"c": (c, 1e-3)})


@added_by_warps.example
def _(rng: np.random.Generator) -> Launch:
    a, b = (rng.standard_normal((rows, 2 * DIM)).astype(bf16.numpy) for rows in (96, 32))
    a[~np.tri(96, 2 * DIM, 2 * DIM - 96, bool)] = 0
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    total, counters = np.zeros(6 * part_size(16, warps=1), np.float32), np.zeros(6, np.uint32)
    return Launch((2, 6), [a, b, total, counters, np.full((96, 32), np.nan, np.float32), 96], {"c": (expected, 1e-3)})
