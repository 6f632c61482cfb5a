"""Registers and spills of the matmul kernels, from the cubin: no GPU is needed."""

from __future__ import annotations

import pytest

from tests.kernels.matmul_cases import RUNGS, Case
from warploom.core.dtypes import bf16, f32
from warploom.inspect.report import inspect_program
from warploom.kernels.matmul.ladder import BEST, summed_in
from warploom.kernels.matmul.problem import MatmulConfig, contiguous_problem
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.kernels.matmul_reduce.problem import ReduceProblem
from warploom.ops.backends import compiled

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC")

CONFIGS = RUNGS | {
    f"{key} with f32 sums": summed_in(config, f32) for key, config in RUNGS.items() if config not in BEST.values()
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_no_rung_spills(config: MatmulConfig, arch: str) -> None:
    case = Case.of_tiles(config, 1, 1, 1)
    used = compiled(case.program, arch).resources
    assert used.spill_bytes == 0
    assert used.registers * case.program.threads <= 65536


def test_a_stage_is_given_back_before_its_rows_are_reduced() -> None:
    """ptxas sinks what signals an mbarrier below arithmetic: the ring would wait for a whole tile's exponentials."""
    problem = contiguous_problem(256, 512, 128, bf16, out_dtype=f32, b_rows=False)
    config = MatmulSm90(tile_m=64, stages=5, pingpong=True, dtype=bf16)
    call, _ = ReduceProblem(problem, "logsumexp").calls(config, 132)
    code = inspect_program(call.source.program, "sm_90a").instructions
    last = max(i for i, x in enumerate(code) if x.mnemonic == "HGMMA")
    behind = [".".join((x.mnemonic, *x.modifiers[:1])) for x in code[last:]]
    released = behind[: behind.index("MUFU.EX2")]
    assert released.count("SYNCS.ARRIVE") == 2  # in the loop of k-tiles, and behind it
