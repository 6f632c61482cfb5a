"""Attention in float64, and how far a 16-bit kernel may be from it, element by element."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.dtypes import DType

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "f16": 2.0**-11}
"""Half the distance of neighbouring numbers around 1: the relative error of one rounding."""

F32_SLACK = 2.0**-18
"""Relative slack for float32 accumulation and the approximate exponential, against Σ p·|v|."""
_TINY = 1e-300  # allowed where nothing but 0 is right: rows that see no key


@dataclass(frozen=True)
class AttentionReference:
    """float64 results for inputs of shape (heads, length, head_dim): O, Σ p·|v| per element, and O with P rounded."""

    output: NDArray[np.float64]
    magnitude: NDArray[np.float64]
    rounded_p: NDArray[np.float64]


@dataclass(frozen=True)
class ErrorReport:
    """``value`` is the largest |o - o64| over what the type allows per element; at most ``bound`` is right.

    ``against_rounded`` is the largest error over the largest error of a float64 computation that rounds P and O to the
    type as the kernel does.
    """

    value: float
    bound: float
    against_rounded: float
    metric: str = "max |o - o64| / (u·(|o64| + Σp|v|) + f32 slack)"

    @property
    def ok(self) -> bool:
        """Whether every element is within its bound, and none is off more than twice the rounded reference's worst."""
        return self.value <= self.bound and self.against_rounded <= 2.0


def attention_reference(
    q: Any, k: Any, v: Any, dtype: DType, scale: float | None = None, seen: Any = None, sinks: Any = None
) -> AttentionReference:
    """softmax(scale · Q·Kᵀ)·V in float64; q (…, q_len, d), k and v (…, kv_len, d), scale 1/√d by default.

    ``seen`` (q_len, kv_len) says which scores count; by default all do. A row without any gives zeros.
    ``sinks`` (…,), one for each q_len × kv_len scores, join the sums of exponentials.
    """
    q64, k64, v64 = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    s = q64 @ np.swapaxes(k64, -1, -2) * (1.0 / math.sqrt(q64.shape[-1]) if scale is None else scale)
    if seen is not None:
        s = np.where(seen, s, -np.inf)
    sink = np.float64(-np.inf) if sinks is None else np.asarray(sinks).astype(np.float64)[..., None, None]
    top = np.maximum(s.max(-1, keepdims=True), sink)
    top = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(s - top)
    total = weights.sum(-1, keepdims=True) + np.exp(sink - top)
    total = np.where(total == 0.0, 1.0, total)
    # Normalised first: relative to the row's maximum the largest weight is 1, which would lose nothing by rounding.
    rounded = (weights / total).astype(dtype.numpy).astype(np.float64)
    return AttentionReference(
        output=weights @ v64 / total, magnitude=weights @ np.abs(v64) / total, rounded_p=rounded @ v64
    )


def attention_error(out: Any, reference: AttentionReference, dtype: DType) -> ErrorReport:
    """How far ``out`` (shaped like the reference) is from float64, by element. NaN counts as infinitely far."""
    got = np.asarray(out).astype(np.float64)
    rounded = reference.rounded_p.astype(dtype.numpy).astype(np.float64)
    return reported(*largest_errors(got, reference.output, reference.magnitude, rounded, dtype))


def largest_errors(got: Any, expected: Any, magnitude: Any, rounded: Any, dtype: DType) -> tuple[Any, Any, Any]:
    """(largest error over what is allowed, largest error, that of ``rounded``, which has P and O rounded to the type).

    Of float64 arrays of NumPy, or of torch.
    """
    error = abs(got - expected)
    error[error != error] = math.inf
    allowed = UNIT_ROUNDOFF[dtype.name] * (abs(expected) + magnitude) + F32_SLACK * magnitude
    return (error / (allowed + _TINY)).max(), error.max(), abs(rounded - expected).max()


def reported(worst: Any, largest: Any, rounding: Any) -> ErrorReport:
    """What :func:`largest_errors` found, of all parts of a result."""
    return ErrorReport(float(worst), 1.0, float(largest) / max(float(rounding), _TINY))
