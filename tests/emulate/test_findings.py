# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Findings between the threads of a CTA, and what they say: the defect planted, and its clean twin."""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import pytest

from tests.emulate.findings import kinds, numbers
from warploom.core.errors import EmulationError
from warploom.emulate import emulate
from warploom.lang import Global, Kernel, SharedTile, Traced, kernel
from warploom.lang import u32 as U32  # noqa: N812


@kernel(threads=64)
def neighbours(k: Kernel, out: Global[U32], *, barrier: bool) -> None:
    """Each thread reads what the thread 32 further wrote."""
    tile = k.shared(U32, 64)
    tile.store([k.thread * 3], 0, k.thread)
    if barrier:
        k.syncthreads()
    out.store(tile.load(0, (k.thread + 32) & 63), k.thread)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_race_between_warps_needs_a_barrier(seed: int | None) -> None:
    out = numbers(64)
    assert emulate(neighbours.trace(barrier=True), 1, [out], seed=seed).findings == ()
    assert (out == (numbers(64) + 32) % 64 * 3).all()
    run = emulate(neighbours.trace(barrier=False), 1, [numbers(64)], seed=seed)
    assert kinds(run) >= {"race"} or kinds(run) == {"uninitialised"}
    if seed is None:
        (race,) = run.findings
        assert race.kind == "race"
        assert race.other is not None
        assert race.where.line != race.other.line
        assert "warp 1" in race.message
        assert "__syncthreads" in str(race)


def through(tile: SharedTile, place: Traced) -> Traced:
    """A helper of the author's, which two of its lines call."""
    tile.store(place, 0, place)
    return tile.load(0, place ^ 32)


@kernel(threads=64)
def helped(k: Kernel, out: Global[U32]) -> None:
    tile = k.shared(U32, 64)
    first = through(tile, k.thread)
    k.syncthreads()
    out.store(first + through(tile, k.thread), k.thread)


def test_a_finding_in_a_helper_names_the_calls_that_led_there() -> None:
    (race,) = emulate(helped.trace(), 1, [numbers(64)]).findings
    helper, call = through.__code__.co_firstlineno, helped.function.__code__.co_firstlineno + 3
    assert race.other is not None
    assert (race.where.line, race.other.line) == (helper + 3, helper + 2)
    for where in (race.where, race.other):
        assert [(caller.function, caller.line) for caller in where.callers] == [("helped", call)]
    assert f"test_findings.py:{call}" in race.lines


@kernel(threads=64)
def staged_rows(k: Kernel, out: Global[U32]) -> None:
    """Each warp reads what the other wrote in row 3 of the second stage."""
    tile = k.shared(U32, (4, 64), stages=2, swizzle="auto").stage(k.cta_x + 1)
    tile.store(k.thread, 3, k.thread)
    out.store(tile.load(3, k.thread ^ 32), k.thread)


def test_a_race_names_the_tile_its_stage_and_its_row() -> None:
    (race,) = emulate(staged_rows.trace(), 1, [numbers(64)]).findings
    assert "of tile, stage 1, row 3, column 32, which" in race.message


@kernel(threads=64)
def counted(k: Kernel, bins: Global[U32], *, atomic: bool) -> None:
    """All threads count in four bins."""
    if atomic:
        k.atomic("add", bins, 1, k.thread & 3)
    else:
        bins.store(bins.load(k.thread & 3) + 1, k.thread & 3)


def test_counting_by_load_and_store_is_pointed_to_an_atomic() -> None:
    assert emulate(counted.trace(atomic=True), 1, [np.zeros(4, np.uint32)]).findings == ()
    races = emulate(counted.trace(atomic=False), 1, [np.zeros(4, np.uint32)]).findings
    assert any("k.atomic" in race.message for race in races)


@kernel(threads=64)
def binned(k: Kernel, out: Global[U32], *, atomic: bool) -> None:
    """All threads count in four bins of shared memory."""
    bins = k.shared(U32, 4)
    with k.when(k.thread < 4):
        bins.store(0, 0, k.thread)
    k.syncthreads()
    if atomic:
        bins.atomic("add", k.lane, 0, k.thread & 3)
    else:
        bins.store(bins.load(0, k.thread & 3) + k.lane, 0, k.thread & 3)
    k.syncthreads()
    with k.when(k.thread < 4):
        out.store(bins.load(0, k.thread), k.thread)


@pytest.mark.parametrize("seed", [None, 1])
def test_counting_in_shared_memory_takes_an_atomic_of_the_tile(seed: int | None) -> None:
    out = np.zeros(4, np.uint32)
    assert emulate(binned.trace(atomic=True), 1, [out], seed=seed).findings == ()
    assert out.tolist() == [2 * sum(range(i, 32, 4)) for i in range(4)]
    races = emulate(binned.trace(atomic=False), 1, [out], seed=seed).findings
    assert any("tile.atomic" in race.message for race in races)


@kernel(threads=32)
def lanes_talk(k: Kernel, out: Global[U32], *, how: str) -> None:
    """Lanes of one warp talk through shared memory."""
    tile = k.shared(U32, 32)
    tile.store([k.thread], 0, k.thread)
    if how == "all":
        k.syncwarp()
    elif how == "halves":
        k.syncwarp(k.select(k.thread < 16, k.value(0xFFFF, U32), 0xFFFF0000))
    distance = 1 if how != "own" else 0
    out.store(tile.load(0, k.thread ^ distance), k.thread)
    if how == "halves":
        out.store(tile.load(0, k.thread ^ 1), k.thread)


