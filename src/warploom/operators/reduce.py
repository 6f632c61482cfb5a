"""Row reductions of a product as PyTorch operators: what ``torch.compile`` and ``torch.export`` see of them.

``warploom::matmul_reduce`` and ``warploom::matmul_argmax`` (the maximum with its column). The public function takes
this way by itself where PyTorch watches (:mod:`warploom.interop.tracing`).
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any, Unpack

import torch

from warploom.core.errors import ProblemError
from warploom.operators.eager import EagerOperation, autocast, runs_eagerly, wants_gradient
from warploom.operators.fakes import for_operator, if_sizes_are_known, seen
from warploom.operators.loss import gradients_operator
from warploom.operators.registration import EXACT, Derivative, Named, define
from warploom.ops import matmul as of_matmul
from warploom.ops import reduce as eager
from warploom.ops.matmul_arrays import checked_config, checked_shape, result_types
from warploom.ops.signatures import ReduceOptions

_REDUCE = (
    "(Tensor a, Tensor b, str op='max', float scale=1.0, Tensor? bias=None, str? config=None, "
    "Tensor? scale_tensor=None) -> Tensor"
)
_ARGMAX = (
    "(Tensor a, Tensor b, float scale=1.0, Tensor? bias=None, str? config=None, Tensor? scale_tensor=None) "
    "-> (Tensor, Tensor)"
)


def _argmax(**given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return eager.matmul_reduce(return_index=True, **given)


def _fake_reduce(
    a: torch.Tensor, b: torch.Tensor, op: str, scale: float, bias: torch.Tensor | None, config: str | None, **_: Any
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


def _fake_argmax(a: torch.Tensor, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake_reduce(a, op="argmax", **given), a.new_empty((a.shape[0],), dtype=torch.int32)


def _check(given: Named) -> None:
    if given.get("op", "max") == "max":
        raise ProblemError("matmul_reduce('max') has no backward pass: call under torch.no_grad(), or pass x.detach()")


def _backward(
    given: Named, results: tuple[Any, ...], gradients: tuple[torch.Tensor | None, ...], wanted: frozenset[str]
) -> Named:
    """Of a log-sum-exp, products with the softmax (:mod:`~warploom.operators.loss`); of a sum, outer products."""
    a, b, bias, tensor = given["a"], given["b"], given.get("bias"), given.get("scale_tensor")
    (lse,), (gradient,), found = results, gradients, dict[str, Any]()
    if gradient is None:
        return found
    scale = float(given.get("scale", 1.0) if tensor is None else tensor)
    if given["op"] == "logsumexp":
        dx, dw, dbias = gradients_operator(
            a, b.mT, lse, None, None, gradient, bias, scale, "a" in wanted, "b" in wanted, wants_bias="bias" in wanted
        )
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


_DERIVATIVE = Derivative(frozenset({"a", "b", "bias"}), _backward, check=_check)
_eager = EagerOperation("matmul_reduce", eager.matmul_reduce, _DERIVATIVE)
reduce_operator = define("matmul_reduce", _REDUCE, eager.matmul_reduce, _fake_reduce, _DERIVATIVE)
"""A reduction of the rows of scale · a·b + bias by :func:`warploom.matmul_reduce`."""
argmax_operator = define("matmul_argmax", _ARGMAX, _argmax, _fake_argmax)
"""The maxima of those rows and their columns."""


def matmul_reduce(
    a: torch.Tensor,
    b: torch.Tensor,
    op: eager.Op = "max",
    *,
    return_index: bool = False,
    **options: Unpack[ReduceOptions],
) -> Any:
    """:func:`warploom.matmul_reduce` where PyTorch keeps a history, or inside a traced graph: one node."""
    operators: Any = torch.ops.warploom
    reduction = eager.reduction_named(op, return_index)
    if runs_eagerly(a):
        tensors = autocast({"a": a, "b": b, "bias": options.pop("bias", None)}, EXACT)
        if wants_gradient(tensors) and reduction != "argmax":
            return _eager(tensors, {"op": op, **options})
        return unwrap(eager.matmul_reduce)(**tensors, op=op, return_index=return_index, **options)
    given = for_operator(**options)
    if reduction == "argmax":
        return operators.matmul_argmax(a, b, **given)
    return operators.matmul_reduce(a, b, op, **given)
