"""``warploom::linear_cross_entropy`` and its gradients as PyTorch operators.

The public function takes this way by itself where PyTorch watches (:mod:`warploom.interop.tracing`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from warploom.kernels.matmul.problem import MatmulConfig
from warploom.operators.eager import EagerOperation, autocast, runs_eagerly, wants_gradient
from warploom.operators.fakes import if_sizes_are_known, seen
from warploom.operators.registration import EXACT, Derivative, Named, define
from warploom.operators.untraced import untraced
from warploom.ops import loss as eager
from warploom.ops.matmul_arrays import checked_config

_OPTIONS = "int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, float? softcap=None"
_LOSS = f"(Tensor x, Tensor w, Tensor target, {_OPTIONS}, str? config=None, Tensor? bias=None) -> (Tensor, Tensor)"
_GRADIENTS = (
    "(Tensor x, Tensor w, Tensor lse, Tensor? target, Tensor? by_loss, Tensor? by_lse, Tensor? bias=None, "
    f"float scale=1.0, bool wants_x=True, bool wants_w=True, {_OPTIONS}, str? config=None, bool wants_bias=False) "
    "-> (Tensor, Tensor, Tensor)"
)


def _losses(
    x: torch.Tensor,
    w: torch.Tensor,
    target: torch.Tensor,
    config: str | None = None,
    bias: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    return eager.losses(x, w, target, eager.loss_of(**options), config, bias)


def _fake_losses(
    x: torch.Tensor,
    w: torch.Tensor,
    target: torch.Tensor,
    config: str | None,
    bias: torch.Tensor | None,
    **options: Any,
) -> Any:
    eager.loss_of(**options)
    views = [seen(y) for y in (x, w, target, bias) if y is not None]
    if_sizes_are_known(lambda: eager.check_loss(*views))
    if config is not None:
        checked_config(config, seen(x).dtype)
    rows = x.new_empty((x.shape[0],), dtype=torch.float32)
    return rows, torch.empty_like(rows)


def _gradients(
    x: torch.Tensor,
    w: torch.Tensor,
    lse: torch.Tensor,
    target: torch.Tensor | None,
    by_loss: torch.Tensor | None,
    by_lse: torch.Tensor | None,
    wants_x: bool = True,
    wants_w: bool = True,
    wants_bias: bool = False,
    **given: Any,
) -> Any:
    of_product = {name: given.pop(name) for name in ("bias", "scale", "config") if name in given}
    loss = None if target is None else eager.loss_of(**given)
    rows, some = eager.RowGradients(lse, by_loss, by_lse, target, loss), x.shape[0] > 0
    products = some and w.shape[1] > 0
    wanted = wants_x and products, wants_w and products, wants_bias and some
    found = eager.gradients(x, w, rows, wanted, **of_product) if any(wanted) else [None] * 3
    wants = (wants_x, wants_w, wants_bias)
    shapes = (shape if asked else (0,) for shape, asked in zip((x.shape, w.shape, w.shape[:1]), wants, strict=True))
    return tuple(x.new_zeros(shape) if y is None else y for y, shape in zip(found, shapes, strict=True))


def _fake_gradients(x: torch.Tensor, w: torch.Tensor, wants_x: bool, wants_w: bool, wants_bias: bool, **_: Any) -> Any:
    sizes = zip((x.shape, w.shape, w.shape[:1]), (wants_x, wants_w, wants_bias), strict=True)
    return tuple(x.new_empty(shape if wants else (0,)) for shape, wants in sizes)


gradients_operator = define("row_gradients", _GRADIENTS, _gradients, _fake_gradients, of_gradients=True)
"""The gradients by x, w and bias of losses, or log-sum-exps, of rows of scale · x·wᵀ + bias; empty if not wanted."""


def _backward_by(run: Callable[..., Any]) -> Callable[..., Named]:
    """The derivative, through what computes :data:`gradients_operator`.

    It forms the logits again, chunk by chunk, as their derivatives (:class:`warploom.ops.loss_plan.GradientPlan`).
    """

    def backward(
        given: Named, results: tuple[Any, ...], gradients: tuple[torch.Tensor | None, ...], wanted: frozenset[str]
    ) -> Named:
        by_loss, by_lse = (x if x is None else x.contiguous() for x in gradients)  # of a sum one number is everywhere
        if by_loss is None and by_lse is None:
            return {}
        wants = {f"wants_{name}": name in wanted for name in ("x", "w", "bias")}
        found = run(**given, lse=results[1], by_loss=by_loss, by_lse=by_lse, **wants)
        return dict(zip(("x", "w", "bias"), found, strict=True))

    return backward


_DERIVATIVE = Derivative(frozenset({"x", "w", "bias"}), _backward_by(gradients_operator))
_eager = EagerOperation("linear_cross_entropy", _losses, _DERIVATIVE, _backward_by(_gradients))
loss_operator = define("linear_cross_entropy", _LOSS, _losses, _fake_losses, _DERIVATIVE)
"""The losses of all rows, and their log-sum-exps, by :func:`warploom.linear_cross_entropy`."""


def linear_cross_entropy(
    x: torch.Tensor,
    w: torch.Tensor,
    target: torch.Tensor,
    *,
    reduction: eager.Reduction = "none",
    return_lse: bool = False,
    config: MatmulConfig | str | None = None,
    **options: Any,
) -> Any:
    """:func:`warploom.linear_cross_entropy` where PyTorch keeps a history, or inside a traced graph: one node."""
    operators: Any = torch.ops.warploom
    bias = options.pop("bias", None)
    if torch.compiler.is_compiling():
        if any(isinstance(option, torch.Tensor) for option in options.values()):
            more = {"bias": bias, "reduction": reduction, "return_lse": return_lse, "config": config}
            return _untraced(x, w, target, **more, **options)
        options["bias"] = bias
    else:
        options = {"bias": bias, **asdict(eager.loss_of(**options))}
    eager.check_reduction(reduction)
    if runs_eagerly(x):
        tensors = autocast({"x": x, "w": w, "target": target, "bias": options.pop("bias", None)}, EXACT)
        compute = _eager if wants_gradient(tensors) else lambda given, others: _losses(**given, **others)
        rows, lse = compute(tensors, {**options, "config": config})
    else:
        notation = None if config is None else str(config)
        rows, lse = operators.linear_cross_entropy(x, w, target, config=notation, **options)
    result = eager.reduced(rows, target, options.get("ignore_index", -100), reduction)
    return (result, lse) if return_lse else result


_untraced = untraced(
    linear_cross_entropy,
    "the options of warploom.linear_cross_entropy are numbers under torch.compile: pass no tensors for them, or "
    "compile without fullgraph=True",
)
