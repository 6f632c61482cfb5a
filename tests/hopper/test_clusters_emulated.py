# pyright: reportInvalidTypeForm=false
"""Clusters on the emulator: the multicast example and its mutants, the cluster's barrier, order and visibility."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.emulate.findings import every, kinds
from tests.hopper.multicast import example
from tests.hopper.mutants import changed, deleted, named, position, rewritten, swapped
from warploom.checking.kernel_file import check_kernel
from warploom.core.dtypes import u32
from warploom.core.errors import ProblemError, TraceError, VerifyError
from warploom.cuda.printer import print_cuda
from warploom.emulate import Emulation, emulate
from warploom.ir.program import Program
from warploom.ir.statements import Const, Op, Operand
from warploom.isa.barriers import bar_sync
from warploom.isa.lanewise import binary
from warploom.lang import Global, Kernel, TensorMap, bf16, f32, kernel
from warploom.lang import u32 as U32  # noqa: N812

SEEDS = range(5)
TILE_BYTES = example.TILE_K * 2
EXPECTED = (example.TILE_M + example.TILE_N) * TILE_BYTES

wait, init, give_back = named("mbarrier.try_wait"), named("mbarrier.init"), named("mbarrier.arrive", remote=True)
multicast = named("cp.async.bulk.tensor", multicast="multicast::cluster")


@cache
def gemm() -> Program:
    return example.multicast_gemm.trace()


def run(program: Program, seed: int | None, **options: Any) -> tuple[Emulation, float]:
    """The emulation of one cluster, and the largest error of the product."""
    launch = example.example(np.random.default_rng(5))
    a, b, out, n, steps = launch.arguments
    emulation = emulate(program, (2, 1), [a, b, out, n, steps], seed=seed, **options)
    expected = launch.expect["out"][0][: 2 * example.TILE_M]
    return emulation, float(np.abs(out[: 2 * example.TILE_M] - expected).max())


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_multicast_gemm_is_right_and_clean(seed: int | None) -> None:
    emulation, error = run(gemm(), seed)
    assert emulation.findings == ()
    assert error < 1e-3


def test_the_example_checks_itself() -> None:
    checked = check_kernel(example.multicast_gemm)
    assert checked.ok
    assert [r.name for r in checked.results] == ["out"]


def test_multicast_gemm_is_right_without_checks() -> None:
    assert run(gemm(), 1, checks=False)[1] < 1e-3


def with_operand(program: Program, matches: Callable[[Op], bool], at: int, value: int | Operand) -> Program:
    """With another operand (negative: from the end) in the first instruction that matches."""
    operand = Const(u32, value) if isinstance(value, int) else value

    def change(op: Op) -> list[Op]:
        operands = list(op.operands)
        operands[at] = operand
        return [replace(op, operands=tuple(operands))]

    return rewritten(program, position(program, matches), change)


def without_barrier(program: Program, number: int) -> Program:
    """Without both halves of the cluster's first (0) or last (1) barrier."""
    return deleted(deleted(program, named("barrier.cluster.arrive"), number), named("barrier.cluster.wait"), number)


def met_alone(program: Program) -> Program:
    """Each CTA meets by itself before the first remote access."""
    barrier = Op(bar_sync(), (Const(u32, 0),), ())
    without = deleted(program, named("barrier.cluster.arrive"))
    return rewritten(without, position(without, named("barrier.cluster.wait")), lambda _: [barrier])


def given_back_at_home(program: Program) -> Program:
    """Both arrivals of a consumer warp go to its own CTA: the address is not mapped."""
    own = binary("add", u32)
    return rewritten(
        program,
        position(program, named("mapa")),
        lambda op: [replace(op, instruction=own, operands=(op.operands[0], Const(u32, 0)))],
    )


def load_a(program: Program) -> Op:
    return next(o for o in program.ops() if named("cp.async.bulk.tensor", multicast="")(o))


def expecting(program: Program, more: int) -> Program:
    return changed(program, named("mbarrier.arrive", remote=False), 0, expected_bytes=EXPECTED + more)


