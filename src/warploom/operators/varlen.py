"""``warploom::attention_varlen`` as a PyTorch operator: what ``torch.compile`` and ``torch.export`` see of a call.

The public function takes this way by itself where PyTorch watches (:mod:`warploom.interop.tracing`).
"""

from __future__ import annotations

from typing import Any

import torch

from warploom.kernels.attention.packed import PackedConfig
from warploom.operators.attention import backward_of, fake_backward, gradients_by_name
from warploom.operators.fakes import if_sizes_are_known, known, seen
from warploom.operators.registration import Derivative, Named, define, differentiated, pair
from warploom.operators.untraced import attention_varlen as untraced
from warploom.ops import attention_varlen as eager
from warploom.ops.attention_arrays import Options, Window
from warploom.ops.attention_varlen_backward import attention_varlen_backward
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

_LENGTHS = "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"
_OTHERS = "scale_tensor", "softcap_tensor", "sinks"


def _saved(given: Named, results: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    return given["q"], given["k"], given["v"], *results, *(given[name] for name in (*_LENGTHS, *_OTHERS))


def _backward(
    saved: tuple[Any, ...], others: Named, gradients: tuple[torch.Tensor | None, ...], _wanted: frozenset[str]
) -> Named:
    (q, k, v, out, lse, q_starts, k_starts, q_used, k_used, scale, softcap, sinks), (dout, dlse) = saved, gradients
    if dout is None and dlse is None:
        return {}
    found = backward_operator(
        torch.zeros_like(out) if dout is None else dout, q, k, v, out, lse, q_starts, k_starts, dlse, sinks, q_used,
        k_used, others["causal"], others.get("scale"), others["window_left"], others["window_right"],
        others.get("softcap"), scale, softcap, others["deterministic"],
    )  # fmt: skip
    return gradients_by_name(found, sinks)


_ARRAYS = {
    "k": "k", "v": "v", "cu_seqlens_q": "q_starts", "cu_seqlens_k": "k_starts", "seqused_q": "q_used",
    "seqused_k": "k_used", "sinks": "sinks",
}  # fmt: skip
"""What the kernels call an operator's arrays."""


def _define(name: str, return_lse: bool, derivative: Derivative | None = None) -> Any:
    def run(deterministic: bool = False, **given: Any) -> Any:  # of its gradients alone
        return eager.attention_varlen(return_lse=return_lse, **given)

    def fake(q: torch.Tensor, config: str | None, **given: Any) -> Any:
        window = pair(given["window_left"], given["window_right"])
        options = Options(given["causal"], given["scale"], window, given["softcap"], return_lse)
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
    derivative=Derivative(frozenset({*"qkv", "sinks"}), _saved, _backward),
)
"""The output and the log-sum-exps (float32, (heads, total_q)) of :func:`warploom.attention_varlen`."""


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None = None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    check: bool = False,
    config: PackedConfig | str | None = None,
    deterministic: bool = False,
) -> Any:
    """:func:`warploom.attention_varlen` inside a traced graph: one call of an operator, no graph break.

    With ``out`` or ``check`` there is one: the operator changes nothing and waits for nothing. ``deterministic`` asks
    for gradients with equal bits from run to run.
    """
    if out is not None or check:
        return untraced(
            q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k, causal=causal,
            window=window, softcap=softcap, scale=scale, sinks=sinks, return_lse=return_lse, out=out, check=check,
            config=config,
        )  # fmt: skip
    left, right = (None, None) if window is None else window
    scale, scale_tensor = known("scale", scale)
    softcap, softcap_tensor = known("softcap", softcap)
    operators: Any = torch.ops.warploom
    given = (
        q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, causal, scale, left, right, softcap,
        None if config is None else str(config), scale_tensor, softcap_tensor, sinks,
        deterministic,
    )  # fmt: skip
    if not (return_lse or differentiated(q, k, v, sinks)):
        return operators.attention_varlen(*given)
    found = operators.attention_varlen_lse(*given)  # the backward pass needs the log-sum-exps
    return found if return_lse else found[0]
