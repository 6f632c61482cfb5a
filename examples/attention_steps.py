"""Attention in five steps, from one block at a time to a persistent kernel (docs/tutorials/attention-kernel.md).

    warploom check examples/attention_steps.py
    warploom check examples/attention_steps.py:ring

Every kernel is made of words of `warploom.tile`; the last one has the shape of the production kernel.
"""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from warploom.lang import Global, Kernel, Launch, SharedTile, TensorMap, Traced, bf16, kernel, u32
from warploom.lang.values import Number
from warploom.layout.tensor_map import TensorMapSpec
from warploom.tile.copies import CopyRing, RowCopy, Rows
from warploom.tile.epilogue import store_pairs, store_rows
from warploom.tile.mask import Mask, Visible
from warploom.tile.pipeline import Boxes, Pipeline, operand_tile, ready
from warploom.tile.product import MmaSync, Wgmma, zero
from warploom.tile.roles import consumer, producer
from warploom.tile.scheduler import Persistent, RowTiles
from warploom.tile.softmax import OnlineSoftmax

ROWS, KEYS, DIM = 64, 64, 64  # query rows of four warps, keys of a block, elements of a head
THREADS = 128
CAUSAL = Visible(window=(None, 0), ragged=True)
Array = np.ndarray[Any, Any]


# -- 1. one block at a time
@kernel(threads=THREADS)
def simple(k: Kernel, q: Global[bf16], key: Global[bf16], value: Global[bf16], out: Global[bf16], blocks: u32) -> None:
    """One head; whole tiles, no mask."""
    row = k.cta_x * ROWS
    q_tile, k_tile, v_tile = (operand_tile(k, bf16, 64, DIM, name=name) for name in "QKV")
    load_q, load_k, load_v = (
        RowCopy(k, tile, Rows(matrix, DIM), THREADS) for tile, matrix in ((q_tile, q), (k_tile, key), (v_tile, value))
    )
    cores = MmaSync(k, bf16)
    s, o = cores.accumulator(16, KEYS, "s"), cores.accumulator(16, DIM, "o")
    scores = cores.product(s, q_tile, k_tile, warp=(k.warp, 0))
    product = cores.product(o, s, v_tile, transposed_b=True)
    softmax = OnlineSoftmax(k, s, o, DIM**-0.5, bf16)

    softmax.begin()
    zero(o)
    load_q.load((row, 0))
    with k.loop(blocks) as j:
        load_k.load((j * KEYS, 0))
        load_v.load((j * KEYS, 0))
        k.commit_group()
        k.wait_group(0)
        k.syncthreads()  # the block is here, for every warp
        scores.start(q_tile, k_tile, zero=True)
        softmax.step()
        product.start(cores.left(s), v_tile)
        k.syncthreads()  # every warp has read the block
    softmax.keep()
    softmax.finish()
    store_pairs(k, q_tile, o, k.warp * 16)
    k.syncthreads()
    RowCopy(k, q_tile, Rows(out, DIM), THREADS).store((row, 0))