@kernel(threads=32)
def halves_cross(k: Kernel, out: Global[U32]) -> None:
    tile = k.shared(U32, 32)
    tile.store([k.thread], 0, k.thread)
    k.syncwarp(k.select(k.thread < 16, k.value(0xFFFF, U32), 0xFFFF0000))
    out.store(tile.load(0, k.thread ^ 16), k.thread)


def test_lanes_of_one_warp_need_syncwarp() -> None:
    for how in ("all", "halves", "own"):
        assert emulate(lanes_talk.trace(how=how), 1, [numbers(32)]).findings == (), how
    (race,) = emulate(lanes_talk.trace(how="none"), 1, [numbers(32)]).findings
    assert race.kind == "race"
    assert race.count == 32
    assert "same warp" in race.message
    # A __syncwarp of each half orders nothing between the halves.
    assert kinds(emulate(halves_cross.trace(), 1, [numbers(32)])) == {"race"}


@kernel(threads=64)
def one_cell(k: Kernel, out: Global[U32], *, values: str) -> None:
    tile = k.shared(U32, 64)
    value = {"equal": 7, "lanes": k.thread}[values]
    with k.when(k.warp == 0):
        tile.store([k.value(value, U32) if isinstance(value, int) else value], 0, 0)
        k.syncwarp()
        out.store(tile.load(0, 0), k.thread)


def test_lanes_may_write_equal_bits_only() -> None:
    assert emulate(one_cell.trace(values="equal"), 1, [numbers(64)]).findings == ()
    assert "race" in kinds(emulate(one_cell.trace(values="lanes"), 1, [numbers(64)]))


def test_stop_raises_at_the_first_finding_and_raise_if_found_names_all() -> None:
    program = neighbours.trace(barrier=False)
    with pytest.raises(EmulationError, match="race at test_findings"):
        emulate(program, 1, [numbers(64)], stop=True)
    run = emulate(program, 1, [numbers(64)])
    with pytest.raises(EmulationError, match="the emulator found 1"):
        run.raise_if_found()
    assert emulate(program, 1, [numbers(64)], checks=False).findings == ()


@kernel(threads=64, requires="sm_90a")
def handed_over(k: Kernel, out: Global[U32], *, arrivals: int, rounds: int) -> None:
    """Warp 1 fills a stage twice, warp 0 reads it ``rounds`` times; each round misses its second arrival."""
    tile, full = k.shared(U32, 32), k.mbarriers(1, "full")
    with k.when(k.thread == 0):
        full.init(arrivals)
        k.mbarrier_fence()
    k.syncthreads()
    for turn in range(rounds):
        with k.when(k.warp == 1, uniform=True):
            tile.store(k.lane + turn, 0, k.lane)
            k.syncwarp()
            if turn == 0 or arrivals > 1:
                full.arrive(when=k.lane == 0)
        with k.when(k.warp == 0, uniform=True):
            full.wait(turn & 1)
            out.store(tile.load(0, k.lane), k.lane)
        k.syncthreads()  # both go on


def test_a_deadlock_names_who_came_and_where_the_others_wait() -> None:
    def message(**how: int) -> str:
        found = emulate(handed_over.trace(**how), 1, [numbers(32)]).findings
        return next(f.message for f in found if f.kind == "deadlock")

    source, first = inspect.getsourcelines(handed_over.function)
    arrive, meet = (first + next(i for i, x in enumerate(source) if word in x) for word in ("arrive(", "both go on"))
    assert f"1 of 2 arrivals missing (warp 1 came at test_findings.py:{arrive})" in message(arrivals=2, rounds=1)
    late = f"warp 1 came for the phase before and waits at test_findings.py:{meet}"
    assert f"1 of 1 arrivals missing ({late})" in message(arrivals=1, rounds=2)


@kernel(threads=64)
def exchanged(k: Kernel, out: Global[U32], rounds: U32) -> None:
    """From the second round on a warp overwrites what the other may still be reading."""
    tile = k.shared(U32, (2, 64), swizzle="auto")
    with k.loop(rounds, start=5) as turn:
        tile.store(k.thread + turn, 1, k.thread)
        k.syncthreads()
        out.store(tile.load(1, k.thread ^ 32), k.thread)


def test_a_finding_in_a_loop_names_its_iteration() -> None:
    assert emulate(exchanged.trace(), 1, [numbers(64), 6]).findings == ()
    (race,) = emulate(exchanged.trace(), 1, [numbers(64), 9]).findings
    (loop,) = race.loops
    assert loop == (replace(race.where, line=race.where.line - 1), 6)
    assert f"where the loop at {loop[0]} has index 6" in str(race)


@kernel(threads=64)
def several_tiles(k: Kernel, out: Global[U32], *, first: bool, second: bool) -> None:
    """Two tiles change hands at one barrier, a third one at another."""
    a, b, c = (k.shared(U32, 64, name=name) for name in "abc")
    a.store(k.thread, 0, k.thread)
    b.store(k.thread, 0, k.thread)
    if first:
        k.syncthreads()
    total = a.load(0, k.thread ^ 32)
    total = total + b.load(0, k.thread ^ 32)
    c.store(total, 0, k.thread)
    if second:
        k.syncthreads()
    out.store(c.load(0, k.thread ^ 32), k.thread)


@pytest.mark.parametrize(("first", "second", "count"), [(True, True, 0), (False, True, 1), (True, False, 1)])
def test_one_missing_barrier_is_one_finding(first: bool, second: bool, count: int) -> None:
    found = emulate(several_tiles.trace(first=first, second=second), 1, [numbers(64)]).findings
    assert [f.kind for f in found] == ["race"] * count


def test_two_missing_barriers_are_two_findings() -> None:
    found = emulate(several_tiles.trace(first=False, second=False), 1, [numbers(64)]).findings
    assert [len(f.follows) for f in found] == [1, 0]
