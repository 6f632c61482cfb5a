"""Words of tiles for sequences of uneven lengths: listed, in equal shares, claimed by whoever is free.

    warploom check examples/sequence_tiles.py
    warploom check examples/sequence_tiles.py:averaged

Each kernel shows one word of `warploom.tile`; `warploom.attention_varlen` and its like are made of these.
"""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from warploom.lang import Global, Kernel, Launch, TensorMap, Traced, bf16, f32, kernel, u32
from warploom.layout.tensor_map import TensorMapSpec
from warploom.tile.pipeline import Boxes, Pipeline, operand_tile, ready
from warploom.tile.planning import ENTRY_WORDS, divisors
from warploom.tile.ragged import PieceList, RaggedBatch, RaggedTiles, Sequences, Slots, sequence_boxes
from warploom.tile.scheduler import Claimed
from warploom.tile.shares import BlockShares, SequenceBlocks

TILE, DIM, HEADS = 32, 64, 2  # rows of a tile, elements of a row, heads
Array = np.ndarray[Any, Any]


# -- packed sequences, by a list of their tiles
@kernel(threads=32, drop_unused=True)
def listed(k: Kernel, rows: Sequences, tiles: Global[u32], batch: RaggedBatch, slots: u32) -> None:
    """Warp b: the tiles of 32 rows of sequence b for each head, with a slot for each. Long sequences come first."""
    order = RaggedTiles(k, rows, rows, batch, TILE, by_row=False, slots=Slots(TILE, of_keys=False, most=slots))
    order.write(PieceList(k, tiles), k.cta_x, k.value(0, u32), k.value(1, u32))


@kernel(threads=64, requires="sm_90a")
def averaged(k: Kernel, x: TensorMap, y: TensorMap, tiles: Global[u32]) -> None:
    """CTA i, listed tile i: rows divided by the length of their sequence. No tile reaches into the next sequence."""
    tile = operand_tile(k, bf16, TILE, DIM, name="rows")
    arrived, changed = Pipeline(k, (tile, sequence_boxes(x)), readers=0), Pipeline(k, tile, readers=0, name="changed")
    ready(k, arrived, changed)
    piece = PieceList(k, tiles).at(k.cta_x)
    place = 0, piece.head, piece.queries.begin, piece.queries.count
    with k.warps(0, 1), k.when(k.lane == 0):
        arrived.producer().put(place)
        changed.consumer().send(sequence_boxes(y), place)
    with k.warps(1, 2):
        rows, factor = arrived.consumer().wait(), k.reciprocal(k.convert(piece.keys.count, f32))
        for col in range(0, DIM, 8):
            words = rows.load(k.lane, col, 4, dtype=u32)
            pairs = [k.unpack(word, bf16) for word in words]
            rows.store([k.pack(a * factor, b * factor, bf16) for a, b in pairs], k.lane, col, dtype=u32)
        changed.producer().written()


# -- uneven lists in equal shares
@kernel(threads=32)
def sums_of_lists(k: Kernel, starts: Global[u32], x: Global[f32], total: Global[f32], lists: u32) -> None:
    """total[i] += the rows starts[i] … starts[i + 1] - 1 of 32: each CTA adds as many rows, whosever they are."""
    one, none = k.value(1, u32), k.value(0, u32)

    def span(number: Traced) -> SequenceBlocks:
        return SequenceBlocks(starts.load(number), starts.load(number + 1), one, none, none, none)

    shares = BlockShares(k, span, lists, one, ctas=k.grid_x)
    shares.survey()
    first, end = shares.of(k.cta_x)
    with k.when(first < end, uniform=True):
        at, own = shares.cursor("at"), k.register(f32, 0.0, "own")
        at.move(shares.find(first))
        with k.loop(end, start=first) as number:
            own += x.load(at.block * 32 + k.lane)
            with k.when(at.ends_tile | (number + 1 == end), uniform=True):
                k.reduce_add(total, own.get(), at.sequence * 32 + k.lane)
                own.set(0.0)
            at.advance()