# -- 2. two blocks in flight, any lengths, a causal mask
@kernel(threads=THREADS)
def ring(
    k: Kernel, q: Global[bf16], key: Global[bf16], value: Global[bf16], out: Global[bf16], q_len: u32, kv_len: u32
) -> None:
    """One head; the last query sees the last key."""
    row, warp_row = k.cta_x * ROWS, k.warp * 16
    q_tile = operand_tile(k, bf16, ROWS, DIM, name="Q")
    k_tile, v_tile = (operand_tile(k, bf16, KEYS, DIM, name=name, stages=2) for name in "KV")
    RowCopy(k, q_tile, Rows(q, DIM, q_len), THREADS).load((row, 0))
    k.commit_group()
    copies = CopyRing(k, (k_tile, Rows(key, DIM, kv_len)), (v_tile, Rows(value, DIM, kv_len)), threads=THREADS)

    cores = MmaSync(k, bf16)
    s, o = cores.accumulator(16, KEYS, "s"), cores.accumulator(16, DIM, "o")
    scores = cores.product(s, q_tile, k_tile, warp=(k.warp, 0))
    product = cores.product(o, s, v_tile, transposed_b=True)
    softmax = OnlineSoftmax(k, s, o, DIM**-0.5, bf16)
    mask = Mask(k, CAUSAL, (ROWS, KEYS), row, (q_len, kv_len))

    def block(step: Traced, keys: SharedTile, values: SharedTile) -> None:
        scores.start(q_tile, keys, zero=True)
        softmax.step(lambda: mask.apply(s, mask.block(step), row=warp_row))
        product.start(cores.left(s), values)

    softmax.begin()
    zero(o)
    copies.each(mask.blocks, lambda step: 2 * [(mask.block(step) * KEYS, 0)], block)
    softmax.keep()
    softmax.finish()
    k.syncwarp()  # every lane has read its Q, which O now overwrites
    store_pairs(k, q_tile, o, warp_row)
    k.syncthreads()
    RowCopy(k, q_tile, Rows(out, DIM, q_len), THREADS).store((row, 0))


# -- 3. roles: one thread copies by TMA, a warpgroup multiplies by wgmma
@kernel(threads=256, requires="sm_90a")
def roles(k: Kernel, q: TensorMap, key: TensorMap, value: TensorMap, out: TensorMap, blocks: u32) -> None:
    """One head; no mask."""
    queries, keys, values, output = loaded(k, (q, key, value, out), blocks)
    with consumer(k, 1):
        cores = Wgmma(k, bf16)
        s, o, p = cores.accumulator(KEYS, "s"), cores.accumulator(DIM, "o"), cores.left(KEYS, "p")
        scores = cores.product(s, queries.tiles[0], keys.tiles[0])
        product = cores.product(o, p, values.tiles[0], transposed_b=True)
        softmax = OnlineSoftmax(k, s, o, DIM**-0.5, bf16)
        get_k, get_v = keys.consumer(), values.consumer()

        softmax.begin()
        zero(o)
        left = queries.consumer().wait()
        with k.loop(blocks):
            scores.start(left, get_k.wait(), zero=True).wait()
            get_k.release()
            softmax.step()
            cores.pack(p, s)
            product.start(p, get_v.wait()).wait()
            get_v.release()
        softmax.keep()
        softmax.finish()
        written = output.producer()
        store_rows(k, written.tile, o, (k.warp & 3) * 16)
        written.written()


def loaded(k: Kernel, maps: tuple[Any, ...], blocks: Traced) -> tuple[Pipeline, ...]:
    """The pipelines of a CTA's 64 query rows, and the thread that fills and empties them."""
    row, (q, key, value, out) = k.cta_x * ROWS, maps
    q_tile = operand_tile(k, bf16, ROWS, DIM, name="Q")
    k_tile, v_tile = (operand_tile(k, bf16, KEYS, DIM, name=name, stages=2) for name in "KV")
    queries = Pipeline(k, (q_tile, Boxes(q)), readers=0)  # filled once: nobody gives it back
    keys = Pipeline(k, (k_tile, Boxes(key)), readers=4)  # each of four warps releases a stage
    values = Pipeline(k, (v_tile, Boxes(value)), readers=4)
    output = Pipeline(k, q_tile, writers=4, readers=0, name="O")  # O leaves through Q's memory
    ready(k, queries, keys, values, output)
    with producer(k, 1), k.when(k.thread == 0):
        queries.producer().put((row,))
        put_k, put_v = keys.producer(), values.producer()
        with k.loop(blocks) as j:
            put_k.put((j * KEYS,))
            put_v.put((j * KEYS,))
        output.consumer().send(Boxes(out), (row,))
    return queries, keys, values, output


