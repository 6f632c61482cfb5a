"""``warploom::attention_varlen`` as a PyTorch operator: what ``torch.compile`` and ``torch.export`` see of a call.

The public function takes this way by itself where PyTorch watches (:mod:`warploom.interop.tracing`).
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any, Unpack

import torch

from warploom.operators.attention import backward_of, fake_backward, gradients
from warploom.operators.fakes import for_operator, if_sizes_are_known, options_of, seen
from warploom.operators.registration import Derivative, define, differentiated
from warploom.operators.untraced import attention_varlen as untraced
from warploom.ops import attention_varlen as eager
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
    "k": "k", "v": "v", "cu_seqlens_q": "q_starts", "cu_seqlens_k": "k_starts", "seqused_q": "q_used",
    "seqused_k": "k_used", "sinks": "sinks",
}  # fmt: skip
"""What the kernels call an operator's arrays."""


def _define(name: str, return_lse: bool, derivative: Derivative | None = None) -> Any:
    compute = unwrap(eager.attention_varlen)  # PyTorch does not watch what a kernel of its own does

    def run(deterministic: bool = False, **given: Any) -> Any:  # of its gradients alone
        return compute(return_lse=return_lse, **given)

    def fake(q: torch.Tensor, config: str | None, **given: Any) -> Any:
        options = options_of(given, return_lse)
        views = {"q": seen(q)} | {kernels: seen(given[n]) for n, kernels in _ARRAYS.items() if given[n] is not None}
        problem = if_sizes_are_known(lambda: checked_packed(views, options))
        if config is not None and problem is not None:
            eager.refuse_packed(eager.read_packed_config(config), problem)
        out = q.new_empty((*q.shape[:2], given["v"].shape[2]))
        return (out, q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)) if return_lse else out

    return define(name, _SCHEMA + ("(Tensor, Tensor)" if return_lse else "Tensor"), run, fake, derivative)


varlen_operator = _define("attention_varlen", return_lse=False)
"""The output of :func:`warploom.attention_varlen`; ``config`` in the notation that ``str(config)`` prints."""

varlen_lse_operator = _define(
    "attention_varlen_lse",
    return_lse=True,
    derivative=Derivative(frozenset({*"qkv", "sinks"}), gradients(backward_operator)),
)
"""The output and the log-sum-exps (float32, (heads, total_q)) of :func:`warploom.attention_varlen`."""


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
    """:func:`warploom.attention_varlen` inside a traced graph: one call of an operator, no graph break.

    With ``out`` or ``check`` there is one: the operator changes nothing and waits for nothing. ``deterministic`` asks
    for gradients with equal bits from run to run.
    """
    tensors = q, k, v, cu_seqlens_q, cu_seqlens_k
    if options.get("out") is not None or options.get("check"):
        return untraced(*tensors, return_lse=return_lse, **options)
    for name in ("out", "check", "max_seqlen_q", "max_seqlen_k"):
        options.pop(name, None)
    given = for_operator(**options, deterministic=deterministic)
    operators: Any = torch.ops.warploom
    if not (return_lse or differentiated(q, k, v, options.get("sinks"))):
        return operators.attention_varlen(*tensors, **given)
    found = operators.attention_varlen_lse(*tensors, **given)  # the backward pass needs the log-sum-exps
    return found if return_lse else found[0]
