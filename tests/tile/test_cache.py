# pyright: reportInvalidTypeForm=false
"""Keys and values of a cache: which rows are copied, and which lines are fetched ahead of their copies."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from warploom.core.arguments import strides
from warploom.core.dtypes import bf16, f32, u16, u32
from warploom.core.errors import TraceError
from warploom.emulate import emulate
from warploom.lang import Global, GlobalPointer, Kernel, Strided, kernel
from warploom.tile.cache import Pages, PageTable, WarpRing
from warploom.tile.pipeline import operand_tile
from warploom.tile.planning import page_table

HEADS, COLS, SEQUENCES, CAPACITY = 2, 128, 3, 64
LINE = 64
"""Elements."""


@kernel(threads=64, drop_unused=True)
def fetched(
    k: Kernel,
    keys: Strided[u16, 2],
    values: Strided[u16, 2],
    table: PageTable,
    block: u32,
    length: u32,
    *,
    page: int,
) -> None:
    """A block of 32 keys of the second sequence's second head."""
    tiles = [operand_tile(k, bf16, 16, COLS, name=name, stages=2) for name in "KV"]
    sources = [replace(x, strides=(*x.strides, HEADS * COLS)) for x in (keys, values)]
    pages = Pages(page, table) if page else None
    ring = WarpRing(k, *zip(tiles, sources, strict=True), warps=2, heads=1, head_dim=COLS, pages=pages)
    one = k.value(1, u32)
    ring.fetch((one, one, block), length)


@pytest.mark.parametrize("page", [0, 16, 64])
@pytest.mark.parametrize(("block", "length"), [(0, 64), (1, 45), (1, 20)])
def test_the_lines_of_a_block_are_fetched_and_no_others(
    page: int, block: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mark(_: Kernel, pointer: GlobalPointer, index: Any) -> None:
        pointer.store(1, index)

    monkeypatch.setattr(Kernel, "prefetch", mark)
    size = page or CAPACITY
    table = np.random.default_rng(page).permutation(SEQUENCES * CAPACITY // size).reshape(SEQUENCES, -1)
    beyond = len(table) * len(table[0]) - 1
    table = table.astype(np.int32)
    if block:
        table[1, -1] = 10**9  # no page: the last one is fetched in its place
    caches = [np.zeros((SEQUENCES * CAPACITY // size, size, HEADS, COLS), np.uint16) for _ in "KV"]
    keys, values = (x.ravel() for x in caches)
    given: dict[str, Any] = {"keys": keys, "values": values, "block": block, "length": length}
    if page:
        given |= {"table_entries": table.ravel()} | page_table(len(table[0]), len(table[0]), beyond + 1)
    outer = (size * HEADS * COLS, COLS)
    emulate(fetched.trace(page=page), 1, given | strides(keys=outer, values=outer)).raise_if_found()
    expected = np.zeros_like(caches[0])
    for key in range(32 * block, min(32 * block + 32, length)):
        at = min(int(table[1, key // size]), beyond) if page else 1
        expected[at, key % size, 1, ::LINE] = 1
    assert all((x == expected).all() for x in caches)


@kernel(threads=32, drop_unused=True)
def counted(k: Kernel, keys: Strided[u16, 2], *, puts: int, waits: int) -> None:
    """Blocks of a ring of two stages."""
    none = k.value(0, u32)
    source = replace(keys, strides=(*keys.strides, COLS))
    tile = operand_tile(k, bf16, 16, COLS, name="K", stages=2)
    ring = WarpRing(k, (tile, source), warps=1, heads=1, head_dim=COLS)
    for block in range(puts):
        ring.put(0, block % 2, (none, none, none), none)
    for _ in range(waits):
        ring.wait(0)
    ring.drain()


@pytest.mark.parametrize(("puts", "waits", "says"), [(3, 0, "each of 2 stages"), (1, 2, "put one first"), (2, 2, "")])
def test_a_ring_counts_its_blocks(puts: int, waits: int, says: str) -> None:
    with pytest.raises(TraceError, match=says) if says else nullcontext():
        counted.trace(puts=puts, waits=waits)


@kernel(threads=64, drop_unused=True)
def summed(k: Kernel, keys: Strided[bf16, 2], table: PageTable, out: Global[f32], length: u32, *, page: int) -> None:
    """The sum of a sequence's keys, in blocks of 32 for each of two warps."""
    none, tile = k.value(0, u32), operand_tile(k, bf16, 32, COLS, name="K", stages=2)
    source = replace(keys, strides=(*keys.strides, COLS))
    ring = WarpRing(k, (tile, source), warps=2, heads=1, head_dim=COLS, pages=Pages(page, table))
    with k.loop((length + 63) // 64) as block:
        ring.look_up(none, block)
        ring.put(0, 0, (none, none, block), length)
        ring.drain()
        k.syncwarp()
        (rows,) = ring.at(0, k.warp)
        for row in range(32):
            for pair in range(0, COLS // 2, 32):
                for i, x in enumerate(k.unpack(rows.load(row, 2 * (k.lane + pair), dtype=u32), bf16)):
                    k.reduce_add(out, x, 2 * (k.lane + pair) + i)
        k.syncwarp()


@pytest.mark.parametrize("page", [8, 16, 32, 64])
def test_blocks_come_from_pages_of_other_sizes(page: int) -> None:
    rng = np.random.default_rng(page)
    table = rng.permutation(128 // page).astype(np.int32)
    cache, out = rng.integers(-9, 9, (128 // page, page, COLS)), np.zeros(COLS, np.float32)
    given: dict[str, Any] = {"keys": cache.astype(bf16.numpy).ravel(), "out": out, "length": 77, "table_entries": table}
    given |= page_table(len(table), len(table), len(table)) | strides(keys=(page * COLS, COLS))
    emulate(summed.trace(page=page), 1, given).raise_if_found()
    assert (out == cache[table].reshape(128, COLS)[:77].sum(0)).all()


def test_heads_divide_the_warps() -> None:
    @kernel(threads=128, drop_unused=True)
    def uneven(k: Kernel, keys: Strided[bf16, 2]) -> None:
        tile = operand_tile(k, bf16, 16, COLS, name="K", stages=4)
        WarpRing(k, (tile, replace(keys, strides=(*keys.strides, COLS))), warps=4, heads=3, head_dim=COLS)

    with pytest.raises(TraceError, match=r"4 warps.*3 heads"):
        uneven.trace()
