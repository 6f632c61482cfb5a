"""What the reduction kernels must give, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


def row_max_reference(a: Any, b: Any) -> NDArray[np.float64]:
    """max over j of (a · bᵀ)[…, i, j]: a (…, m, k), b (…, n, k) → (…, m)."""
    a64, b64 = (np.asarray(x).astype(np.float64) for x in (a, b))
    return (a64 @ np.swapaxes(b64, -1, -2)).max(axis=-1)


def row_max_tolerance(a: Any, b: Any) -> NDArray[np.float64]:
    """How far a float32 accumulation may be from that: k · 2^-22 of the largest Σ|a·b| of each row."""
    a64, b64 = (np.abs(np.asarray(x).astype(np.float64)) for x in (a, b))
    return a64.shape[-1] * 2.0**-22 * (a64 @ np.swapaxes(b64, -1, -2)).max(axis=-1)


@dataclass(frozen=True)
class SoftmaxState:
    """Running statistics of a softmax over blocks of columns: maxima m and sums l (rows), and weighted values O."""

    maximum: NDArray[np.float64]
    total: NDArray[np.float64]
    output: NDArray[np.float64]


def softmax_reference(q: Any, keys: Any, values: Any, scale: float | None = None) -> SoftmaxState:
    """softmax(scale · q·keysᵀ) · values with its row maxima and sums; scale defaults to 1/√d."""
    q64, k64, v64 = (np.asarray(x).astype(np.float64) for x in (q, keys, values))
    s = q64 @ k64.T * (1.0 / math.sqrt(q64.shape[-1]) if scale is None else scale)
    top = s.max(axis=-1)
    p = np.exp(s - top[:, None])
    total = p.sum(axis=-1)
    return SoftmaxState(top, total, p @ v64 / total[:, None])
