"""Registers and spills of the rungs, from the cubin: no GPU is needed."""

from __future__ import annotations

import pytest

from tests.kernels.gemm_cases import RUNGS, problem_of, traced
from warploom.core.dtypes import f16, f32
from warploom.cuda.cubin import find_nvdisasm
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.ladder import BEST, summed_in
from warploom.kernels.gemm.problem import contiguous_problem

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC")


CONFIGS = RUNGS | {
    f"{key} with f32 sums": summed_in(config, f32) for key, config in RUNGS.items() if config not in BEST.values()
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("key", CONFIGS)
def test_no_rung_spills(key, arch):
    from warploom.ops.backends import compiled

    config = CONFIGS[key]
    problem = problem_of(config, config.tile_m, config.tile_n, config.tile_k)
    used = compiled(traced(config, problem), arch).resources
    assert used.spill_bytes == 0
    assert used.registers * config.threads <= 65536


FED = (
    HopperGemmConfig(mma_sync=True, persistent=True),
    HopperGemmConfig(256, 128, mma_sync=True, persistent=True),
    HopperGemmConfig(128, 128, 6, mma_sync=True, persistent=True, pingpong=True),
)


@pytest.mark.parametrize("config", FED, ids=str)
@pytest.mark.parametrize("b_rows", [True, False])
def test_warps_fed_by_the_tma_keep_everything_in_registers(config, b_rows):
    from warploom.ops.backends import compiled
    from warploom.ops.gemm_kernels import trace_for

    problem = contiguous_problem(config.tile_m, config.tile_n, config.tile_k, config.dtype, b_rows=b_rows)
    used = compiled(trace_for(config, problem.features(config)), "sm_90a").resources
    assert used.spill_bytes == 0
    assert used.stack_bytes == 0


@pytest.mark.skipif(find_nvdisasm() is None, reason="needs nvdisasm")
@pytest.mark.parametrize(("out_dtype", "b_rows"), [(f16, True), (f32, False)])
@pytest.mark.parametrize("config", FED, ids=str)
def test_no_stage_is_given_back_before_it_is_read(config, out_dtype, b_rows):
    """An arrival at an mbarrier waits for no ``ldmatrix`` by itself: ptxas must have made it wait for each."""
    from warploom.inspect.report import inspect_program
    from warploom.ops.gemm_kernels import trace_for

    problem = contiguous_problem(512, 512, 512, config.dtype, out_dtype=out_dtype, b_rows=b_rows)
    listing = inspect_program(trace_for(config, problem.features(config)), "sm_90a").listing
    loads: list[int | None] = []  # the counter of each ldmatrix; they arrive in order
    arrived = 0
    on_the_way: list[int] = []
    for instruction in listing.instructions:
        assert instruction.control is not None
        waited = [i + 1 for i, counter in enumerate(loads) if counter in instruction.control.waits]
        arrived = max([arrived, *waited])
        if instruction.opcode.startswith("SYNCS.ARRIVE") and instruction.predicate:
            on_the_way.append(len(loads) - arrived)
        if instruction.mnemonic == "LDSM":
            loads.append(instruction.control.written)
    assert on_the_way == [sum(config.warp_tile) // 16, 0]  # in the loop the next stage's first, after it none
