"""Registers and spills of the first rungs, from the cubin: no GPU is needed."""

from __future__ import annotations

import pytest

from tests.kernels.attention_cases import RUNGS, traced
from warploom.core.dtypes import bf16
from warploom.core.targets import TARGETS, target
from warploom.ir.verify import verify

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC")

LIMITS = {"1": 202, "2": 232}


def _resources(key: str, arch: str):
    from warploom.ops.backends import compiled

    return compiled(traced(RUNGS[key]), arch).resources


@pytest.mark.parametrize("key", LIMITS)
def test_the_first_rungs_fit_their_registers(key):
    config = RUNGS[key]
    assert (config.tile_m, config.tile_n, config.num_warps, config.dtype) == (64, 64, 4, bf16)
    used = _resources(key, "sm_80")
    assert used.spill_bytes == 0
    assert used.registers <= LIMITS[key]


@pytest.mark.parametrize("arch", TARGETS)
def test_the_base_compiles_everywhere(arch):
    verify(traced(RUNGS["1"]), target(arch))
    assert _resources("1", arch).registers <= target(arch).registers_per_thread
