"""``warploom::attention_varlen`` as a PyTorch operator: what ``torch.compile`` and ``torch.export`` see of a call.

The public function takes this way by itself where PyTorch watches (:mod:`warploom.interop.tracing`).
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any, Unpack

import torch

from warploom.operators.attention import DifferentiableAttention, backward_of, define_both, fake_backward
from warploom.operators.eager import runs_eagerly
from warploom.operators.fakes import if_sizes_are_known, seen
from warploom.operators.registration import Named, define
from warploom.operators.untraced import untraced
from warploom.ops import attention_varlen as eager
from warploom.ops.attention_arrays import Options
from warploom.ops.attention_varlen_backward import attention_varlen_backward
from warploom.ops.signatures import VarlenOptions
from warploom.ops.varlen_arrays import checked_packed

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, bool causal=False, float? scale=None, SymInt? window_left=None, "
    "SymInt? window_right=None, float? softcap=None, str? config=None, Tensor? scale_tensor=None, "
    "Tensor? softcap_tensor=None, Tensor? sinks=None, bool deterministic=False) -> "
)


_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens_q, "
    "Tensor? cu_seqlens_k=None, Tensor? dlse=None, Tensor? sinks=None, Tensor? seqused_q=None, "
    "Tensor? seqused_k=None, bool causal=False, float? scale=None, SymInt? window_left=None, "
    "SymInt? window_right=None, float? softcap=None, Tensor? scale_tensor=None, Tensor? softcap_tensor=None, "
    "bool deterministic=False) -> (Tensor, Tensor, Tensor, Tensor)"
)


backward_operator = define(
    "attention_varlen_backward", _BACKWARD, backward_of(attention_varlen_backward), fake_backward, of_gradients=True
)
"""The gradients by q, k, v and sinks; the last is empty without sinks."""

_ARRAYS = {
    "q": "q",
    "k": "k",
    "v": "v",
    "cu_seqlens_q": "q_starts",
    "cu_seqlens_k": "k_starts",
    "seqused_q": "q_used",
    "seqused_k": "k_used",
    "sinks": "sinks",
}
"""What the kernels call an operator's arrays."""


def _fake(given: Named, options: Options) -> Any:
    q, config = given["q"], given["config"]
    views = {kernels: seen(given[name]) for name, kernels in _ARRAYS.items() if given[name] is not None}
    problem = if_sizes_are_known(lambda: checked_packed(views, options))
    if config is not None and problem is not None:
        eager.refuse_packed(config, problem)
    out = q.new_empty((*q.shape[:2], given["v"].shape[2]))
    return out, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


_varlen = DifferentiableAttention(
    "attention_varlen", eager.attention_varlen, attention_varlen_backward, backward_operator
)
varlen_operator, varlen_lse_operator = define_both(
    "attention_varlen", _SCHEMA, eager.attention_varlen, _fake, _varlen.derivative
)
"""The output of :func:`warploom.attention_varlen`, and with the log-sum-exps (float32, (heads, total_q))."""


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    return_lse: bool = False,
    deterministic: bool = False,
    **options: Unpack[VarlenOptions],
) -> Any:
    """:func:`warploom.attention_varlen` where PyTorch keeps a history, or inside a traced graph: one node.

    With ``out`` or ``check`` a graph breaks: the operator changes nothing and waits for nothing. ``deterministic`` asks
    for gradients with equal bits from run to run.
    """
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    tensors |= {name: options.pop(name, None) for name in ("seqused_q", "seqused_k", "sinks")}
    for name in ("max_seqlen_q", "max_seqlen_k"):
        options.pop(name, None)
    if options.get("out") is None and options.get("check", False) is False:
        for name in ("out", "check"):
            options.pop(name, None)
    elif not runs_eagerly(q):
        return _checked(return_lse=return_lse, deterministic=deterministic, **tensors, **options)
    elif options.get("out") is not None:  # has no history
        return unwrap(eager.attention_varlen)(return_lse=return_lse, **tensors, **options)
    return _varlen(tensors, return_lse, {**options, "deterministic": deterministic})


_checked = untraced(
    attention_varlen,
    "warploom.attention_varlen takes no out or check under torch.compile: leave them away, or compile without "
    "fullgraph=True",
)
