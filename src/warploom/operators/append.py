"""``warploom::append_to_cache`` as a PyTorch operator, for graphs: it changes the caches, and the turned queries."""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import torch

from warploom.core.errors import ProblemError
from warploom.operators.fakes import if_sizes_are_known, seen
from warploom.operators.registration import define_mutating
from warploom.ops import append_to_cache as eager

_NAMES = "k_cache", "v_cache", "k", "v", "lengths", "table", "q", "cos", "sin", "k_scale", "v_scale"
_SCHEMA = (
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor kv_lens, Tensor? block_table, Tensor? q, "
    "Tensor? cos, Tensor? sin, Tensor? k_scale, Tensor? v_scale, bool interleaved, Tensor(c!)? turned) -> ()"
)
_append = unwrap(eager.append_to_cache)  # PyTorch does not watch what a kernel of its own does


def _run(*given: Any) -> None:
    *arrays, interleaved, turned = given
    named = dict(zip(_NAMES[5:], arrays[5:], strict=True))
    found = _append(*arrays[:5], block_table=named.pop("table"), interleaved=interleaved, **named)
    if turned is not None:
        turned.copy_(found)


def _fake(*given: Any) -> None:
    *arrays, interleaved, _ = given
    views = {name: seen(x) for name, x in zip(_NAMES, arrays, strict=True) if x is not None}
    if_sizes_are_known(lambda: eager.read_append(views, interleaved))


_APPEND = define_mutating("append_to_cache", _SCHEMA, _run, _fake)


def append_to_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_lens: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    q: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = False,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    check: bool = False,
) -> torch.Tensor | None:
    """:func:`warploom.append_to_cache` inside a traced graph: one call of an operator, no graph break."""
    if check:
        raise ProblemError("check=True reads lengths on the CPU, which a traced graph cannot: check before it")
    turned = None if q is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    _APPEND(k_cache, v_cache, k, v, kv_lens, block_table, q, cos, sin, k_scale, v_scale, interleaved, turned)
    return turned