# -- 4. the next block's scores beside this block's softmax
@kernel(threads=256, requires="sm_90a")
def overlap(k: Kernel, q: TensorMap, key: TensorMap, value: TensorMap, out: TensorMap, blocks: u32) -> None:
    """One head; no mask."""
    queries, keys, values, output = loaded(k, (q, key, value, out), blocks)
    with consumer(k, 1):
        cores = Wgmma(k, bf16)
        s, o, p = cores.accumulator(KEYS, "s"), cores.accumulator(DIM, "o"), cores.left(KEYS, "p")
        scores = cores.product(s, queries.tiles[0], keys.tiles[0])
        product = cores.product(o, p, values.tiles[0], transposed_b=True)
        softmax = OnlineSoftmax(k, s, o, DIM**-0.5, bf16)
        get_k, get_v = keys.consumer(), values.consumer()

        left = queries.consumer().wait()
        scores.start(left, get_k.wait(), zero=True).wait()
        get_k.release()
        softmax.first()
        cores.pack(p, s)
        zero(o)
        with k.loop(blocks, start=1):
            next_scores = scores.start(left, get_k.wait(), zero=True)
            output_sums = product.start(p, get_v.wait())
            next_scores.wait()
            get_k.release()
            factors = softmax.deferred()
            output_sums.wait(s)
            get_v.release()
            cores.pack(p, s)
            softmax.rescale(factors)
        product.start(p, get_v.wait()).wait()
        get_v.release()
        softmax.keep()
        softmax.finish()
        written = output.producer()
        store_rows(k, written.tile, o, (k.warp & 3) * 16)
        written.written()


# -- 5. a persistent kernel: two consumers, every head, a causal mask
CONSUMERS = 2
TILE = 64 * CONSUMERS


@kernel(threads=384, requires="sm_90a")
def persistent(
    k: Kernel, q: TensorMap, key: TensorMap, value: TensorMap, out: TensorMap, q_len: u32, kv_len: u32, heads: u32
) -> None:
    """Every head; the last query sees the last key. Any grid along x."""
    row_blocks = (q_len + (TILE - 1)) // TILE
    order = Persistent(k, row_blocks * heads, alternating=True)
    tiles = RowTiles.of(k, row_blocks, heads, together=heads)

    def tile_of(turn: Traced) -> tuple[Traced, Traced, Mask]:
        block, head = tiles.tile(order.item(turn))
        return block * TILE, head, Mask(k, CAUSAL, (TILE, KEYS), block * TILE, (q_len, kv_len))

    queries, keys, values, output = loaded_in_turn(k, (q, key, value, out), order.count, tile_of)
    with consumer(k, CONSUMERS):
        me, warp = k.warpgroup - 1, k.warp & 3
        cores = Wgmma(k, bf16)
        s, o, p = cores.accumulator(KEYS, "s"), cores.accumulator(DIM, "o"), cores.left(KEYS, "p")
        scores = cores.product(s, queries.tiles[0], keys.tiles[0])
        product = cores.product(o, p, values.tiles[0], transposed_b=True)
        softmax = OnlineSoftmax(k, s, o, DIM**-0.5, bf16)
        get_k, get_v = keys.consumer(), values.consumer()
        with k.loop(order.count) as turn:
            _, _, mask = tile_of(turn)

            def cut(step: Number, mask: Mask = mask) -> None:
                mask.apply(s, mask.block(step), row=me * 64)

            left = queries.at(turn, me).wait()
            scores.start(left, get_k.wait(), zero=True).wait()
            get_k.release()
            softmax.first(lambda: cut(0))
            cores.pack(p, s)
            zero(o)
            with k.loop(mask.blocks, start=1) as step:
                next_scores = scores.start(left, get_k.wait(), zero=True)
                output_sums = product.start(p, get_v.wait())
                next_scores.wait()
                get_k.release()
                factors = softmax.deferred(lambda: cut(step))
                output_sums.wait(s)
                get_v.release()
                cores.pack(p, s)
                softmax.rescale(factors)
            product.start(p, get_v.wait()).wait()
            get_v.release()
            softmax.keep()
            softmax.finish()
            written = output.at(turn, me)
            store_rows(k, written.tile, o, warp * 16)
            written.written()