MUTANTS: dict[str, tuple[Callable[[Program], Program], set[str]]] = {
    "no barrier before the first remote access": (lambda p: without_barrier(p, 0), {"mbarrier"}),
    "no wait at the first barrier": (lambda p: deleted(p, named("barrier.cluster.wait")), {"mbarrier", "barrier"}),
    "no arrival at the first barrier": (lambda p: deleted(p, named("barrier.cluster.arrive")), {"barrier"}),
    "the CTAs meet apart": (met_alone, {"mbarrier"}),
    "no barrier at the end": (lambda p: without_barrier(p, 1), {"cluster"}),
    "no mbarrier fence": (lambda p: deleted(p, named("fence.mbarrier_init")), {"mbarrier"}),
    "consumers do not give back": (lambda p: deleted(p, give_back), {"deadlock"}),
    "consumers give back at home alone": (given_back_at_home, {"race", "in_flight"}),
    "given back to rank 0 alone": (
        lambda p: with_operand(p, lambda op: op.instruction.operator == "lt", 1, 1),
        {"deadlock"},
    ),
    "given back before the products end": (
        lambda p: swapped(p, named("wgmma.wait_group"), give_back),
        {"race", "in_flight"},
    ),
    "own consumers expected alone": (
        lambda p: changed(changed(p, init, 2, count=4), init, 3, count=4),
        {"race", "in_flight", "mbarrier"},
    ),
    "one arrival too many expected": (lambda p: changed(p, init, 2, count=9), {"deadlock"}),
    "one arrival too few expected": (lambda p: changed(p, init, 2, count=7), {"mbarrier"}),
    "half of B to rank 0 alone": (lambda p: with_operand(p, multicast, -1, 0b01), {"deadlock"}),
    "half of B to rank 1 alone": (lambda p: with_operand(p, multicast, -1, 0b10), {"deadlock"}),
    "a CTA beyond the cluster": (lambda p: with_operand(p, multicast, -1, 0b101), {"bounds"}),
    "both halves to one place": (
        lambda p: with_operand(p, multicast, 0, load_a(p).operands[0]),
        {"race", "in_flight", "uninitialised"},
    ),
    "half of B's bytes expected": (
        lambda p: expecting(p, -example.HALF_N * TILE_BYTES),
        {"deadlock", "in_flight", "mbarrier", "race"},
    ),
    "twice B's bytes expected": (lambda p: expecting(p, example.TILE_N * TILE_BYTES), {"deadlock"}),
    "no wait for a full stage": (lambda p: deleted(p, wait, 0), {"race", "in_flight", "uninitialised"}),
    "no wait for a free stage": (lambda p: deleted(p, wait, 1), {"race", "in_flight"}),
}


ORDERS = (None, 0, 1)  # every one of twenty seeds finds each of them


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught_in_every_order(name: str) -> None:
    mutate, kinds = MUTANTS[name]
    program = mutate(gemm())
    for seed in ORDERS:
        found = {f.kind for f in every(run(program, seed)[0])}
        assert found & kinds, f"seed {seed}: {sorted(found)}"


def test_a_cta_that_leaves_early_is_named_by_its_rank() -> None:
    (found,) = run(without_barrier(gemm(), 1), None)[0].findings
    assert found.kind == "cluster"
    assert "mbarrier.arrive.shared::cluster may reach empty[" in found.message
    assert "of the CTA of rank" in found.message
    assert found.rank is not None
    assert f"rank {found.rank} of its cluster" in str(found)
    assert str(found.where).startswith("multicast_gemm.py:")


def test_deadlock_names_the_mbarriers_of_every_rank() -> None:
    report = next(f for f in every(run(deleted(gemm(), give_back), 1)[0]) if f.kind == "deadlock")
    for rank in (0, 1):
        assert f"empty[0] of the CTA of rank {rank} is in phase 0 (parity 0), 8 of 8 arrivals" in report.message


@kernel(threads=64, requires="sm_90a", cluster=(2, 2, 1))
def who(k: Kernel, out: Global[U32]) -> None:
    linear = k.cta_x + k.special("nctaid.x") * k.cta_y
    names = ("cluster_ctarank", "cluster_nctarank", "cluster_ctaid.x", "cluster_ctaid.y", "clusterid.x", "clusterid.y")
    with k.when(k.thread == 0):
        out.store(k.cluster_rank, linear * 8)
        for i, name in enumerate(names, 1):
            out.store(k.special(name), linear * 8 + i)


