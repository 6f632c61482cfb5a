"""Every synchronisation of the wgmma GEMM kernel deleted or shifted: caught, or shown to be redundant."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.hopper.gemm_cases import PAIRS, TOGETHER, TURNS, matrix, run
from tests.hopper.mutants import edits, rewritten
from warploom.core.dtypes import f16
from warploom.ir.program import Program
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
    a = matrix(rng, 3 * config.cluster * config.tile_m, DEPTH * config.tile_k, f16)
    b = matrix(rng, DEPTH * config.tile_k, config.tile_n, f16)
    return plan_matmul(a, b, config=config), a, b


def caught(config: HopperGemmConfig, mutant: Program) -> bool:
    made, a, b = problem(config)
    return any(run(made, a, b, seed=seed, program=mutant, ctas=1)[0].findings for seed in ROUNDS)


REDUNDANT = {
    # Between k-tiles nothing touches the accumulators; ptxas wants the fence there all the same (C7519).
    "without wgmma.fence.sync.aligned in _issue",
}


@pytest.mark.parametrize("config", [TOGETHER, TURNS, PAIRS], ids=str)
def test_every_mutant_is_caught_or_redundant(config: HopperGemmConfig) -> None:
    made, a, b = problem(config)
    emulation, out = run(made, a, b, ctas=1)
    assert emulation.findings == ()
    assert gemm_error(out, gemm_reference(a, b), f16).ok
    ops = list(made.program.ops())
    survivors: set[str] = set()
    count = 0
    for number, op in enumerate(ops):
        for what, rewrite in edits(op):
            count += 1
            if not caught(config, rewritten(made.program, number, rewrite)):
                survivors.add(f"{what} in {op.where.function}")
    assert count > 30
    assert survivors <= REDUNDANT
