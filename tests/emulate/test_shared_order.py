# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Order within a CTA that is not a whole barrier: strong accesses to shared memory, lanes that meet in part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulate.findings import kinds, numbers
from warploom.emulate import emulate
from warploom.isa.memory import MemoryOrder, atomic, store
from warploom.lang import Global, Kernel, kernel
from warploom.lang import u32 as U32  # noqa: N812


@kernel(threads=128)
def last_warp(k: Kernel, out: Global[U32], *, order: MemoryOrder, sync: bool = True) -> None:
    """The warp that counts last in shared memory adds what all of them wrote there."""
    tile, count = k.shared(U32, 128), k.shared(U32, 4)
    with k.when(k.thread == 0):
        count.store([k.value(0, U32)], 0, 0)
    k.syncthreads()
    tile.store([k.thread], 0, k.thread)
    if sync:
        k.syncwarp()
    last = k.register(U32, 0)
    with k.when(k.lane == 0):
        (before,) = k.emit(atomic("shared", "add", U32, order=order, scope="cta"), (count.address(0), k.value(1, U32)))
        last.set(k.select(before == 3, k.value(1, U32), 0))
    k.syncwarp()
    with k.when(k.shfl_idx(last, 0) == 1):
        total = k.register(U32, 0)
        for warp in range(4):
            total += tile.load(0, k.lane + 32 * warp)
        out.store([total], k.lane)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_an_atomic_of_shared_memory_orders_what_it_releases(seed: int | None) -> None:
    out = numbers(32)
    assert emulate(last_warp.trace(order="acq_rel"), 1, [out], seed=seed).findings == ()
    assert (out == 4 * np.arange(32) + 32 * 6).all()
    for kernel_args in ({"order": "relaxed"}, {"order": "release"}, {"order": "acq_rel", "sync": False}):
        run = emulate(last_warp.trace(**kernel_args), 1, [numbers(32)], seed=seed)
        assert kinds(run) == {"race"}, kernel_args


@kernel(threads=64)
def counted(k: Kernel, out: Global[U32], *, barrier: bool, strong: bool) -> None:
    """Both warps count, then one reads the sum."""
    count = k.shared(U32, 4)
    with k.when(k.thread == 0):
        count.store([k.value(0, U32)], 0, 0)
    k.syncthreads()
    if strong:
        k.emit(atomic("shared", "add", U32, order="relaxed", scope="cta"), (count.address(0), k.value(1, U32)))
    else:
        k.emit(store("shared", U32, order="relaxed"), (count.address(0), k.value(1, U32)))
    if barrier:
        k.syncthreads()
    else:
        k.syncwarp()
    with k.when(k.warp == 0):
        out.store(count.load(0, 0), k.lane)


@pytest.mark.parametrize("strong", [False, True])
def test_a_plain_read_comes_after_the_updates_of_every_warp(strong: bool) -> None:
    out: np.ndarray[Any, Any] = numbers(32)
    assert emulate(counted.trace(barrier=True, strong=strong), 1, [out]).findings == ()
    assert (out == (64 if strong else 1)).all()
    (race,) = emulate(counted.trace(barrier=False, strong=strong), 1, [numbers(32)]).findings
    assert race.kind == "race"
    assert "warp 1" in race.message


@kernel(threads=64, requires="sm_90")
def halves(k: Kernel, out: Global[U32], *, meet: bool, same: bool = True, leader: int = 0) -> None:
    """The lanes of half a warp read one cell, meet, and their leader lets the other warp write it."""
    tile, full = k.shared(U32, 4), k.mbarriers(1, "full")
    with k.when(k.thread == 0):
        tile.store([k.value(7, U32)], 0, 0)
        full.init(1)
        k.mbarrier_fence()
    k.syncthreads()
    with k.when(k.warp == 0, uniform=True):
        half = k.select(k.lane < 16, k.value(0xFFFF, U32), 0xFFFF0000)
        with k.when(k.lane < (16 if same else 17)):
            out.store(tile.load(0, 0), k.lane)
        if meet:
            k.syncwarp(half)
        full.arrive(when=k.lane == leader)
    with k.when(k.warp == 1, uniform=True):
        full.wait(0)
        with k.when(k.lane == 0):
            tile.store([k.value(8, U32)], 0, 0)


