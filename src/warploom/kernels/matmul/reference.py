"""The product in float64, and how far a kernel may be from it, element by element."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.core.dtypes import DType, f16, f32

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-24}
"""Half the distance of neighbouring numbers around 1: the relative error of one rounding."""

MMA_SLACK = 2.0**-22
"""Relative error, per step of depth 16, that ``mma`` with f32 accumulators may add to Σ|a·b| (it truncates)."""

F16_TINY = 2.0**-24
"""The smallest step of f16: an absolute error that any rounding to it may make."""

MMA_DEPTH = 16


@dataclass(frozen=True)
class GemmReference:
    """float64 results, NumPy's or torch's: A·B and Σ|a|·|b| per element, and the depth of the sums."""

    product: Any
    magnitude: Any
    depth: int


@dataclass(frozen=True)
class GemmError:
    """``value`` is the largest |c - c64| over what the types allow at that element; at most ``bound`` is right."""

    value: float
    bound: float = 1.0
    metric: str = "max |c - c64| / (u_out·|c64| + γ·Σ|a·b|)"

    @property
    def ok(self) -> bool:
        """False for NaN too."""
        return self.value <= self.bound


def gemm_reference(a: Any, b: Any) -> GemmReference:
    """A (…, m, k) times B (…, k, n) in float64."""
    a64, b64 = np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)
    return GemmReference(a64 @ b64, np.abs(a64) @ np.abs(b64), a64.shape[-1])


def accumulation_bound(depth: int, accumulate: DType) -> float:
    """γ: what summing ``depth`` products may lose, relative to Σ|a·b|.

    Each ``mma`` adds 16 products to the accumulator. f32: its internal sum truncates, up to 2^-22 per step. f16: the
    sum is also rounded to f16 after every step, n·u / (1 - n·u) for n roundings (Higham, "Accuracy and Stability of
    Numerical Algorithms", lemma 3.1).
    """
    steps = -(-depth // MMA_DEPTH)
    f32_part = steps * MMA_SLACK
    if accumulate is not f16:
        return f32_part
    n_u = steps * UNIT_ROUNDOFF["f16"]
    return f32_part + (n_u / (1.0 - n_u) if n_u < 0.5 else 2.0 * n_u)


def gemm_error(out: Any, reference: GemmReference, out_dtype: DType, accumulate: DType = f32) -> GemmError:
    """The error of ``out`` against float64, by element. NaN counts as infinitely far."""
    got = np.asarray(out).astype(np.float64)
    return GemmError(float(largest_error(got, reference, out_dtype, accumulate)) if got.size else 0.0)


def largest_error(got: Any, reference: GemmReference, out_dtype: DType, accumulate: DType) -> Any:
    """The largest |c - c64| over what the types allow at that element, of float64 NumPy arrays or torch tensors."""
    error = abs(got - reference.product)
    error[error != error] = math.inf
    gamma, u = accumulation_bound(reference.depth, accumulate), UNIT_ROUNDOFF[out_dtype.name]
    allowed = u * (1.0 + gamma) * abs(reference.product) + (gamma + u * gamma) * reference.magnitude
    steps = -(-reference.depth // MMA_DEPTH) if accumulate is f16 else int(out_dtype is f16)
    return (error / (allowed + (steps * F16_TINY + float(np.finfo(np.float64).tiny)))).max()
