"""Words of tiles for caches of keys and values: in pages, in parts, with heads that share keys, in 8 bits.

    warploom check examples/cache_tiles.py
    warploom check examples/cache_tiles.py:gathered

Each kernel shows one word of `warploom.tile`; `warploom.attention_paged` is made of these.
"""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

from warploom.lang import (
    Global,
    GlobalPointer,
    Kernel,
    Launch,
    SharedTile,
    Strided,
    TensorMap,
    Traced,
    bf16,
    f16,
    f32,
    kernel,
    u16,
    u32,
)
from warploom.layout.tensor_map import TensorMapSpec
from warploom.tile.cache import PagedBoxes, PageRuns, Pages, PageTable, WarpRing
from warploom.tile.copies import RowCopy, Rows
from warploom.tile.eight_bits import LANES, ProductAlongRows, ProductDownRows, columns, position
from warploom.tile.epilogue import OutputMatrix, Sums, copy_out, store_registers
from warploom.tile.mask import GroupMask, Visible
from warploom.tile.merge import WarpSums, merged, with_sink
from warploom.tile.pipeline import Pipeline, operand_tile, ready
from warploom.tile.planning import box_rows
from warploom.tile.product import MmaSync, zero
from warploom.tile.softmax import OnlineSoftmax

DIM, PAGE, BLOCK = 64, 16, 32  # elements of a row, rows of a page, rows that are copied together
Array = np.ndarray[Any, Any]


