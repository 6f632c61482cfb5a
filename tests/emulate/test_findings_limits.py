# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Findings of bounds, alignment, divergence, member masks and barriers: the defect planted, and its clean twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulate.findings import kinds, numbers
from warploom.emulate import emulate
from warploom.lang import Global, Kernel, kernel
from warploom.lang import u32 as U32  # noqa: N812


@kernel(threads=32)
def strided(k: Kernel, a: Global[U32], b: Global[U32], *, offset: int) -> None:
    b.store(a.load(k.thread + offset), k.thread)


def test_bounds_of_global_arrays() -> None:
    program = strided.trace(offset=0)
    assert emulate(program, 1, [numbers(32), numbers(32)]).findings == ()
    (found,) = emulate(strided.trace(offset=3), 1, [numbers(32), numbers(32)]).findings
    assert found.kind == "bounds"
    assert found.count == 3
    assert found.lane == 29
    assert found.address == 128
    assert "byte 128 of a[32], where a has shape (32,)" in found.message
    out = numbers(16)
    (found,) = emulate(program, 1, [numbers(32), out]).findings
    assert "of b[16]," in found.message
    assert (out == numbers(16)).all()


@pytest.mark.parametrize(
    ("array", "element"), [(numbers(30).reshape(5, 6), "[5, 0]"), (numbers(30).reshape(6, 5).T, "[0, 6]")]
)
def test_bounds_name_the_element(array: Any, element: str) -> None:
    (found,) = emulate(strided.trace(offset=0), 1, [array, numbers(32)]).findings
    assert f"byte 120 of a{element}, where a has shape {array.shape}" in found.message


@pytest.mark.parametrize(("array", "count"), [(numbers(64)[::2], 16), (numbers(80).reshape(8, 10)[:, 1:6], 15)])
def test_bounds_of_the_elements_of_a_view_with_gaps(array: Any, count: int) -> None:
    """A kernel that takes a view for an array without gaps reads and writes what lies between the elements."""
    for arguments in ([array, numbers(32)], [numbers(32), array]):
        (found,) = emulate(strided.trace(offset=0), 1, arguments).findings
        assert (found.kind, found.count) == ("bounds", count)
        assert "np.ascontiguousarray" in found.message
    assert emulate(strided.trace(offset=0), 1, [np.ascontiguousarray(array), numbers(32)]).findings == ()


def test_views_with_gaps_may_lie_beside_other_arrays() -> None:
    both = numbers(128)
    assert emulate(strided.trace(offset=0), 1, [both[:32], both[32:64]]).findings == ()
    assert emulate(shifted.trace(), 1, [both[:63:2], both[64:96], numbers(32)]).findings == ()


@kernel(threads=32)
def shifted(k: Kernel, gaps: Global[U32], a: Global[U32], out: Global[U32]) -> None:
    out.store(a.load(k.thread) + gaps.load(0), k.thread)


@kernel(threads=32)
def partly_copied(k: Kernel, x: Global[U32], *, early: bool) -> None:
    """Copies 8 of 16 bytes, of an array that the kernel also writes: behind those bytes, or ``early`` in them."""
    tile = k.shared(U32, 128)
    k.cp_async(tile.address(0, 4 * k.thread), x + 4 * k.thread, valid_bytes=k.value(8, U32))
    k.commit_group()
    x.store([k.thread], 4 * k.thread + (1 if early else 2))
    k.wait_group()


def test_copies_read_no_more_bytes_than_they_are_told() -> None:
    assert emulate(partly_copied.trace(early=False), 1, [numbers(128)]).findings == ()
    (found,) = emulate(partly_copied.trace(early=True), 1, [numbers(128)]).findings
    assert found.kind == "in_flight"
    assert found.address == 4


@kernel(threads=32)
def apart(k: Kernel, a: Global[U32], out: Global[U32], *, count: int) -> None:
    with k.when(k.thread < 31):
        out.store(a.load(k.thread * 4, count), k.thread * 4)


def test_an_access_to_several_elements_may_not_reach_between_them() -> None:
    array = numbers(128).reshape(32, 4)[:, :2]
    assert emulate(apart.trace(count=2), 1, [array, numbers(128)]).findings == ()
    assert kinds(emulate(apart.trace(count=4), 1, [array, numbers(128)])) == {"bounds"}


