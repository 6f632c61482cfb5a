"""The gradients of attention in float64, and how far a 16-bit kernel may be from them, element by element.

A kernel rounds P and dS to the type before it multiplies by them, and each gradient in the end; everything else is
float32. So an element of dV may be off by u·(|dV| + Σ P·|dO|), one of dK by u·(|dK| + Σ |dS|·|Q|), and float32's slack.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from warploom.core.dtypes import DType
from warploom.kernels.attention.reference import F32_SLACK, UNIT_ROUNDOFF, as_double, namespace_of

SCORE_SLACK = 2.0**-22
"""Relative slack of a score and of a log-sum-exp: what they are off by is a relative error of P."""
SMALLEST = {"bf16": 2.0**-133, "f16": 2.0**-24}
"""The distance of the smallest numbers, of which half may be lost by any rounding."""


@dataclass(frozen=True)
class Gradient:
    """One gradient in float64, and how far each element may be off."""

    value: Any
    allowed: Any

    def excess(self, found: Any) -> float:
        """The largest error over what is allowed; at most 1 is right. NaN counts as infinitely far."""
        xp, error = namespace_of(self.value), abs(as_double(found) - self.value)
        over = xp.where(error == 0.0, error, error / self.allowed)
        return float(xp.nan_to_num(over, nan=math.inf, posinf=math.inf).max())


@dataclass(frozen=True)
class GradientReference:
    """dQ, dK and dV of (…, heads, length, head_dim), heads that share keys summed; of sinks (heads,)."""

    dq: Gradient
    dk: Gradient
    dv: Gradient
    dsinks: Gradient | None = None

    def excess(self, dq: Any, dk: Any, dv: Any, dsinks: Any = None) -> dict[str, float]:
        """:meth:`Gradient.excess` of each."""
        found = {"dq": self.dq.excess(dq), "dk": self.dk.excess(dk), "dv": self.dv.excess(dv)}
        return found if self.dsinks is None else {**found, "dsinks": self.dsinks.excess(dsinks)}


def gradient_reference(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    *,
    dtype: DType,
    scale: float | None = None,
    seen: Any = None,
    softcap: float | None = None,
    dlse: Any = None,
    sinks: Any = None,
    rows: int | None = None,
) -> GradientReference:
    """The gradients of softmax(scale · Q·Kᵀ)·V for ``dout``; arrays of NumPy or tensors of PyTorch, wherever they lie.

    They are (…, heads, length, head_dim); k and v may have fewer heads. ``out`` is the result as it was rounded, which
    a kernel forms delta from. ``seen`` (q_len, kv_len) says which scores count; ``dlse`` (…, heads, q_len) is the
    gradient of the log-sum-exp; ``sinks`` (heads,) are in the sums of exponentials. ``rows`` queries are taken at a
    time, by default all: memory grows with rows · kv_len.
    """
    kv_heads, q_len, found = k.shape[-3], q.shape[-2], list[_Part]()

    def grouped(x: Any) -> Any:  # (…, key heads, heads that share one, length, head_dim)
        return as_double(x).reshape(*x.shape[:-3], kv_heads, -1, *x.shape[-2:])

    k64, v64 = grouped(k), grouped(v)
    sink = None if sinks is None else as_double(sinks).reshape(kv_heads, -1, 1, 1)
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    unit, tiny = UNIT_ROUNDOFF[dtype.name], SMALLEST[dtype.name] / 2
    rows = rows or max(1, q_len)
    for first in range(0, max(1, q_len), rows):
        block = slice(first, first + rows)
        do64, q64, o64 = (grouped(x[..., block, :]) for x in (dout, q, out))
        own = seen if seen is None else seen[..., block, :]
        change = 0.0 if dlse is None else grouped(dlse[..., block, None])
        score = _probabilities(q64, k64, factor, own, softcap, sink)
        found.append(_part((do64, q64, o64, k64, v64), score, factor, change, (unit, tiny)))

    def gradient(parts: Iterable[Any], like: Any) -> Gradient:
        value, off = (x.reshape(like.shape) for x in parts)
        return Gradient(value, off + unit * (abs(value) + off) + tiny)

    whole = (namespace_of(q).concatenate([part.dq[i] for part in found], axis=-2) for i in range(2))
    of_k, of_v = (
        [sum(part[i] for part in parts) for i in range(2)] for parts in ([p.dk for p in found], [p.dv for p in found])
    )
    three = gradient(whole, q), gradient(of_k, k), gradient(of_v, v)
    if sinks is None:
        return GradientReference(*three)
    of_sinks: Any = (sum(p.dsinks[i].reshape(-1, *sinks.shape).sum(0) for p in found) for i in range(2))
    return GradientReference(*three, Gradient(*of_sinks))


@dataclass(frozen=True)
class _Part:
    """What a block of queries gives to each gradient: the value, and what it may be off by before it is rounded."""

    dq: tuple[Any, Any]
    dk: tuple[Any, Any]
    dv: tuple[Any, Any]
    dsinks: tuple[Any, Any]


def _part(
    given: tuple[Any, ...], score: tuple[Any, ...], factor: float, change: Any, precision: tuple[float, float]
) -> _Part:
    (do64, q64, o64, k64, v64), (p, slope, sizes, of_sink, sink_size), (unit, tiny) = given, score, precision
    slack, size = F32_SLACK + SCORE_SLACK * sizes, abs(factor)
    delta = (do64 * o64).sum(-1)[..., None] - change
    delta_size = abs(do64 * o64).sum(-1)[..., None] + abs(change)
    dp, dp_size = do64 @ _turned(v64), abs(do64) @ _turned(abs(v64))
    ds = p * (dp - delta) * slope
    ds_off = unit * abs(ds) + tiny + slack * p * (dp_size + delta_size)
    return _Part(
        (factor * ds @ k64, size * ds_off @ abs(k64)),
        ((factor * _turned(ds) @ q64).sum(-3), (size * _turned(ds_off) @ abs(q64)).sum(-3)),
        ((_turned(p) @ do64).sum(-3), (_turned((unit + slack) * p + tiny) @ abs(do64)).sum(-3)),
        (
            -(of_sink * delta).sum(-2),
            ((F32_SLACK + SCORE_SLACK * sink_size) * of_sink * delta_size + 2.0**-126).sum(-2),
        ),
    )


def _probabilities(
    q: Any, k: Any, factor: float, seen: Any, softcap: float | None, sink: Any
) -> tuple[Any, Any, Any, Any, Any]:
    """P, the slope of the soft cap, and the size of what each score and its log-sum-exp are sums of.

    Then the sink's P, and the size of it and the log-sum-exp.
    """
    xp = namespace_of(q)
    scores, slope = factor * (q @ _turned(k)), 1.0
    if softcap is not None:
        tanh = xp.tanh(scores / softcap)
        scores, slope = softcap * tanh, 1.0 - tanh * tanh
    if seen is not None:
        scores = xp.where(seen, scores, -math.inf)
    top = xp.amax(scores, axis=-1, keepdims=True)
    if sink is not None:
        top = xp.maximum(top, sink)
    top = xp.where(top == -math.inf, 0.0, top)
    weights = xp.exp(scores - top)
    own = xp.zeros_like(top) if sink is None else xp.exp(sink - top)
    total = weights.sum(-1)[..., None] + own
    total = xp.where(total == 0.0, 1.0, total)
    logs = abs(top + xp.log(total))
    sizes = abs(factor) * (abs(q) @ _turned(abs(k))) + logs
    return (
        weights / total,
        slope,
        sizes,
        own / total,
        logs if sink is None else logs + abs(xp.where(own == 0.0, 0.0, sink)),
    )


def _turned(x: Any) -> Any:
    return x.swapaxes(-1, -2)
