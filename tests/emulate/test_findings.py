# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Every kind of finding: a kernel with the defect planted, and its clean twin."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.emulate.findings import every, kinds, numbers, without
from warploom.core.errors import EmulationError
from warploom.emulate import Emulation, emulate
from warploom.isa.matrix import MmaSync
from warploom.isa.memory import Atomic
from warploom.lang import Global, Kernel, SharedTile, Traced, bf16, kernel
from warploom.lang import f32 as F32  # noqa: N812
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
def overwritten(k: Kernel, out: Global[U32], *, barrier: bool) -> None:
    """A tile is read by the other warp and then written again."""
    tile = k.shared(U32, 64)
    tile.store([k.thread], 0, k.thread)
    k.syncthreads()
    out.store(tile.load(0, k.thread ^ 32), k.thread)
    if barrier:
        k.syncthreads()
    tile.store([k.thread], 0, k.thread)


def test_race_of_a_write_after_another_warps_read() -> None:
    assert emulate(overwritten.trace(barrier=True), 1, [numbers(64)]).findings == ()
    (race,) = emulate(overwritten.trace(barrier=False), 1, [numbers(64)]).findings
    assert race.kind == "race"
    assert "writes" in race.message
    assert "read" in race.message


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


@kernel(threads=32)
def matrix_after_store(k: Kernel, out: Global[U32], *, sync: bool) -> None:
    tile = k.shared(U32, (8, 4))
    tile.store([k.thread], 0, k.thread)
    if sync:
        k.syncwarp()
    (register,) = k.ldmatrix(tile.address(k.thread & 7, 0), 1)
    out.store([register], k.thread)


def test_ldmatrix_reads_for_other_lanes() -> None:
    out = numbers(32)
    assert emulate(matrix_after_store.trace(sync=True), 1, [out]).findings == ()
    assert (out == numbers(32)).all()
    assert kinds(emulate(matrix_after_store.trace(sync=False), 1, [numbers(32)])) == {"race"}


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


@kernel(threads=64)
def same_store(k: Kernel, out: Global[U32]) -> None:
    """Both warps write one value to one place, without order."""
    tile = k.shared(U32, 32)
    tile.store([k.lane], 0, k.lane)
    k.syncthreads()
    out.store(tile.load(0, k.lane), k.thread)


def test_warps_that_write_one_place_race_even_with_equal_bits() -> None:
    assert kinds(emulate(same_store.trace(), 1, [numbers(64)])) == {"race"}


@kernel(threads=64)
def copied(k: Kernel, source: Global[U32], out: Global[U32], *, wait: int | None, barrier: bool) -> None:
    tile = k.shared(U32, 256)
    k.cp_async(tile.address(0, k.thread * 4), source + k.thread * 4)
    k.commit_group()
    if wait is not None:
        k.wait_group(wait)
    if barrier:
        k.syncthreads()
    out.store(tile.load(0, k.thread ^ 32), k.thread)


def test_copies_are_poison_until_waited_for_and_ordered() -> None:
    def run(commit: bool = True, wait: int | None = 0, barrier: bool = True) -> Emulation:
        out = numbers(64)
        program = copied.trace(wait=wait, barrier=barrier)
        if not commit:
            program = without(program, "cp.async.commit_group")
        result = emulate(program, 1, [numbers(256) * 5, out])
        if not result.findings:
            assert (out == (numbers(64) ^ 32) * 5).all()
        return result

    assert run().findings == ()
    assert kinds(run(wait=None)) >= {"in_flight", "leak"}
    assert kinds(run(wait=1)) >= {"in_flight", "leak"}
    assert kinds(run(commit=False)) >= {"in_flight", "leak"}
    assert "never committed" in " ".join(str(f) for f in every(run(commit=False)))
    assert kinds(run(barrier=False)) == {"race"}


@kernel(threads=32)
def copied_and_left(k: Kernel, source: Global[U32], *, wait: bool) -> None:
    tile = k.shared(U32, 128)
    k.cp_async(tile.address(0, k.thread * 4), source + k.thread * 4)
    k.commit_group()
    if wait:
        k.wait_group(0)


def test_leak_of_a_copy_nobody_waits_for() -> None:
    assert emulate(copied_and_left.trace(wait=True), 2, [numbers(128)]).findings == ()
    (leak,) = emulate(copied_and_left.trace(wait=False), 2, [numbers(128)]).findings
    assert leak.kind == "leak"
    assert "never waited for" in leak.message


@kernel(threads=32)
def partly_written(k: Kernel, out: Global[U32], *, first: int, half: bool) -> None:
    tile = k.shared(U32, 64)
    tile.store([k.thread], 0, k.thread + first)
    k.syncwarp()
    word = tile.load(0, k.thread)
    out.store([word & 0xFFFF if half else word], k.thread)


def test_uninitialised_shared_memory_is_reported_where_it_shows() -> None:
    assert emulate(partly_written.trace(first=0, half=False), 1, [numbers(32)]).findings == ()
    (found,) = emulate(partly_written.trace(first=8, half=False), 1, [numbers(32)]).findings
    assert found.kind == "uninitialised"
    assert found.count == 8
    assert found.other is not None
    assert found.other.line == found.where.line - 1
    assert kinds(emulate(partly_written.trace(first=8, half=True), 1, [numbers(32)])) == {"uninitialised"}


