"""``warploom::linear_cross_entropy`` and its gradients as PyTorch operators.

The public function takes this way by itself where PyTorch watches (:mod:`warploom.interop.tracing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from warploom.operators.fakes import arguments_of, if_sizes_are_known, made_of
from warploom.operators.graphs import untraced
from warploom.operators.recorded import Gradients, RecordedCall, Recorder, Tape, by_names, eagerly, runs_eagerly
from warploom.operators.registration import Derivative, define
from warploom.operators.schema import Named, Schema
from warploom.ops import loss as eager
from warploom.ops.calls import Caller
from warploom.ops.matmul import checked_config

_CALL, _GRADIENTS = eager.loss_call, eager.row_gradients_call
_OPTIONS = "ignore_index", "label_smoothing", "z_loss", "softcap"
_REDUCTION, _IGNORED = (_CALL.option_names.index(name) for name in ("reduction", "ignore_index"))
_TARGET = _CALL.array_names.index("target")
_LOSS = Schema(_CALL.declaration, {"reduction": "none", "return_lse": False}, twins=False)
_BY_ROWS = Schema(_GRADIENTS.declaration, {"blocks": None}, twins=False)


def _losses(arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any) -> Any:
    return _CALL.computed(arrays, options, config)


def _fake_losses(given: Named) -> Any:
    found = arguments_of(_CALL.declaration, given)
    if_sizes_are_known(lambda: eager.check_words(found))
    if given["config"] is not None:
        checked_config(given["config"], found.views["x"].dtype)
    return made_of(found.results, given)


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


def _fake_gradients(given: Named) -> Any:
    x, w = given["x"], given["w"]
    shapes = {"x": x.shape, "w": w.shape, "bias": w.shape[:1]}
    return tuple(x.new_empty(shape if given[f"wants_{name}"] else (0,)) for name, shape in shapes.items())


_THREE = "(Tensor, Tensor, Tensor)"
gradients_operator = define("row_gradients", _BY_ROWS, _THREE, _gradients, _fake_gradients, of_gradients=True)
"""The gradients by x, w and bias of losses, or log-sum-exps, of rows of scale · x·wᵀ + bias; empty if not wanted."""


def _backward_by(run: Callable[..., Any]) -> Callable[..., Named]:
    """The derivative, through what computes :data:`gradients_operator`.

    It forms the logits again, chunk by chunk, as their derivatives (:class:`warploom.ops.loss.GradientPlan`).
    """

    def backward(
        given: Named, results: Sequence[Any], gradients: Sequence[torch.Tensor | None], wanted: frozenset[str]
    ) -> Named:
        by_loss, by_lse = (x if x is None else x.contiguous() for x in gradients)  # of a sum one number is everywhere
        if by_loss is None and by_lse is None:
            return {}
        wants = {f"wants_{name}": name in wanted for name in ("x", "w", "bias")}
        taken = {name: given[name] for name in (*_OPTIONS, "x", "w", "target", "bias", "config") if name in given}
        found = run(**taken, lse=results[1], by_loss=by_loss, by_lse=by_lse, **wants)
        return dict(zip(("x", "w", "bias"), found, strict=True))

    return backward


def eager_gradients(tape: Tape) -> Callable[..., Any]:
    """What computes :data:`gradients_operator` in an eager backward pass."""

    def run(*arrays: torch.Tensor, config: Any = None, **given: Any) -> Any:
        known = {**dict(zip(_GRADIENTS.array_names, arrays, strict=False)), **given}
        return _gradients(*_GRADIENTS.positions(known), config, tape.run)

    return run


def _eager_backward(call: RecordedCall, tape: Tape, gradients: Gradients) -> Named:
    given, results = by_names(call, tape.saved), tape.saved[len(call.names) :]
    return _backward_by(eager_gradients(tape))(given, results, gradients, call.wanted)


def _reduced(
    call: RecordedCall, tensors: Sequence[torch.Tensor], results: list[Any]
) -> tuple[list[Any], tuple[torch.Tensor, ...]]:
    """The losses' sum or mean in their place, and how many rows count in a mean."""
    reduction, (losses, lse) = call.options[_REDUCTION], results
    if reduction == "none":
        return results, ()
    if reduction == "sum":
        return [losses.sum(), lse], ()
    count = eager.counted(tensors[_TARGET], call.options[_IGNORED], losses.dtype)
    return [losses.sum() / count, lse], (count,)


def _by_rows(call: RecordedCall, saved: tuple[torch.Tensor, ...], gradients: Gradients) -> Gradients:
    """The gradients of the losses of rows and of log-sum-exps, of those of what :func:`_reduced` gives."""
    reduction, by_loss = call.options[_REDUCTION], gradients[0]
    if reduction == "none" or by_loss is None:
        return gradients
    rows = by_loss.expand(len(saved[_TARGET]))
    return rows / saved[-1] if reduction == "mean" else rows.contiguous(), *gradients[1:]


_DERIVATIVE = Derivative(frozenset({"x", "w", "bias"}), _backward_by(gradients_operator))
_recorder = Recorder(_CALL, _LOSS, _DERIVATIVE, _eager_backward, {"return_lse": True}, (_reduced, _by_rows))
loss_operator = define("linear_cross_entropy", _LOSS, "(Tensor, Tensor)", _losses, _fake_losses, _DERIVATIVE)
"""The losses of all rows, and their log-sum-exps, by :func:`warploom.linear_cross_entropy`."""


def linear_cross_entropy(*, config: Any = None, **given: Any) -> Any:
    """The losses and log-sum-exps of all rows where PyTorch keeps a history, or inside a traced graph: one node."""
    compiling = torch.compiler.is_compiling()
    if compiling and any(isinstance(given[name], torch.Tensor) for name in _OPTIONS):
        return _untraced(config=config, **given)
    if runs_eagerly(given["x"]):
        return eagerly(_recorder, *_CALL.positions(given), config)
    operators: Any = torch.ops.warploom
    return operators.linear_cross_entropy(**_LOSS.arguments(given, config))


_untraced = untraced(
    linear_cross_entropy,
    "the options of warploom.linear_cross_entropy are numbers under torch.compile: pass no tensors for them, or "
    "compile without fullgraph=True",
)
