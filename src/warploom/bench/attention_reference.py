"""Attention in float64 on the GPU, block by block, so that long sequences fit its memory."""

from __future__ import annotations

from itertools import product
from typing import Any

from warploom.bench.baselines import torch_module
from warploom.core.dtypes import DType
from warploom.kernels.attention.problem import AttentionProblem
from warploom.kernels.attention.reference import ErrorReport, attention_reference, largest_errors, seen_of

_BLOCK_ELEMENTS = 1 << 27  # of a block of scores: 1 GiB in float64


def torch_error(out: Any, q: Any, k: Any, v: Any, dtype: DType, problem: AttentionProblem | None = None) -> ErrorReport:
    """How far ``out`` is from float64 attention of q, k, v, all torch tensors (batch, seq, heads, head_dim).

    ``problem``: its window, soft cap and scale; without one, every query sees every key. The same bounds, element by
    element, as :func:`warploom.kernels.attention.reference.attention_error`.
    """
    torch = torch_module() if out.is_cuda else __import__("torch")
    worst = (torch.zeros((), dtype=torch.float64, device=out.device),) * 3
    batch, q_len, heads, _ = q.shape
    kv_len, window = k.shape[1], (None, None) if problem is None else problem.window
    how = {} if problem is None else {"scale": problem.scale, "softcap": problem.softcap}
    block, group = max(1, min(q_len, _BLOCK_ELEMENTS // kv_len)), heads // k.shape[2]
    for b, h, start in product(range(batch), range(heads), range(0, q_len, block)):
        rows = slice(start, start + block)
        seen = seen_of(q_len, kv_len, window, rows=rows, device=q.device)
        given = q[b, rows, h], k[b, :, h // group], v[b, :, h // group]
        found = largest_errors(out[b, rows, h], attention_reference(*given, dtype, seen=seen, **how), dtype)
        worst = tuple(map(torch.maximum, worst, found))
    return ErrorReport.of(*map(float, worst))
