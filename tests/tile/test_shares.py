# pyright: reportInvalidTypeForm=false
"""Shares of the blocks of uneven sequences: every block once and in order, as much for every CTA."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.tile.support import clean
from warploom.core.dtypes import s32, u32
from warploom.lang import Global, Kernel, Traced, kernel
from warploom.tile.shares import BlockShares, SequenceBlocks

HEADS, TILES, MOST = 2, 2, 200


@kernel(threads=32)
def visits(
    k: Kernel, blocks: Global[s32], seen: Global[u32], owners: Global[u32], batch: u32, ctas: u32, *, gap: int
) -> None:
    """What each CTA visits, in order: sequence, head, tile, block; and which CTAs have parts of each tile."""

    def span(sequence: Traced) -> SequenceBlocks:
        end = k.bitcast(blocks.load(sequence, 1)[0], u32)
        none = k.value(0, u32)
        return SequenceBlocks(none, end, k.value(TILES, u32), none, none, none)

    shares = BlockShares(k, span, batch, k.value(HEADS, u32), ctas=ctas, gap=gap)
    shares.survey()
    with k.loop(batch * (HEADS * TILES), start=k.cta_x, step=ctas) as tile:
        place = shares.find(shares.start(tile))
        lowest, highest = shares.ctas_of(place)
        with k.when(k.lane == 0):
            owners.store([place.sequence, place.head * TILES + place.tile, lowest, highest], tile * 4)
    first, end = shares.of(k.cta_x)
    count = k.register(u32, 0, "count")
    with k.when(first < end, uniform=True):
        at = shares.cursor("at")
        at.move(shares.find(first))
        with k.loop(end, start=first) as number, k.when(number == at.number, uniform=True):
            entry = (k.cta_x * MOST + count) * 4
            with k.when(k.lane == 0):
                seen.store([at.sequence.get(), at.head.get(), at.tile.get(), at.block.get()], entry)
            count += 1
            at.advance()


@pytest.mark.parametrize(("gap", "ctas"), [(0, 5), (1, 9), (3, 40)])
def test_every_block_is_visited_once_and_no_cta_has_more_than_its_share(gap: int, ctas: int) -> None:
    lengths = np.random.default_rng(ctas).integers(1, 3, 150)  # of more sequences than a warp looks at together
    lengths[[3, 149]] = 9, 6
    seen, of_tiles = np.full((ctas, MOST, 4), 0xFFFF, np.uint32), np.zeros((len(lengths) * HEADS * TILES, 4), np.uint32)
    assert clean(visits.trace(gap=gap), ctas, [lengths.astype(np.int32), seen, of_tiles, len(lengths), ctas])
    found = [tuple(map(int, x)) for own in seen for x in own if x[0] != 0xFFFF]
    expected = [
        (b, head, tile, block)
        for b, n in enumerate(lengths.tolist())
        for head in range(HEADS)
        for tile in range(TILES)
        for block in range(n)
    ]
    assert found == expected
    total = (lengths + gap).sum() * HEADS * TILES
    assert max(_cost(own, gap) for own in seen) <= -(-total // ctas)
    owners: dict[tuple[int, int], list[int]] = {}
    for cta, own in enumerate(seen.tolist()):
        for sequence, head, tile, _ in own:
            owners.setdefault((sequence, head * TILES + tile), []).append(cta)
    assert [tuple(x) for x in of_tiles.tolist()] == [
        (*x, min(owners[x]), max(owners[x])) for x in owners if x[0] != 0xFFFF
    ]


@pytest.mark.parametrize(("ctas", "most"), [(17, 32), (40, 15)])
def test_tiles_as_long_as_each_other_stay_whole_where_that_costs_little(ctas: int, most: int) -> None:
    lengths, seen = np.full(16, 8, np.int32), np.full((ctas, MOST, 4), 0xFFFF, np.uint32)
    assert clean(
        visits.trace(gap=1), ctas, [lengths, seen, np.zeros((16 * HEADS * TILES, 4), np.uint32), len(lengths), ctas]
    )
    blocks = [own[own[:, 0] != 0xFFFF, 3] for own in seen]
    assert sum(map(len, blocks)) == 8 * 16 * HEADS * TILES
    assert max(map(len, blocks)) <= most
    assert all((own[:1] == 0).all() for own in blocks) == (most == 32)


def _cost(own: Any, gap: int) -> int:
    """Numbers of a share: its blocks, and the gaps before those tiles that it has more than the first of."""
    blocks = own[own[:, 0] != 0xFFFF]
    return len(blocks) + gap * int((blocks[1:, 3] == 0).sum())
