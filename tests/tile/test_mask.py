"""Masks against the predicate written out: what is visited, what is cut, and which scores remain."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.tile.support import clean
from warploom.core.errors import TraceError
from warploom.ir.program import Program
from warploom.kernels.attention.problem import AttentionProblem, Even
from warploom.lang import Global, Kernel, bf16, f32, kernel, s32, u32
from warploom.layout.catalogue import mma_fragment
from warploom.tile.mask import Mask, SeenBy, Visible, key_tiles

Window = tuple[int | None, int | None]
WARPS, ROWS = 2, 16
TILE_M = WARPS * ROWS


@kernel(threads=32 * WARPS, drop_unused=True)
def masked(
    k: Kernel,
    out: Global[f32],
    cuts: Global[u32],
    visits: Global[u32],
    reach: Global[s32],
    q_len: u32,
    kv_len: u32,
    keys: u32,
    *,
    tile_n: int,
    visible: Visible,
    first: int | None = None,
) -> None:
    """A CTA for each 32 rows: 1 where a score of a visited block counts, 0 where it is -inf; whether blocks are cut."""
    begin = None if first is None else k.value(first, u32)
    row = k.cta_x * TILE_M
    mask = Mask(k, visible, (TILE_M, tile_n), row, (q_len, kv_len), begin=begin)
    with k.when(k.thread == 0):
        visits.store(mask.blocks, k.cta_x)
    end = mask.reach(k.warp * ROWS, ROWS)
    if end is not None:
        reach.store(end, k.cta_x * WARPS + k.warp)
    scores = k.accumulator(mma_fragment("m16n8k16", "C").tile(1, tile_n // 8), None, "scores")
    with k.loop(mask.blocks) as step:
        block = mask.block(step)
        for register in scores.mutable:
            register.set(0.0)
        mask.apply(scores, block, row=k.warp * ROWS)
        for element, score in enumerate(scores.mutable):
            at_row, at_col = scores.layout.coordinates(k.lane, element)
            place = k.mul_wide(row + k.warp * ROWS + at_row, keys) + k.mul_wide(block * tile_n + at_col, 1)
            (out + place).store(k.select(score == 0.0, k.value(1.0, f32), k.value(0.0, f32)))
        cut = mask.cuts(block)
        if cut is not None:
            with k.when(k.thread == 0):
                cuts.store(k.select(cut, k.value(1, u32), k.value(0, u32)), k.cta_x * (keys // tile_n) + block)


def predicate(q_len: int, kv_len: int, window: Window) -> Any:
    """Which keys each row sees, written out."""
    left, right = window
    aligned = np.arange(q_len)[:, None] + kv_len - q_len
    key = np.arange(kv_len)[None]
    return (key >= (aligned - left if left is not None else 0)) & (
        key <= (aligned + right if right is not None else kv_len)
    )


@pytest.mark.parametrize("window", [(None, None), (None, 0), (None, 7), (20, None), (0, 0), (33, 5), (200, 200)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(96, 96), (70, 150), (150, 70), (1, 100), (96, 16)])
@pytest.mark.parametrize("tile_n", [16, 48])
def test_a_mask_is_its_predicate(window: Window, q_len: int, kv_len: int, tile_n: int) -> None:
    visible = Visible(window, ragged=kv_len % tile_n != 0)
    compare(masked.trace(tile_n=tile_n, visible=visible), visible, q_len, kv_len, tile_n)


@pytest.mark.parametrize("window", [(20, None), (None, 7), (20, 7)])
def test_the_edges_of_a_mask_cut_blocks_at_every_alignment(window: Window) -> None:
    """Also where a single key, the first of a block or the last, is hidden from a single row."""
    visible = Visible(window, ragged=True)
    program = masked.trace(tile_n=16, visible=visible)
    for kv_len in range(64, 80):
        compare(program, visible, 64, kv_len, 16)


def compare(program: Program, visible: Visible, q_len: int, kv_len: int, tile_n: int) -> None:
    """Run a kernel of :func:`masked` and compare what it visits, cuts and hides with the predicate."""
    window = visible.window
    tiles, blocks = -(-q_len // TILE_M), -(-kv_len // tile_n)
    keys = blocks * tile_n
    out = np.full((tiles * TILE_M, keys), np.nan, np.float32)
    cuts, visits = np.full((tiles, blocks), 2, np.uint32), np.zeros(tiles, np.uint32)
    reach = np.full((tiles, WARPS), tile_n, np.int32)
    given = {
        "out": out,
        "cuts": cuts,
        "visits": visits,
        "reach": reach,
        "q_len": q_len,
        "kv_len": kv_len,
        "keys": keys,
    }
    assert clean(program, tiles, {p.name: given[p.name] for p in program.parameters})

    problem = AttentionProblem(1, 1, 1, Even(q_len, kv_len), 64, bf16, window=window)
    assert visits.tolist() == list(problem.visited_blocks(TILE_M, tile_n)), "what the host counts"
    seen = np.zeros((tiles * TILE_M, keys), bool)
    seen[:q_len, :kv_len] = predicate(q_len, kv_len, window)
    visited = ~np.isnan(out)
    assert not seen[~visited].any(), "all that counts is visited"
    assert ((out == 1) == seen)[:q_len][visited[:q_len]].all()
    for tile in range(tiles):
        rows = slice(tile * TILE_M, min((tile + 1) * TILE_M, q_len))
        for block in range(blocks):
            part = seen[rows, block * tile_n : (block + 1) * tile_n]
            if not visited[rows, block * tile_n].any():
                assert not part.any()
            elif cuts[tile, block] != 1:  # what no row is kept from is not masked
                assert part.all()
            elif (tile + 1) * TILE_M <= q_len:  # and nothing else
                assert not part.all()
        used = visited[tile * TILE_M].reshape(blocks, tile_n).any(1)
        last = tile_n * np.nonzero(used)[0][-1]
        for warp, end in enumerate(reach[tile]):
            first = tile * TILE_M + ROWS * warp
            own: Any = seen[first : first + ROWS, last : last + tile_n].any(0)
            assert not own[max(0, end) :].any(), "no key behind"
            if window[0] is None and end > 0 and (tile * WARPS + warp + 1) * ROWS <= q_len:
                assert own[min(end, tile_n) - 1], "and not one too many"
        assert np.diff(np.nonzero(used)[0]).tolist() == [1] * (used.sum() - 1), "one span of blocks, never none"
    if not visible.masks:
        assert (cuts == 2).all()


def test_a_mask_can_begin_where_another_one_does() -> None:
    """As consumers of a tile do, each with an end of its own."""
    out, cuts, visits = np.full((32, 96), np.nan, np.float32), np.zeros(6, np.uint32), np.zeros(1, np.uint32)
    reach = np.zeros(WARPS, np.int32)
    program = masked.trace(tile_n=16, visible=Visible((5, 0)), first=2)
    given = {"out": out, "cuts": cuts, "visits": visits, "reach": reach, "q_len": 32, "kv_len": 96, "keys": 96}
    assert clean(program, 1, {p.name: given[p.name] for p in program.parameters})
    assert (visits.tolist(), reach.tolist()) == ([4], [0, 16])
    assert np.isnan(out[:, :32]).all()
    assert ((out == 1) == predicate(32, 96, (5, 0)))[:, 32:].all()


def test_scores_that_cannot_be_masked_in_place_are_refused() -> None:
    @kernel(threads=32)
    def wrong(k: Kernel, n: u32) -> None:
        layout = mma_fragment("m16n8k16", "C")
        values = k.fragment(layout, f32, [k.value(0.0, f32)] * 4)
        Mask(k, Visible((None, 0)), (16, 16), 0, (n, n)).apply(values, k.value(0, u32))

    with pytest.raises(TraceError, match="only an accumulator"):
        wrong.trace()


@kernel(threads=32 * WARPS, drop_unused=True)
def seen_by(
    k: Kernel,
    out: Global[f32],
    visits: Global[u32],
    first: Global[u32],
    end: Global[u32],
    q_len: u32,
    kv_len: u32,
    turns: Global[u32],
    rows: u32,
    *,
    tile_m: int,
    visible: Visible,
    rising: bool,
) -> None:
    """A CTA for each 32 keys: 1 where a row of a visited block sees a key, else 0; who visits each block, and when."""
    key = k.cta_x * TILE_M
    mask = SeenBy(k, visible, (tile_m, TILE_M), key, (q_len, kv_len), rising=rising)
    with k.when(k.thread == 0):
        visits.store(mask.blocks, k.cta_x)
        with k.loop(mask.blocks) as step:
            turns.store(step, k.cta_x * (rows // tile_m) + mask.block(step))
        with k.when(k.cta_x == 0), k.loop((q_len + (tile_m - 1)) // tile_m) as block:
            for to, tile in zip(
                (first, end), key_tiles(k, visible, (tile_m, TILE_M), block, (q_len, kv_len)), strict=True
            ):
                to.store(tile, block)
    scores = k.accumulator(mma_fragment("m16n8k16", "C").tile(1, tile_m // 8), None, "scores")
    with k.loop(mask.blocks) as step:
        block = mask.block(step)
        for register in scores.mutable:
            register.set(1.0)
        mask.apply(scores, block, row=k.warp * ROWS)
        for element, score in enumerate(scores.mutable):
            at_key, at_row = scores.layout.coordinates(k.lane, element)
            place = k.mul_wide(key + k.warp * ROWS + at_key, rows) + k.mul_wide(block * tile_m + at_row, 1)
            (out + place).store(score.get())


@pytest.mark.parametrize("window", [(None, None), (None, 0), (None, 7), (20, None), (0, 0), (33, 5), (200, 200)])
@pytest.mark.parametrize(("q_len", "kv_len"), [(96, 96), (70, 150), (150, 70), (1, 100), (96, 16)])
@pytest.mark.parametrize(("tile_m", "rising"), [(16, True), (48, False)])
def test_who_sees_keys_is_the_same_predicate(
    window: Window, q_len: int, kv_len: int, tile_m: int, rising: bool
) -> None:
    tiles, blocks = -(-kv_len // TILE_M), -(-q_len // tile_m)
    rows = blocks * tile_m
    out = np.full((tiles * TILE_M, rows), np.nan, np.float32)
    visits = np.zeros(tiles, np.uint32)
    first, end = np.zeros(blocks, np.uint32), np.zeros(blocks, np.uint32)
    turns = np.full((tiles, blocks), -1, np.int32)
    given: dict[str, Any] = {"out": out, "visits": visits, "first": first, "end": end, "turns": turns.view(np.uint32)}
    given |= {"q_len": q_len, "kv_len": kv_len, "rows": rows}
    program = seen_by.trace(tile_m=tile_m, visible=Visible(window, ragged=kv_len % TILE_M != 0), rising=rising)
    assert clean(program, tiles, {p.name: given[p.name] for p in program.parameters})

    seen = np.zeros((tiles * TILE_M, rows), bool)
    seen[:kv_len, :q_len] = predicate(q_len, kv_len, window).T
    visited = ~np.isnan(out)
    assert not seen[~visited].any(), "all that counts is visited"
    assert ((out == 1) == seen)[:, :q_len][visited[:, :q_len]].all()
    used: Any = visited.reshape(tiles, TILE_M, blocks, tile_m).any((1, 3))
    assert used.sum(1).tolist() == visits.tolist()
    problem = AttentionProblem(1, 1, 1, Even(q_len, kv_len), 64, bf16, window=window)
    assert visits.tolist() == problem.visiting_blocks(tile_m, TILE_M).tolist(), "what the host counts"
    for own, at in zip(used, turns, strict=True):
        assert at[own].tolist() == list(range(own.sum()))[:: 1 if rising else -1]
    if rising and q_len == kv_len and window == (None, 0):
        assert all(len(set(at[at >= 0])) == (at >= 0).sum() for at in turns.T), "tiles meet at no block"
    for block in range(blocks):
        assert np.nonzero(used[:, block])[0].tolist() == list(range(first[block], end[block])), "turns count them"
    needed: Any = seen.reshape(tiles, TILE_M, blocks, tile_m).any((1, 3))
    assert (used.sum() - needed.sum()) <= tiles, "no block is visited in vain, but where both ends are ragged"