@pytest.mark.parametrize("leader", [0, 7, 15])
def test_lanes_that_met_have_read_before_their_leader_tells(leader: int) -> None:
    def found(*, meet: bool, same: bool = True) -> set[str]:
        return kinds(emulate(halves.trace(meet=meet, same=same, leader=leader), 1, [numbers(32)]))

    assert found(meet=True) == set()
    assert found(meet=False) == {"race"}
    assert found(meet=True, same=False) == {"race"}


@kernel(threads=32)
def read_and_written(k: Kernel, out: Global[U32], *, meets: bool, writer: int) -> None:
    """Some lanes read one cell, and one of them overwrites it."""
    tile = k.shared(U32, 4)
    with k.when(k.lane == 0):
        tile.store([k.value(7, U32)], 0, 0)
    k.syncwarp()
    with k.when(k.lane < 16):
        out.store(tile.load(0, 0), k.lane)
    if meets:
        k.syncwarp()
    with k.when(k.lane == writer):
        tile.store([k.value(8, U32)], 0, 0)


@pytest.mark.parametrize("writer", [0, 7, 15, 31])
def test_a_reader_overwrites_what_other_lanes_have_read_at_once(writer: int) -> None:
    assert emulate(read_and_written.trace(meets=True, writer=writer), 1, [numbers(32)]).findings == ()
    assert kinds(emulate(read_and_written.trace(meets=False, writer=writer), 1, [numbers(32)])) == {"race"}


@kernel(threads=32)
def read_by_two(k: Kernel, out: Global[U32]) -> None:
    """A lane that meets the first reader of a word, and is the second reader itself, may overwrite it."""
    tile = k.shared(U32, 32)
    tile.store([k.thread], 0, k.thread)
    k.syncwarp()
    with k.when(k.lane < 16):
        out.store(tile.load(0, k.lane), k.lane)
        k.syncwarp(0xFFFF)
        out.store(tile.load(0, k.lane ^ 4), k.lane)
        tile.store([k.thread], 0, k.lane ^ 4)


def test_each_lane_of_several_readers_is_asked_for_its_own_read() -> None:
    assert emulate(read_by_two.trace(), 1, [numbers(32)]).findings == ()


@kernel(threads=64, requires="sm_90a")
def arrived_and_read(k: Kernel, out: Global[U32], *, meets: bool) -> None:
    """Half of a warp has waited for the tile; that its lanes arrive somewhere together tells the others nothing."""
    tile, full = k.shared(U32, 32), k.mbarriers(1)
    with k.when(k.thread == 0):
        full.init(1)
        k.mbarrier_fence()
    k.syncthreads()
    with k.warps(0, 1):
        tile.store([k.thread], 0, k.lane)
        k.syncwarp()
        full.arrive(when=k.lane == 0)
        k.bar_sync(1, 64)
    with k.warps(1, 2):
        with k.when(k.lane >= 16):
            full.wait(0)
        k.bar_arrive(1, 64)
        if meets:
            k.syncwarp()
        out.store(tile.load(0, k.lane), k.lane)


@pytest.mark.parametrize("seed", [None, 0])
def test_lanes_that_arrive_together_have_not_met(seed: int | None) -> None:
    assert emulate(arrived_and_read.trace(meets=True), 1, [numbers(32)], seed=seed).findings == ()
    assert kinds(emulate(arrived_and_read.trace(meets=False), 1, [numbers(32)], seed=seed)) == {"race"}


