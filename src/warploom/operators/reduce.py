"""Row reductions of a product as PyTorch operators: what ``torch.compile`` and ``torch.export`` see of them.

``warploom::matmul_reduce``, ``warploom::matmul_argmax`` (the maximum with its column) and
``warploom::linear_cross_entropy``. The public functions take this way by themselves while a graph is
traced, where tensors have no memory to point at (:mod:`warploom.interop.tracing`).
"""

from __future__ import annotations

from typing import Any

import torch

from warploom.core.errors import ProblemError
from warploom.kernels.matmul.problem import MatmulConfig
from warploom.operators.registration import define
from warploom.ops import reduce as eager

_REDUCE = "(Tensor a, Tensor b, str op='max', float scale=1.0, Tensor? bias=None, str? config=None) -> Tensor"
_ARGMAX = "(Tensor a, Tensor b, float scale=1.0, Tensor? bias=None, str? config=None) -> (Tensor, Tensor)"
_LOSS = "(Tensor x, Tensor w, Tensor target, str? config=None) -> Tensor"


def _reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    op: Any = "max",
    scale: float = 1.0,
    bias: torch.Tensor | None = None,
    config: str | None = None,
) -> torch.Tensor:
    return eager.matmul_reduce(a, b, op, scale=scale, bias=bias, config=config)


def _argmax(
    a: torch.Tensor, b: torch.Tensor, scale: float = 1.0, bias: torch.Tensor | None = None, config: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return eager.matmul_reduce(a, b, scale=scale, bias=bias, return_index=True, config=config)


def _loss(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, config: str | None = None) -> torch.Tensor:
    return eager.linear_cross_entropy(x, w, target, config=config)


def _rows(a: torch.Tensor, b: torch.Tensor, *_: Any, **_named: Any) -> torch.Tensor:
    if a.dim() != 2 or b.dim() != 2:
        raise ProblemError(f"a and b are matrices, not of shapes {tuple(a.shape)} and {tuple(b.shape)}")
    return a.new_empty((a.shape[0],), dtype=torch.float32)


def _rows_and_columns(a: torch.Tensor, b: torch.Tensor, *_: Any, **_named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _rows(a, b), a.new_empty((a.shape[0],), dtype=torch.int32)


reduce_operator = define("matmul_reduce", _REDUCE, _reduce, _rows)
"""A reduction of the rows of scale · a·b + bias by :func:`warploom.matmul_reduce`."""
argmax_operator = define("matmul_argmax", _ARGMAX, _argmax, _rows_and_columns)
"""The maxima of those rows and their columns."""
loss_operator = define("linear_cross_entropy", _LOSS, _loss, _rows)
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
    if eager.reduction_named(op, return_index) == "argmax":
        return operators.matmul_argmax(a, b, scale, bias, notation)
    return operators.matmul_reduce(a, b, op, scale, bias, notation)


def linear_cross_entropy(
    x: torch.Tensor, w: torch.Tensor, target: torch.Tensor, *, config: MatmulConfig | str | None = None
) -> torch.Tensor:
    """:func:`warploom.linear_cross_entropy` inside a traced graph: one call of an operator, no graph break."""
    operators: Any = torch.ops.warploom
    return operators.linear_cross_entropy(x, w, target, None if config is None else str(config))
