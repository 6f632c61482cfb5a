"""``attention_backward`` on CPU arrays: right gradients of random problems, what it leaves alone, what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import warploom
from tests.kernels.gradient_reference import gradient_reference
from tests.ops.attention_problem import Problem
from tests.ops.emulated_gpu import EmulatedGpu
from tests.properties import slow_property
from warploom.core.dtypes import bf16, f16
from warploom.core.errors import ConfigError, ProblemError

NAMES = "dout", "q", "k", "v", "out", "lse"


def arrays_of(problem: Problem) -> dict[str, Any]:
    """Random inputs, and what ``attention`` makes of them."""
    q, k, v = problem.inputs()
    found: dict[str, Any] = {"q": q, "k": k, "v": v, "sinks": problem.logits}
    found["dout"] = problem.array(4, problem.q_len, problem.heads, problem.v_dim)
    found["out"], found["lse"] = warploom.attention(q, k, v, return_lse=True, sinks=problem.logits, **problem.options)
    numbers = np.random.default_rng(5).standard_normal(found["lse"].shape).astype(np.float32)
    return found | {"dlse": numbers if problem.lse_gradient else None}


def excess(problem: Problem, x: dict[str, Any], gradients: Any) -> float:
    """The largest error over what is allowed."""
    reference = gradient_reference(
        *(problem.turned(x[n]) for n in NAMES[:5]),
        dtype=problem.dtype,
        scale=problem.scale,
        seen=problem.seen,
        softcap=problem.softcap,
        dlse=x["dlse"],
        sinks=x["sinks"],
    )
    return max(reference.excess(*map(problem.turned, gradients[:3]), *gradients[3:]).values())


def backward(x: dict[str, Any], **options: Any) -> Any:
    """The call on arrays by name."""
    return warploom.attention_backward(*(x[n] for n in NAMES), dlse=x["dlse"], sinks=x["sinks"], **options)


PROBLEMS = st.builds(
    Problem,
    q_len=st.sampled_from([1, 31, 64, 65, 100]),
    kv_len=st.sampled_from([1, 33, 64, 90, 129]),
    batch=st.sampled_from([1, 1, 2]),
    kv_heads=st.sampled_from([1, 1, 2]),
    group=st.sampled_from([1, 1, 2]),
    head_dim=st.sampled_from([8, 40, 64, 96, 128, 160]),
    dtype=st.sampled_from([f16, bf16]),
    causal=st.booleans(),
    window=st.sampled_from([None, None, (0, None), (17, 5), (None, 9)]),
    softcap=st.sampled_from([None, None, 3.0]),
    scale=st.sampled_from([None, None, 0.3]),
    layout=st.sampled_from(["bshd", "bhsd"]),
    stride=st.integers(1, 2),
    lse_gradient=st.booleans(),
    sinks=st.booleans(),
    v_dim=st.sampled_from([0, 0, 24, 64, 136]),
)
PLAIN = Problem(65, 40, 1, 1, 1, 16, f16)


@slow_property(8)
@given(PROBLEMS)
def test_gradients_of_random_problems(problem: Problem) -> None:
    x = arrays_of(problem)
    gradients = backward(x, **problem.options)
    assert len(gradients) == 3 + problem.sinks
    for name, gradient in zip(("q", "k", "v", "sinks"), gradients, strict=False):
        assert (gradient.shape, gradient.dtype) == (x[name].shape, x[name].dtype)
        assert gradient.flags.c_contiguous
    assert excess(problem, x, gradients) <= 1.0, problem


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_lengths_of_zero_have_gradients_of_zero(q_len: int, kv_len: int) -> None:
    x = arrays_of(Problem(q_len, kv_len, 2, 1, 2, 16, bf16))
    for name, gradient in zip("qkv", backward(x), strict=True):
        assert gradient.shape == x[name].shape
        assert not gradient.any()


def test_without_keys_the_gradient_of_sinks_is_that_of_the_log_sum_exp() -> None:
    x = arrays_of(Problem(5, 0, 2, 1, 2, 16, bf16, lse_gradient=True, sinks=True))
    np.testing.assert_allclose(backward(x)[3], x["dlse"].sum((0, 2)), rtol=1e-6)
    assert not backward({**x, "dlse": None})[3].any()


def test_a_gradient_that_is_one_number_everywhere() -> None:
    x = arrays_of(PLAIN)
    x["dout"] = np.broadcast_to(np.float16(1.0), x["q"].shape)
    assert excess(PLAIN, x, backward(x)) <= 1.0


def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    x = arrays_of(PLAIN)
    tensors = {name: None if array is None else torch.tensor(array) for name, array in x.items()}
    found = backward(tensors)
    assert all(isinstance(g, torch.Tensor) for g in found)
    for a, b in zip(found, backward(x), strict=True):
        np.testing.assert_array_equal(a.numpy(), b)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("deterministic", [False, True])
def test_host_arrays_travel_to_a_gpu(deterministic: bool) -> None:
    problem = Problem(40, 50, 2, 1, 2, 16, bf16, causal=True, stride=2, lse_gradient=True, sinks=True)
    x = arrays_of(problem)
    assert excess(problem, x, backward(x, causal=True, deterministic=deterministic)) <= 1.0


def test_a_call_again_prepares_nothing(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(40, 50, 1, 1, 2, 16, bf16, sinks=True)
    first, second = arrays_of(problem), arrays_of(problem)
    second["dout"] = second["dout"][:, ::-1].copy()
    gpu.hold(monkeypatch)
    gpu.prepared.clear()
    assert excess(problem, first, backward(first)) <= 1.0
    prepared = list(gpu.prepared)
    assert len(prepared) == 4
    assert excess(problem, second, backward(second)) <= 1.0
    assert excess(problem, first, backward(first, causal=np.array(0))) <= 1.0
    assert gpu.prepared == prepared
    backward(first, deterministic=True)
    assert len(gpu.prepared) > 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lse": np.zeros((1, 65, 1), np.float32)}, "lse has shape .* the forward pass returns it"),
        ({"lse": np.zeros((1, 1, 65), np.float16)}, "lse is f16.*the forward pass returns it"),
        ({"dlse": np.zeros((1, 1, 64), np.float32)}, "dlse has shape"),
        ({"dout": np.zeros((1, 65, 1, 8), np.float16)}, "dout has shape"),
        ({"out": np.zeros((1, 65, 1, 16), np.float32)}, "q is f16 and out is f32"),
        ({"k": np.zeros((1, 40, 1, 8), np.float16)}, "k has shape .*head_dim = 16, as q has"),
        ({"k": np.zeros((1, 30, 1, 16), np.float16)}, "v has shape .*kv_len = 30, as k has"),
    ],
)
def test_arrays_that_do_not_go_together(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ProblemError, match=said):
        backward({**arrays_of(PLAIN), **change})


def test_configurations_that_do_not_fit() -> None:
    x = arrays_of(PLAIN)
    with pytest.raises(ConfigError, match="head_dim is 16"):
        backward(x, config="attention_backward_sm80(head_dim=64, dtype=f16)")
    with pytest.raises(ConfigError, match="in_turn"):
        backward(x, config="attention_backward_sm80(head_dim=16, dtype=f16)", deterministic=True)
    with pytest.raises(ProblemError, match="deterministic is True or False"):
        backward(x, deterministic="yes")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_plan_states_its_memory(head_dim: int, deterministic: bool) -> None:
    q, k = (np.zeros((2, length, heads, head_dim), bf16.numpy) for length, heads in ((300, 2), (200, 1)))
    of_q, lse = dict.fromkeys(("q", "out", "dout"), q), np.zeros((2, 2, 300), np.float32)
    x = {**of_q, "k": k, "v": k, "lse": lse}
    plan = warploom.plan_attention_backward(*(x[n] for n in NAMES), deterministic=deterministic)
    rows = 2 * 2 * 320  # whole blocks of query rows
    assert rows * head_dim * 4 <= plan.workspace_bytes <= rows * (head_dim * 4 + 8) + 4096
    assert str(plan.config) in str(plan)


def test_a_plan_has_its_code() -> None:
    x = arrays_of(PLAIN)
    assert "attention_backward" in warploom.plan_attention_backward(*(x[n] for n in NAMES)).cuda


def test_wide_heads_share_no_sums_on_hopper() -> None:
    problem = Problem(130, 70, 1, 1, 1, 136, bf16, causal=True)
    x = arrays_of(problem)
    config = "attention_backward_wide_sm90(head_dim=136)"
    plan = warploom.plan_attention_backward(*(x[n] for n in NAMES), causal=True, config=config)
    assert plan.workspace_bytes <= 2 * 4 * 256 + 1024
    assert excess(problem, x, backward(x, causal=True, config=config)) <= 1.0
