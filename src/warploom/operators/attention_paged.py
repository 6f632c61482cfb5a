"""``warploom::attention_paged`` as a PyTorch operator, for graphs; without a derivative."""

from __future__ import annotations

from typing import Any

import torch

from warploom.core.errors import ProblemError
from warploom.interop.copies import as_if_compact
from warploom.operators.attention import define_both
from warploom.operators.schema import Schema
from warploom.ops import attention_paged as eager
from warploom.ops.declare import Arguments

_CALL = eager.attention_paged_call
_SCHEMA = Schema(_CALL.declaration, {"return_lse": False})


def _check(given: Arguments, config: Any) -> None:
    problem = eager.problem_on_cache(given)
    if config is not None:
        eager.refuse_paged(config, given.laid_out(as_if_compact), problem)


attention_paged_operator, attention_paged_lse_operator = define_both(_CALL, _check)
"""The output of :func:`warploom.attention_paged`, and with the log-sum-exps."""


def attention_paged(
    *, return_lse: bool = False, out: torch.Tensor | None = None, check: bool = False, config: Any = None, **given: Any
) -> Any:
    """:func:`warploom.attention_paged` inside a traced graph: one call of an operator, no graph break."""
    if check:
        raise ProblemError("check=True reads lengths on the CPU, which a traced graph cannot: check before it")
    operators: Any = torch.ops.warploom
    operator = operators.attention_paged_lse if return_lse else operators.attention_paged
    found = operator(**_SCHEMA.arguments(given, config))
    if out is None:
        return found
    out.copy_(found[0] if return_lse else found)
    return (out, found[1]) if return_lse else out