def loaded_in_turn(
    k: Kernel, maps: tuple[Any, ...], turns: Traced, tile_of: Callable[[Traced], tuple[Traced, Traced, Mask]]
) -> tuple[Pipeline, ...]:
    """The pipelines of a CTA's tiles, and two threads: one copies keys and values, one Q and O."""
    q, key, value, out = maps
    q_tile = operand_tile(k, bf16, 64, DIM, name="Q", stages=CONSUMERS)
    k_tile, v_tile = (operand_tile(k, bf16, KEYS, DIM, name=name, stages=2) for name in "KV")
    queries = Pipeline(k, (q_tile, Boxes(q)), readers=0, parts=CONSUMERS)
    keys = Pipeline(k, (k_tile, Boxes(key)), readers=4 * CONSUMERS)
    values = Pipeline(k, (v_tile, Boxes(value)), readers=4 * CONSUMERS)
    output = Pipeline(k, q_tile, writers=4, readers=0, parts=CONSUMERS, name="O")
    ready(k, queries, keys, values, output)
    with producer(k, CONSUMERS):
        with k.when(k.thread == 0):
            put_k, put_v = keys.producer(), values.producer()
            with k.loop(turns) as turn:
                _, head, mask = tile_of(turn)
                with k.loop(mask.blocks) as step:
                    for put in (put_k, put_v):
                        put.put((mask.block(step) * KEYS, head))
        with k.when(k.thread == 32), k.loop(turns) as turn:
            row, head, _ = tile_of(turn)
            for part in range(CONSUMERS):
                queries.at(turn, part).put((row + part * 64, head))
            for part in range(CONSUMERS):
                output.at(turn, part).send(Boxes(out), (row + part * 64, head))
    return queries, keys, values, output


# -- each step runs once: warploom check
def inputs(rng: np.random.Generator, q_len: int, kv_len: int, *heads: int) -> list[Array]:
    """Q, K, V, and an O that nobody has written."""
    q, key, value = (rng.standard_normal((*heads, n, DIM)).astype(bf16.numpy) for n in (q_len, kv_len, kv_len))
    return [q, key, value, np.full_like(q, np.nan)]


def attention(q: Array, key: Array, value: Array, *, causal: bool = False) -> tuple[Array, float]:
    """The result in float64, and how far off a kernel may be."""
    q, key, value = (x.astype(np.float64) for x in (q, key, value))
    s = q @ np.swapaxes(key, -1, -2) / np.sqrt(DIM)
    if causal:
        s = np.where(np.tri(s.shape[-2], s.shape[-1], s.shape[-1] - s.shape[-2], bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True) @ value, 0.01


def boxes(x: Array) -> tuple[Array, TensorMapSpec]:
    """A matrix as the TMA sees it: boxes of 64 rows, swizzled over their 128 bytes."""
    box = (DIM, 64, 1)[: x.ndim]
    return x, TensorMapSpec(bf16, x.shape[::-1], x.strides[-2::-1], box, 2 * DIM)


@simple.example
def _(rng: np.random.Generator) -> Launch:
    q, key, value, out = inputs(rng, 128, 192)
    return Launch(2, [q, key, value, out, 3], {"out": attention(q, key, value)})


@ring.example
def _(rng: np.random.Generator) -> Launch:
    q, key, value, out = inputs(rng, 100, 170)
    return Launch(2, [q, key, value, out, 100, 170], {"out": attention(q, key, value, causal=True)})


@roles.example
@overlap.example
def _(rng: np.random.Generator) -> Launch:
    q, key, value, out = inputs(rng, 128, 192)
    return Launch(2, [*map(boxes, (q, key, value, out)), 3], {"out": attention(q, key, value)})


@persistent.example
def _(rng: np.random.Generator) -> Launch:
    q, key, value, out = inputs(rng, 150, 180, 2)
    maps = map(boxes, (q, key, value, out))
    return Launch(3, [*maps, 150, 180, 2], {"out": attention(q, key, value, causal=True)})
