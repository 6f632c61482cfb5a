# pyright: reportInvalidTypeForm=false
"""Clusters on the emulator: the multicast example and its mutants, the cluster's barrier, order and visibility."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.hopper.multicast import example
from tests.hopper.mutants import changed, deleted, every_op, named, position, rewritten, swapped
from warploom.core.dtypes import u32
from warploom.core.errors import ProblemError, TraceError, VerifyError
from warploom.emulate import Emulation, emulate
from warploom.ir.program import Const, Op, Program
from warploom.isa.alu import Binary
from warploom.isa.async_copy import TensorCopy
from warploom.isa.cluster import ClusterArrive, ClusterWait, MapShared
from warploom.isa.sync import BarSync, MbarrierArrival, MbarrierInitFence, MbarrierInitialise, MbarrierTryWait
from warploom.isa.warp import Special
from warploom.isa.wgmma import WgmmaWait
from warploom.lang import Global, Kernel, TensorMap, bf16, f32, kernel
from warploom.lang import u32 as U32  # noqa: N812

SEEDS = range(20)
TILE_BYTES = example.TILE_K * 2
EXPECTED = (example.TILE_M + example.TILE_N) * TILE_BYTES

wait, init, give_back = named(MbarrierTryWait), named(MbarrierInitialise), named(MbarrierArrival, remote=True)
multicast = named(TensorCopy, multicast=True)


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


def test_multicast_gemm_is_right_without_checks() -> None:
    assert run(gemm(), 1, checks=False)[1] < 1e-3


def with_operand(program: Program, matches: Callable[[Op], bool], at: int, value: int) -> Program:
    """With a constant as one operand (negative: from the end) of the first instruction that matches."""

    def change(op: Op) -> list[Op]:
        operands = list(op.operands)
        operands[at] = Const(u32, value)
        return [replace(op, operands=tuple(operands))]

    return rewritten(program, position(program, matches), change)


def without_barrier(program: Program, number: int) -> Program:
    """Without both halves of the cluster's first (0) or last (1) barrier."""
    return deleted(deleted(program, named(ClusterArrive), number), named(ClusterWait), number)


def met_alone(program: Program) -> Program:
    """Each CTA meets by itself before the first remote access."""
    op = next(o for o in every_op(program) if isinstance(o.instruction, ClusterWait))
    barrier = Op(BarSync(), (Const(u32, 0),), (), op.where)
    return rewritten(deleted(program, named(ClusterArrive)), position(program, named(ClusterWait)) - 1, lambda _: [barrier])


def given_back_at_home(program: Program) -> Program:
    """Both arrivals of a consumer warp go to its own CTA."""
    rank = Op(Special("cluster_ctarank"), (), (mine := next(iter(rank_values(program))),))
    assert mine is not None
    at = position(program, named(MapShared))
    del rank
    return rewritten(program, at, lambda op: [replace(op, instruction=Binary("add", u32), operands=(op.operands[0], Const(u32, 0)))])


def rank_values(program: Program) -> list[Any]:
    return [op.results[0] for op in every_op(program) if op.instruction == Special("cluster_ctarank")]


MUTANTS: dict[str, tuple[Callable[[Program], Program], set[str]]] = {
    "no barrier before the first remote access": (lambda p: without_barrier(p, 0), {"mbarrier"}),
    "no wait at the first barrier": (lambda p: deleted(p, named(ClusterWait)), {"mbarrier", "barrier"}),
    "no arrival at the first barrier": (lambda p: deleted(p, named(ClusterArrive)), {"barrier"}),
    "the CTAs meet apart": (met_alone, {"mbarrier"}),
    "no barrier at the end": (lambda p: without_barrier(p, 1), {"cluster"}),
    "no mbarrier fence": (lambda p: deleted(p, named(MbarrierInitFence)), {"mbarrier"}),
    "consumers do not give back": (lambda p: deleted(p, give_back), {"deadlock"}),
    "consumers give back at home alone": (given_back_at_home, {"race", "in_flight"}),
    "given back to rank 0 alone": (
        lambda p: rewritten(p, position(p, named(Binary, op="lt")), lambda op: [replace(op, operands=(op.operands[0], Const(u32, 1)))]),
        {"deadlock"},
    ),
    "given back before the products end": (lambda p: swapped(p, named(WgmmaWait), give_back), {"race", "in_flight"}),
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
        lambda p: rewritten(p, position(p, multicast), lambda op: [replace(op, operands=(load_a(p).operands[0], *op.operands[1:]))]),
        {"race", "in_flight", "uninitialised"},
    ),
    "half of B's bytes expected": (
        lambda p: changed(p, named(MbarrierArrival, remote=False), 0, expected_bytes=EXPECTED - example.HALF_N * TILE_BYTES),
        {"deadlock", "in_flight", "mbarrier", "race"},
    ),
    "twice B's bytes expected": (
        lambda p: changed(p, named(MbarrierArrival, remote=False), 0, expected_bytes=EXPECTED + example.TILE_N * TILE_BYTES),
        {"deadlock"},
    ),
    "no wait for a full stage": (lambda p: deleted(p, wait, 0), {"race", "in_flight", "uninitialised"}),
    "no wait for a free stage": (lambda p: deleted(p, wait, 1), {"race", "in_flight"}),
}


def load_a(program: Program) -> Op:
    return next(op for op in every_op(program) if isinstance(op.instruction, TensorCopy) and not op.instruction.multicast)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught_in_every_order(name: str) -> None:
    mutate, kinds = MUTANTS[name]
    program = mutate(gemm())
    for seed in (None, *SEEDS):
        found = {f.kind for f in run(program, seed)[0].findings}
        assert found & kinds, f"seed {seed}: {sorted(found)}"
