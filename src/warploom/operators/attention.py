"""``warploom::attention`` as a PyTorch operator: what ``torch.compile`` and ``torch.export`` see of a call.

:func:`warploom.attention` takes this way by itself while a graph is traced, where tensors have no memory to point
at (:mod:`warploom.interop.tracing`). The operators allocate through PyTorch, wait for nothing and work on the
current stream, so compiled code may run in CUDA graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from warploom.kernels.attention.problem import AttentionConfig
from warploom.operators.registration import define
from warploom.ops import attention as eager

if TYPE_CHECKING:
    from warploom.ops.attention_arrays import Layout, Window

_SEQUENCE_AXIS = {"bshd": 1, "bhsd": 2}
_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, bool causal=False, float? scale=None, SymInt? window_left=None, "
    "SymInt? window_right=None, float? softcap=None, str layout='bshd', str? config=None) -> "
)

_ARGUMENTS = ("q", "k", "v", "causal", "scale", "window_left", "window_right", "softcap", "layout", "config")


def _define(name: str, return_lse: bool) -> Any:
    def run(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False, scale: float | None = None,
        window_left: int | None = None, window_right: int | None = None, softcap: float | None = None,
        layout: Any = "bshd", config: str | None = None,
    ) -> Any:  # fmt: skip
        window = None if window_left is None and window_right is None else (window_left, window_right)
        return eager.attention(
            q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, return_lse=return_lse,
            layout=layout, config=config,
        )  # fmt: skip

    def fake(q: torch.Tensor, *others: Any) -> Any:
        out = q.new_empty(q.shape)  # row-major, whatever the strides of q
        if not return_lse:
            return out
        layout = dict(zip(_ARGUMENTS[1:], others, strict=False)).get("layout", "bshd")
        sequence = _SEQUENCE_AXIS.get(layout, 1)
        rows = q.shape[0], q.shape[3 - sequence], q.shape[sequence]
        return out, q.new_empty(rows, dtype=torch.float32)

    return define(name, _SCHEMA + ("(Tensor, Tensor)" if return_lse else "Tensor"), run, fake)


attention_operator = _define("attention", return_lse=False)
"""The output of :func:`warploom.attention`; ``config`` in the notation that ``str(config)`` prints."""

attention_lse_operator = _define("attention_lse", return_lse=True)
"""The output and the log-sum-exp (float32, (batch, heads, q_len)) of :func:`warploom.attention`."""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    layout: Layout = "bshd",
    config: AttentionConfig | str | None = None,
) -> Any:
    """:func:`warploom.attention` inside a traced graph: one call of an operator, no graph break."""
    left, right = (None, None) if window is None else window
    notation = None if config is None else str(config)
    operators: Any = torch.ops.warploom
    chosen = operators.attention_lse if return_lse else operators.attention
    return chosen(q, k, v, causal, scale, left, right, softcap, layout, notation)
