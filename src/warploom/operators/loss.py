"""``warploom::linear_cross_entropy`` and its gradients as PyTorch operators.

The public function takes this way by itself where PyTorch watches (:mod:`warploom.interop.tracing`).
"""

from __future__ import annotations

from typing import Any

import torch

from warploom.kernels.matmul.problem import MatmulConfig
from warploom.operators.fakes import if_sizes_are_known, seen
from warploom.operators.registration import Derivative, Named, define
from warploom.ops import loss as eager
from warploom.ops.matmul_arrays import checked_config

_OPTIONS = "int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, float? softcap=None"
_LOSS = f"(Tensor x, Tensor w, Tensor target, {_OPTIONS}, str? config=None) -> (Tensor, Tensor)"
_GRADIENTS = (
    "(Tensor x, Tensor w, Tensor lse, Tensor? target, Tensor? by_loss, Tensor? by_lse, Tensor? bias=None, "
    f"float scale=1.0, bool wants_x=True, bool wants_w=True, {_OPTIONS}, str? config=None) -> (Tensor, Tensor)"
)


def _losses(
    x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, config: str | None = None,
) -> Any:  # fmt: skip
    return eager.losses(x, w, target, eager.loss_of(ignore_index, label_smoothing, z_loss, softcap), config)


def _fake_losses(
    x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, config: str | None = None,
) -> Any:  # fmt: skip
    eager.loss_of(ignore_index, label_smoothing, z_loss, softcap)
    if_sizes_are_known(lambda: eager.check_loss(seen(x), seen(w), seen(target)))
    if config is not None:
        checked_config(config, seen(x).dtype)
    rows = x.new_empty((x.shape[0],), dtype=torch.float32)
    return rows, torch.empty_like(rows)


def _gradients(
    x: torch.Tensor, w: torch.Tensor, lse: torch.Tensor, target: torch.Tensor | None, by_loss: torch.Tensor | None,
    by_lse: torch.Tensor | None, bias: torch.Tensor | None = None, scale: float = 1.0, wants_x: bool = True,
    wants_w: bool = True, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, config: str | None = None,
) -> Any:  # fmt: skip
    if x.shape[0] == 0 or w.shape[1] == 0:
        return tuple(torch.zeros_like(y) if wants else y.new_empty(0) for y, wants in ((x, wants_x), (w, wants_w)))
    loss = None if target is None else eager.loss_of(ignore_index, label_smoothing, z_loss, softcap)
    rows = eager.RowGradients(lse, by_loss, by_lse, target, loss)
    found = eager.gradients(x, w, rows, (wants_x, wants_w), bias=bias, scale=scale, config=config)
    return tuple(x.new_empty(0) if gradient is None else gradient for gradient in found)


def _fake_gradients(
    x: torch.Tensor, w: torch.Tensor, lse: torch.Tensor, target: Any, by_loss: Any, by_lse: Any, bias: Any = None,
    scale: float = 1.0, wants_x: bool = True, wants_w: bool = True, *_options: Any, **_named: Any,
) -> Any:  # fmt: skip
    return tuple(y.new_empty(y.shape if wants else (0,)) for y, wants in ((x, wants_x), (w, wants_w)))


gradients_operator = define("row_gradients", _GRADIENTS, _gradients, _fake_gradients)
"""The gradients by x and w of losses, or log-sum-exps, of the rows of scale · x·wᵀ + bias; empty where not wanted."""


def _saved(given: Named, results: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return given["x"], given["w"], given["target"], results[1]


def _backward(
    saved: tuple[Any, ...], others: Named, gradients: tuple[torch.Tensor | None, ...], wanted: frozenset[str]
) -> Named:
    """The logits again, chunk by chunk, as their derivatives (:class:`warploom.ops.loss_plan.GradientPlan`)."""
    (x, w, target, lse), (by_loss, by_lse) = saved, gradients
    if by_loss is None and by_lse is None:
        return {}
    dx, dw = gradients_operator(
        x, w, lse, target, by_loss, by_lse, None, 1.0, "x" in wanted, "w" in wanted, others["ignore_index"],
        others["label_smoothing"], others["z_loss"], others["softcap"], others["config"],
    )  # fmt: skip
    return {"x": dx, "w": dw}


loss_operator = define(
    "linear_cross_entropy", _LOSS, _losses, _fake_losses, Derivative(frozenset({"x", "w"}), _saved, _backward)
)
"""The losses of all rows, and their log-sum-exps, by :func:`warploom.linear_cross_entropy`."""


def linear_cross_entropy(
    x: torch.Tensor,
    w: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: eager.Reduction = "none",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    return_lse: bool = False,
    config: MatmulConfig | str | None = None,
) -> Any:
    """:func:`warploom.linear_cross_entropy` inside a traced graph: one call of an operator, no graph break."""
    operators: Any = torch.ops.warploom
    eager.check_reduction(reduction)
    rows, lse = operators.linear_cross_entropy(
        x, w, target, ignore_index, label_smoothing, z_loss, softcap, None if config is None else str(config)
    )
    result = eager.reduced(rows, target, ignore_index, reduction)
    return (result, lse) if return_lse else result
