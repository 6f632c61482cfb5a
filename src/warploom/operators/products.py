"""The gradients of a product, which are products again."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from warploom.interop.torch_internals import is_batched
from warploom.ops import matmul as eager


def gradients_of_product(
    a: torch.Tensor,
    b: torch.Tensor,
    gradient: torch.Tensor,
    alpha: Any,
    wanted: frozenset[str],
    multiply: Callable[..., torch.Tensor] = eager.matmul,
    then: Callable[[Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor] = lambda f, x: f(x),
) -> dict[str, torch.Tensor]:
    """The gradients by a, b and bias of alpha · a·b + bias: products again, with a and b read where they lie.

    The result's gradient enters them in the type of a and b; the bias's is summed in f32. Sums over the dimensions that
    were broadcast are in f32 too. ``multiply`` is :func:`warploom.matmul`; ``then`` applies a function to a tensor.
    """
    if is_batched(gradient):  # is_grads_batched=True: the dispatcher unpacks them
        multiply = torch.ops.warploom.matmul
    d, found = gradient.to(a.dtype), dict[str, torch.Tensor]()

    def product(left: torch.Tensor, right: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """left·right, in memory as ``like`` lies: of w.T the gradient by w is not copied to lie as w does."""
        turned, shape = like.stride(-2) == 1 < like.stride(-1), like.shape
        if turned:
            left, right, shape = right.mT, left.mT, like.mT.shape
        if left.dim() == right.dim() == 2 or torch.broadcast_shapes(left.shape[:-2], right.shape[:-2]) == shape[:-2]:
            found = multiply(left, right, alpha=alpha)
        else:
            found = multiply(left, right, alpha=alpha, out_dtype="f32").sum_to_size(shape).to(a.dtype)
        return found.mT if turned else found

    if "a" in wanted:
        found["a"] = product(d, b.mT, a)
    if "b" in wanted and b.dim() == 2:  # the rows of all batches are those of one product
        found["b"] = product(_rows(a).mT, _rows(d), b)
    elif "b" in wanted:
        found["b"] = product(a.mT, d, b)
    if "bias" in wanted:
        dtype = a.dtype
        found["bias"] = then(lambda x: _rows(x).sum(0, dtype=torch.float32).to(dtype), gradient)
    return found


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The rows of all batches as those of one matrix; gradients that are batched cannot be flattened."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
