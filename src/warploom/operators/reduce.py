"""Row reductions of a product as PyTorch operators: what ``torch.compile`` and ``torch.export`` see of them.

``warploom::matmul_reduce``, ``warploom::matmul_argmax`` (the maximum with its column) and
``warploom::linear_cross_entropy``. The public functions take this way by themselves while a graph is
traced, where tensors have no memory to point at (:mod:`warploom.interop.tracing`).
"""

from __future__ import annotations

from typing import Any

import torch

from warploom.kernels.matmul.problem import MatmulConfig
from warploom.operators.fakes import if_sizes_are_known, known, seen
from warploom.operators.registration import define
from warploom.ops import reduce as eager
from warploom.ops.matmul_arrays import checked_config, checked_shape, result_types

_REDUCE = (
    "(Tensor a, Tensor b, str op='max', float scale=1.0, Tensor? bias=None, str? config=None, "
    "Tensor? scale_tensor=None) -> Tensor"
)
_ARGMAX = (
    "(Tensor a, Tensor b, float scale=1.0, Tensor? bias=None, str? config=None, Tensor? scale_tensor=None) "
    "-> (Tensor, Tensor)"
)
_LOSS = "(Tensor x, Tensor w, Tensor target, str? config=None) -> Tensor"


def _reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    op: Any = "max",
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    config: str | None = None,
    scale_tensor: Any = None,
) -> torch.Tensor:
    factor = scale if scale_tensor is None else scale_tensor
    return eager.matmul_reduce(a, b, op, scale=factor, bias=bias, config=config)


def _argmax(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    config: str | None = None,
    scale_tensor: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    factor = scale if scale_tensor is None else scale_tensor
    return eager.matmul_reduce(a, b, scale=factor, bias=bias, return_index=True, config=config)


def _loss(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, config: str | None = None) -> torch.Tensor:
    return eager.linear_cross_entropy(x, w, target, config=config)


def _fake_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    op: str = "max",
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    config: str | None = None,
    scale_tensor: Any = None,
) -> torch.Tensor:
    views = [seen(x) for x in (a, b, bias) if x is not None]
    result_types(views[0], views[1], None, None, "f32", scale)

    def check() -> None:
        eager.check_matrices(views[0], views[1], op)
        checked_shape(views, bias is not None)

    if_sizes_are_known(check)
    if config is not None:
        checked_config(config, views[0].dtype)
    return a.new_empty((a.shape[0],), dtype=torch.float32)


def _fake_argmax(
    a: torch.Tensor,
    b: torch.Tensor,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    config: str | None = None,
    scale_tensor: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_reduce(a, b, "argmax", scale, bias, config), a.new_empty((a.shape[0],), dtype=torch.int32)


def _fake_loss(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, config: str | None = None) -> torch.Tensor:
    if_sizes_are_known(lambda: eager.check_loss(seen(x), seen(w), seen(target)))
    if config is not None:
        checked_config(config, seen(x).dtype)
    return x.new_empty((x.shape[0],), dtype=torch.float32)


reduce_operator = define("matmul_reduce", _REDUCE, _reduce, _fake_reduce)
"""A reduction of the rows of scale · a·b + bias by :func:`warploom.matmul_reduce`."""
argmax_operator = define("matmul_argmax", _ARGMAX, _argmax, _fake_argmax)
"""The maxima of those rows and their columns."""
loss_operator = define("linear_cross_entropy", _LOSS, _loss, _fake_loss)
"""The loss of each row by :func:`warploom.linear_cross_entropy`."""


def matmul_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    op: eager.Op = "max",
    *,
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    return_index: bool = False,
    config: MatmulConfig | str | None = None,
) -> Any:
    """:func:`warploom.matmul_reduce` inside a traced graph: one call of an operator, no graph break."""
    operators: Any = torch.ops.warploom
    notation = None if config is None else str(config)
    factor, tensor = known("scale", scale)
    factor = 1.0 if factor is None else factor
    if eager.reduction_named(op, return_index) == "argmax":
        return operators.matmul_argmax(a, b, factor, bias, notation, tensor)
    return operators.matmul_reduce(a, b, op, factor, bias, notation, tensor)


def linear_cross_entropy(
    x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, *, config: MatmulConfig | str | None = None
) -> torch.Tensor:
    """:func:`warploom.linear_cross_entropy` inside a traced graph: one call of an operator, no graph break."""
    operators: Any = torch.ops.warploom
    return operators.linear_cross_entropy(x, w, target, None if config is None else str(config))
