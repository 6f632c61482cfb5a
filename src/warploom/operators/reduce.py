"""Row reductions of a product as PyTorch operators: what ``torch.compile`` and ``torch.export`` see of them.

``warploom::matmul_reduce`` and ``warploom::matmul_argmax`` (the maximum with its column). The public function takes
this way by itself where PyTorch watches (:mod:`warploom.interop.tracing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from warploom.core.errors import ProblemError
from warploom.operators.fakes import arguments_of, if_sizes_are_known, made_of
from warploom.operators.loss import eager_gradients, gradients_operator
from warploom.operators.recorded import Gradients, RecordedCall, Recorder, Tape, by_names, eagerly, runs_eagerly
from warploom.operators.registration import Derivative, define
from warploom.operators.schema import Named, Schema
from warploom.ops import matmul as of_matmul
from warploom.ops import reduce as eager

_CALL = eager.matmul_reduce_call
_REDUCE = Schema(_CALL.declaration, {"return_index": False})
_ARGMAX = Schema(_CALL.declaration, {"op": "max", "return_index": True})


def _run(arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any) -> Any:
    return _CALL.computed(arrays, options, config)


def _fake(given: Named) -> Any:
    found = arguments_of(_CALL.declaration, given, return_index="op" not in given)
    if_sizes_are_known(lambda: eager.check_columns(found))
    if given["config"] is not None:
        of_matmul.checked_config(given["config"], found.views["a"].dtype)
    return made_of(found.results, given)


def _check(given: Named) -> None:
    if given.get("op", "max") == "max":
        raise ProblemError("matmul_reduce('max') has no backward pass: call under torch.no_grad(), or pass x.detach()")


def _backward(
    given: Named,
    results: Sequence[Any],
    gradients: Gradients,
    wanted: frozenset[str],
    by_rows: Callable[..., Any] = gradients_operator,
) -> Named:
    """Of a log-sum-exp, products with the softmax (:mod:`~warploom.operators.loss`); of a sum, outer products."""
    a, b, bias, tensor = given["a"], given["b"], given.get("bias"), given.get("scale_tensor")
    (lse,), (gradient,), found = results, gradients, dict[str, Any]()
    if gradient is None:
        return found
    scale = float(given.get("scale", 1.0) if tensor is None else tensor)
    if given["op"] == "logsumexp":
        wants = {"wants_x": "a" in wanted, "wants_w": "b" in wanted, "wants_bias": "bias" in wanted}
        dx, dw, dbias = by_rows(a, b.mT, lse, by_lse=gradient, bias=bias, scale=scale, **wants)
        return {"a": dx, "b": dw.mT if "b" in wanted else dw, "bias": dbias}
    if "a" in wanted:
        found["a"] = torch.outer(gradient, b.sum(1, dtype=torch.float32) * scale).to(a.dtype)
    if "b" in wanted:  # the gradient in two parts of 16 bits: it enters the product with f32's accuracy, or nearly
        high = gradient.to(a.dtype)
        parts = torch.stack([high, (gradient - high).to(a.dtype)])
        column = of_matmul.matmul(parts, a, out_dtype="f32").sum(0) * scale
        found["b"] = column.to(b.dtype)[:, None].repeat(1, b.shape[1])
    if "bias" in wanted:
        found["bias"] = gradient.sum().to(b.dtype).repeat(b.shape[1])
    return found


def _eager_backward(call: RecordedCall, tape: Tape, gradients: Gradients) -> Named:
    given, results = by_names(call, tape.saved), tape.saved[len(call.names) :]
    return _backward(given, results, gradients, call.wanted, eager_gradients(tape))


_DERIVATIVE = Derivative(frozenset({"a", "b", "bias"}), _backward, check=_check)
_recorder = Recorder(_CALL, _REDUCE, _DERIVATIVE, _eager_backward)
reduce_operator = define("matmul_reduce", _REDUCE, "Tensor", _run, _fake, _DERIVATIVE)
"""A reduction of the rows of scale · a·b + bias by :func:`warploom.matmul_reduce`."""
argmax_operator = define("matmul_argmax", _ARGMAX, "(Tensor, Tensor)", _run, _fake)
"""The maxima of those rows and their columns."""


def matmul_reduce(*, config: Any = None, **given: Any) -> Any:
    """:func:`warploom.matmul_reduce` where PyTorch keeps a history, or inside a traced graph: one node."""
    operators: Any = torch.ops.warploom
    with_index = eager.reduction_named(given["op"], given["return_index"]) == "argmax"
    if not runs_eagerly(given["a"]):
        schema, operator = (_ARGMAX, operators.matmul_argmax) if with_index else (_REDUCE, operators.matmul_reduce)
        return operator(**schema.arguments(given, config))
    arrays, options = _CALL.positions(given)
    return eagerly(_recorder, arrays, options, config)