@pytest.mark.parametrize("seed", [None, 3])
def test_ranks_and_places_in_a_grid_of_clusters(seed: int | None) -> None:
    out = np.zeros((6, 4, 8), np.uint32)
    assert emulate(who.trace(), (4, 6), [out], seed=seed).findings == ()
    for y in range(6):
        for x in range(4):
            rank = x % 2 + 2 * (y % 2)
            np.testing.assert_array_equal(out[y, x], [rank, rank, 4, x % 2, y % 2, x // 2, y // 2, 0])


def test_more_clusters_than_run_at_once() -> None:
    out = np.zeros((96, 16, 8), np.uint32)  # 1536 CTAs of two warps, in three batches
    assert emulate(who.trace(), (16, 96), [out]).findings == ()
    y, x = np.ix_(np.arange(96), np.arange(16))
    np.testing.assert_array_equal(out[..., 1], x % 2 + 2 * (y % 2))
    np.testing.assert_array_equal(out[..., 6], np.broadcast_to(y // 2, (96, 16)))


@kernel(threads=64, requires="sm_90a", cluster=(2, 2, 1))
def beyond(k: Kernel, out: Global[U32]) -> None:
    with k.when((k.cta_x == 5) & (k.cta_y == 90) & (k.thread == 33)):
        out.store(k.value(1, U32), 100)


def test_findings_name_the_cta_in_the_grid_and_its_rank() -> None:
    (found,) = emulate(beyond.trace(), (16, 96), [np.zeros(4, np.uint32)]).findings
    assert (found.kind, found.cta, found.rank, found.warp, found.lane) == ("bounds", 90 * 16 + 5, 1, 1, 1)


@kernel(threads=64, requires="sm_90a", cluster=2)
def handed_over(k: Kernel, data: Global[U32], flag: Global[U32], out: Global[U32], *, order: str) -> None:
    """The CTAs of a cluster write, meet, and the last of all clusters reads what they all have written."""
    k.cluster_sync()
    data.store(k.thread, k.cta_x * 64 + k.thread)
    k.cluster_sync()
    last = k.shared(U32, 1)
    with k.when(k.thread == 0):
        last.store(k.atomic("add", flag, 1, order=order), 0)  # type: ignore[arg-type]
    k.syncthreads()
    before = last.load(0)
    with k.when(before == k.grid_x - 1), k.loop(k.grid_x) as cta:
        out.store(data.load(cta * 64 + k.thread), cta * 64 + k.thread)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(("order", "expected"), [("acq_rel", set[str]()), ("relaxed", {"race"})])
def test_order_among_clusters_goes_through_atomics(order: str, expected: set[str], seed: int | None) -> None:
    data, flag, out = np.zeros(384, np.uint32), np.zeros(1, np.uint32), np.zeros(384, np.uint32)
    emulation = emulate(handed_over.trace(order=order), 6, [data, flag, out], seed=seed)
    assert kinds(emulation) == expected
    assert (out == np.tile(np.arange(64), 6)).all()


@kernel(threads=64, requires="sm_90a", cluster=4)
def pass_on(k: Kernel, out: Global[f32], *, how: str) -> None:
    """Each CTA writes 64 numbers to global memory and reads those of the next one."""
    bar = k.mbarriers(1, "told")
    with k.when(k.thread == 0):
        bar.init(2)
        k.mbarrier_fence()
    k.cluster_sync()
    mine, next_rank = k.cluster_rank * 64, (k.cluster_rank + 1) & 3
    out.store(k.convert(k.thread + mine, f32), mine + k.thread)
    if how == "barrier":
        k.cluster_sync()
    elif how == "barrier of the CTA":
        k.syncthreads()
    else:
        arrive, wait_at = how.split()
        k.syncwarp()
        bar.arrive(cta=(k.cluster_rank + 3) & 3, when=k.lane == 0, scope=arrive)  # type: ignore[arg-type]
        bar.wait(0, scope=wait_at)  # type: ignore[arg-type]
    value = out.load(next_rank * 64 + k.thread)
    k.cluster_sync()
    out.store(value, 256 + mine + k.thread)
    k.cluster_sync()


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("barrier", set[str]()),
        ("cluster cluster", set[str]()),
        ("barrier of the CTA", {"race"}),
        ("cta cluster", {"race"}),
        ("cluster cta", {"race"}),
        ("cta cta", {"race"}),
    ],
)
def test_writes_become_visible_at_the_scope_of_the_cluster(how: str, expected: set[str], seed: int | None) -> None:
    out = np.zeros(512, np.float32)
    emulation = emulate(pass_on.trace(how=how), 4, [out], seed=seed)
    assert kinds(emulation) == expected
    if expected:
        assert any("of the same cluster" in f.message and "scope='cluster'" in f.message for f in every(emulation))
    else:
        np.testing.assert_array_equal(out[256:].reshape(4, 64), np.roll(np.arange(256.0).reshape(4, 64), -1, axis=0))


@kernel(threads=96, requires="sm_90a", cluster=2)
def halves(k: Kernel, out: Global[f32]) -> None:
    """The two halves of the cluster's barrier, with work between them."""
    k.cluster_arrive()
    out.store(k.value(1.0, f32), (k.cta_x * 3 + k.warp) * 32 + k.lane)
    k.cluster_wait()


@kernel(threads=64, requires="sm_90a", cluster=2)
def some_leave(k: Kernel, out: Global[f32], *, missing: bool) -> None:
    """One CTA waits for the cluster; the other exits without a word, or waits for something else for ever."""
    bar = k.mbarriers(1, "never")
    with k.when(k.thread == 0):
        bar.init(1)
    k.cluster_sync()
    with k.when(k.cluster_rank == 0, uniform=True):
        k.cluster_sync()
        out.store(k.value(1.0, f32), k.thread)
    if missing:
        with k.when(k.cluster_rank == 1, uniform=True):
            bar.arrive(when=k.thread == 64)
            bar.wait(0)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_threads_that_have_exited_count_as_arrived(seed: int | None) -> None:
    out = np.zeros(64, np.float32)
    assert emulate(some_leave.trace(missing=False), 2, [out], seed=seed).findings == ()
    assert (out == 1).all()


def test_deadlock_at_the_clusters_barrier_says_who_is_missing() -> None:
    emulation = emulate(some_leave.trace(missing=True), 2, [np.zeros(64, np.float32)])
    report = next(f for f in every(emulation) if f.kind == "deadlock" and "barrier.cluster.wait" in f.message)
    assert "the cluster's barrier misses warp 0 of the CTA of rank 1, warp 1 of the CTA of rank 1" in report.message


# -- what is refused before anything runs ---------------------------------------------------------------------------


@kernel(threads=64, requires="sm_90a", cluster=lambda **c: c["ctas"])
def refused(k: Kernel, m: TensorMap, *, ctas: int, mask: int = 1, rank: int = 0) -> None:
    tile = k.shared(bf16, (64, 64), name="tile", swizzle="auto")
    full = k.mbarriers(1, "full")
    k.tma_load(tile, m, (0, 0), full, multicast=mask)
    full.arrive(cta=rank)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"ctas": 2, "mask": 0b100},
            r"^test_clusters_emulated.py:\d+: multicast=0b100 names CTAs outside of the cluster, which has 2",
        ),
        ({"ctas": 2, "mask": 0}, r"masks are 0b1 to 0b11"),
        ({"ctas": 1, "mask": 0b11}, r"outside of the cluster, which has 1"),
        ({"ctas": 4, "rank": 4}, r"^test_clusters_emulated.py:\d+: .*no CTA of rank 4 in a cluster of 4"),
        ({"ctas": 9}, r"test_clusters_emulated.py:\d+: a cluster of \(9, 1, 1\) CTAs: it has 1 to 8"),
        ({"ctas": (2, 2, 4)}, r"a cluster of \(2, 2, 4\) CTAs"),
        ({"ctas": 0}, r"refused: a cluster is one to three positive counts"),
    ],
)
def test_mistakes_are_refused_with_the_authors_line(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises((TraceError, VerifyError), match=message):
        refused.trace(**wrong)


def test_a_cluster_needs_sm_90_and_a_grid_that_it_divides() -> None:
    with pytest.raises(VerifyError, match="clusters need sm_90"):
        replace(who, requires="sm_80").trace()
    with pytest.raises(ProblemError, match=r"clusters of \(2, 2, 1\) CTAs: the grid \(4, 3, 1\) must be a multiple"):
        emulate(who.trace(), (4, 3), [np.zeros(96, np.uint32)])


def test_the_printed_kernel_declares_its_clusters() -> None:
    text = print_cuda(who.trace())
    assert "__global__ void __cluster_dims__(2, 2, 1) __launch_bounds__(64, 1)" in text
    assert "clusters of 2×2×1" in text.splitlines()[0]
    assert "cluster" not in print_cuda(replace(halves, cluster=1).trace(), comments=False).split("{")[0]


def test_clusters_are_part_of_the_program() -> None:
    assert "cluster (2, 2, 1)" in who.trace().text
    assert who.trace().digest != replace(who, cluster=(4, 1, 1)).trace().digest
