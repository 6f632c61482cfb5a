"""``warploom::attention_varlen`` as a PyTorch operator: what ``torch.compile`` and ``torch.export`` see of a call.

The public function takes this way by itself where PyTorch watches (:mod:`warploom.interop.tracing`).
"""

from __future__ import annotations

from typing import Any

from warploom.operators.attention import DifferentiableAttention, define_backward, define_both
from warploom.operators.graphs import untraced
from warploom.operators.recorded import runs_eagerly
from warploom.ops import attention_varlen as eager
from warploom.ops.attention_backward import attention_varlen_backward_call
from warploom.ops.declare import Arguments


def _check(given: Arguments, config: Any) -> None:
    problem = eager.packed_problem(given)
    if config is not None:
        eager.refuse_packed(config, problem)


_CALL = eager.attention_varlen_call
backward_operator = define_backward(attention_varlen_backward_call)
_varlen = DifferentiableAttention(_CALL, attention_varlen_backward_call, backward_operator)
varlen_operator, varlen_lse_operator = define_both(_CALL, _check, _varlen.derivative)
"""The output of :func:`warploom.attention_varlen`, and with the log-sum-exps (float32, (heads, total_q))."""


def attention_varlen(
    q: Any, *others: Any, deterministic: bool = False, check: bool = False, config: Any = None, **options: Any
) -> Any:
    """:func:`warploom.attention_varlen` where PyTorch keeps a history, or inside a traced graph: one node.

    With ``out`` or ``check`` a graph breaks: the operator changes nothing and waits for nothing. ``deterministic`` asks
    for gradients with equal bits from run to run.
    """
    given = {"q": q, **dict(zip(_CALL.array_names[1:], others, strict=False)), **options}
    out = given.get("out")
    if (out is not None or check is not False) and not runs_eagerly(q):
        return _checked(deterministic=deterministic, check=check, config=config, **given)
    if out is not None:  # has no history
        return _CALL.computed(*_CALL.positions(given), config, check)
    return _varlen(given, config, check, deterministic)


_checked = untraced(
    attention_varlen,
    "warploom.attention_varlen takes no out or check under torch.compile: leave them away, or compile without "
    "fullgraph=True",
)