@kernel(threads=32)
def copied(k: Kernel, a: Global[U32], b: Global[U32], out: Global[U32], *, bytes_of_last: int) -> None:
    tile = k.shared(U32, 128)
    valid = k.select(k.thread < 31, 8, bytes_of_last)
    k.cp_async(tile.address(0, k.thread * 4), a + k.thread * 4, valid_bytes=valid)
    k.commit_group()
    k.wait_group()
    k.syncwarp()
    out.store(tile.load(0, k.thread * 4) + b.load(k.thread), k.thread)


def test_copies_of_some_bytes_may_not_reach_between_the_elements_of_a_view_nor_mind_another_view() -> None:
    """Sizes differ by lane, and no lane of a copy goes to the other array."""
    gaps, plain = numbers(128).reshape(32, 4)[:, :2], numbers(128)
    assert emulate(copied.trace(bytes_of_last=8), 1, [gaps, numbers(32), numbers(32)]).findings == ()
    assert kinds(emulate(copied.trace(bytes_of_last=8), 1, [plain, numbers(64)[::2], numbers(32)])) == {"bounds"}
    (found,) = emulate(copied.trace(bytes_of_last=16), 1, [gaps, numbers(32), numbers(32)]).findings
    assert (found.kind, found.count, found.lane) == ("bounds", 1, 31)


@kernel(threads=64)
def copied_and_written(k: Kernel, a: Global[U32], *, barrier: bool) -> None:
    tile = k.shared(U32, 128)
    with k.when(k.thread < 32):
        k.cp_async(tile.address(0, k.thread * 4), a + k.thread * 4, valid_bytes=k.select(k.thread < 31, 16, 4))
        k.commit_group()
        k.wait_group()
    if barrier:
        k.syncthreads()
    with k.when(k.thread == 32):
        a.store(1, 124)


def test_copies_of_some_bytes_race_with_a_store_to_those_alone() -> None:
    """Sizes differ by lane, in an array that the kernel writes."""
    assert emulate(copied_and_written.trace(barrier=True), 1, [numbers(128)]).findings == ()
    found = emulate(copied_and_written.trace(barrier=False), 1, [numbers(128)])
    assert kinds(found) == {"race"}
    assert found.findings[0].address == 4 * 124


@kernel(threads=32)
def wide(k: Kernel, a: Global[U32], out: Global[U32], *, offset: int) -> None:
    out.store(a.load(k.thread * 2 + offset, 2), k.thread * 2)


def test_alignment_of_global_accesses_and_of_views() -> None:
    assert emulate(wide.trace(offset=0), 1, [numbers(66), numbers(64)]).findings == ()
    assert kinds(emulate(wide.trace(offset=1), 1, [numbers(66), numbers(64)])) == {"misaligned"}
    # A view that starts one element into an allocation is no better aligned than its elements.
    assert kinds(emulate(wide.trace(offset=0), 1, [numbers(66)[1:], numbers(64)])) == {"misaligned"}
    assert emulate(wide.trace(offset=1), 1, [numbers(66)[1:], numbers(64)]).findings == ()


@kernel(threads=64)
def divergent(k: Kernel, out: Global[U32], *, limit: int, uniform: bool) -> None:
    with k.when(k.thread < limit, uniform=uniform):
        k.bar_sync(1, 32)
    out.store([k.thread], k.thread)


def test_divergence_at_aligned_instructions_and_false_uniformity() -> None:
    assert emulate(divergent.trace(limit=32, uniform=True), 1, [numbers(64)]).findings == ()
    assert kinds(emulate(divergent.trace(limit=20, uniform=False), 1, [numbers(64)])) == {"divergence"}
    run = emulate(divergent.trace(limit=20, uniform=True), 1, [numbers(64)])
    assert len([f for f in run.findings if "uniform" in f.message]) == 1


