"""Random problems on the emulator: shapes, lengths, masks, options, types, layouts and strides."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import warploom
from warploom.core.dtypes import bf16, f16
from warploom.kernels.attention.ladder import FULL_LADDER
from warploom.kernels.attention.ladder_config import RungSm80
from warploom.kernels.attention.problem import AttentionConfig
from warploom.kernels.attention.sm80 import ForwardSm80
from warploom.kernels.attention.sm90 import ForwardSm90

NUMPY = {f16: np.dtype(np.float16), bf16: np.dtype(ml_dtypes.bfloat16)}
UNIT = {f16: 2.0**-11, bf16: 2.0**-8}
TINY = {f16: 2.0**-25, bf16: 0.0}
"""What rounding to a number below the type's normal ones may lose."""
LENGTHS = st.one_of(st.sampled_from([0, 1, 31, 32, 33, 64]), st.integers(2, 100))


@dataclass(frozen=True)
class Problem:
    """What is asked; ``stride`` is the step through a longer array at which positions lie."""

    q_len: int
    kv_len: int
    batch: int
    kv_heads: int
    group: int
    head_dim: int
    dtype: Any
    causal: bool
    window: Any
    softcap: float | None
    scale: float | None
    layout: str
    stride: int
    sinks: bool = False
    v_dim: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``attention``."""
        return {name: getattr(self, name) for name in ("causal", "window", "softcap", "scale", "layout")}

    @property
    def logits(self) -> Any:
        """The sinks: one that is none, and others around the scores."""
        found = np.array([-np.inf, 1.5, -1.0, 9.0, 0.0, 3.0], np.float32)[: self.kv_heads * self.group]
        return found if self.sinks else None

    def array(self, seed: int, length: int, heads: int, cols: int = 0) -> Any:
        """Random numbers in the layout; a view of a longer array where ``stride`` is 2."""
        shape = [self.batch, length * self.stride, heads, cols or self.head_dim]
        whole = np.random.default_rng(seed).standard_normal(shape, np.float32).astype(NUMPY[self.dtype])
        view = whole[:, :: self.stride]
        return view if self.layout == "bshd" else view.swapaxes(1, 2)


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


def reference(problem: Problem, q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """(O, Σ p·|v|, log-sum-exp), heads first, in float64."""
    if problem.layout == "bshd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    q, k, v = q.astype(np.float64), *(np.repeat(x.astype(np.float64), problem.group, 1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) * (1 / math.sqrt(problem.head_dim) if problem.scale is None else problem.scale)
    if problem.softcap is not None:
        scores = problem.softcap * np.tanh(scores / problem.softcap)
    left, right = problem.window or (None, None)
    if problem.causal:
        right = 0 if right is None else min(right, 0)
    ahead = np.arange(problem.kv_len)[None] - np.arange(problem.q_len)[:, None] - (problem.kv_len - problem.q_len)
    seen = (ahead >= -math.inf if left is None else ahead >= -left) & (ahead <= (math.inf if right is None else right))
    scores = np.where(seen, scores, -np.inf)
    sink = np.asarray(problem.logits if problem.sinks else -np.inf, np.float64)[..., None, None]
    most = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
    weights = np.exp(scores - np.where(np.isfinite(most), most, 0.0))
    total = weights.sum(-1, keepdims=True) + np.exp(sink - np.where(np.isfinite(most), most, 0.0))
    with np.errstate(divide="ignore"):
        lse = np.log(total[..., 0]) + np.where(np.isfinite(most), most, 0.0)[..., 0]
    p = weights / np.where(total == 0, 1.0, total)
    return p @ v, p @ np.abs(v), lse


def check(config: AttentionConfig, problem: Problem, *, with_lse: bool) -> None:
    """One call with all checks on (a finding raises), every element against float64."""
    heads = problem.kv_heads * problem.group
    q = problem.array(1, problem.q_len, heads)
    k = problem.array(2, problem.kv_len, problem.kv_heads)
    v = problem.array(3, problem.kv_len, problem.kv_heads, problem.v_dim)
    found: Any = warploom.attention(
        q, k, v, config=small(config, problem), return_lse=with_lse, sinks=problem.logits, **problem.options
    )
    out, lse = found if with_lse else (found, None)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert out.dtype == q.dtype
    expected, magnitude, lse64 = reference(problem, q, k, v)
    got = (out.swapaxes(1, 2) if problem.layout == "bshd" else out).astype(np.float64)
    allowed = UNIT[problem.dtype] * (np.abs(expected) + magnitude) + 2.0**-16 * magnitude + TINY[problem.dtype]
    assert (np.abs(got - expected) <= allowed).all()  # a NaN is not
    if lse is not None:
        finite = np.isfinite(lse64)
        assert np.array_equal(np.isfinite(lse), finite)
        assert np.array_equal(lse[~finite], lse64[~finite])
        assert np.abs(lse[finite] - lse64[finite]).max(initial=0.0) < 1e-4


COLUMNS = ForwardSm90(sum_column=True, skip_masked=True)


@pytest.mark.parametrize("config", [ForwardSm80(), ForwardSm90(), COLUMNS], ids=["sm80", "sm90", "sum column"])
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
    plain = Problem(64, 64, 1, 1, 1, 64, f16, False, None, None, None, "bshd", 1)
    check(config, replace(plain, **options), with_lse=True)


@pytest.mark.parametrize("key", ["1", "7", "16", "h1", "h7"])
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
