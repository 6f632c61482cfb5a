"""Row reductions of products as PyTorch operators, the loss of an output layer among them, and their gradients.

``warploom::matmul_reduce``, ``warploom::matmul_argmax`` (the maximum with its column),
``warploom::linear_cross_entropy`` and ``warploom::row_gradients``. The public functions take this way by themselves
where PyTorch watches (:mod:`warploom.interop.tracing`).
"""

from __future__ import annotations

from typing import Any

import torch

from warploom.core.errors import ProblemError
from warploom.operators.graphs import untraced
from warploom.operators.recorded import (
    BackwardPass,
    Derivative,
    Place,
    RecordedCall,
    Recorder,
    runs_eagerly,
)
from warploom.operators.registration import define_call, define_gradients
from warploom.operators.schema import Named
from warploom.ops import loss as of_loss
from warploom.ops import matmul as of_matmul
from warploom.ops import reduce as of_reduce
from warploom.ops.declare import Arguments

_LOSS, _GRADIENTS, _REDUCE = of_loss.loss_call, of_loss.row_gradients_call, of_reduce.matmul_reduce_call
_FORMED, _SCALE = of_loss.loss_with_gradients_call, of_loss.scale_gradients_call
_OPTIONS = "ignore_index", "label_smoothing", "z_loss", "softcap"
_REDUCTIONS = "none", "sum", "mean"


# -- the gradients of both
gradients_operator, row_gradients = define_gradients(_GRADIENTS, fixed={"blocks": None}, twins=False)
_WANTS = "wants_x", "wants_w", "wants_bias"


def _by_rows(
    call: RecordedCall, how: BackwardPass, names: tuple[str, str, str], config: Any = None, **given: Any
) -> dict[str, Place]:
    """The gradients by x, w and bias, which the call has by ``names``."""
    wants = {option: name in call.wanted for option, name in zip(_WANTS, names, strict=True)}
    found = how.run(_GRADIENTS, *_GRADIENTS.positions(given | wants), config)
    return dict(zip([name for name in names if name in call.wanted], found, strict=True))


# -- the loss
def _loss_gradients(call: RecordedCall, how: BackwardPass) -> dict[str, Place]:
    """The gradients of a node; the logits are formed again, in chunks (:class:`warploom.ops.loss.GradientPlan`)."""
    by_loss, by_lse, *_ = (x if x is None else x.then(torch.Tensor.contiguous) for x in how.by_results)
    if by_loss is None and by_lse is None:
        return {}
    given, (_, lse, *count) = call.given(how.saved), how.saved[len(call.names) :]
    mean = call.options["reduction"] == "mean"
    rows = {"lse": lse, "by_loss": by_loss, "by_lse": by_lse, "count": count[0] if mean else None}
    return _by_rows(call, how, ("x", "w", "bias"), call.config, **given, **rows)


def _formed_gradients(call: RecordedCall, how: BackwardPass) -> dict[str, Place]:
    """The gradients that the forward pass has formed, times that of the loss; formed anew where these are gone.

    Those of an operator are its last three results: graphs have gradients of their own made of them.
    """
    by_loss, names = how.by_results[0], ("x", "w", "bias")
    of_operator = how.saved[len(call.names) + 3 :]
    if by_loss is None or not (how.formed or of_operator) or torch.is_grad_enabled():
        how.by_results[1:] = [None] * len(how.by_results[1:])
        return _loss_gradients(call, how)
    if of_operator:
        made = zip(names, of_operator, strict=True)
        return {name: Place(_times(x.tensor, by_loss.tensor)) for name, x in made if name in call.wanted}
    rest = iter(how.formed)
    found = {name: next(rest) for name in names if name in call.wanted}
    how.run(_SCALE, (by_loss.then(torch.Tensor.contiguous), *map(found.get, names)), ())
    return found


