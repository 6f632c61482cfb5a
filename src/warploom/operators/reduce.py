"""Row reductions of products as PyTorch operators, the loss of an output layer among them, and their gradients.

``warploom::matmul_reduce``, ``warploom::matmul_argmax`` (the maximum with its column),
``warploom::linear_cross_entropy`` and ``warploom::row_gradients``. The public functions take this way by themselves
where PyTorch watches (:mod:`warploom.interop.tracing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from warploom.core.errors import ProblemError
from warploom.operators.graphs import untraced
from warploom.operators.recorded import Gradients, RecordedCall, Recorder, Tape, by_names, eagerly, runs_eagerly
from warploom.operators.registration import Derivative, define_call
from warploom.operators.schema import Named
from warploom.ops import loss as of_loss
from warploom.ops import matmul as of_matmul
from warploom.ops import reduce as of_reduce
from warploom.ops.calls import Caller
from warploom.ops.declare import Arguments

_LOSS, _GRADIENTS, _REDUCE = of_loss.loss_call, of_loss.row_gradients_call, of_reduce.matmul_reduce_call
_OPTIONS = "ignore_index", "label_smoothing", "z_loss", "softcap"
_REDUCTION, _IGNORED = (_LOSS.option_names.index(name) for name in ("reduction", "ignore_index"))
_TARGET = _LOSS.array_names.index("target")


# -- the gradients of both
def _gradients(
    arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any, run: Callable[..., list[Any]] = Caller.made
) -> Any:
    """The gradients by x, w and bias; zeros where there are no elements, and an empty tensor for one not wanted."""
    x, w = arrays[:2]
    scale, *wants = options[:4]
    some = x.shape[0] > 0
    products = some and w.shape[1] > 0
    wanted = wants[0] and products, wants[1] and products, wants[2] and some
    found = iter(run(_GRADIENTS, arrays, (scale, *wanted, *options[4:]), config) if any(wanted) else ())
    shapes = (shape if asked else (0,) for shape, asked in zip((x.shape, w.shape, w.shape[:1]), wants, strict=True))
    return tuple(next(found) if is_made else x.new_zeros(shape) for is_made, shape in zip(wanted, shapes, strict=True))


_, gradients_operator = define_call(_GRADIENTS, fixed={"blocks": None}, twins=False, of_gradients=True, run=_gradients)
"""The gradients by x, w and bias of losses, or log-sum-exps, of rows of scale · x·wᵀ + bias; empty if not wanted."""


def _eager_gradients(tape: Tape) -> Callable[..., Any]:
    """A function that computes what :data:`gradients_operator` does, in an eager backward pass."""

    def run(*arrays: torch.Tensor, config: Any = None, **given: Any) -> Any:
        known = {**dict(zip(_GRADIENTS.array_names, arrays, strict=False)), **given}
        return _gradients(*_GRADIENTS.positions(known), config, tape.run)

    return run


# -- the loss
def _loss_backward_by(run: Callable[..., Any]) -> Callable[..., Named]:
    """The derivative, through what computes :data:`gradients_operator`.

    It forms the logits again, chunk by chunk, as their derivatives (:class:`warploom.ops.loss.GradientPlan`).
    """

    def backward(given: Named, results: Sequence[Any], gradients: Gradients, wanted: frozenset[str]) -> Named:
        by_loss, by_lse = (x if x is None else x.contiguous() for x in gradients)  # of a sum one number is everywhere
        if by_loss is None and by_lse is None:
            return {}
        wants = {f"wants_{name}": name in wanted for name in ("x", "w", "bias")}
        taken = {name: given[name] for name in (*_OPTIONS, "x", "w", "target", "bias", "config") if name in given}
        found = run(**taken, lse=results[1], by_loss=by_loss, by_lse=by_lse, **wants)
        return dict(zip(("x", "w", "bias"), found, strict=True))

    return backward


def _eager_loss_backward(call: RecordedCall, tape: Tape, gradients: Gradients) -> Named:
    given, results = by_names(call, tape.saved), tape.saved[len(call.names) :]
    return _loss_backward_by(_eager_gradients(tape))(given, results, gradients, call.wanted)


def _reduced(
    call: RecordedCall, tensors: Sequence[torch.Tensor], results: list[Any]
) -> tuple[list[Any], tuple[torch.Tensor, ...]]:
    """The losses' sum or mean in their place, and how many rows count in a mean."""
    reduction, (losses, lse) = call.options[_REDUCTION], results
    if reduction == "none":
        return results, ()
    if reduction == "sum":
        return [losses.sum(), lse], ()
    count = of_loss.counted(tensors[_TARGET], call.options[_IGNORED], losses.dtype)
    return [losses.sum() / count, lse], (count,)


