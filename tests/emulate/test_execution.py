# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""What runs computes: control flow, roles, atomics, batches, zero fill, strided views."""

from __future__ import annotations

import weakref

import numpy as np
import pytest

from tests.kernels.attention_cases import RUNGS, Case
from warploom.core.errors import ProblemError
from warploom.emulate import emulate
from warploom.lang import Global, Kernel, kernel
from warploom.lang import f32 as F32  # noqa: N812
from warploom.lang import u32 as U32  # noqa: N812

SEEDS = [None, 0, 1]


@kernel(threads=64)
def divergent_loops(k: Kernel, out: Global[U32], extra: U32) -> None:
    """Every lane counts to its own limit; odd numbers are counted apart."""
    odd, even = k.register(U32, 0), k.register(U32, 0)
    with k.loop(k.thread % 7 + k.cta_x * extra) as i:
        with k.when((i & 1) == 1):
            odd.set(odd.get() + i)
        with k.otherwise():
            even.set(even.get() + 100)
    out.store([odd.get() + even.get()], k.cta_x * 64 + k.thread)


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_warps_and_ctas_that_go_their_own_ways(seed: int | None) -> None:
    out = np.zeros(320, np.uint32)
    run = emulate(divergent_loops.trace(), 5, {"out": out, "extra": 3}, seed=seed)
    assert run.findings == ()
    limits = [t % 7 + c * 3 for c in range(5) for t in range(64)]
    expected = [sum(i if i & 1 else 100 for i in range(limit)) for limit in limits]
    assert out.tolist() == expected


@kernel(threads=96)
def chequered(k: Kernel, out: Global[U32]) -> None:
    """Warps that are no product of CTAs and warp numbers go another way, and meet the others again."""
    value = k.register(U32, k.thread)
    with k.when(((k.cta_x + k.warp) & 1) == 0):
        value.set(value.get() + 1000)
        with k.when(k.lane < 4):
            value.set(value.get() + k.shfl_xor(k.lane, 1, 0xF))
        value.set(value.get() + k.shfl_idx(value.get(), 0) * 0)
    out.store([value.get()], k.cta_x * 96 + k.thread)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_set_of_warps_may_diverge(seed: int | None) -> None:
    out = np.zeros(4 * 96, np.uint32)
    assert emulate(chequered.trace(), 4, [out], seed=seed).findings == ()
    cta, thread = np.divmod(np.arange(out.size), 96)
    lane = thread % 32
    inside = (cta + thread // 32) % 2 == 0
    assert (out == thread + inside * (1000 + (lane < 4) * (lane ^ 1))).all()


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


def test_ctas_with_different_trip_counts_meet_their_own_barriers() -> None:
    out = np.zeros(32 * 700, np.uint32)  # more CTAs than one batch holds
    run = emulate(ragged_trips.trace(), 700, [out])
    assert run.findings == ()
    cta, thread = np.divmod(np.arange(out.size), 32)
    assert (out == cta * (31 - thread) + cta * (cta - 1) // 2).all()
    assert run.executed["bar.sync"] == 2 * sum(range(700))


@kernel(threads=96)
def producer_consumers(k: Kernel, source: Global[U32], out: Global[U32], *, steps: int, release: bool) -> None:
    """Warp 0 fills a buffer, warps 1 and 2 use it; named barriers hand it back and forth."""
    tile = k.shared(U32, 32)
    with k.warps(0, 1), k.loop(steps) as i:
        if release:
            with k.when(i > 0):
                k.bar_sync(2, 96)
        tile.store([source.load(i * 32 + k.lane) * 2], 0, k.lane)
        k.bar_arrive(1, 96)
    with k.warps(1, 3):
        total = k.register(U32, 0)
        with k.loop(steps) as i:
            k.bar_sync(1, 96)
            total.set(total.get() + tile.load(0, k.lane))
            if release:
                with k.when(i < steps - 1):
                    k.bar_arrive(2, 96)
        out.store([total.get()], k.thread - 32)


@pytest.mark.parametrize("seed", [None, 0, 1, 2, 3])
def test_roles_run_as_tasks_of_their_own(seed: int | None) -> None:
    source, out = np.arange(160, dtype=np.uint32), np.zeros(64, np.uint32)
    run = emulate(producer_consumers.trace(steps=5, release=True), 1, [source, out], seed=seed)
    assert run.findings == ()
    assert out.tolist() == 2 * (2 * source.reshape(5, 32).sum(0)).tolist()
    run = emulate(producer_consumers.trace(steps=5, release=False), 1, [source, out], seed=seed)
    assert {f.kind for f in run.findings} & {"race", "barrier"}


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


@kernel(threads=32)
def zero_filled(k: Kernel, source: Global[U32], out: Global[U32], count: U32) -> None:
    tile = k.shared(U32, 128)
    left = k.select(count > k.thread * 4, (count - k.thread * 4) * 4, 0)
    k.cp_async(tile.address(0, k.thread * 4), source + k.thread * 4, valid_bytes=k.minimum(left, 16))
    k.commit_group()
    k.wait_group(0)
    out.store(tile.load(0, k.thread * 4, 4), k.thread * 4)


def test_zero_fill_reads_only_the_valid_bytes() -> None:
    source, out = np.arange(1, 71, dtype=np.uint32), np.full(128, 9, np.uint32)
    assert emulate(zero_filled.trace(), 1, [source, out, 70]).findings == ()
    assert out.tolist() == source.tolist() + [0] * 58
    found = emulate(zero_filled.trace(), 1, [source, out, 71]).findings
    assert {f.kind for f in found} == {"bounds"}


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
