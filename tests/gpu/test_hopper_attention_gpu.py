"""Every ``wgmma`` configuration that calls choose, on ragged, causal and grouped problems, against float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

import warploom  # noqa: E402 (after the skip)
from warploom.core.dtypes import bf16  # noqa: E402
from warploom.core.targets import target  # noqa: E402
from warploom.kernels.attention.choice import choose  # noqa: E402
from warploom.kernels.attention.forward_sm90 import ForwardSm90  # noqa: E402
from warploom.kernels.attention.problem import AttentionProblem, Even  # noqa: E402
from warploom.kernels.attention.reference import attention_error, attention_reference  # noqa: E402
from warploom.kernels.attention.scores import seen_of  # noqa: E402
from warploom.ops.backends import gpu_present, gpu_target  # noqa: E402

if gpu_present() and not gpu_target(0).has_wgmma:
    pytest.skip("needs wgmma", allow_module_level=True)


def chosen() -> list[ForwardSm90]:
    """The distinct configurations of problems of any length, with and without a mask, a soft cap and sums."""
    found: dict[ForwardSm90, None] = {}
    for head_dim, length, right, cap, lse in product(
        (64, 80, 128, 192, 256), (256, 1024, 2048, 8192, 16384), (None, 0), (None, 20.0), (False, True)
    ):
        problem = AttentionProblem(
            4, 16, 16, Even(length, length), head_dim, bf16, window=(None, right), softcap=cap, lse=lse
        )
        config, _ = choose(problem, target("sm_90a"))
        assert isinstance(config, ForwardSm90)
        found[config] = None
        if (length, right, cap, lse) == (256, 0, None, True):  # what takes few queries
            found[replace(config, consumers=1)] = None
    return list(found)


CHOSEN = pytest.mark.parametrize("config", chosen(), ids=str)


@CHOSEN
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "heads", "kv_heads"), [(1000, 1000, 6, 3), (130, 900, 40, 40), (512, 77, 2, 1)]
)
def test_it_is_right(config: ForwardSm90, causal: bool, q_len: int, kv_len: int, heads: int, kv_heads: int) -> None:
    generator = torch.Generator("cuda").manual_seed(q_len)

    def some(length: int, count: int) -> Any:
        shape = (3, length, count, config.head_dim)
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    q, k, v = some(q_len, heads), some(kv_len, kv_heads), some(kv_len, kv_heads)
    assert error_over_bound(config, q, k, v, causal) <= 1.0


@CHOSEN
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_right_where_maxima_grow(config: ForwardSm90, causal: bool) -> None:
    """In all rows and every block as keys are visited, in single rows, and by so much that P would overflow."""
    generator = torch.Generator("cuda").manual_seed(11)
    shape = 2, 1500, 5, config.head_dim
    q, k, v = (torch.randn(shape, device="cuda", generator=generator) for _ in range(3))
    growing = k * torch.linspace(60.0, 1.0, 1500, device="cuda")[None, :, None, None]
    single = k.clone()
    single[:, 100::300] = 4.0 * q[:, 700::160][:, :5]
    for keys in (growing, single, 12.0 * k):
        assert error_over_bound(config, q.bfloat16(), keys.bfloat16(), v.bfloat16(), causal) <= 1.0


@CHOSEN
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_it_loses_nothing_that_is_no_number(config: ForwardSm90, bad: float) -> None:
    """A NaN among the keys makes every row NaN; an infinity those whose score it makes +inf, others ignore that key."""
    generator = torch.Generator("cuda").manual_seed(12)
    shape = 1, 1100, 2, config.head_dim
    q, k, v = (torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(3))
    for position in (3, 600, 1090):
        keys = k.clone()
        keys[0, position, 1, 7] = bad
        out = warploom.attention(q, keys, v, config=config)
        assert not bool(out[0, :, 0].isnan().any())
        expected = torch.full((1100,), True, device="cuda") if bad != bad else q[0, :, 1, 7] > 0
        assert bool((out[0, :, 1].isnan().all(-1) == expected).all())
        assert bool((out[0, :, 1].isnan().any(-1) == expected).all())


def error_over_bound(config: ForwardSm90, q: Any, k: Any, v: Any, causal: bool) -> float:
    """The largest error over what bf16 allows, against float64."""
    out = warploom.attention(q, k, v, causal=causal, config=config)
    seen = seen_of(q.shape[1], k.shape[1], (None, 0 if causal else None), device="cuda")
    reference = attention_reference(*(x.transpose(1, 2) for x in (q, k, v)), dtype=bf16, seen=seen)
    return attention_error(out.transpose(1, 2), reference, bf16).value
