"""The error bound of matrix products: what it lets pass and what it does not."""

from __future__ import annotations

import numpy as np
import pytest

from warploom.core.dtypes import f16, f32
from warploom.kernels.matmul.reference import accumulation_bound, gemm_error, gemm_reference

RNG = np.random.default_rng(1)
A, B = RNG.standard_normal((24, 256)).astype(np.float16), RNG.standard_normal((256, 40)).astype(np.float16)
REFERENCE = gemm_reference(A, B)


def test_correctly_rounded_results_pass():
    assert gemm_error(REFERENCE.product.astype(np.float16), REFERENCE, f16).value <= 1.0
    assert gemm_error(REFERENCE.product.astype(np.float32), REFERENCE, f32).ok


def test_f16_sums_pass_only_their_own_bound():
    total = np.zeros((24, 40), np.float16)
    for k in range(0, 256, 16):
        total = (total + A[:, k : k + 16].astype(np.float32) @ B[k : k + 16].astype(np.float32)).astype(np.float16)
    assert gemm_error(total, REFERENCE, f16, f16).ok
    assert not gemm_error(total, REFERENCE, f16, f32).ok


@pytest.mark.parametrize("defect", ["one element", "a product missing", "nan", "swapped"])
def test_one_wrong_element_is_enough(defect):
    out = REFERENCE.product.astype(np.float32)
    if defect == "one element":
        out[3, 5] *= 1.001
    elif defect == "a product missing":
        out -= 0.0
        out[7, 7] -= np.float32(A[7, 9]) * np.float32(B[9, 7])
    elif defect == "nan":
        out[0, 0] = np.nan
    else:
        out[[1, 2]] = out[[2, 1]]
    assert not gemm_error(out, REFERENCE, f32).ok


def test_bounds_grow_with_the_depth_and_with_f16():
    assert accumulation_bound(4096, f32) == 16 * accumulation_bound(256, f32)
    assert accumulation_bound(256, f16) > 1000 * accumulation_bound(256, f32)
