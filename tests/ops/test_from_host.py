"""CPU arrays on a GPU: what is copied there meets the kernel's parameters. The GPU is played by the emulator."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import warploom
from tests.kernels.attention64 import near as near_attention
from warploom.core.dtypes import bf16
from warploom.kernels.attention.reference import attention_reference
from warploom.lang.functions import silu

pytestmark = pytest.mark.usefixtures("gpu")


def random(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(ml_dtypes.bfloat16)


def near(found: np.ndarray[Any, Any], exact: np.ndarray[Any, Any]) -> bool:
    return bool((np.abs(found.astype(np.float64) - exact) <= 2**-7 * (np.abs(exact) + 1)).all())


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize(
    "config",
    [
        None,
        "matmul_sm80(BM=32, BN=32, BK=32, WM=16, WN=16, STAGES=2, split_k=2)",
        "matmul_sm80(BM=32, BN=32, BK=32, WM=16, WN=16, STAGES=2, stream_k=1)",
    ],
)
def test_what_is_combined_with_the_sums(batch: tuple[int, ...], config: str | None) -> None:
    a, b, bias = random(*batch, 20, 72), random(72, 80), random(80)
    gate, residual = random(*batch, 20, 80), random(*batch, 20, 80)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    assert near(warploom.matmul(a, b, config=config), exact)
    exact += bias.astype(np.float64)
    assert near(warploom.matmul(a, b, bias=bias, config=config), exact)
    exact = exact / (1 + np.exp(-exact)) * gate.astype(np.float64) + residual.astype(np.float64)
    found = warploom.matmul(
        a, b, bias=bias, epilogue=lambda s, g, r: silu(s) * g + r, extras=(gate, residual), config=config
    )
    assert near(found, exact)


def test_attention_with_its_log_sum_exp() -> None:
    q, k, v = (random(1, 70, 2, 64) for _ in range(3))
    out, lse = warploom.attention(q, k, v, return_lse=True)
    exact = attention_reference(*(np.swapaxes(x, 1, 2) for x in (q, k, v)), dtype=bf16)
    assert near_attention(np.swapaxes(out, 1, 2), exact, bf16).all()
    assert np.abs(lse - exact.lse).max() <= 1e-4


def test_a_loss_and_a_reduction() -> None:
    x, w = random(33, 40), random(50, 40)
    logits = x.astype(np.float64) @ w.astype(np.float64).T
    target = np.arange(33) % 50
    loss = warploom.linear_cross_entropy(x, w, target)
    assert np.abs(loss - (np.logaddexp.reduce(logits, 1) - logits[np.arange(33), target])).max() <= 1e-4
    values, index = warploom.matmul_reduce(x, w.T, return_index=True)
    assert np.abs(values - logits.max(1)).max() <= 1e-4
    assert (index == logits.argmax(1)).all()