def _by_rows(call: RecordedCall, saved: tuple[torch.Tensor, ...], gradients: Gradients) -> Gradients:
    """The gradients of the losses of rows and of log-sum-exps, of those of what :func:`_reduced` gives."""
    reduction, by_loss = call.options[_REDUCTION], gradients[0]
    if reduction == "none" or by_loss is None:
        return gradients
    rows = by_loss.expand(len(saved[_TARGET]))
    return rows / saved[-1] if reduction == "mean" else rows.contiguous(), *gradients[1:]


def _check_loss(given: Arguments, config: Any) -> None:
    of_loss.check_words(given)
    if config is not None:
        of_matmul.checked_config(config, given.views["a"].dtype)


_LOSS_DERIVATIVE = Derivative(frozenset({"x", "w", "bias"}), _loss_backward_by(gradients_operator))
_LOSS_SCHEMA, loss_operator = define_call(
    _LOSS, fixed={"reduction": "none", "return_lse": False}, twins=False, check=_check_loss, derivative=_LOSS_DERIVATIVE
)
_record_loss = Recorder(
    _LOSS, _LOSS_SCHEMA, _LOSS_DERIVATIVE, _eager_loss_backward, {"return_lse": True}, (_reduced, _by_rows)
)


def linear_cross_entropy(*, config: Any = None, **given: Any) -> Any:
    """The losses and log-sum-exps of all rows where PyTorch keeps a history, or inside a traced graph: one node."""
    compiling = torch.compiler.is_compiling()
    if compiling and any(isinstance(given[name], torch.Tensor) for name in _OPTIONS):
        return _untraced(config=config, **given)
    if runs_eagerly(given["x"]):
        return eagerly(_record_loss, *_LOSS.positions(given), config)
    operators: Any = torch.ops.warploom
    return operators.linear_cross_entropy(**_LOSS_SCHEMA.arguments(given, config))


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


def _reduce_backward(
    given: Named,
    results: Sequence[Any],
    gradients: Gradients,
    wanted: frozenset[str],
    by_rows: Callable[..., Any] = gradients_operator,
) -> Named:
    """The gradients of a log-sum-exp, products with the softmax, or of a sum, outer products."""
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


def _eager_reduce_backward(call: RecordedCall, tape: Tape, gradients: Gradients) -> Named:
    given, results = by_names(call, tape.saved), tape.saved[len(call.names) :]
    return _reduce_backward(given, results, gradients, call.wanted, _eager_gradients(tape))


_REDUCE_DERIVATIVE = Derivative(frozenset({"a", "b", "bias"}), _reduce_backward, check=_check_differentiable)
_REDUCE_SCHEMA, reduce_operator = define_call(
    _REDUCE, fixed={"return_index": False}, check=_check_reduction, derivative=_REDUCE_DERIVATIVE
)
_ARGMAX_SCHEMA, argmax_operator = define_call(
    _REDUCE, name="matmul_argmax", fixed={"op": "max", "return_index": True}, check=_check_reduction
)
_record_reduction = Recorder(_REDUCE, _REDUCE_SCHEMA, _REDUCE_DERIVATIVE, _eager_reduce_backward)


def matmul_reduce(*, config: Any = None, **given: Any) -> Any:
    """:func:`warploom.matmul_reduce` where PyTorch keeps a history, or inside a traced graph: one node."""
    with_index = of_reduce.reduction_named(given["op"], given["return_index"]) == "argmax"
    if not runs_eagerly(given["a"]):
        operators: Any = torch.ops.warploom
        if with_index:
            return operators.matmul_argmax(**_ARGMAX_SCHEMA.arguments(given, config))
        return operators.matmul_reduce(**_REDUCE_SCHEMA.arguments(given, config))
    return eagerly(_record_reduction, *_REDUCE.positions(given), config)
