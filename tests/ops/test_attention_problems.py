"""Random problems on the emulator: shapes, lengths, masks, options, types, layouts and strides."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import warploom
from tests.kernels.attention64 import near
from tests.ops.attention_problem import Problem
from tests.properties import slow_property
from warploom.core.dtypes import bf16, f16
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.problem import AttentionConfig
from warploom.kernels.attention.reference import attention_reference
from warploom_lab.kernels.attention.ladder import FULL_LADDER
from warploom_lab.kernels.attention.ladder_config import RungSm80

LENGTHS = st.one_of(st.sampled_from([0, 1, 31, 32, 33, 64]), st.integers(2, 100))


PROBLEMS = st.builds(
    Problem,
    q_len=LENGTHS,
    kv_len=LENGTHS,
    batch=st.sampled_from([1, 1, 2]),
    kv_heads=st.sampled_from([1, 1, 2]),
    group=st.sampled_from([1, 1, 3]),
    head_dim=st.sampled_from([8, 40, 64, 64, 72]),
    dtype=st.sampled_from([f16, bf16]),
    causal=st.booleans(),
    window=st.sampled_from([None, None, (7, None), (None, 3), (40, 0), (0, 0)]),
    softcap=st.sampled_from([None, 5.0]),
    scale=st.sampled_from([None, 0.3]),
    layout=st.sampled_from(["bshd", "bhsd"]),
    stride=st.sampled_from([1, 2]),
    sinks=st.booleans(),
    v_dim=st.sampled_from([0, 0, 16, 72, 128]),
)


def small(config: AttentionConfig, problem: Problem) -> AttentionConfig:
    """The configuration at the problem's head_dim and type, with the smallest tiles that keep its rows per warp."""
    config = replace(config, head_dim=problem.head_dim, dtype=problem.dtype)
    if not isinstance(config, RungSm80):
        config = replace(config, v_dim=0 if problem.v_dim == problem.head_dim else problem.v_dim)
    if isinstance(config, RungSm80 | ForwardSm80):
        return replace(config, tile_m=2 * config.warp_rows, num_warps=2, tile_n=32)
    config = replace(config, tile_n=64)
    # Row sums as a column need whole panels of bf16: elsewhere the kernel does without.
    return replace(config, sum_column=False) if config.check() else config


def check(config: AttentionConfig, problem: Problem, *, with_lse: bool) -> None:
    """One call with all checks on (a finding raises), every element against float64."""
    q, k, v = problem.inputs()
    found: Any = warploom.attention(
        q, k, v, config=small(config, problem), return_lse=with_lse, sinks=problem.logits, **problem.options
    )
    out, lse = found if with_lse else (found, None)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert out.dtype == q.dtype
    how = {"seen": problem.seen, "scale": problem.scale, "softcap": problem.softcap, "sinks": problem.logits}
    exact = attention_reference(*map(problem.turned, (q, k, v)), dtype=problem.dtype, **how)
    assert near(problem.turned(out), exact, problem.dtype).all()
    if lse is not None:
        finite = np.isfinite(exact.lse)
        assert np.array_equal(np.isfinite(lse), finite)
        assert np.array_equal(lse[~finite], exact.lse[~finite])
        assert np.abs(lse[finite] - exact.lse[finite]).max(initial=0.0) < 1e-4


COLUMNS = ForwardSm90(sum_column=True, skip_masked=True)


@pytest.mark.parametrize("config", [ForwardSm80(), ForwardSm90(), COLUMNS], ids=["sm80", "sm90", "sum column"])
@slow_property(6)
@given(PROBLEMS, st.booleans())
def test_random_problems(config, problem, with_lse):
    check(config, problem, with_lse=with_lse)


EXTREMES: list[dict[str, Any]] = [
    *({"softcap": cap} for cap in (0.5, 20.0, 1e4, 1e8)),
    {"sinks": True, "group": 4, "q_len": 100, "causal": True, "softcap": 2.0},
    *({"scale": scale} for scale in (-0.5, 0.0)),  # folded into the exponential they turn the order of scores
    *({"window": sides, "q_len": 100, "kv_len": 40} for sides in ((2**31 - 1, None), (2**40, 0), [2**31 - 101, 5])),
]


@pytest.mark.parametrize("config", [ForwardSm80(), ForwardSm90()], ids=["sm80", "sm90"])
@pytest.mark.parametrize("options", EXTREMES, ids=str)
def test_options_at_their_ends(options, config):
    check(config, replace(Problem(64, 64, 1, 1, 1, 64, f16), **options), with_lse=True)


@pytest.mark.parametrize("key", ["1", "7", "16", "h1", "h7"])
@slow_property(2)
@given(PROBLEMS)
def test_random_problems_for_rungs(key, problem):
    config = FULL_LADDER.rung(key).config
    if isinstance(config, RungSm80):
        problem = replace(problem, softcap=None, sinks=False, v_dim=0)
    check(config, problem, with_lse=False)


def test_a_scale_that_is_the_default_needs_no_kernel_of_its_own():
    q = np.zeros((1, 16, 1, 40), np.float16)
    assert warploom.plan(q, q, q, scale=1 / math.sqrt(40)).problem == warploom.plan(q, q, q).problem
    assert warploom.plan(q, q, q, scale=0.15).problem != warploom.plan(q, q, q).problem
