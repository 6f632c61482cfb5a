"""Registers and spills of the first rungs, from the cubin: no GPU is needed."""

from __future__ import annotations

import pytest

from tests.kernels.attention_cases import RUNGS, Case
from warploom.core.targets import TARGETS, target
from warploom.cuda.store import Resources
from warploom.ops.backends import compiled

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC")

LIMITS = {"1": 202, "2": 232}


def resources(key: str, arch: str) -> Resources:
    """Of a rung's kernel for whole tiles."""
    return compiled(Case.of_blocks(RUNGS[key], 2).program, arch).resources


@pytest.mark.parametrize("key", LIMITS)
def test_the_first_rungs_fit_their_registers(key: str) -> None:
    used = resources(key, "sm_80")
    assert used.spill_bytes == 0
    assert used.registers <= LIMITS[key]


@pytest.mark.parametrize("arch", TARGETS)
def test_the_base_compiles_everywhere(arch: str) -> None:
    assert resources("1", arch).registers <= target(arch).registers_per_thread
