"""Attention in float64, and how far a 16-bit kernel may be from it, element by element."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.core.dtypes import DType
from warploom.kernels.attention.scores import OPTIONS

UNIT_ROUNDOFF = {"bf16": 2.0**-8, "f16": 2.0**-11}
"""Half the distance of neighbouring numbers around 1: the relative error of one rounding."""

F32_SLACK = 2.0**-18
"""Relative slack for float32 accumulation and the approximate exponential, against Σ p·|v|."""

_NOTHING = 1e-300
"""Allowed where nothing but 0 is right."""


@dataclass(frozen=True)
class AttentionReference:
    """float64 results, NumPy's or PyTorch's as the inputs: O (…, q_len, d), and what belongs to each element or row.

    ``magnitude`` is Σ p·|v|, ``rounded_p`` O with P rounded to the type, ``lse`` (…, q_len) the log-sum-exps.
    """

    output: Any
    magnitude: Any
    rounded_p: Any
    lse: Any


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

    @classmethod
    def of(cls, value: float, error: float, rounding: float) -> ErrorReport:
        """The report of what :func:`largest_errors` gives."""
        return cls(value, 1.0, error / max(rounding, _NOTHING))

    @property
    def ok(self) -> bool:
        """Whether every element is within its bound, and none is off more than twice the rounded reference's worst."""
        return self.value <= self.bound and self.against_rounded <= 2.0


def attention_reference(
    q: Any,
    k: Any,
    v: Any,
    dtype: DType,
    scale: float | None = None,
    seen: Any = None,
    **options: Any,
) -> AttentionReference:
    """softmax(scale · Q·Kᵀ)·V in float64; q (…, q_len, d), k and v (…, kv_len, d), scale 1/√d by default.

    Arrays of NumPy or tensors of PyTorch; k and v may have fewer heads, of which each is that of so many of q.
    ``seen`` (q_len, kv_len) says which scores count; by default all do. A row without any gives zeros.
    Other ``options`` as of attention by their names; arrays of them are (…,), a number for each q_len × kv_len scores.
    """
    q, k, v = map(as_double, (q, k, v))
    xp = namespace_of(q)
    k, v = (_of_each_head(x, q) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    asked = [(OPTIONS[name], options[name]) for name in OPTIONS if options.get(name) is not None]
    given = [(kind, as_double(value)[..., None, None] if kind.array else value) for kind, value in asked]
    for kind, value in given:
        s = kind.float64(s, value)
    if seen is not None:
        s = xp.where(seen, s, -math.inf)
    sink = xp.full_like(q[..., :1], -math.inf)
    for value in (value for kind, value in given if kind.joins):
        sink = xp.broadcast_to(value, sink.shape)
    s = xp.concatenate([s, sink], -1)
    top = xp.amax(s, axis=-1, keepdims=True)
    top = xp.where(xp.isfinite(top), top, 0.0)
    weights = xp.exp(s - top)
    total = weights.sum(-1)[..., None]
    with np.errstate(divide="ignore"):
        lse = (xp.log(total) + top)[..., 0]
    # Normalised first: relative to the row's maximum the largest weight is 1, which would lose nothing by rounding.
    p = (weights / xp.where(total == 0.0, 1.0, total))[..., :-1]
    return AttentionReference(p @ v, p @ abs(v), _rounded(p, dtype) @ v, lse)


def attention_error(out: Any, reference: AttentionReference, dtype: DType) -> ErrorReport:
    """The error of ``out`` (shaped like the reference) against float64, by element. NaN counts as infinitely far."""
    return ErrorReport.of(*(float(x) for x in largest_errors(out, reference, dtype)))


def largest_errors(out: Any, reference: AttentionReference, dtype: DType) -> tuple[Any, Any, Any]:
    """(The largest error over what is allowed, the largest error, the largest of rounding P and O alone)."""
    xp, exact = namespace_of(reference.output), reference.output
    error = abs(as_double(out) - exact)
    error = xp.where(xp.isnan(error), math.inf, error)
    allowed = UNIT_ROUNDOFF[dtype.name] * (abs(exact) + reference.magnitude) + F32_SLACK * reference.magnitude
    over = error / xp.where(allowed > 0.0, allowed, _NOTHING)  # nothing but 0 is right: rows that see no key
    return over.max(), error.max(), abs(_rounded(reference.rounded_p, dtype) - exact).max()


def namespace_of(x: Any) -> Any:
    """NumPy, or PyTorch: what is called here has one name and form in both."""
    return np if isinstance(x, np.ndarray) else sys.modules["torch"]


def as_double(x: Any) -> Any:
    """An array in float64."""
    return x.double() if hasattr(x, "double") else np.asarray(x).astype(np.float64)


def _of_each_head(x: Any, q: Any) -> Any:
    """Keys or values (…, heads, length, head_dim), each head as often as query heads share it."""
    if x.ndim < 3 or x.shape[-3] == q.shape[-3]:
        return x
    *lead, heads, length, width = x.shape
    shape = *lead, heads, q.shape[-3] // heads, length, width
    return namespace_of(x).broadcast_to(x[..., None, :, :], shape).reshape(*lead, q.shape[-3], length, width)


def _rounded(x: Any, dtype: DType) -> Any:
    if isinstance(x, np.ndarray):
        return x.astype(dtype.numpy).astype(np.float64)
    return x.to(getattr(sys.modules["torch"], {"bf16": "bfloat16", "f16": "float16"}[dtype.name])).double()
