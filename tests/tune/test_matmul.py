"""Matmul's part of the tuner: its space, and the check of its results."""

import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.core.dtypes import bf16, f16, f32
from warploom.core.targets import target
from warploom.kernels.matmul.choice import BEST32
from warploom.kernels.matmul.problem import contiguous_problem
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.settings import read
from warploom.measure.matmul import checked_problem
from warploom.tune.build import Built, build_all
from warploom.tune.matmul import MATMUL, MOST_SM80, MOST_SM90
from warploom.tune.matmul import space as tiles
from warploom.tune.operation import neighbours

SM90, SM80 = target("sm_90a"), target("sm_80")
PROBLEM = contiguous_problem(4096, 4096, 4096, f16)
SMALL = MatmulSm80(tile_m=64, tile_n=32, tile_k=32, warp_m=32, warp_n=16, stages=2)


def space(problem, goal, requires, most=MOST_SM80) -> list[Any]:
    return [c for c in tiles(problem, goal, most) if c.requires == requires]


@pytest.mark.parametrize("sizes", [(4096, 4096, 4096), (16, 6144, 4096), (100, 77, 33)])
@pytest.mark.parametrize("arch", ["sm_86", "sm_90a"])
def test_the_space_is_small_and_fits(arch, sizes):
    problem, goal = contiguous_problem(sizes[0], sizes[1], sizes[2], bf16, b_rows=False), target(arch)
    found = list(MATMUL.space(problem, goal))
    default, _ = MATMUL.choose(problem, goal)
    assert default in found
    assert len(found) == len(set(found)) <= MOST_SM80 + MOST_SM90
    assert {(c.dtype, c.accumulate) for c in found} == {(bf16, f32)}
    for config in found:
        assert MATMUL.violations(config, problem, goal) == []
        assert read(str(config), MATMUL.kinds) == config


def test_long_sums_of_few_elements_are_tried_split():
    assert len({c.split_k for c in space(contiguous_problem(64, 64, 65536, f16), SM90, "sm_80")}) > 2


def test_wgmma_is_searched_where_the_tma_takes_the_arrays_and_rows_fill_its_tiles():
    found = space(PROBLEM, SM90, "sm_90a")
    assert len(found) == MOST_SM90
    assert {c.pingpong for c in found} == {False, True}
    assert space(PROBLEM, SM80, "sm_90a") == []
    for problem in (
        contiguous_problem(16, 4096, 4096, f16),
        contiguous_problem(4096, 4096, 4096, f16, f16),
        contiguous_problem(4096, 4095, 4096, f16),
    ):
        assert space(problem, SM90, "sm_90a") == []


@pytest.mark.parametrize("config", [BEST32, MATMUL.choose(PROBLEM, SM90)[0]], ids=repr)
def test_each_flag_is_tried_and_types_are_not(config):
    changed = {
        name for c in neighbours(config, MATMUL.fixed) for name in vars(c) if getattr(c, name) != getattr(config, name)
    }
    assert {"stages", "block_stride", "split_k"} <= changed
    assert not changed & {"dtype", "accumulate", "opt_level"}


def test_fragments_that_fit_no_register_file_are_not_compiled():
    assert MATMUL.violations(BEST32, PROBLEM, SM90) == []
    for wide in (replace(BEST32, tile_m=256, warp_m=128), replace(BEST32, min_ctas=2)):
        assert "fragments alone" in MATMUL.violations(wide, PROBLEM, SM90)[0]


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_results_are_checked_on_the_kernel_that_is_timed(data):
    m, n, k = (data.draw(st.one_of(st.integers(1, 300), st.integers(1, 20000))) for _ in range(3))
    problem = contiguous_problem(
        m,
        n,
        k,
        f16,
        data.draw(st.sampled_from([f16, f32])),
        out_dtype=data.draw(st.sampled_from([f16, f32])),
        b_rows=data.draw(st.booleans()),
        batch=data.draw(st.sampled_from([1, 5])),
    )
    config = data.draw(st.sampled_from(list(MATMUL.space(problem, SM90))))
    checked = checked_problem(problem, config)
    assert MATMUL.source(checked, config) == MATMUL.source(problem, config)
    assert checked.differences(config) == []
    assert checked.flops <= 2 * 2 * (12 * 256) ** 2 * 17 * 128


def test_a_split_k_is_another_kernel_than_another_split():
    """Else the tuner would drop one of the two as the same machine code."""
    pytest.importorskip("cuda.core")
    problem = contiguous_problem(64, 32, 512, f16)
    assert pickle.loads(pickle.dumps(problem)) == problem
    sources = [MATMUL.source(problem, replace(SMALL, split_k=s)) for s in (2, 4)]
    two, four = build_all(sources, "sm_80")
    assert isinstance(two, Built)
    assert isinstance(four, Built)
    assert two.kernel.cubin != four.kernel.cubin
    assert two.faults(SM80) == []


@pytest.mark.gpu
def test_tuning_on_a_gpu():
    from warploom.tune.tuner import Effort, Tuner, gpu_for_tuning

    tuner = Tuner(MATMUL, gpu_for_tuning(), budget=60, effort=Effort(passes=0))
    outcome = tuner.tune(contiguous_problem(256, 512, 4096, f16, b_rows=False))
    assert outcome.found is not None
    assert outcome.found.speedup >= 0.97
    assert not any("wrong" in reason for reason in outcome.dropped)
