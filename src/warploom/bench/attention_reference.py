"""Attention in float64 on the GPU, block by block, so that long sequences fit its memory."""

from __future__ import annotations

import math
from typing import Any

from warploom.bench.peers import torch_module
from warploom.core.dtypes import DType
from warploom.kernels.attention.reference import F32_SLACK, UNIT_ROUNDOFF, ErrorReport

_BLOCK_ELEMENTS = 1 << 27  # of a block of scores: 1 GiB in float64


def torch_error(out: Any, q: Any, k: Any, v: Any, dtype: DType) -> ErrorReport:
    """How far ``out`` is from float64 attention of q, k, v, all torch tensors (batch, seq, heads, head_dim).

    The same bounds, element by element, as :func:`warploom.kernels.attention.reference.attention_error`.
    """
    torch = torch_module() if out.is_cuda else __import__("torch")
    worst = largest = rounding = torch.zeros((), dtype=torch.float64, device=out.device)
    batch, q_len, heads, head_dim = q.shape
    rows = max(1, min(q_len, _BLOCK_ELEMENTS // k.shape[1]))
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, :, h].double(), v[b, :, h].double()
            for start in range(0, q_len, rows):
                part = slice(start, start + rows)
                got = out[b, part, h].double()
                found = _block(torch, got, q[b, part, h].double() / math.sqrt(head_dim), keys, values, dtype, out.dtype)
                worst, largest, rounding = (
                    torch.maximum(x, y) for x, y in zip((worst, largest, rounding), found, strict=True)
                )
    return ErrorReport(float(worst), 1.0, float(largest) / max(float(rounding), 1e-300))


def _block(torch: Any, got: Any, q: Any, k: Any, v: Any, dtype: DType, kind: Any) -> tuple[Any, Any, Any]:
    """(largest error over what is allowed, largest error, largest error of rounding P and O) of some query rows."""
    scores = q @ k.T
    weights = torch.exp_(scores.sub_(scores.amax(-1, keepdim=True)))
    total = weights.sum(-1, keepdim=True)
    expected, magnitude = weights @ v / total, weights @ v.abs() / total
    rounded = ((weights / total).to(kind).double() @ v).to(kind).double()
    error = torch.nan_to_num((got - expected).abs(), nan=math.inf)
    allowed = UNIT_ROUNDOFF[dtype.name] * (expected.abs() + magnitude) + F32_SLACK * magnitude
    return (error / allowed).max(), error.max(), (rounded - expected).abs().max()
