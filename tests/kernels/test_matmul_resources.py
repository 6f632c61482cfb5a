"""Registers and spills of the matmul kernels, from the cubin: no GPU is needed."""

from __future__ import annotations

import operator
from dataclasses import replace

import pytest

from tests.kernels.matmul_cases import RUNGS, Case
from warploom.core.dtypes import bf16, f32
from warploom.kernels.matmul.features import Epilogue, Extra
from warploom.kernels.matmul.problem import MatmulConfig, contiguous_problem
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.kernels.matmul_reduce.problem import ReduceProblem
from warploom.kernels.source import KernelCall
from warploom.ops.backends import compiled
from warploom_lab.inspect.report import inspect_program
from warploom_lab.kernels.matmul.ladder import BEST, summed_in

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


def instructions(call: KernelCall) -> list[str]:
    """What becomes of a call's kernel: each instruction with its first modifier."""
    code = inspect_program(call.source.program, "sm_90a").instructions
    return [".".join((x.mnemonic, *x.modifiers[:1])) for x in code]


def test_what_a_result_is_added_to_is_loaded_several_at_a_time() -> None:
    """A load does not pass a store, which may be to the same array."""
    epilogue = Epilogue(extras=(Extra(wide=True),), function=operator.add, key="sum")
    problem = replace(contiguous_problem(128, 128, 512, bf16, out_dtype=f32), epilogue=epilogue)
    code = instructions(MatmulSm90(tile_m=128, tile_n=128, stages=6, dtype=bf16).calls(problem, 132)[0])
    assert code[: code.index("STG.E")].count("LDG.E") > 8


def test_a_stage_is_given_back_before_its_rows_are_reduced() -> None:
    """ptxas sinks what signals an mbarrier below arithmetic: the ring would wait for a whole tile's exponentials."""
    problem = contiguous_problem(256, 512, 128, bf16, out_dtype=f32, b_rows=False)
    config = MatmulSm90(tile_m=64, stages=5, pingpong=True, dtype=bf16)
    call, _ = ReduceProblem(problem, "logsumexp").calls(config, 132)
    code = instructions(call)
    behind = code[max(i for i, name in enumerate(code) if name.startswith("HGMMA")) :]
    assert behind[: behind.index("MUFU.EX2")].count("SYNCS.ARRIVE") == 2  # in the loop of k-tiles, and behind it
