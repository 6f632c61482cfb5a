"""Words of tiles for gradients: a softmax's, a product's transpose, and sums that many CTAs add to.

    warploom check examples/gradient_tiles.py

Each kernel shows one word of `warploom.tile`; the gradients of `warploom.attention` are made of these.
"""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from typing import Any

import numpy as np

from warploom.lang import Fragment, Global, Kernel, Launch, SharedTile, TensorMap, Traced, bf16, f32, kernel, u32
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
from warploom.tile.copies import CopyRing, RowCopy, Rows
from warploom.tile.epilogue import Sums, Target, await_sent, copy_out, send_rows, store_registers, store_row_values
from warploom.tile.gradient import SoftmaxGradient
from warploom.tile.mask import SeenBy, Visible
from warploom.tile.pipeline import Boxes, Pipeline, operand_tile, ready
from warploom.tile.product import MmaSync, Wgmma
from warploom.tile.roles import Meeting
from warploom.tile.transposed import TransposedStore, column_values, row_values

ROWS, KEYS, DIM = 16, 32, 64
LOG2_E = float(np.log2(np.e))
Array = np.ndarray[Any, Any]


@kernel(threads=32)
def score_gradient(
    k: Kernel, q: Global[bf16], key: Global[bf16], d_out: Global[bf16], value: Global[bf16], log: Global[f32],
    delta: Global[f32], ds: Global[f32],
) -> None:  # fmt: skip
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
    store_registers(Sums(k, gradient, first, first), Target(k, ds, KEYS, f32))


@kernel(threads=128)
def attention_received(
    k: Kernel, q: Global[bf16], key: Global[bf16], log: Global[f32], out: Global[f32], q_len: u32, kv_len: u32
) -> None:
    """CTA j: for each of 64 keys the sum of its probabilities, of the queries that see it under a causal mask.

    Scores are transposed: keys are rows. ``log`` goes on to a multiple of 32 queries with inf, which makes P = 0.
    """
    first, warp_row = k.cta_x * 64, k.warp * 16
    k_tile, q_tile = operand_tile(k, bf16, 64, DIM, name="K"), operand_tile(k, bf16, 32, DIM, name="Q", stages=2)
    RowCopy(k, k_tile, Rows(key, DIM, kv_len), 128).load((first, 0))
    k.commit_group()
    copies = CopyRing(k, (q_tile, Rows(q, DIM, q_len)), threads=128)
    cores = MmaSync(k, bf16)
    s, totals = cores.accumulator(16, 32, "s"), k.registers(f32, 2, 0.0, "totals")
    scores = cores.product(s, k_tile, q_tile, warp=(k.warp, 0))
    softmax = SoftmaxGradient(k, s, DIM**-0.5)
    seen = SeenBy(k, Visible((None, 0), ragged=True), (32, 64), first, (q_len, kv_len))

    def add(step: Traced, queries: SharedTile) -> None:
        block = seen.block(step)
        scores.start(k_tile, queries, zero=True)
        shift = [x * -LOG2_E for x in column_values(log + block * 32, s, k.lane)]
        softmax.probabilities(shift, lambda: seen.apply(s, block, row=warp_row))
        for total, part in zip(totals, s.reduce("add", "col"), strict=True):
            total += part

    copies.each(seen.blocks, lambda step: [(seen.block(step) * 32, 0)], add)
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
def transposed(k: Kernel, a: TensorMap, b: TensorMap, c: Global[bf16]) -> None:
    """C = (A·Bᵀ)ᵀ, rounded: 64 rows of sums are 64 columns of the tile."""
    cores, sums, tile = product_of(k, a, b)
    packed = cores.left(64, "packed")
    cores.pack(packed, sums)
    TransposedStore(k, tile).store(tile, packed)
    k.syncthreads()  # every warp has stored its columns
    copy_out(Target(k, c, 64, bf16), tile, k.value(0, u32), k.value(0, u32), k.thread, 128)


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
        store_registers(Sums(k, sums, k.value(0, u32), k.value(0, u32)), Target(k, c, 64, f32))


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
        store_registers(Sums(k, sums, k.value(0, u32), k.value(0, u32)), Target(k, c, 64, f32))


@kernel(threads=32)
def added_by_warps(
    k: Kernel, a: Global[bf16], b: Global[bf16], total: Global[f32], turns: PartTurns, c: Global[f32]
) -> None:
    """C = A·Bᵀ of 16 and 32 rows: each CTA adds the product of its slice of K, in any order, to what begins as 0."""
    tiles = [operand_tile(k, bf16, rows, DIM, name=name) for name, rows in (("A", 16), ("B", 32))]
    for tile, matrix in zip(tiles, (a, b), strict=True):
        RowCopy(k, tile, Rows(matrix, k.grid_x * DIM), 32).load((0, k.cta_x * DIM))
    k.commit_group()
    k.wait_group(0)
    k.syncwarp()
    cores = MmaSync(k, bf16)
    sums = cores.accumulator(16, 32, "c")
    cores.product(sums, *tiles).start(*tiles, zero=True)
    reduce_warp_part(k, total, sums)
    k.syncwarp()  # every lane has added
    with k.when(k.lane == 0):
        turns.pass_on(0)
    with k.when(k.cta_x == k.grid_x - 1, uniform=True):
        with k.when(k.lane == 0):
            turns.await_turn(0, k.grid_x)
        k.syncwarp()
        for register, x in zip(sums.mutable, load_warp_part(k, total, len(sums.registers)), strict=True):
            register.set(x)
        store_registers(Sums(k, sums, k.value(0, u32), k.value(0, u32)), Target(k, c, 32, f32))


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
    given = [q, key, np.pad(log, (0, 24), constant_values=np.inf).astype(np.float32)]
    expected = np.exp(s - log[:, None]).sum(0)
    return Launch(2, [*given, np.full(100, np.nan, np.float32), 40, 100], {"out": (expected, 1e-4)})


def matrices(rng: np.random.Generator, depth: int) -> tuple[list[Any], Array]:
    """A and B of 64 rows as the TMA sees them, and A·Bᵀ."""
    a, b = (rng.standard_normal((64, depth)).astype(bf16.numpy) for _ in range(2))
    return [boxes(a), boxes(b)], a.astype(np.float64) @ b.astype(np.float64).T


def boxes(x: Array) -> tuple[Array, TensorMapSpec]:
    """A matrix as the TMA sees it: boxes of 64 rows, swizzled over their 128 bytes."""
    return x, TensorMapSpec(bf16, x.shape[::-1], x.strides[:1], (DIM, 64), 2 * DIM)


@sent.example
def _(rng: np.random.Generator) -> Launch:
    given, c = matrices(rng, DIM)
    return Launch(1, [*given, boxes(np.full((64, 64), np.nan, bf16.numpy))], {"c": (c, 0.125)})


@transposed.example
def _(rng: np.random.Generator) -> Launch:
    given, c = matrices(rng, DIM)
    return Launch(1, [*given, np.full((64, 64), np.nan, bf16.numpy)], {"c": (c.T, 0.125)})


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
    a, b = (rng.standard_normal((rows, 3 * DIM)).astype(bf16.numpy) for rows in (16, 32))
    expected = a.astype(np.float64) @ b.astype(np.float64).T
    total, counters = np.zeros(part_size(16, warps=1), np.float32), np.zeros(1, np.uint32)
    return Launch(3, [a, b, total, counters, np.full((16, 32), np.nan, np.float32)], {"c": (expected, 1e-3)})
