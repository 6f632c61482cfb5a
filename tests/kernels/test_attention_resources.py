"""Registers and spills of the first rungs, from the cubin: no GPU is needed."""

from __future__ import annotations

import pytest

from tests.kernels.attention_cases import RUNGS, Case
from warploom.core.dtypes import bf16
from warploom.core.targets import TARGETS, target
from warploom.cuda.store import Resources
from warploom.kernels.attention.choice import choose
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.problem import ArrayStrides, AttentionProblem, Even
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


@pytest.mark.parametrize(("head_dim", "length"), [(128, 4096), (256, 512)])
def test_wgmma_is_not_serialised_where_a_tile_has_the_most_to_keep(head_dim: int, length: int) -> None:
    """Log-sum-exps and sinks beside a mask: ptxas says so where it has no registers left, which is an error."""
    problem = AttentionProblem(2, 8, 8, Even(length, length), head_dim, bf16, window=(None, 0), lse=True, sinks=True)
    config = choose(problem, target("sm_90a"))[0]
    assert isinstance(config, ForwardSm90)
    (call,) = config.calls(problem, ArrayStrides.contiguous(problem), 132)
    assert compiled(call.source.program, "sm_90a").resources.registers