# -- rows in pages
@kernel(threads=64)
def added_up(k: Kernel, cache: Strided[bf16, 3], table: PageTable, lengths: Global[u32], out: Global[f32]) -> None:
    """CTA b: the sum of sequence b's rows, two columns a lane. Each of two warps waits for its own copies alone."""
    sequence, none = k.cta_x, k.value(0, u32)
    length = lengths.load(sequence)
    tile = operand_tile(k, bf16, BLOCK // 2, DIM, name="rows", stages=2 * 2)  # two stages for each of two warps
    ring = WarpRing(k, (tile, cache), warps=2, heads=1, head_dim=DIM, pages=Pages(PAGE, table))
    totals = k.registers(f32, 2, 0.0, "totals")
    ring.look_up(sequence, none)
    ring.put(0, 0, (sequence, none, none), length)
    with k.loop((length + (BLOCK - 1)) // BLOCK) as block:
        ring.look_up(sequence, block + 1)
        ring.put(0, (block + 1) % 2, (sequence, none, block + 1), length)  # behind the last row: zeros
        ring.wait(0)  # this lane's copies of the block have arrived ...
        k.syncwarp()  # ... and now every lane's have
        (rows,) = ring.at(block % 2, k.warp)
        for row in range(BLOCK // 2):
            for total, x in zip(totals, k.unpack(rows.load(row, 2 * k.lane, dtype=u32), bf16), strict=True):
                total += x
        k.syncwarp()  # every lane has read the stage, which is filled again
    ring.drain()
    for i, total in enumerate(totals):
        k.reduce_add(out, total.get(), sequence * DIM + 2 * k.lane + i)


@kernel(threads=64, requires="sm_90a")
def gathered(k: Kernel, cache: TensorMap, table: PageTable, lengths: Global[u32], out: Global[bf16]) -> None:
    """CTA b: the rows of sequence b side by side, zeros behind them, by boxes of a page each."""
    sequence, none, blocks = k.cta_x, k.value(0, u32), table.columns * PAGE // BLOCK
    length = lengths.load(sequence)
    tile = operand_tile(k, bf16, BLOCK, DIM, name="rows", stages=2)
    ring = Pipeline(k, (tile, PagedBoxes.of(cache, rows=box_rows(PAGE, BLOCK))), readers=1)
    ready(k, ring)
    with k.warps(0, 1), k.when(k.lane == 0):
        put, runs = ring.producer(), PageRuns(k, Pages(PAGE, table), k.value(PAGE, u32), BLOCK)
        runs.look_up(sequence, none)
        with k.loop(blocks) as block:
            put.put((0, *runs.at(block, length)))
            runs.look_up(sequence, block + 1)
    with k.warps(1, 2):
        get = ring.consumer()
        with k.loop(blocks) as block:
            first = (sequence * blocks + block) * BLOCK
            copy_out(OutputMatrix(k, out, DIM, bf16), get.wait(), first, none, k.lane, 32)
            k.fence_async()  # before the TMA fills the stage again
            k.syncwarp()  # every lane has read it
            get.release()


# -- attention over parts of the keys
PARTS = 3


@kernel(threads=DIM)
def put_together(
    k: Kernel, parts: Global[f32], logs: Global[f32], sink: Global[f32], out: Global[f32], rows: u32
) -> None:
    """CTA r: row r of O from those of three parts of the keys, their log-sum-exps, and a logit without a value."""
    row = k.cta_x
    weights, factor, log = merged(k, [logs.load(part * rows + row) for part in range(PARTS)])
    total = k.value(0.0, f32)
    for part, weight in enumerate(weights):
        total = k.fma(weight, parts.load((part * rows + row) * DIM + k.thread), total)
    beside, _ = with_sink(k, log, sink.load())
    out.store(total * factor * beside, row * DIM + k.thread)


# -- query heads that share keys, as rows of one tile
GROUP = 4


@kernel(threads=32)
def grouped(k: Kernel, p: Global[f32], queries: u32, keys: u32) -> None:
    """CTA b: equal weights of block b's keys for 16 rows, the heads of a query in turn; 0 where a query sees no key."""
    scores = MmaSync(k, f16).accumulator(16, BLOCK, "s")
    zero(scores)
    mask = GroupMask(k, Visible((None, 0), ragged=True), BLOCK, (queries, keys), lambda row: row // GROUP)
    mask.apply(scores, k.cta_x, lambda block: block * BLOCK)
    for score in scores.mutable:
        score.set(k.exp2(score))
    store_registers(Sums(k, scores, k.value(0, u32), k.cta_x * BLOCK), OutputMatrix(k, p, 2 * BLOCK, f32))


# -- keys and values in 8 bits
KEYS = 32


@kernel(threads=32, requires="sm_90")
def fp8_scores(k: Kernel, q: Global[f16], keys: Global[u16], s: Global[f32]) -> None:
    """S = Q·Kᵀ of 16 queries in f16 and 32 keys in e4m3, two elements of which are one of 16 bits."""
    q_tile, k_tile = operand_tile(k, f16, 16, DIM, name="Q"), operand_tile(k, f16, KEYS, DIM // 2, name="K")
    RowCopy(k, k_tile, Rows(keys, DIM // 2), 32).load((0, 0))
    k.commit_group()
    put_queries(k, q, q_tile)
    k.wait_group(0)
    k.syncwarp()
    sums = MmaSync(k, f16).accumulator(16, KEYS, "s")
    ProductAlongRows(k, sums, q_tile, k_tile, DIM, 0).start(q_tile, k_tile, zero=True)
    store_registers(Sums(k, sums, k.value(0, u32), k.value(0, u32)), OutputMatrix(k, s, KEYS, f32))


def put_queries(k: Kernel, q: GlobalPointer, tile: SharedTile) -> None:
    """16 queries by a warp, in the order of keys."""
    for row, col in product((0, 8), range(0, DIM, 16)):  # a lane has four neighbours of row and row + 8
        at = (k.lane // 4 + row, k.lane % 4)
        for i, pair in enumerate(q.load(at[0] * DIM + col + at[1] * 4, 2, dtype=u32)):
            tile.store([pair], at[0], position(col + 2 * i) + at[1] * 2, dtype=u32)


@kernel(threads=32, requires="sm_90")
def fp8_values(k: Kernel, p: Global[f32], values: Global[u16], out: Global[f32]) -> None:
    """O = P·V of weights and 32 values in e4m3."""
    tile = operand_tile(k, f16, KEYS, DIM // 2, name="V")
    RowCopy(k, tile, Rows(values, DIM // 2), 32).load((0, 0))
    k.commit_group()
    k.wait_group(0)
    k.syncwarp()
    cores = MmaSync(k, f16)
    weights, sums = cores.accumulator(16, KEYS, "p"), cores.accumulator(16, DIM, "o")
    for element, weight in enumerate(weights.mutable):
        row, col = weights.layout.coordinates(k.lane, element)
        weight.set(p.load(row * KEYS + col))
    zero(sums)
    ProductDownRows(k, sums, tile, KEYS, 0).start(cores.left(weights), tile)
    lane = LANES.apply(lane=k.lane)
    for row, col, four in columns(sums):  # neighbours, unlike those of other products
        out.store([x.get() for x in four], (lane["row"] + row) * DIM + lane["col"] + col)


@kernel(threads=64, requires="sm_90")
def fp8_attention(
    k: Kernel, q: Global[f16], keys: Strided[u16, 3], values: Strided[u16, 3], out: Global[f32], length: u32
) -> None:
    """O of 16 queries; each of two warps has the products of its own 16 keys."""
    none = k.value(0, u32)
    q_tile = operand_tile(k, f16, 16, DIM, name="Q")
    k_tile, v_tile = (operand_tile(k, f16, KEYS // 2, DIM // 2, name=name, stages=2) for name in "KV")
    ring = WarpRing(k, (k_tile, keys), (v_tile, values), warps=2, heads=1, head_dim=DIM // 2)
    for tile in range(2):
        ring.put(tile, 0, (none, none, none), length)
    with k.warps(0, 1):
        put_queries(k, q, q_tile)
    ring.drain()
    k.syncthreads()
    cores = MmaSync(k, f16)
    s, o = cores.accumulator(16, KEYS // 2, "s"), cores.accumulator(16, DIM, "o")
    softmax = OnlineSoftmax(k, s, o, DIM**-0.5, f16, lse=True)
    sums = WarpSums(k, ring, o, softmax, DIM, fp8=True)
    own_keys, own_values = ring.at(0, k.warp)
    softmax.begin()
    zero(o)
    ProductAlongRows(k, s, q_tile, k_tile, DIM, 0).start(q_tile, own_keys, zero=True)
    softmax.step()
    ProductDownRows(k, o, v_tile, KEYS // 2, 0).start(cores.left(s), own_values)
    sums.finish()

    def leave(row: Traced, _: Traced, store: Callable[..., None]) -> None:
        store(lambda col, four: out.store(four, row * DIM + col), lambda: None)

    sums.each(0, lambda row: row < 16, leave)


# -- each kernel runs once: warploom check
def paged(rng: np.random.Generator) -> tuple[Array, Array, Array, Array]:
    """A cache of (pages, keys, DIM), a table of six pages for each of three sequences, lengths, and their rows."""
    cache = rng.standard_normal((18, PAGE, DIM)).astype(bf16.numpy)
    table, lengths = rng.permutation(18).reshape(3, 6).astype(np.int32), np.array([96, 37, 0], np.uint32)
    exist = np.arange(6 * PAGE)[:, None] < lengths[:, None, None]
    return cache, table, lengths, np.where(exist, cache[table].reshape(3, 6 * PAGE, DIM), 0)


@added_up.example
def _(rng: np.random.Generator) -> Launch:
    cache, table, lengths, rows = paged(rng)
    out = np.zeros((3, DIM), np.float32)
    return Launch(3, [cache[:, None], table, lengths, out, 6, 18], {"out": (rows.astype(np.float64).sum(1), 1e-4)})


@gathered.example
def _(rng: np.random.Generator) -> Launch:
    cache, table, lengths, rows = paged(rng)
    flat = cache.reshape(-1, 1, DIM)
    pages = flat, TensorMapSpec.ragged(bf16, flat.shape[::-1], flat.strides[-2::-1], (DIM, 1, PAGE), 2 * DIM)
    return Launch(3, [pages, table, lengths, np.full_like(rows, np.nan), 6, 18], {"out": (rows, 0)})


def softmax_of(s: Array, value: Array) -> tuple[Array, Array]:
    """O and the log-sum-exps of each row in float64; -inf of a row without a key."""
    if not s.shape[1]:
        return np.zeros((len(s), DIM)), np.full(len(s), -np.inf)
    log = np.logaddexp.reduce(s, axis=1)
    return np.exp(s - log[:, None]) @ value, log


@put_together.example
def _(rng: np.random.Generator) -> Launch:
    s, value = 4 * rng.standard_normal((5, 40)), rng.standard_normal((40, DIM))
    found = [softmax_of(s[:, part], value[part]) for part in (slice(0, 8), slice(8, 8), slice(8, 40))]
    parts, logs = (np.stack(x).astype(np.float32) for x in zip(*found, strict=True))
    expected, _ = softmax_of(np.pad(s, ((0, 0), (0, 1)), constant_values=2.0), np.pad(value, ((0, 1), (0, 0))))
    given = [parts, logs, np.array([2], np.float32), np.full((5, DIM), np.nan, np.float32), 5]
    return Launch(5, given, {"out": (expected, 1e-5)})


def fp8(rng: np.random.Generator) -> tuple[Array, Array]:
    """Rows in e4m3, as pairs of elements and in float64."""
    rows = rng.standard_normal((KEYS, DIM)).astype(ml_dtypes.float8_e4m3fn)
    return rows.view(np.uint16), rows.astype(np.float64)


@grouped.example
def _(_: np.random.Generator) -> Launch:
    queries, keys = 16 // GROUP, 2 * BLOCK - 5
    last = np.arange(16)[:, None] // GROUP + keys - queries
    seen = np.arange(2 * BLOCK) <= np.minimum(last, keys - 1)
    return Launch(2, [np.full(seen.shape, np.nan, np.float32), queries, keys], {"p": (seen.astype(np.float64), 0)})


@fp8_scores.example
def _(rng: np.random.Generator) -> Launch:
    q, (pairs, keys) = rng.standard_normal((16, DIM)).astype(np.float16), fp8(rng)
    expected = q.astype(np.float64) @ keys.T
    return Launch(1, [q, pairs, np.full_like(expected, np.nan, np.float32)], {"s": (expected, 1e-4)})


@fp8_values.example
def _(rng: np.random.Generator) -> Launch:
    p, (pairs, values) = rng.random((16, KEYS)).astype(np.float32), fp8(rng)
    expected = p.astype(np.float16).astype(np.float64) @ values
    return Launch(1, [p, pairs, np.full_like(expected, np.nan, np.float32)], {"out": (expected, 1e-4)})


@fp8_attention.example
def _(rng: np.random.Generator) -> Launch:
    q, (keys, exact_keys), (values, exact) = rng.standard_normal((16, DIM)).astype(np.float16), fp8(rng), fp8(rng)
    expected, _ = softmax_of(q.astype(np.float64) @ exact_keys.T * DIM**-0.5, exact)
    given = q, keys[None, None], values[None, None], np.full(q.shape, np.nan, np.float32), KEYS
    return Launch(1, given, {"out": (expected, 1e-3)})
