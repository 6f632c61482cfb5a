"""Products with an epilogue of the caller's own, differentiated: by the derivative of the epilogue's trace.

A traced epilogue is a small graph of f32 operations. Its derivative is another epilogue, of the same product: the
backward pass multiplies again rather than keeping what the epilogue was given, so that nothing of the result's size is
stored between the passes, and the epilogue's argument is not rounded.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from inspect import unwrap
from typing import Any

import torch

from warploom.core.dtypes import f32
from warploom.core.errors import ProblemError
from warploom.core.identity import function_key
from warploom.kernels.matmul.features import MOST_EXTRAS, EpilogueFunction
from warploom.lang.arithmetic import Arithmetic
from warploom.lang.derivative import vector_jacobian
from warploom.lang.functions import as_f32
from warploom.lang.values import Number, Traced
from warploom.operators.products import gradients_of_product
from warploom.ops import matmul as eager
from warploom.ops.matmul_arrays import check_function
from warploom.ops.options import number

_product = unwrap(eager.matmul)  # the public one would come back here where something requires a gradient


@dataclass(frozen=True)
class EpilogueGradient:
    """An epilogue's vector-Jacobian product by its argument ``by`` (0 the sum), as an epilogue.

    Its extra matrices are the gradient of the result, and then those of the epilogue. ``key`` stands for ``function``.
    """

    function: EpilogueFunction = field(compare=False)
    key: Hashable
    by: int

    def __call__(self, x: Traced, gradient: Traced, *extras: Traced) -> Number:
        """The gradient by the argument, for one element."""
        result = as_f32(self.function(x, *extras), x)
        return vector_jacobian(result, (x, *extras), gradient)[self.by]


@lru_cache(maxsize=256)
def _check(gradient: EpilogueGradient, extras: int) -> None:
    """Raises ProblemError for an epilogue that cannot be, or has no derivative."""
    check_function(gradient.function, extras)
    k = Arithmetic()
    gradient(*[Traced(k, k.new_value(f32)) for _ in range(2 + extras)])


class WithEpilogue(torch.autograd.Function):
    """:func:`warploom.matmul` with an epilogue, of a, b, the bias or None, its other options, and the extras."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, bias: Any, options: dict[str, Any], *extras: torch.Tensor) -> torch.Tensor:
        """The product; the arguments are kept."""
        ctx.save_for_backward(a, b, bias, *extras)
        ctx.options = options
        return _product(a, b, bias=bias, extras=extras, **options)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """The gradient of the epilogue's sum is the same product through another epilogue; then that of the product."""
        if torch.is_grad_enabled():
            raise ProblemError("a product with an epilogue is not differentiated twice: leave out create_graph=True")
        a, b, bias, *extras = ctx.saved_tensors
        function, alpha = ctx.options["epilogue"], ctx.options.get("alpha", 1.0)
        needed = ctx.needs_input_grad
        others = grad_outputs[0].to(a.dtype), *extras

        def of(by: int, out_dtype: Any = None) -> torch.Tensor:
            own = EpilogueGradient(function, function_key(function), by)
            return _product(a, b, bias=bias, extras=others, alpha=alpha, epilogue=own, out_dtype=out_dtype)

        def of_extra(i: int, extra: torch.Tensor) -> torch.Tensor:
            """Of a value for a row or a column the sum of its elements' gradients."""
            whole = extra.dtype == a.dtype and extra.shape == grad_outputs[0].shape
            return of(1 + i) if whole else of(1 + i, "f32").sum_to_size(extra.shape).to(extra.dtype)

        found = [of_extra(i, x) if needs else None for i, (x, needs) in enumerate(zip(extras, needed[4:], strict=True))]
        wanted = frozenset(name for name, needs in zip(("a", "b", "bias"), needed, strict=False) if needs)
        product = gradients_of_product(a, b, of(0), alpha, wanted) if wanted else {}
        return *(product.get(name) for name in ("a", "b", "bias")), None, *found


def matmul(
    a: Any, b: Any, *, bias: Any = None, extras: Sequence[Any] = (), out: Any = None, **options: Any
) -> torch.Tensor:
    """:func:`warploom.matmul` with arguments that no operator takes; with a history if a gradient is wanted.

    Under autocast tensors are taken in its type.
    """
    if "alpha" in options:  # before the pass forward, which is without gradients
        options["alpha"] = number("alpha", options["alpha"])
    given = [a, b, bias, *extras]
    device = a.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        given = [x if x is None else x.to(dtype) for x in given]
    a, b, bias, *extras = given
    with torch.autocast(device, enabled=False):
        wanted = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
        function = options.get("epilogue")
        if not wanted or out is not None or function is None:
            return _product(a, b, bias=bias, extras=extras, out=out, **options)
        if len(extras) >= MOST_EXTRAS:
            raise ProblemError(
                f"an epilogue with {len(extras)} extra matrices has no backward pass, which takes one more than "
                f"{MOST_EXTRAS}: call under torch.no_grad(), or leave one of them to PyTorch"
            )
        _check(EpilogueGradient(function, function_key(function), 0), len(extras))
        return WithEpilogue.apply(a, b, bias, options, *extras)