@kernel(threads=32)
def masked_poison(k: Kernel, out: Global[U32], *, mask: int) -> None:
    """Poison in bits that a mask clears does not show; nor does a select's other side."""
    tile = k.shared(U32, 64)
    tile.store([k.thread], 0, k.thread)
    k.syncwarp()
    word = tile.load(0, k.thread + 16)
    out.store([k.select(k.thread < 16, word, 0) | (tile.load(0, 63) & mask)], k.thread)


def test_poison_is_tracked_by_bits() -> None:
    assert emulate(masked_poison.trace(mask=0), 1, [numbers(32)]).findings == ()
    assert kinds(emulate(masked_poison.trace(mask=4), 1, [numbers(32)])) == {"uninitialised"}


@kernel(threads=32)
def unset_register(k: Kernel, out: Global[U32], *, initial: bool, lanes: int) -> None:
    total = k.register(U32, 0 if initial else None, name="total")
    with k.when(k.thread < lanes):
        total.set(k.thread)
    out.store([total.get()], k.thread)


def test_uninitialised_registers() -> None:
    assert emulate(unset_register.trace(initial=True, lanes=5), 1, [numbers(32)]).findings == ()
    assert emulate(unset_register.trace(initial=False, lanes=32), 1, [numbers(32)]).findings == ()
    (found,) = emulate(unset_register.trace(initial=False, lanes=5), 1, [numbers(32)]).findings
    assert found.kind == "uninitialised"
    assert found.count == 27
    assert found.lane == 5
    assert "total" in found.message


@kernel(threads=32)
def grid_store(k: Kernel, out: Global[U32], *, own: bool) -> None:
    index = k.cta_x * 32 + k.thread if own else k.thread
    out.store([k.cta_x], index)


@kernel(threads=32)
def grid_sum(k: Kernel, out: Global[F32], *, atomic: bool) -> None:
    if atomic:
        k.atomic("add", out, k.value(1.0, F32))
    else:
        with k.when(k.thread == 0):
            out.store([out.load(0) + 1.0], 0)


def test_races_between_ctas() -> None:
    assert emulate(grid_store.trace(own=True), 4, [numbers(128)]).findings == ()
    (race,) = emulate(grid_store.trace(own=False), 4, [numbers(128)]).findings
    assert race.kind == "race"
    total = np.zeros(1, np.float32)
    assert emulate(grid_sum.trace(atomic=True), 4, [total]).findings == ()
    assert total[0] == 128
    assert kinds(emulate(grid_sum.trace(atomic=False), 4, [total])) == {"race"}


@kernel(threads=64)
def last_cta_sums(
    k: Kernel, parts: Global[U32], count: Global[U32], out: Global[U32], *, fence: bool, barrier: bool
) -> None:
    """Every CTA leaves its part; the last one to arrive adds them up."""
    flag = k.shared(U32, 1)
    parts.store([k.thread + 100 * k.cta_x], k.cta_x * 64 + k.thread)
    if barrier:
        k.syncthreads()
    with k.when(k.thread == 0):
        if fence:
            k.fence("gpu")
        before = k.atomic("add", count, k.value(1, U32))
        if fence:
            k.fence("gpu")
        flag.store([before], 0, 0)
    k.syncthreads()
    with k.when(flag.load(0, 0) == k.grid_x - 1):
        total = k.register(U32, 0)
        with k.loop(k.grid_x) as i:
            total.set(total.get() + parts.load(i * 64 + k.thread))
        out.store([total.get()], k.thread)


@pytest.mark.parametrize("seed", [None, 4])
def test_order_across_ctas_by_fences_and_atomics(seed: int | None) -> None:
    def run(**how: bool) -> tuple[Emulation, np.ndarray[Any, Any]]:
        out = np.zeros(64, np.uint32)
        arrays = [np.zeros(192, np.uint32), np.zeros(1, np.uint32), out]
        return emulate(last_cta_sums.trace(**how), 3, arrays, seed=seed), out

    result, out = run(fence=True, barrier=True)
    assert result.findings == ()
    assert (out == 3 * numbers(64) + 300).all()
    assert kinds(run(fence=False, barrier=True)[0]) == {"race"}
    assert kinds(run(fence=True, barrier=False)[0]) == {"race"}


def test_stop_raises_at_the_first_finding_and_raise_if_found_names_all() -> None:
    program = neighbours.trace(barrier=False)
    with pytest.raises(EmulationError, match="race at test_findings"):
        emulate(program, 1, [numbers(64)], stop=True)
    run = emulate(program, 1, [numbers(64)])
    with pytest.raises(EmulationError, match="the emulator found 1"):
        run.raise_if_found()
    assert emulate(program, 1, [numbers(64)], checks=False).findings == ()


