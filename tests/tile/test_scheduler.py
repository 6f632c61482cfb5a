"""Which tile next: every tile once, the longest first; and how many planes form a group."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels.attention_cases import Case
from tests.tile.support import clean, escapes
from warploom.core.dtypes import bf16
from warploom.emulate import emulate
from warploom.interop.arrays import describe
from warploom.ir.program import Program
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.problem import ArrayStrides, AttentionProblem, Even
from warploom.kernels.attention.reference import attention_error, attention_reference
from warploom.lang import Global, Kernel, Traced, kernel, u32
from warploom.ops.backends import emulator_arguments
from warploom.tile.pipeline import Pipeline, ready
from warploom.tile.planning import (
    L2_BYTES,
    Work,
    divisors,
    estimated_seconds,
    heads_at_once,
    heads_together,
    order,
    planes_together,
    row_tiles,
)
from warploom.tile.scheduler import Claimed, Divisor, GroupedTiles, Persistent, RowTiles, Single


@kernel(threads=32)
def visits(
    k: Kernel,
    tiles: Global[u32],
    turns: Global[u32],
    order: RowTiles,
    *,
    tile: str,
    items: str,
) -> None:
    """tiles[item] = (row, column) packed of the item; turns[item] = the turn of its CTA."""
    which: Any = order.ordered(grouped=tile == "together")
    of_cta = Single(k) if items == "single" else Persistent(k, which.count, alternating=items == "alternating")
    if tile in ("grouped", "row by row"):
        which = GroupedTiles(k, order.rows.value, order.planes, 3 if tile == "grouped" else 0)
    with k.loop(of_cta.count) as turn:
        item = of_cta.item(turn)
        row, col = which.tile(item)
        with k.when(k.lane == 0):
            tiles.store(row * 1000 + col, item)
            turns.store(turn, item)


def visited(rows: int, cols: int, ctas: int, **options: Any) -> tuple[Any, Any]:
    """(row, column) of every item, and its turn; each was stored."""
    numbers = row_tiles(rows, cols, options.pop("together", 1))
    tiles, turns = (np.full(rows * cols, 999_999, np.uint32) for _ in range(2))
    program = visits.trace(**options)
    scalars = [numbers[x.name] for x in program.parameters if x.kind == "scalar"]
    assert clean(program, ctas, [tiles, turns, *scalars])
    assert 999_999 not in turns
    return np.divmod(tiles, 1000), turns


@pytest.mark.parametrize("tile", ["grouped", "row by row", "by planes", "together"])
@pytest.mark.parametrize("items", ["single", "persistent", "alternating"])
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (7, 5), (4, 9)])
def test_every_tile_is_visited_once(tile: str, items: str, rows: int, cols: int) -> None:
    for ctas in [rows * cols] if items == "single" else [1, 4, rows * cols + 3]:
        together = 2 if tile == "together" else 1
        (row, col), turns = visited(rows, cols, ctas, tile=tile, items=items, together=together)
        assert sorted(zip(row, col, strict=True)) == [(i, j) for i in range(rows) for j in range(cols)]
        if items == "persistent":
            assert (turns == np.arange(rows * cols) // ctas).all()


@pytest.mark.parametrize("heads", [1, 7, 16, 32])
def test_groups_of_heads_are_as_large_as_each_other(heads: int) -> None:
    for fitting in range(1, 40):
        size = heads_together(L2_BYTES // fitting, 1, heads)
        groups = -(-heads // size)
        assert size <= fitting
        assert groups * size - heads < groups


def test_a_group_has_a_tile_for_every_multiprocessor() -> None:
    for tiles, wanted in ((16, 8), (256, 1), (1, 16)):
        assert heads_together(L2_BYTES, 1, 16, heads_at_once(tiles, 120)) == wanted


def test_alternating_rounds_go_the_other_way() -> None:
    """Nobody gets the first item of every round: three CTAs' items of six rounds differ by one each way."""
    _, turns = visited(1, 18, 3, tile="row by row", items="alternating")
    assert (turns == np.arange(18) // 3).all()
    work = np.arange(18)[::-1]
    placed = [[3 * t + (c if t % 2 == 0 else 2 - c) for t in range(6)] for c in range(3)]
    assert len({int(work[items].sum()) for items in placed}) == 1


@kernel(threads=96, requires="sm_90")
def claims(k: Kernel, counter: Global[u32], taken: Global[u32], total: u32) -> None:
    """taken[item] counts a thread that claims the item, a warp that waits to be told and one that asks ahead."""
    told, work = Claimed.telling(k), Pipeline(k, k.shared(u32, 1, stages=3), readers=2)
    ready(k, told, work)
    order = Claimed(k, total, counter, told)

    def take(turn: Traced) -> None:
        item = order.item(turn)
        with k.when(k.lane == 0):
            k.atomic("add", taken, 1, item)

    def worked_on(turn: Traced) -> None:
        work.at(turn).wait()
        k.syncwarp()
        work.at(turn).release()

    with k.warps(0, 1), k.when(k.thread == 0), order.turns(claims=True) as turn:
        work.at(turn, filling=True).claim()
        take(turn)
        work.full.arrive(work.at(turn).stage)
        order.claim(turn + 1)
    with k.warps(1, 2), order.turns() as turn:
        take(turn)
        worked_on(turn)
    with k.warps(2, 3):
        for turn in range(2):
            with k.when(order.has(turn), uniform=True):
                take(k.value(turn, u32))
        with order.turns(asks=True) as turn:
            with k.when(order.has(turn + 2), uniform=True):
                take(turn + 2)
            worked_on(turn)


def all_claimed(program: Program, seed: int | None, total: int = 13, ctas: int = 2) -> bool:
    counter, taken = np.zeros(1, np.uint32), np.zeros(total + 1, np.uint32)
    return clean(program, ctas, [counter, taken, total], seed) and bool((taken == [3] * total + [0]).all())


@pytest.mark.parametrize("total", [0, 1, 4, 23])
def test_every_item_is_claimed_once_whoever_comes_first(total: int) -> None:
    for ctas, seed in ((1, None), (2, 0), (5, 1)):
        assert all_claimed(claims.trace(), seed, total, ctas)


def test_mutants_of_claims_are_caught() -> None:
    """But for the fence that copies need, of which there are none, and a wait for work that asking ahead implies."""

    def right(program: Program, seed: int | None) -> bool:
        return all_claimed(program, seed) and all_claimed(program, seed, total=1)

    spare = {"without fence.mbarrier_init.release.cluster": 1, "without mbarrier.try_wait.parity": 1}
    assert escapes(claims.trace(), right) == Counter(spare)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_host_s_order_is_the_kernel_s(size: int) -> None:
    """And the longest tiles of a group come first."""
    planes, tiles = order(Work(7, (1, 2, 3, 4), 1e-6, 1e4, 1e4, True, 5), size)
    (row, plane), _ = visited(4, 7, 5, tile="together", items="persistent", together=size)
    assert (row == tiles).all()
    assert (plane == planes).all()
    groups = planes // size
    assert (np.diff(groups) >= 0).all()
    assert all((np.diff(tiles[groups == group]) <= 0).all() for group in set(groups.tolist()))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_attention_is_right_in_any_grouping(size: int, persistent: bool) -> None:
    config = ForwardSm90(consumers=1, tile_n=64, head_dim=64, turns=False, persistent=persistent)
    case = Case(config, 128, 128, (None, 0), heads=5, ctas=3)
    q, k, v = case.inputs(size)
    out = np.full_like(q, np.nan)
    call = replace(case.call, scalars={**case.call.scalars, **row_tiles(2 if config.consumers == 1 else 1, 5, size)})
    arguments = emulator_arguments(case.program, [describe(x) for x in (q, k, v, out)], call.scalars, call.maps)
    assert emulate(case.program, call.grid, arguments).findings == ()
    q, k, v, out = (np.swapaxes(x[0], 0, 1) for x in (q, k, v, out))
    assert attention_error(out, attention_reference(q, k, v, bf16, seen=case.seen), bf16).ok


# -- how many planes form a group
def causal(n: int, head_dim: int = 128, tokens: int = 16384, width: int = 2048) -> AttentionProblem:
    heads = width // head_dim
    return AttentionProblem(tokens // n, heads, heads, Even(n, n), head_dim, bf16, window=(None, 0))


def chosen(problem: AttentionProblem) -> int:
    """The planes that the production kernel puts together on an H200."""
    (call,) = ForwardSm90().calls(problem, ArrayStrides.contiguous(problem), 132)
    return call.scalars["order_together_value"]


def test_short_sequences_keep_their_keys_near_and_long_ones_stay_balanced() -> None:
    for length in (512, 1024, 2048):
        assert chosen(causal(length)) <= 66 < causal(length).planes
    assert chosen(causal(16384)) == 16, "groups of fewer planes would leave SMs waiting"


@pytest.mark.parametrize(
    ("length", "size", "measured"),
    [(512, 512, 119), (1024, 256, 179), (2048, 128, 302), (4096, 64, 480), (4096, 4, 729), (8192, 4, 1466)],
)
def test_the_estimate_is_near_what_was_measured(length: int, size: int, measured: float) -> None:
    """d=128, causal, on an H200: 286, 382, 455, 573, 377 and 375 TFLOP/s, in microseconds."""
    problem = causal(length)
    row = 2 * 128 * 2
    work = Work(problem.planes, problem.visited_blocks(128, 128), 1.68e-6, 128 * row, 128 * row, True, 132)
    assert estimated_seconds(work, size) * 1e6 == pytest.approx(measured, rel=0.15)


def test_the_chosen_size_is_never_estimated_slower_than_one_group() -> None:
    for length in (512, 1024, 2048, 4096, 8192, 16384):
        for planes in (1, 3, 16, 100, 16384 * 16 // length):
            blocks = tuple(range(1, length // 128 + 1))
            work = Work(planes, blocks, 1.68e-6, 65536.0, 65536.0, True, 132)
            assert estimated_seconds(work, planes_together(work)) <= estimated_seconds(work, planes)


@kernel(threads=32)
def divided(k: Kernel, numbers: Global[u32], quotients: Global[u32], rests: Global[u32], by: Divisor) -> None:
    """quotient and remainder of each number."""
    place = k.cta_x * 32 + k.lane
    quotient, rest = by.divide(numbers.load(place))
    quotients.store(quotient, place)
    rests.store(rest, place)


@pytest.mark.parametrize("by", [1, 2, 3, 7, 16, 641, 65535, 65536, 65537, 2**30 - 1, 2**30, 2**31 - 1])
def test_divisors_divide_exactly(by: int) -> None:
    near = [x for n in (1, 2, 3, 1000, (2**31 - 1) // by) for x in (n * by - 1, n * by, n * by + 1)]
    drawn = np.random.default_rng(by).integers(0, 2**31, 49)
    numbers = np.array([*near, *drawn], np.int64).clip(0, 2**31 - 1).astype(np.uint32)
    quotients, rests = np.zeros_like(numbers), np.zeros_like(numbers)
    assert clean(divided.trace(), 2, [numbers, quotients, rests, *divisors(by=by).values()])
    assert (quotients == numbers // by).all()
    assert (rests == numbers % by).all()
