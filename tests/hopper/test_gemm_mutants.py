"""Every synchronisation of the GEMM kernels fed by the TMA deleted or shifted: caught, or shown to be redundant."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from tests.hopper.gemm_cases import PAIRS, TOGETHER, TURNS, WARPS, WARPS_ALONE, WARPS_IN_PAIRS, matrix, run
from tests.hopper.mutants import Rewrite, edits, index_edits, rewritten
from warploom.core.dtypes import f16
from warploom.ir.program import Program
from warploom.ir.statements import Op, Value
from warploom.isa.memory import LdMatrix
from warploom.isa.sync import MbarrierArrival
from warploom.isa.warp import SyncWarp
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.reference import gemm_error, gemm_reference
from warploom.ops.matmul import plan_matmul
from warploom.ops.matmul_plan import MatmulPlan

ROUNDS = (None, 0, 1, 2)
DEPTH = 5
"""k-tiles: they wrap the ring of two stages twice."""


@cache
def problem(config: HopperGemmConfig) -> tuple[MatmulPlan, np.ndarray, np.ndarray]:
    """Three tiles, by one CTA; or three pairs by a cluster."""
    rng = np.random.default_rng(6)
    a = matrix(
        rng,
        3 * config.cluster * config.tile_m,
        DEPTH * config.tile_k,
        f16,
    )
    b = matrix(rng, DEPTH * config.tile_k, config.tile_n, f16)
    return plan_matmul(a, b, config=config), a, b


def caught(config: HopperGemmConfig, mutant: Program) -> bool:
    made, a, b = problem(config)
    return any(run(made, a, b, seed=seed, program=mutant, ctas=1)[0].findings for seed in ROUNDS)


def without_meeting(op: Op) -> Iterator[tuple[str, Rewrite]]:
    """Lanes of a warp that do not meet."""
    return (edit for edit in index_edits(op) if isinstance(op.instruction, SyncWarp))


REDUNDANT = {
    # Between k-tiles nothing touches the accumulators; ptxas wants the fence there all the same (C7519).
    "without wgmma.fence.sync.aligned in _issue",
}


@pytest.mark.parametrize("config", [TOGETHER, TURNS, PAIRS, WARPS], ids=str)
def test_every_mutant_is_caught_or_redundant(config: HopperGemmConfig) -> None:
    made, a, b = problem(config)
    emulation, out = run(made, a, b, ctas=1)
    assert emulation.findings == ()
    assert gemm_error(out, gemm_reference(a, b), f16).ok
    ops = list(made.program.ops())
    survivors: set[str] = set()
    count = 0
    for number, op in enumerate(ops):
        for what, rewrite in (*edits(op), *without_meeting(op)):
            count += 1
            if not caught(config, rewritten(made.program, number, rewrite)):
                survivors.add(f"{what} in {op.where.function}")
    assert count > 30
    assert survivors <= REDUNDANT


@pytest.mark.parametrize("config", [WARPS, WARPS_ALONE, WARPS_IN_PAIRS], ids=str)
def test_a_stage_is_given_back_on_what_was_read_of_it(config: HopperGemmConfig) -> None:
    """The emulator's ``ldmatrix`` reads at once; the hardware's may be overtaken by an arrival that needs it not."""
    program = problem(config)[0].program
    given_back = [op for op in program.ops() if op.where.function == "release"]
    arrivals = [op for op in given_back if isinstance(op.instruction, MbarrierArrival)]
    made = {result: op for op in program.ops() for result in op.results if isinstance(result, Value)}
    for arrival in arrivals:
        found, open_ones = set[Op](), list(arrival.operands)
        while open_ones:
            op = made.get(open_ones.pop())  # type: ignore[arg-type]
            if op is not None and op not in found:
                found.add(op)
                open_ones += op.operands
        loads = [op for op in found if isinstance(op.instruction, LdMatrix)]
        assert len(loads) == sum(config.warp_tile) // 16  # of the last k-step: they arrive in order
    assert len(arrivals) == 2  # in the loop, and after it
