"""``warploom::attention_paged`` as a PyTorch operator, for graphs; without a derivative."""

from __future__ import annotations

from typing import Any

import torch

from warploom.core.errors import ProblemError
from warploom.operators.attention import define_both
from warploom.operators.fakes import for_operator, if_sizes_are_known, seen
from warploom.operators.registration import Named
from warploom.ops import attention_paged as eager
from warploom.ops.attention_arrays import Options
from warploom.ops.attention_paged_arrays import given_split, read_cache

_SCHEMA = (
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor kv_lens, Tensor? block_table=None, Tensor? cu_seqlens_q=None, "
    "bool causal=True, SymInt? window_left=None, SymInt? window_right=None, float? softcap=None, float? scale=None, "
    "SymInt? fixed_split=None, str? config=None, Tensor? scale_tensor=None, Tensor? softcap_tensor=None, "
    "Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None) -> "
)


_ARRAYS = "q", "k_cache", "v_cache", "kv_lens", "cu_seqlens_q", "block_table", "k_scale", "v_scale", "sinks"


def _fake(given: Named, options: Options) -> Any:
    q = given["q"]
    views = {name: seen(given[name]) for name in _ARRAYS if given[name] is not None}
    inputs = if_sizes_are_known(lambda: read_cache(views, options, given_split(given["fixed_split"])))
    if given["config"] is not None and inputs is not None:
        eager.refuse_paged(given["config"], inputs)
    *outer, queries, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((*outer, heads, queries), dtype=torch.float32)


attention_paged_operator, attention_paged_lse_operator = define_both(
    "attention_paged", _SCHEMA, eager.attention_paged, _fake
)
"""The output of :func:`warploom.attention_paged`, and with the log-sum-exps."""


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
