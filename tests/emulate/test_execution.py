# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""What runs computes: control flow, roles, atomics, batches, zero fill, strided views."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

from tests.kernels.attention_cases import RUNGS, Case
from warploom.core.errors import ProblemError
from warploom.emulate import emulate
from warploom.lang import Global, Kernel, kernel
from warploom.lang import f32 as F32  # noqa: N812
from warploom.lang import u32 as U32  # noqa: N812

SEEDS = [None, 0, 1]


@kernel(threads=32)
def ragged_trips(k: Kernel, out: Global[U32]) -> None:
    """CTA c goes round c times, with a barrier each time."""
    total = k.register(U32, 0)
    tile = k.shared(U32, 32)
    with k.loop(k.cta_x) as i:
        tile.store([k.thread + i], 0, k.thread)
        k.syncthreads()
        total.set(total.get() + tile.load(0, 31 - k.thread))
        k.syncthreads()
    out.store([total.get()], k.cta_x * 32 + k.thread)


@kernel(threads=64, requires="sm_90a")
def lanes_of_a_warp(k: Kernel, out: Global[U32]) -> None:
    """Lane 0 waits for what lane 1 of its warp does behind the branch in which it waits."""
    told = k.mbarriers(1, "told")
    tile = k.shared(U32, 4)
    with k.when(k.thread == 0):
        told.init(1)
        k.mbarrier_fence()
    k.syncthreads()
    with k.when(k.thread == 0):
        told.wait(0, 0)
        out.store([tile.load(0, 0)], 0)
    with k.when(k.thread == 1):
        tile.store([k.value(7, U32)], 0, 0)
        told.arrive(0)
    k.syncthreads()
    out.store([k.thread], k.thread + 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lane_may_wait_for_another_one_of_its_warp(seed: int | None) -> None:
    out = np.zeros(65, np.uint32)
    assert emulate(lanes_of_a_warp.trace(), 1, [out], seed=seed).findings == ()
    assert out.tolist() == [7, *range(64)]


@kernel(threads=64, requires="sm_90a")
def waits_within_a_loop(k: Kernel, out: Global[U32]) -> None:
    """Warp 0 goes round five times and waits in the fourth pass for what warp 1, which goes round once, does later."""
    told = k.mbarriers(1, "told")
    with k.when(k.thread == 0):
        told.init(1)
        k.mbarrier_fence()
    k.syncthreads()
    total = k.register(U32, 100)
    with k.loop(k.select(k.warp == 0, 5, 1)) as i:
        total.set(total.get() + i + 1)
        with k.when(i == 3):
            told.wait(0)
    with k.when(k.warp == 1):
        told.arrive(0, when=k.lane == 0)
    out.store([total.get()], k.thread)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loop_goes_on_as_it_was_where_its_warps_part(seed: int | None) -> None:
    out = np.zeros(64, np.uint32)
    assert emulate(waits_within_a_loop.trace(), 1, [out], seed=seed).findings == ()
    assert (out == np.repeat([115, 101], 32)).all()


def test_ctas_with_different_trip_counts_meet_their_own_barriers() -> None:
    out = np.zeros(32 * 700, np.uint32)  # more CTAs than one batch holds
    run = emulate(ragged_trips.trace(), 700, [out])
    assert run.findings == ()
    cta, thread = np.divmod(np.arange(out.size), 32)
    assert (out == cta * (31 - thread) + cta * (cta - 1) // 2).all()
    assert run.executed["bar.sync"] == 2 * sum(range(700))


@kernel(threads=64)
def shared_histogram(k: Kernel, data: Global[U32], out: Global[U32]) -> None:
    old = k.atomic("add", out, 1, data.load(k.thread))
    out.store([old], 8 + k.thread)


def test_atomics_apply_one_lane_after_the_other() -> None:
    data = np.random.default_rng(0).integers(0, 8, 64).astype(np.uint32)
    out = np.zeros(72, np.uint32)
    assert emulate(shared_histogram.trace(), 1, [data, out]).findings == ()
    assert out[:8].tolist() == np.bincount(data, minlength=8).tolist()
    seen = [int((data[:i] == data[i]).sum()) for i in range(64)]
    assert out[8:].tolist() == seen


def test_arguments_are_checked() -> None:
    program = shared_histogram.trace()
    data = np.zeros(64, np.uint32)
    with pytest.raises(ProblemError, match="takes 2 arguments"):
        emulate(program, 1, [data])
    with pytest.raises(ProblemError, match="elements of 8 bytes"):
        emulate(program, 1, [data, np.zeros(3)])
    with pytest.raises(ProblemError, match="missing arguments"):
        emulate(program, 1, {"data": data})
    with pytest.raises(ProblemError, match="NumPy array"):
        emulate(program, 1, [data, 3])
    for seed in ("x", 1.5, -1):
        with pytest.raises(ProblemError, match="seed is a number"):
            emulate(program, 1, [data, data], seed=seed)  # pyright: ignore[reportArgumentType]


@kernel(threads=32)
def scaled(k: Kernel, x: Global[F32], stride: U32) -> None:
    x.store([x.load(k.thread * stride) * 2.0], k.thread * stride)


def test_strided_views_are_changed_in_place() -> None:
    base = np.ones(256, np.float32)
    assert emulate(scaled.trace(), 1, [base[::8], 8]).findings == ()
    assert base.reshape(32, 8)[:, 0].tolist() == [2.0] * 32
    assert base.sum() == 256 + 32
    assert {f.kind for f in emulate(scaled.trace(), 1, [base[:241:8], 9]).findings} == {"bounds"}


@pytest.mark.parametrize("odd", [0, 4, 12])
def test_arrays_at_odd_addresses_are_changed_in_place(odd: int) -> None:
    """What owns its memory is aligned on a GPU, wherever it lies here."""
    memory = np.ones(144, np.float32)
    array = np.frombuffer(memoryview(memory.view(np.uint8))[odd : odd + 512], np.float32)
    run = emulate(doubled.trace(), 1, [array])
    assert run.findings == ()
    assert array.tolist() == [2.0] * 128
    assert memory.sum() == 144 + 128


@kernel(threads=64)
def passed_on(k: Kernel, x: Global[F32], out: Global[F32], *, barrier: bool) -> None:
    x.store([1.0], k.thread)
    if barrier:
        k.syncthreads()
    out.store([out.load(63 - k.thread) + 2.0], 63 - k.thread)


def own(memory: np.ndarray[Any, Any], first: int, count: int) -> np.ndarray[Any, Any]:
    """A part of an array that seems to own its memory, as views of other frameworks do."""
    return np.frombuffer(memoryview(memory.view(np.uint8))[4 * first :], np.float32, count)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("distance", [0, 1, 3, 4])
def test_arrays_at_odd_addresses_that_share_memory_go_on_sharing_it(distance: int, seed: int | None) -> None:
    for odd in (0, 1):
        memory = np.zeros(144, np.float32)
        parts = own(memory, odd, 64), own(memory, odd + distance, 64)
        assert emulate(passed_on.trace(barrier=True), 1, parts, seed=seed).findings == ()
        wanted = np.zeros(144, np.float32)
        wanted[odd : odd + 64] = 1
        wanted[odd + distance : odd + distance + 64] += 2
        assert memory.tolist() == wanted.tolist()
        assert {f.kind for f in emulate(passed_on.trace(barrier=False), 1, parts, seed=seed).findings} == {"race"}


def test_vectors_of_arrays_that_share_memory_are_aligned_as_the_memory_is() -> None:
    memory = np.ones(144, np.float32)
    assert emulate(both_doubled.trace(), 1, [own(memory, 0, 128), own(memory, 4, 128)]).findings == ()
    assert memory.tolist() == [1.0] * 4 + [2.0] * 128 + [1.0] * 12
    (found,) = emulate(both_doubled.trace(), 1, [own(memory, 0, 128), own(memory, 1, 128)]).findings
    assert found.kind == "misaligned"


@kernel(threads=32)
def both_doubled(k: Kernel, x: Global[F32], out: Global[F32]) -> None:
    with k.when(k.thread == 0):
        x.load(0, 4)
    out.store([v * 2.0 for v in out.load(k.thread * 4, 4)], k.thread * 4)


def test_an_access_where_every_array_is_empty_is_out_of_bounds() -> None:
    (found,) = emulate(doubled.trace(), 1, [np.zeros((0, 5), np.float32)]).findings
    assert found.kind == "bounds"


@kernel(threads=32)
def doubled(k: Kernel, x: Global[F32]) -> None:
    x.store([v * 2.0 for v in x.load(k.thread * 4, 4)], k.thread * 4)


def test_progress_grows_to_one() -> None:
    told: list[float] = []
    Case.of_blocks(RUNGS["2"], 3).run(progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0


@kernel(threads=64)
def crossed(k: Kernel, out: Global[U32], extra: U32) -> None:
    """The second warp reads what the first has written, without a barrier."""
    tile = k.shared(U32, 64, name="tile")
    tile.store(k.thread * extra, 0, k.thread)
    out.store([tile.load(0, 63 - k.thread)], k.cta_x * 64 + k.thread)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_runs_again_as_it_ran_first(seed: int | None) -> None:
    """Its steps are kept; nothing of a launch is: neither counts, nor findings, nor arrays."""
    program, found = crossed.trace(), []
    for extra in (3, 3, 4):
        out = np.zeros(128, np.uint32)
        run = emulate(program, 2, {"out": out, "extra": extra}, seed=seed)
        found.append(([str(f) for f in run.findings], run.executed, [n for _, n in run.counts], out.tolist()))
    assert found[0] == found[1]
    assert found[0][:3] == found[2][:3]
    assert found[2][0], "the race"
    alive = weakref.ref(out)
    del out, run
    assert alive() is None
