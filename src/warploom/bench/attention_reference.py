"""Attention in float64 on the GPU, block by block, so that long sequences fit its memory."""

from __future__ import annotations

import math
from typing import Any

from warploom.bench.peers import torch_module
from warploom.core.dtypes import DType
from warploom.kernels.attention.problem import AttentionProblem
from warploom.kernels.attention.reference import ErrorReport, largest_errors, reported

_BLOCK_ELEMENTS = 1 << 27  # of a block of scores: 1 GiB in float64


def torch_error(out: Any, q: Any, k: Any, v: Any, dtype: DType, problem: AttentionProblem | None = None) -> ErrorReport:
    """How far ``out`` is from float64 attention of q, k, v, all torch tensors (batch, seq, heads, head_dim).

    ``problem``: its window, soft cap and scale; without one, every query sees every key. The same bounds, element by
    element, as :func:`warploom.kernels.attention.reference.attention_error`.
    """
    torch = torch_module() if out.is_cuda else __import__("torch")
    worst = largest = rounding = torch.zeros((), dtype=torch.float64, device=out.device)
    batch, q_len, heads, _ = q.shape
    rows, group = max(1, min(q_len, _BLOCK_ELEMENTS // k.shape[1])), heads // k.shape[2]
    for b in range(batch):
        for h in range(heads):
            keys, values = k[b, :, h // group].double(), v[b, :, h // group].double()
            for start in range(0, q_len, rows):
                part = slice(start, start + rows)
                scores = _scores(torch, q[b, part, h].double(), keys, start + k.shape[1] - q_len, problem)
                found = _block(torch, out[b, part, h].double(), scores, values, dtype, out.dtype)
                worst, largest, rounding = (
                    torch.maximum(x, y) for x, y in zip((worst, largest, rounding), found, strict=True)
                )
    return reported(worst, largest, rounding)


def _scores(torch: Any, q: Any, k: Any, diagonal: int, problem: AttentionProblem | None) -> Any:
    """Scaled, capped, and -inf where a query does not see a key; ``diagonal`` is the first query's own key."""
    scale = None if problem is None else problem.scale
    scores = q @ k.T * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if problem is None:
        return scores
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    row, key = (torch.arange(n, device=q.device) for n in scores.shape)
    distance = key[None] - row[:, None] - diagonal
    left, right = problem.window
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    return scores.masked_fill_(hidden, -math.inf)


def _block(torch: Any, got: Any, scores: Any, v: Any, dtype: DType, kind: Any) -> tuple[Any, Any, Any]:
    """(largest error over what is allowed, largest error, largest error of rounding P and O) of some query rows."""
    weights = torch.nan_to_num_(torch.softmax(scores, -1), nan=0.0)  # of a row that sees no key
    expected, magnitude = weights @ v, weights @ v.abs()
    rounded = (weights.to(kind).double() @ v).to(kind).double()
    return largest_errors(got, expected, magnitude, rounded, dtype)
