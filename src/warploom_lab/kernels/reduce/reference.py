"""What the reduction kernels must give, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def row_max_reference(a: Any, b: Any) -> NDArray[np.float64]:
    """max over j of (a · bᵀ)[…, i, j]: a (…, m, k), b (…, n, k) → (…, m)."""
    a64, b64 = (np.asarray(x).astype(np.float64) for x in (a, b))
    return (a64 @ np.swapaxes(b64, -1, -2)).max(axis=-1)


def row_max_tolerance(a: Any, b: Any) -> NDArray[np.float64]:
    """The bound of a float32 accumulation's error: k · 2^-22 of the largest Σ|a·b| of each row."""
    a64, b64 = (np.abs(np.asarray(x).astype(np.float64)) for x in (a, b))
    return a64.shape[-1] * 2.0**-22 * (a64 @ np.swapaxes(b64, -1, -2)).max(axis=-1)
