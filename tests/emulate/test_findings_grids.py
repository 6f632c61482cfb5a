# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Findings between CTAs: the defect planted, and its clean twin."""

from __future__ import annotations

import pytest

from tests.emulate.findings import kinds, numbers
from warploom.emulate import emulate
from warploom.isa.instruction import named
from warploom.lang import Global, Kernel, kernel
from warploom.lang import u32 as U32  # noqa: N812


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


@kernel(threads=32)
def added_in_place(k: Kernel, x: Global[U32], *, waits_first: bool = True) -> None:
    """CTA c copies its words, waits for them in turn c of 3, and writes them back, moved by a lane."""
    tile, own = k.shared(U32, 32), k.cta_x * 32
    k.cp_async(tile.address(0, k.lane), x + own + k.lane, 4)
    k.commit_group()
    with k.loop(3) as turn, k.when(turn == k.cta_x, uniform=True):
        if waits_first:
            k.wait_group(0)
        k.syncwarp()
        x.store(k.lane if not waits_first else tile.load(0, k.lane ^ 1), own + (k.lane ^ 8))
        k.syncwarp()
        if not waits_first:
            k.wait_group(0)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_copies_of_a_cta_are_done_when_it_has_waited_whenever_others_wait(seed: int | None) -> None:
    x = numbers(96)
    assert emulate(added_in_place.trace(), 3, [x], seed=seed).findings == ()
    assert (x == numbers(96) ^ 9).all()


def test_what_is_written_while_a_copy_reads_it_is_found_though_barriers_stand_between() -> None:
    (finding,) = emulate(added_in_place.trace(waits_first=False), 3, [numbers(96)]).findings
    assert finding.kind == "in_flight"


@kernel(threads=64)
def agreed(k: Kernel, out: Global[U32], seen: Global[U32], *, how: str) -> None:
    """All warps of all CTAs store one word to the same place; ``how`` says what else happens to it."""
    value = k.value(7, U32)
    if how == "of the CTA":
        value = k.cta_x * 1
    if how == "of the warp":
        value = k.warp * 1
    if how == "of the lane":
        value = k.lane * 1
    out.store(value, 0)
    if how == "read after a barrier":
        k.syncthreads()
        with k.when(k.cta_x == 0):
            seen.store(out.load(0), k.thread)
    if how == "written again":
        with k.when((k.cta_x == 0) & (k.thread == 0)):
            out.store(k.value(9, U32), 0)
    if how == "added to":
        with k.when(k.thread == 0):
            k.atomic("add", out, 0, order="relaxed")


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_warps_and_ctas_may_store_equal_values_to_one_place(seed: int | None) -> None:
    def found(how: str, grid: int) -> set[str]:
        return kinds(emulate(agreed.trace(how=how), grid, [numbers(1), numbers(64)], seed=seed))

    for grid in (1, 3):
        assert found("equal", grid) == set()
        assert found("of the warp", grid) == {"race"}
        assert found("of the lane", grid) == {"race"}
        assert found("written again", grid) == {"race"}
        assert found("added to", grid) == {"race"}
    assert found("of the CTA", 3) == {"race"}
    assert found("read after a barrier", 1) == set()
    assert found("read after a barrier", 3) == {"race"}  # the other CTAs store it at any time


@kernel(threads=64)
def agreed_by_some(k: Kernel, out: Global[U32], seen: Global[U32], *, lanes: int, meets: bool, then: str) -> None:
    """Some lanes of each warp store one word to the same place, which the last of all these threads then accesses."""
    with k.when(k.lane < lanes):
        out.store(k.value(7, U32), 0)
    if meets:
        k.syncthreads()
    with k.when((k.cta_x == k.grid_x - 1) & (k.warp == 1) & (k.lane == lanes - 1)):
        if then == "read":
            seen.store(out.load(0), 0)
        if then == "write":
            out.store(k.value(9, U32), 0)
        if then == "add":
            k.atomic("add", out, 0, order="relaxed")


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("lanes", [1, 4, 32])
@pytest.mark.parametrize("then", ["read", "write", "add"])
def test_who_has_stored_what_others_store_too_is_ordered_after_himself_alone(
    seed: int | None, lanes: int, then: str
) -> None:
    def found(grid: int, *, meets: bool) -> set[str]:
        program = agreed_by_some.trace(lanes=lanes, meets=meets, then=then)
        return kinds(emulate(program, grid, [numbers(1), numbers(64)], seed=seed))

    assert found(1, meets=True) == set()
    assert found(1, meets=False) == {"race"}
    assert found(3, meets=True) == {"race"}


@kernel(threads=64)
def fenced_apart(k: Kernel, parts: Global[U32], count: Global[U32], out: Global[U32], *, how: str) -> None:
    """Threads fence their parts one after another, one counts for the CTA, and the last CTA adds them up."""
    last = k.shared(U32, 4)
    parts.store(k.thread, k.cta_x * 64 + k.thread)
    if how == "lane by lane":
        for lane in range(32):
            with k.when(k.lane == lane):
                k.issue(named("fence.sc.gpu"))
    else:
        with k.when(k.lane < 16):
            k.issue(named("fence.sc.gpu"))
        if how != "half of them":
            with k.when(k.lane >= 16):
                k.issue(named("fence.sc.gpu"))
    k.syncthreads()
    if how == "and others again":
        with k.when(k.thread > 0), k.loop(20):
            k.issue(named("fence.sc.gpu"))
    with k.when(k.thread == 0):
        last.store(k.atomic("add", count, 1, order="relaxed"), 0, 0)
    k.syncthreads()
    with k.when(last.load(0, 0) == k.grid_x - 1):
        k.issue(named("fence.sc.gpu"))
        total = k.register(U32, 0)
        with k.loop(k.grid_x) as i:
            total += parts.load(i * 64 + (k.thread ^ 48))
        out.store(total, k.thread)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("how", ["in halves", "lane by lane", "and others again", "half of them"])
def test_threads_of_a_cta_may_fence_one_after_another(how: str, seed: int | None) -> None:
    out = numbers(64)
    run = emulate(fenced_apart.trace(how=how), 3, [numbers(192), numbers(1) * 0, out], seed=seed)
    assert kinds(run) == ({"race"} if how == "half of them" else set())
    assert out.tolist() == [3 * (i ^ 48) for i in range(64)]


@kernel(threads=96)
def agreed_after_a_read(k: Kernel, out: Global[U32], seen: Global[U32], *, ordered: bool, atomic: bool) -> None:
    """Warps 0 and 2 store one word to the same place, which warp 1 has read, or updated, before one of them did."""
    with k.when(k.thread == 32):
        seen.store(k.atomic("add", out, 0, order="relaxed") if atomic else out.load(0), 0)
    if ordered:
        k.syncthreads()
    else:
        with k.warps(0, 2):
            k.bar_sync(1, 64)
    with k.when((k.warp != 1) & (k.lane == 0)):
        with k.when(k.warp == 0):
            out.store(k.value(7, U32), 0)
        with k.when(k.warp == 2):
            out.store(k.value(7, U32), 0)


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
def test_equal_stores_are_each_ordered_after_what_was_there(seed: int | None, atomic: bool) -> None:
    def found(*, ordered: bool) -> set[str]:
        program = agreed_after_a_read.trace(ordered=ordered, atomic=atomic)
        return kinds(emulate(program, 1, [numbers(1), numbers(1)], seed=seed))

    assert found(ordered=True) == set()
    assert found(ordered=False) == {"race"}
