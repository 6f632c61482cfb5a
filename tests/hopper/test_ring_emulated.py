"""The TMA ring on the emulator: right under every order of warps and copies, and no defect goes unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.emulate.findings import every
from tests.hopper import mutants
from tests.hopper.mutants import changed, deleted, named, rewritten, swapped, without_flip
from tests.hopper.ring import TILE_K, TILE_M, TILE_N, ring_matmul
from warploom.core.dtypes import bf16, u32
from warploom.emulate import Emulation, TensorMapArgument, emulate
from warploom.ir.program import Program
from warploom.ir.statements import Const, Op
from warploom.layout.tensor_map import TensorMapSpec

STEPS = 4  # each of the two stages is used twice
SEEDS = range(8)  # two of them hold a group of warps back
EXPECTED = (TILE_M + TILE_N) * TILE_K * 2

consumer_arrival = named("mbarrier.arrive", expected_bytes=None)
producer_arrival = named("mbarrier.arrive", expected_bytes=EXPECTED)
wait, init = named("mbarrier.try_wait"), named("mbarrier.init")


@cache
def ring() -> Program:
    return ring_matmul.trace(steps=STEPS)


@cache
def operands() -> tuple[np.ndarray[Any, Any], ...]:
    """A, B and their product."""
    numbers = np.random.default_rng(5)
    k = TILE_K * STEPS
    a, b = (numbers.standard_normal((rows, k)).astype(ml_dtypes.bfloat16) for rows in (TILE_M, TILE_N))
    return a, b, a.astype(np.float32) @ b.astype(np.float32).T


def run(program: Program, seed: int | None, **options: Any) -> tuple[Emulation, float]:
    """The emulation, and the largest error of the product."""
    a, b, product = operands()
    out = np.full((TILE_M, TILE_N), np.nan, np.float32)
    maps = [
        TensorMapArgument(x, TensorMapSpec(bf16, x.shape[::-1], (2 * x.shape[1],), (TILE_K, x.shape[0]), 128))
        for x in (a, b)
    ]
    emulation = emulate(program, 1, [*maps, out], seed=seed, **options)
    return emulation, float(np.abs(out - product).max())


@pytest.mark.parametrize("seed", [None, *SEEDS])
def test_ring_is_right_and_clean(seed: int | None) -> None:
    emulation, error = run(ring(), seed)
    assert emulation.findings == ()
    assert error < 1e-3


def test_ring_is_right_without_checks() -> None:
    emulation, error = run(ring(), None, checks=False)
    assert emulation.findings == ()
    assert error < 1e-3


def reads_stage(op: Op) -> bool:
    return op.instruction.operator == "shl" and op.operands[1] == Const(u32, 13)


def stage_shifted(program: Program, number: int) -> Program:
    """A tile address that always takes stage 0."""
    at = mutants.position(program, reads_stage, number)
    return rewritten(program, at, lambda op: [replace(op, operands=(Const(u32, 0), op.operands[1]))])


MUTANTS: dict[str, tuple[Callable[[Program], Program], set[str]]] = {
    "no wait for a free stage": (lambda p: deleted(p, wait, 0), {"race", "in_flight"}),
    "no wait for a full stage": (lambda p: deleted(p, wait, 1), {"race", "in_flight", "uninitialised"}),
    "consumers do not arrive": (lambda p: deleted(p, consumer_arrival), {"deadlock"}),
    "producer does not arrive": (lambda p: deleted(p, producer_arrival), {"deadlock"}),
    "one arrival too many expected": (lambda p: changed(p, init, 2, count=5), {"deadlock"}),
    "one arrival too few expected": (lambda p: changed(p, init, 2, count=3), {"mbarrier"}),
    "half the arrivals expected": (lambda p: changed(p, init, 2, count=2), {"mbarrier"}),
    "two arrivals at full expected": (lambda p: changed(p, init, 0, count=2), {"deadlock"}),
    "too many bytes expected": (
        lambda p: changed(p, producer_arrival, 0, expected_bytes=EXPECTED + 16),
        {"deadlock", "mbarrier"},
    ),
    "too few bytes expected": (
        lambda p: changed(p, producer_arrival, 0, expected_bytes=EXPECTED - 16),
        {"deadlock", "mbarrier"},
    ),
    "only A's bytes expected": (
        lambda p: changed(p, producer_arrival, 0, expected_bytes=TILE_M * TILE_K * 2),
        {"deadlock", "in_flight", "race", "uninitialised"},
    ),
    "producer's parity stays": (lambda p: without_flip(p, 0), {"race", "in_flight", "deadlock"}),
    "consumers' parity stays": (lambda p: without_flip(p, 1), {"race", "in_flight", "deadlock", "uninitialised"}),
    "producer loads A into stage 0": (lambda p: stage_shifted(p, 0), {"race", "in_flight", "uninitialised"}),
    "consumers read A from stage 0": (lambda p: stage_shifted(p, 1), {"race", "in_flight", "uninitialised"}),
    "stage given back before the products end": (
        lambda p: swapped(p, named("wgmma.wait_group"), consumer_arrival),
        {"race", "in_flight"},
    ),
    "products not waited for": (lambda p: deleted(p, named("wgmma.wait_group")), {"race", "in_flight", "leak"}),
    "products not committed": (lambda p: deleted(p, named("wgmma.commit_group")), {"in_flight", "leak"}),
    "one group left pending": (lambda p: changed(p, named("wgmma.wait_group"), 0, pending=1), {"in_flight", "race"}),
    "no wgmma.fence": (lambda p: deleted(p, named("wgmma.fence")), {"race"}),
    "no mbarrier fence": (lambda p: deleted(p, named("fence.mbarrier_init")), {"mbarrier"}),
    "no barrier after the initialisation": (lambda p: deleted(p, named("bar.sync")), {"mbarrier"}),
    "one mbarrier not initialised": (lambda p: deleted(p, init, 1), {"mbarrier"}),
    "A not loaded": (lambda p: deleted(p, named("cp.async.bulk.tensor"), 0), {"deadlock"}),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught_in_every_order(name: str) -> None:
    mutate, kinds = MUTANTS[name]
    program = mutate(ring())
    for seed in (None, *SEEDS):
        found = {f.kind for f in every(run(program, seed)[0])}
        assert found & kinds, f"seed {seed}: {sorted(found)}"


def test_every_wgmma_of_the_last_depth_is_needed() -> None:
    emulation, error = run(deleted(ring(), named("wgmma.mma_async"), 3), None)
    assert emulation.findings == ()  # no synchronisation defect: the product is merely wrong
    assert error > 1


def test_deadlock_tells_the_state_of_every_waiter() -> None:
    emulation, _ = run(deleted(ring(), consumer_arrival), 3)
    report = next(f for f in every(emulation) if f.kind == "deadlock")
    assert "free[0]" in report.message
    assert "4 of 4 arrivals" in report.message
    assert "waited for by warp 0 (parity 0)" in report.message