@kernel(threads=96)
def agreed(k: Kernel, out: Global[U32], *, how: str) -> None:
    """Warps 0 and 1 store one word each to the same place, and warp 2 reads it; ``how`` leaves something out."""
    tile, third = k.shared(U32, 32), k.warp == 2
    with k.when(k.lane == 0):
        if how in ("in turn", "one in turn"):  # by instructions of their own
            with k.when(k.warp == 0):
                tile.store([k.value(7, U32)], 0, 0)
            with k.when(k.warp == 1):
                tile.store([k.value(7, U32)], 0, 0)
        else:
            value = k.warp * 0 + 7 if how != "different" else k.warp
            with k.when(k.warp < 2):
                tile.store([value], 0, 0)
    if how in ("one of two", "one in turn"):
        with k.warps(0, 1):
            k.bar_arrive(1, 64)
        with k.warps(1, 2):
            k.bar_arrive(2, 64)
        with k.warps(2, 3):
            k.bar_sync(1, 64)
            out.store([tile.load(0, 0)], k.lane)
            k.bar_sync(2, 64)
        return
    if how != "unordered":
        k.syncthreads()
    with k.when(third):
        out.store([tile.load(0, 0)], k.lane)
    if how == "written again":
        with k.when(k.thread == 0):
            tile.store([k.value(9, U32)], 0, 0)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_warps_may_store_equal_values_to_one_place(seed: int | None) -> None:
    def found(how: str) -> set[str]:
        return kinds(emulate(agreed.trace(how=how), 1, [numbers(32)], seed=seed))

    for how in ("equal", "in turn"):
        assert found(how) == set(), how
    assert found("different") == {"race"}
    assert found("unordered") & {"race", "uninitialised"}
    assert found("written again") == {"race"}
    for how in ("one of two", "one in turn"):  # the reader waits for one of the writers alone
        assert found(how) == {"race"}, how


@kernel(threads=32)
def agreed_by_lanes(k: Kernel, out: Global[U32], *, at_once: bool, reader: int) -> None:
    """Lanes of the lower half store one word to the same place and meet, then a lane reads it."""
    tile = k.shared(U32, 32)
    with k.when(k.lane < 16):
        if at_once:
            tile.store([k.value(7, U32)], 0, 0)
        else:
            for lane in (0, 3):
                with k.when(k.lane == lane):
                    tile.store([k.value(7, U32)], 0, 0)
        k.syncwarp(0xFFFF)
    with k.when(k.lane == reader):
        out.store([tile.load(0, 0)], k.lane)


@pytest.mark.parametrize("at_once", [False, True])
def test_lanes_that_met_know_of_all_equal_stores_to_a_place(at_once: bool) -> None:
    for reader in (0, 3, 7):
        assert emulate(agreed_by_lanes.trace(at_once=at_once, reader=reader), 1, [numbers(32)]).findings == (), reader
    assert kinds(emulate(agreed_by_lanes.trace(at_once=at_once, reader=20), 1, [numbers(32)])) == {"race"}


@kernel(threads=32, requires="sm_90a")
def told_of_a_reader(k: Kernel, out: Global[U32], *, others: int, whole: bool) -> None:
    """Lane 19 writes the word that it has read itself, as have the first lanes, of which lane 0 tells it."""
    tile, read = k.shared(U32, 32), k.mbarriers(1)
    tile.store([k.thread], 0, k.lane)
    with k.when(k.thread == 0):
        read.init(1)
        k.mbarrier_fence()
    k.syncwarp()
    if whole:  # all lanes read all words
        k.ldmatrix(tile.address(0, k.lane % 8 * 4), 1)
        k.syncwarp()
    total = k.register(U32, 0)
    total += tile.load(0, k.lane)
    with k.when(k.lane < others):
        total += tile.load(0, 19)
    read.arrive(when=k.lane == 0)
    with k.when(k.lane >= 16):
        read.wait(0)
        with k.when(k.lane == 19):
            tile.store([k.value(8, U32)], 0, 19)
    out.store(total, k.lane)


@pytest.mark.parametrize("whole", [False, True])
def test_a_lane_may_write_what_others_have_read_that_it_was_told_of(whole: bool) -> None:
    assert emulate(told_of_a_reader.trace(others=1, whole=whole), 1, [numbers(32)]).findings == ()
    assert kinds(emulate(told_of_a_reader.trace(others=2, whole=whole), 1, [numbers(32)])) == {"race"}
