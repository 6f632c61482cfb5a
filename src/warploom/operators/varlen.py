"""``warploom::attention_varlen`` as a PyTorch operator: what ``torch.compile`` and ``torch.export`` see of a call.

The public function takes this way by itself where PyTorch watches (:mod:`warploom.interop.tracing`).
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any, Unpack

import torch

from warploom.interop.arrays import arrays_of, describe_all
from warploom.operators.attention import backward_of, define_both, fake_backward
from warploom.operators.fakes import for_operator, if_sizes_are_known, seen
from warploom.operators.registration import Named, define, differentiated
from warploom.operators.untraced import untraced
from warploom.ops import attention_varlen as eager
from warploom.ops.attention_arrays import Options
from warploom.ops.attention_varlen_backward import attention_varlen_backward
from warploom.ops.options import flag
from warploom.ops.signatures import VarlenOptions
from warploom.ops.varlen_arrays import NAMES, check_lengths, checked_packed

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


varlen_operator, varlen_lse_operator = define_both(
    "attention_varlen", _SCHEMA, eager.attention_varlen, _fake, backward_operator
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
    """:func:`warploom.attention_varlen` inside a traced graph: one call of an operator, no graph break.

    With ``out`` or ``check`` there is one: the operator changes nothing and waits for nothing. ``deterministic`` asks
    for gradients with equal bits from run to run.
    """
    tensors = q, k, v, cu_seqlens_q, cu_seqlens_k
    if options.get("out") is not None or options.get("check", False) is not False:
        return _checked(*tensors, return_lse=return_lse, deterministic=deterministic, **options)
    for name in ("out", "check", "max_seqlen_q", "max_seqlen_k"):
        options.pop(name, None)
    given = for_operator(**options, deterministic=deterministic)
    operators: Any = torch.ops.warploom
    if not (return_lse or differentiated(q, k, v, options.get("sinks"))):
        return operators.attention_varlen(*tensors, **given)
    found = operators.attention_varlen_lse(*tensors, **given)  # the backward pass needs the log-sum-exps
    return found if return_lse else found[0]


def _look_first(*tensors: Any, deterministic: bool, check: Any = False, out: Any = None, **options: Any) -> Any:
    """:func:`attention_varlen` with ``check`` or ``out``, where no graph is traced."""
    if out is not None:
        return unwrap(eager.attention_varlen)(*tensors, check=check, out=out, **options)
    if flag("check", check):
        q, k, _, starts, k_starts = tensors
        used = {name: options.get(public) for name, public in (("q_used", "seqused_q"), ("k_used", "seqused_k"))}
        with torch.no_grad():  # a gradient that is wanted is no hindrance
            check_lengths(
                describe_all(arrays_of({"q": q, "k": k, "q_starts": starts}, k_starts=k_starts, **used), NAMES)
            )
    return attention_varlen(*tensors, deterministic=deterministic, **options)


_checked = untraced(
    _look_first,
    "warploom.attention_varlen takes no out or check under torch.compile: leave them away, or compile without "
    "fullgraph=True",
)
