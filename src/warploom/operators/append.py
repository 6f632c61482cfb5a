"""``warploom::append_to_cache`` as a PyTorch operator, for graphs: it changes the caches, and the turned queries."""

from __future__ import annotations

from typing import Any

import torch

from warploom.core.errors import ProblemError
from warploom.operators.fakes import arguments_of, if_sizes_are_known
from warploom.operators.registration import define_mutating
from warploom.ops import attention_paged as eager
from warploom.ops.declare import flag

_SCHEMA = (
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor kv_lens, Tensor? block_table, Tensor? q, "
    "Tensor? cos, Tensor? sin, Tensor? k_scale, Tensor? v_scale, bool interleaved, Tensor(c!)? turned) -> ()"
)


def _run(*given: Any) -> None:
    *arrays, interleaved, turned = given
    found = eager.append_call.computed(tuple(arrays), (interleaved,))
    if turned is not None:
        turned.copy_(found)


def _fake(*given: Any) -> None:
    *arrays, interleaved, _ = given
    declaration = eager.append_call.declaration
    found = arguments_of(declaration, declaration.named(tuple(arrays)), interleaved=interleaved)
    if_sizes_are_known(lambda: eager.append_problem(found))


_APPEND = define_mutating("append_to_cache", _SCHEMA, _run, _fake)


def append_to_cache(*, check: bool = False, config: None = None, **given: Any) -> torch.Tensor | None:
    """:func:`warploom.append_to_cache` inside a traced graph: one call of an operator, no graph break."""
    if check:
        raise ProblemError("check=True reads lengths on the CPU, which a traced graph cannot: check before it")
    arrays, (interleaved,) = eager.append_call.positions(given)
    q = given["q"]
    turned = None if q is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    if not torch.compiler.is_compiling():
        interleaved = flag("interleaved", interleaved)
    _APPEND(*arrays, interleaved, turned)
    return turned
