"""Whether attention is right beside float64: by one rule where soft caps or extremes are, and by one elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np

from warploom.core.dtypes import DType, dtype_of
from warploom.kernels.attention.reference import UNIT_ROUNDOFF, AttentionReference, attention_error, attention_reference
from warploom.kernels.attention.scores import Window, seen_of

TINY = {"f16": 2.0**-25, "bf16": 0.0}
"""What rounding to a number below the type's normal ones may lose."""


def near(out: Any, exact: AttentionReference, dtype: DType) -> Any:
    """Which elements are near enough where exponentials and soft caps are approximate; NaN is not."""
    unit = UNIT_ROUNDOFF[dtype.name]
    allowed = unit * (abs(exact.output) + exact.magnitude) + 2.0**-16 * exact.magnitude + TINY[dtype.name]
    return abs(out - exact.output) <= allowed


def is_right(out: Any, q: Any, k: Any, v: Any, window: Window = (None, None), sinks: Any = None) -> bool:
    """Whether every element is within its bound; all (…, sequence, heads, head_dim), 16 bits."""
    dtype = dtype_of(q.dtype)
    q, k, v, out = (np.swapaxes(np.asarray(x), -2, -3) for x in (q, k, v, out))
    seen = seen_of(q.shape[-2], k.shape[-2], window)
    return attention_error(out, attention_reference(q, k, v, dtype, seen=seen, sinks=sinks), dtype).ok