@kernel(threads=64, requires="sm_90a")
def sums_by_claims(
    k: Kernel, x: TensorMap, starts: Global[u32], total: Global[f32], counter: Global[u32], lists: u32
) -> None:
    """The same with whole lists, of blocks of 16 rows: a CTA that is done with one takes the next that nobody has."""
    tile, told = operand_tile(k, bf16, 16, DIM, name="rows", stages=2), Claimed.telling(k)
    ring = Pipeline(k, (tile, Boxes(x)), readers=1)
    ready(k, told, ring)
    order, put, get = Claimed(k, lists, counter, told), ring.producer(), ring.consumer()

    def blocks(turn: Traced) -> AbstractContextManager[Traced]:
        number = order.item(turn)
        return k.loop(starts.load(number + 1), start=starts.load(number))

    with k.warps(0, 1), k.when(k.lane == 0), order.turns(claims=True) as turn:
        with blocks(turn) as block:
            put.put((block * 16,))
        order.claim(turn + 1)
    with k.warps(1, 2), order.turns() as turn:
        sums = k.registers(f32, 2, 0.0, "sums")
        with blocks(turn):
            rows = get.wait()
            for row in range(16):
                for own, part in zip(sums, k.unpack(rows.load(row, 2 * k.lane, dtype=u32), bf16), strict=True):
                    own += part
            k.fence_async()  # before the TMA fills the stage again
            k.syncwarp()  # every lane has read it
            get.release()
        total.store([x.get() for x in sums], order.item(turn) * DIM + 2 * k.lane)


# -- each kernel runs once: warploom check
STARTS = np.array([0, 20, 20, 90, 130], np.uint32)


def pieces() -> Array:
    """The list of tiles: an entry that counts them; (row, rows left, row, rows, head, number, first slot) of each."""
    lengths = np.diff(STARTS.astype(np.int64))
    slots = np.cumsum([0, *-(-lengths // TILE)])
    longest = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    found = [
        (STARTS[i] + row, lengths[i] - row, STARTS[i], lengths[i], head, row // TILE, slots[i])
        for i in longest
        for row in range(0, lengths[i], TILE)
        for head in range(HEADS)
    ]
    words = np.zeros((1 + len(found), ENTRY_WORDS), np.uint32)
    words[0, 0], words[1:, :7] = len(found), found
    return words


@listed.example
def _(rng: np.random.Generator) -> Launch:
    words = pieces()
    most = len(words) // HEADS
    batch = 4, HEADS, *divisors(together=HEADS).values(), most
    return Launch(4, [STARTS, np.zeros_like(words), most, 130, *batch], {"tiles": (words, 0)})


def sequence_map(x: Array, rows: int) -> tuple[Array, TensorMapSpec]:
    """(total, heads, DIM) as the TMA sees one sequence of it: boxes of so many rows of a head."""
    box = DIM, 1, rows
    return x, TensorMapSpec.ragged(bf16, x.shape[::-1], x.strides[-2::-1], box, 2 * DIM)


@averaged.example
def _(rng: np.random.Generator) -> Launch:
    x, words = rng.standard_normal((130, HEADS, DIM)).astype(bf16.numpy), pieces()
    lengths = np.diff(STARTS.astype(np.int64))
    expected = x.astype(np.float64) / np.repeat(lengths, lengths)[:, None, None]
    maps = [sequence_map(array, TILE) for array in (x, np.full_like(x, np.nan))]
    return Launch(len(words) - 1, [*maps, words], {"y": (expected, 2e-3)})


@sums_of_lists.example
def _(rng: np.random.Generator) -> Launch:
    starts = np.concatenate([[0], np.cumsum([3, 50, 1, 1, 20])]).astype(np.uint32)
    x = rng.standard_normal((starts[-1], 32)).astype(np.float32)
    expected = np.add.reduceat(x.astype(np.float64), starts[:-1])
    return Launch(7, [starts, x, np.zeros((5, 32), np.float32), 5], {"total": (expected, 1e-4)})


@sums_by_claims.example
def _(rng: np.random.Generator) -> Launch:
    starts = np.concatenate([[0], np.cumsum([3, 9, 1, 1, 5])]).astype(np.uint32)
    x, counter = rng.standard_normal((16 * starts[-1], DIM)).astype(bf16.numpy), np.zeros(1, np.uint32)
    rows = x, TensorMapSpec(bf16, x.shape[::-1], x.strides[:1], (DIM, 16), 2 * DIM)
    expected = np.add.reduceat(x.astype(np.float64), 16 * starts[:-1].astype(int))
    return Launch(2, [rows, starts, np.full((5, DIM), np.nan, np.float32), counter, 5], {"total": (expected, 1e-4)})
