"""``warploom::attention_paged`` as a PyTorch operator, for graphs; without a derivative."""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import torch

from warploom.core.errors import ProblemError
from warploom.operators.fakes import for_operator, if_sizes_are_known, options_of, seen
from warploom.operators.registration import define
from warploom.ops import attention_paged as eager
from warploom.ops.attention_paged_arrays import read_cache

_SCHEMA = (
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor kv_lens, Tensor? block_table=None, Tensor? cu_seqlens_q=None, "
    "bool causal=True, SymInt? window_left=None, SymInt? window_right=None, float? softcap=None, float? scale=None, "
    "SymInt? fixed_split=None, str? config=None, Tensor? scale_tensor=None, Tensor? softcap_tensor=None, "
    "Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None) -> "
)


_ARRAYS = "k_cache", "v_cache", "kv_lens", "cu_seqlens_q", "block_table", "k_scale", "v_scale", "sinks"


def _define(name: str, return_lse: bool) -> Any:
    compute = unwrap(eager.attention_paged)  # PyTorch does not watch what a kernel of its own does

    def run(**given: Any) -> Any:
        return compute(return_lse=return_lse, **given)

    def fake(q: torch.Tensor, **given: Any) -> Any:
        options = options_of(given, return_lse)
        views = {"q": seen(q)} | {n: seen(given[n]) for n in _ARRAYS if given[n] is not None}
        if_sizes_are_known(lambda: read_cache(views, options, given["fixed_split"]))
        out = q.new_empty(q.shape)
        if not return_lse:
            return out
        *outer, queries, heads, _ = q.shape
        return out, q.new_empty((*outer, heads, queries), dtype=torch.float32)

    return define(name, _SCHEMA + ("(Tensor, Tensor)" if return_lse else "Tensor"), run, fake)


attention_paged_operator = _define("attention_paged", return_lse=False)
"""The output of :func:`warploom.attention_paged`; ``config`` in the notation that ``str(config)`` prints."""

attention_paged_lse_operator = _define("attention_paged_lse", return_lse=True)
"""The output and the log-sum-exps."""


def attention_paged(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    check: bool = False,
    **options: Any,
) -> Any:
    """:func:`warploom.attention_paged` inside a traced graph: one call of an operator, no graph break."""
    if check:
        raise ProblemError("check=True reads lengths on the CPU, which a traced graph cannot: check before it")
    operators: Any = torch.ops.warploom
    operator = operators.attention_paged_lse if return_lse else operators.attention_paged
    found = operator(q, k_cache, v_cache, kv_lens, **for_operator(**options))
    if out is None:
        return found
    out.copy_(found[0] if return_lse else found)
    return (out, found[1]) if return_lse else out
