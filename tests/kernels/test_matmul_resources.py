"""Registers and spills of the matmul kernels, from the cubin: no GPU is needed."""

from __future__ import annotations

import pytest

from tests.kernels.matmul_cases import RUNGS, Case
from warploom.core.dtypes import f32
from warploom.kernels.matmul.ladder import BEST, summed_in
from warploom.kernels.matmul.problem import MatmulConfig
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