def _times(gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return (gradient.float() * factor).to(gradient.dtype)


def _check_loss(given: Arguments, config: Any) -> None:
    of_loss.check_words(given)
    if config is not None:
        of_matmul.checked_config(config, given.views["a"].dtype)


_LOSS_DERIVATIVE = Derivative(frozenset({"x", "w", "bias"}), _loss_gradients, needs={"return_lse": True})
_LOSS_OPERATORS = {
    reduction: define_call(
        _LOSS,
        name=_LOSS.name if reduction == "none" else f"{_LOSS.name}_{reduction}",
        fixed={"reduction": reduction, "return_lse": True},
        twins=False,
        check=_check_loss,
        derivative=_LOSS_DERIVATIVE,
    )
    for reduction in _REDUCTIONS
}
_LOSS_SCHEMA, loss_operator = _LOSS_OPERATORS["none"]
_record_loss = Recorder(_LOSS, _LOSS_DERIVATIVE)
_FORMED_DERIVATIVE = Derivative(_LOSS_DERIVATIVE.by, _formed_gradients, formed=frozenset({"dx", "dw", "dbias"}))
_record_formed = Recorder(_FORMED, _FORMED_DERIVATIVE)
_FORMED_SCHEMA, formed_operator = define_call(
    _FORMED, fixed={"blocks": None}, twins=False, check=_check_loss, derivative=_FORMED_DERIVATIVE, every_result=True
)


def linear_cross_entropy(*, config: Any = None, **given: Any) -> Any:
    """The losses, and log-sum-exps of all rows, where PyTorch keeps a history, or inside a traced graph: one node."""
    compiling, reduction = torch.compiler.is_compiling(), given["reduction"]
    if compiling and any(isinstance(given[name], torch.Tensor) for name in _OPTIONS):
        return _untraced(config=config, **given)
    eager = runs_eagerly(given["x"])
    formed = given | _wants(given) if (eager or compiling) and _are_formed(given) else {}
    if eager:
        arrays, options = _LOSS.positions(given)
        if formed:
            return _record_formed(*_FORMED.positions(formed), config, public=(_LOSS, options))
        return _record_loss(arrays, options, config)
    if formed:
        return torch.ops.warploom.loss_with_gradients(**_FORMED_SCHEMA.arguments(formed, config))[0]
    if not compiling or reduction not in _REDUCTIONS:
        _LOSS.declaration.options["reduction"].plain(reduction)
    name = "linear_cross_entropy" + ("" if reduction == "none" else f"_{reduction}")
    return getattr(torch.ops.warploom, name)(**_LOSS_SCHEMA.arguments(given, config))


def _has_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _wants(given: Named) -> dict[str, bool]:
    return {want: _has_gradient(given[name]) for want, name in zip(_WANTS, ("x", "w", "bias"), strict=True)}


def _are_formed(given: Named) -> bool:
    """Whether the forward pass of a call forms the gradients; in a graph whatever the number of rows."""
    x, w = given["x"], given["w"]
    if not isinstance(w, torch.Tensor) or x.dim() != 2 or w.dim() != 2 or not torch.is_grad_enabled():
        return False
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    if dtype is not torch.bfloat16 or not any(_has_gradient(given[name]) for name in ("x", "w", "bias")):
        return False
    names = "reduction", "softcap", "return_lse", "workspace_mib"
    rows = of_loss.LEAST_FORMED_ROWS if torch.compiler.is_compiling() else len(x)
    return of_loss.gradients_are_formed(rows, *w.shape, **{name: given[name] for name in names})


_untraced = untraced(
    linear_cross_entropy,
    "the options of warploom.linear_cross_entropy are numbers under torch.compile: pass no tensors for them, or "
    "compile without fullgraph=True",
)


# -- reductions
def _check_reduction(given: Arguments, config: Any) -> None:
    of_reduce.check_columns(given)
    if config is not None:
        of_matmul.checked_config(config, given.views["a"].dtype)


def _check_differentiable(given: Named) -> None:
    if given.get("op", "max") == "max":
        raise ProblemError("matmul_reduce('max') has no backward pass: call under torch.no_grad(), or pass x.detach()")


def _reduce_gradients(call: RecordedCall, how: BackwardPass) -> dict[str, Place]:
    """The gradients of a log-sum-exp, products with the softmax, or of a sum, outer products."""
    given, wanted, (by_result,), found = call.given(how.saved), call.wanted, how.by_results, dict[str, Place]()
    if by_result is None:
        return found
    scale = given["scale"]
    scale = float(scale.tensor if isinstance(scale, Place) else scale)
    if given["op"] == "logsumexp":
        x, w = given["a"], given["b"].then(_turned)
        rows = {"x": x, "w": w, "lse": how.saved[-1], "by_lse": by_result, "bias": given.get("bias"), "scale": scale}
        found = _by_rows(call, how, ("a", "b", "bias"), **rows)
        return found | {"b": found["b"].then(_turned)} if "b" in found else found
    a, b, gradient = given["a"].tensor, given["b"].tensor, by_result.tensor
    if "a" in wanted:
        found["a"] = Place(torch.outer(gradient, b.sum(1, dtype=torch.float32) * scale).to(a.dtype))
    if "b" in wanted:  # the gradient in two parts of 16 bits: it enters the product with f32's accuracy, or nearly
        high = gradient.to(a.dtype)
        parts = torch.stack([high, (gradient - high).to(a.dtype)])
        column = of_matmul.matmul(parts, a, out_dtype="f32").sum(0) * scale
        found["b"] = Place(column.to(b.dtype)[:, None].repeat(1, b.shape[1]))
    if "bias" in wanted:
        found["bias"] = Place(gradient.sum().to(b.dtype).repeat(b.shape[1]))
    return found


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.mT


_REDUCE_DERIVATIVE = Derivative(frozenset({"a", "b", "bias"}), _reduce_gradients, check=_check_differentiable)
_REDUCE_SCHEMA, reduce_operator = define_call(
    _REDUCE, fixed={"return_index": False}, check=_check_reduction, derivative=_REDUCE_DERIVATIVE
)
_ARGMAX_SCHEMA, argmax_operator = define_call(
    _REDUCE, name="matmul_argmax", fixed={"op": "max", "return_index": True}, check=_check_reduction
)
_record_reduction = Recorder(_REDUCE, _REDUCE_DERIVATIVE)


def matmul_reduce(*, config: Any = None, **given: Any) -> Any:
    """:func:`warploom.matmul_reduce` where PyTorch keeps a history, or inside a traced graph: one node."""
    with_index = of_reduce.reduction_named(given["op"], given["return_index"]) == "argmax"
    if not runs_eagerly(given["a"]):
        operators: Any = torch.ops.warploom
        if with_index:
            return operators.matmul_argmax(**_ARGMAX_SCHEMA.arguments(given, config))
        return operators.matmul_reduce(**_REDUCE_SCHEMA.arguments(given, config))
    return _record_reduction(*_REDUCE.positions(given), config)