@kernel(threads=96)
def rendezvous(k: Kernel, out: Global[U32], *, count: int, arrive: bool) -> None:
    """Warp 0 waits for warp 1, which only arrives."""
    tile = k.shared(U32, 32)
    with k.when(k.warp == 0):
        k.bar_sync(3, count)
        out.store(tile.load(0, k.lane), k.lane)
    with k.when(k.warp == 1):
        tile.store([k.lane + 1], 0, k.lane)
        if arrive:
            k.bar_arrive(3, count)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_named_barriers_deadlock_and_counts(seed: int | None) -> None:
    out = np.zeros(32, np.uint32)
    assert (
        emulate(rendezvous.trace(count=64, arrive=True), 3, [out], seed=seed).findings == ()
    )  # all CTAs write the same
    out = np.zeros(32, np.uint32)
    assert emulate(rendezvous.trace(count=64, arrive=True), 1, [out], seed=seed).findings == ()
    assert (out == numbers(32) + 1).all()
    (dead,) = emulate(rendezvous.trace(count=64, arrive=False), 1, [np.zeros(32, np.uint32)], seed=seed).findings
    assert dead.kind == "deadlock"
    assert "32 of 64 threads: warp 0 came, warps 1, 2 have ended" in dead.message
    assert kinds(emulate(rendezvous.trace(count=96, arrive=True), 1, [out], seed=seed)) == {"deadlock"}


@kernel(threads=128)
def role_that_meets_all(k: Kernel, out: Global[U32]) -> None:
    with k.warps(0, 2):
        k.syncthreads()
    with k.warps(2, 4):
        out.store(k.lane, k.lane)


def test_a_role_that_waits_for_all_threads_is_told_of_named_barriers_once() -> None:
    (dead,) = emulate(role_that_meets_all.trace(), 4, [np.zeros(32, np.uint32)]).findings
    assert "k.named_barriers()" in dead.message
    assert dead.message.count("barrier 0 has 64 of 128 threads") == 1


@kernel(threads=32)
def two_tiles(k: Kernel, out: Global[U32], n: U32, *, case: str) -> None:
    first = k.shared(U32, (2, 32), stages=2)
    second = k.shared(U32, (2, 32), name="second")
    first.store(k.lane, 0, k.lane)
    second.store(k.lane, n & 1, k.lane)
    k.syncwarp()
    one = first.stage(0)
    {
        "row": lambda: first.stage(1).store(k.lane, n + 1, k.lane),
        "stage": lambda: first.stage(n + 1).store(k.lane, 0, k.lane),
        "before": lambda: second.store(k.lane, n - 1, k.lane),
        "address": lambda: k.store("shared", one.address(n, k.lane) + 128, U32, [k.lane], "", "weak"),
        "copy": lambda: k.cp_async(one.address(n + 1, k.lane), out + k.lane, 4),
    }[case]()
    if case == "copy":
        k.commit_group()
        k.wait_group()


@pytest.mark.parametrize("case", ["row", "stage", "before", "address", "copy"])
def test_an_access_beyond_its_tile_that_lands_in_another_one(case: str) -> None:
    """All of it is inside of shared memory, and nobody else touches those bytes."""
    program = two_tiles.trace(case=case)
    inside, outside = (1, 0) if case == "before" else (0, 1)
    assert emulate(program, 1, [numbers(32), inside]).findings == ()
    (found,) = emulate(program, 1, [numbers(32), outside]).findings
    assert found.kind == "bounds"
    assert f"the tile {'second' if case == 'before' else 'first'} (bytes" in found.message
    assert found.count == 32


@kernel(threads=32)
def undefined_results(k: Kernel, out: Global[U32], n: U32, *, op: str) -> None:
    with k.when(k.lane < 3):
        left, by = k.lane + 7, n + k.lane
        out.store({"//": lambda: left // by, "%": lambda: left % by, "<<": lambda: left << by}[op](), k.lane)


@pytest.mark.parametrize(("op", "n", "lanes"), [("//", 0, 1), ("%", 0, 1), ("<<", 31, 2)])
def test_what_the_hardware_leaves_undefined(op: str, n: int, lanes: int) -> None:
    program = undefined_results.trace(op=op)
    assert emulate(program, 1, [numbers(32), 1]).findings == ()
    (found,) = emulate(program, 1, [numbers(32), n]).findings
    assert (found.kind, found.count) == ("undefined", lanes)
    assert ("divides by 0" if n == 0 else "shifts by 32 of its 32 bits") in found.message


@kernel(threads=32)
def from_lane(k: Kernel, out: Global[U32], n: U32) -> None:
    out.store(k.shfl_idx(k.lane, n), k.lane)


@pytest.mark.parametrize("lane", [0, 31, 32, 45])
def test_of_a_lanes_number_the_low_five_bits_count(lane: int) -> None:
    """PTX's ``shfl.idx`` takes ``bval & 31`` as the lane, whatever is above it."""
    out = numbers(32)
    assert emulate(from_lane.trace(), 1, [out, lane]).findings == ()
    np.testing.assert_array_equal(out, lane & 31)
