"""Calls of ``matmul`` by ``wgmma``: what is combined with the product, batches, and results within larger arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import warploom
from tests.kernels.matmul_cases import TOGETHER, TURNS
from warploom.core.dtypes import bf16
from warploom.kernels.matmul.reference import gemm_error, gemm_reference
from warploom.kernels.matmul.sm90 import MatmulSm90

KINDS = {"together": TOGETHER, "turns": TURNS, "alone": MatmulSm90(64, 96, 2, 1, block_stride=4)}


def numbers(seed: int, *shape: int, dtype: Any = np.float16) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("n", [96, 30])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_everything_that_matmul_combines(kind: str, splits: int, n: int) -> None:
    """Batches that broadcast, scale, bias, an extra matrix, a function; of 30 columns the lines are not aligned."""
    a, b, bias, gate = numbers(1, 2, 70, 136), numbers(2, 2, n, 136), numbers(3, n), numbers(4, 2, 70, n)
    right = (b if kind == "turns" else b[:1]).transpose(0, 2, 1)
    got = warploom.matmul(
        a,
        right,
        config=replace(KINDS[kind], split_k=splits),
        bias=bias,
        alpha=0.5,
        epilogue=lambda x, y: x * y,
        extras=(gate,),
        out_dtype="f32",
    )
    a64, b64, bias64, gate64 = (x.astype(np.float64) for x in (a, right, bias, gate))
    np.testing.assert_allclose(got, (0.5 * a64 @ b64 + bias64) * gate64, rtol=1e-5, atol=1e-4)


def test_rows_of_c_within_a_larger_array_are_all_that_is_written() -> None:
    a, b = numbers(1, 100, 72, dtype=bf16.numpy), numbers(2, 72, 40, dtype=bf16.numpy)
    whole = np.full((110, 64), 7, bf16.numpy)
    warploom.matmul(a, b, out=whole[:100, :40], config=replace(TOGETHER, dtype=bf16))
    assert gemm_error(whole[:100, :40], gemm_reference(a, b), bf16).ok
    assert (whole[100:].astype(np.float32) == 7).all()
    assert (whole[:, 40:].astype(np.float32) == 7).all()


def test_batches_that_lie_between_the_rows() -> None:
    a, b = (numbers(seed, 70, 3, 72).transpose(1, 0, 2) for seed in (1, 2))
    whole = np.full((70, 3, 80), 7, np.float16)
    out = whole.transpose(1, 0, 2)[:, :, :70]
    warploom.matmul(a, b.transpose(0, 2, 1), out=out, config=TOGETHER)
    exact = a.astype(np.float64) @ b.astype(np.float64).transpose(0, 2, 1)
    np.testing.assert_allclose(out, exact, rtol=1e-3, atol=1e-2)
    assert (whole[:, :, 70:] == 7).all()