@kernel(threads=64)
def shared_counter(k: Kernel, out: Global[U32], *, initialise: bool, barriers: int) -> None:
    tile = k.shared(U32, 4)
    if initialise:
        with k.when(k.thread == 0):
            tile.store([0], 0, 0)
    if barriers > 0:
        k.syncthreads()
    k.emit(Atomic("shared", "add", U32), (tile.address(0, 0), k.value(1, U32)))
    if barriers > 1:
        k.syncthreads()
    out.store(tile.load(0, 0), k.thread)


def test_atomics_on_shared_memory() -> None:
    out = numbers(64)
    assert emulate(shared_counter.trace(initialise=True, barriers=2), 1, [out]).findings == ()
    assert (out == 64).all()
    assert kinds(emulate(shared_counter.trace(initialise=True, barriers=1), 1, [out])) == {"race"}
    assert kinds(emulate(shared_counter.trace(initialise=True, barriers=0), 1, [out])) == {"race"}
    assert kinds(emulate(shared_counter.trace(initialise=False, barriers=2), 1, [out])) == {"uninitialised"}


def test_a_copy_that_is_refused_altogether_is_not_under_way() -> None:
    @kernel(threads=32)
    def astray(k: Kernel, source: Global[U32]) -> None:
        tile = k.shared(U32, 128)
        k.cp_async(tile.address(0, k.thread * 4) + 4096, source + k.thread * 4)
        k.commit_group()
        k.wait_group(0)

    assert kinds(emulate(astray.trace(), 1, [numbers(128)])) == {"bounds"}


@kernel(threads=64)
def poisoned_uses(k: Kernel, out: Global[U32], *, use: str, initial: bool) -> None:
    value = k.register(U32, name="value")
    with k.when(k.cta_x == (0 if initial else 5)):
        value.set(1)
    got = value.get()
    if use == "address":
        out.store([k.thread], k.thread + got)
    elif use == "condition":
        with k.when(got == 1):
            out.store([k.thread], k.thread)
    elif use == "bound":
        with k.loop(got):
            out.store([k.thread], k.thread)
    elif use == "vote":
        out.store([k.ballot(got == 1)], k.thread)


@pytest.mark.parametrize("use", ["address", "condition", "bound", "vote"])
def test_poison_that_decides_something_is_reported(use: str) -> None:
    assert emulate(poisoned_uses.trace(use=use, initial=True), 1, [numbers(66)]).findings == ()
    assert "uninitialised" in kinds(emulate(poisoned_uses.trace(use=use, initial=False), 1, [numbers(66)]))


@kernel(threads=32)
def poisoned_matrix(k: Kernel, out: Global[F32], *, row: int) -> None:
    """The row of A that is never written spoils its row of D alone."""
    a = k.shared(U32, (16, 8))
    with k.loop(4) as i:
        place = k.thread + i * 32
        with k.when((place >> 3) != row):
            a.store([place & 0], 0, place)
    k.syncwarp()
    registers = k.ldmatrix(a.address(k.lane & 15, (k.lane >> 4) * 4), 4)
    zero = k.value(0, U32)
    nothing = k.value(0.0, F32)
    d = k.emit(MmaSync("m16n8k16", bf16), (*registers, zero, zero, *[nothing] * 4))
    out.store([d[0]], k.thread)
    out.store([d[2]], k.thread + 32)


def test_a_poisoned_row_of_a_spoils_its_row_of_d() -> None:
    clean = emulate(poisoned_matrix.trace(row=99), 1, [np.zeros(64, np.float32)])
    assert clean.findings == ()
    (found,) = emulate(poisoned_matrix.trace(row=3), 1, [np.zeros(64, np.float32)]).findings
    assert found.kind == "uninitialised"
    assert (found.count, found.lane) == (4, 12)


@kernel(threads=64)
def source_changes(k: Kernel, data: Global[U32], *, wait_first: bool) -> None:
    """Warp 1 overwrites what warp 0 copies: fine after warp 0 has waited, not before."""
    tile = k.shared(U32, 128)
    with k.when(k.warp == 0):
        k.cp_async(tile.address(0, k.lane * 4), data + k.lane * 4)
    k.commit_group()
    if wait_first:
        k.wait_group(0)
    k.syncthreads()
    with k.when(k.warp == 1):
        data.store([k.lane], k.lane)
    if not wait_first:
        k.wait_group(0)


def test_the_source_of_a_copy_must_not_change_under_way() -> None:
    assert emulate(source_changes.trace(wait_first=True), 1, [numbers(128)]).findings == ()
    (race,) = emulate(source_changes.trace(wait_first=False), 1, [numbers(128)]).findings
    assert race.kind == "race"
    assert "cp.async" in race.message


@kernel(threads=32)
def own_places(k: Kernel, out: Global[U32]) -> None:
    """Each CTA begins to write its own words a turn after the one before it, and goes on."""
    with k.loop(3) as turn, k.when(turn >= k.cta_x, uniform=True):
        out.store(turn, k.cta_x * 32 + k.lane)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_words_that_nobody_wrote_race_with_nobody(seed: int | None) -> None:
    out = numbers(96)
    assert emulate(own_places.trace(), 3, [out], seed=seed).findings == ()
    assert (out == 2).all()


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
    assert f"where the loop of {loop[0]} is at 6" in str(race)
