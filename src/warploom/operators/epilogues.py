"""Epilogues of products in PyTorch: their names, by which an operator takes them, and their derivatives.

A traced epilogue is a small graph of f32 operations. Its derivative is another epilogue, of the same product: the
backward pass multiplies again rather than keeping what the epilogue was given, so that nothing of the result's size is
stored between the passes, and the epilogue's argument is not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from warploom.core.dtypes import f32
from warploom.core.errors import ProblemError
from warploom.core.identity import function_key
from warploom.kernels.matmul.features import MOST_EXTRAS, EpilogueFunction
from warploom.lang.arithmetic import Arithmetic
from warploom.lang.functions import as_f32, vector_jacobian
from warploom.lang.values import Number, Traced
from warploom.operators.products import gradients_of_product
from warploom.ops.matmul import check_function


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


# -- names
_FUNCTIONS: dict[str, EpilogueFunction] = {}
_NAMES: dict[int, str] = {}
"""By the identity of a function, which :data:`_FUNCTIONS` keeps alive."""


def name_of(epilogue: EpilogueFunction) -> str:
    """The name by which an operator takes this very function, for the life of the process.

    Equal functions have names of their own: what one closes over may change later. While torch.compile traces, reading
    ``id`` has it guard on the identity, and reading ``repr`` has it break the graph at functions that close over what
    it does not know, such as a tensor.
    """
    repr(epilogue)
    return _named(epilogue, id(epilogue))


@torch.compiler.assume_constant_result
def _named(epilogue: EpilogueFunction, _: int) -> str:
    name = _NAMES.get(id(epilogue))
    if name is None:
        name = _NAMES[id(epilogue)] = f"{getattr(epilogue, '__name__', 'epilogue')}.{len(_NAMES)}"
        _FUNCTIONS[name] = epilogue
    return name


def function_of(epilogue: Any) -> Any:
    """The function of a name of :func:`name_of` or :func:`_gradient_name`; functions and None as they are.

    Raises ProblemError for the name of another process, as an exported graph has it.
    """
    if not isinstance(epilogue, str):
        return epilogue
    name, _, by = epilogue.partition(_BY)
    function = _FUNCTIONS.get(name)
    if function is None:
        raise ProblemError(
            f"the epilogue {epilogue} is a function of the process that traced this graph: trace it here"
        )
    return EpilogueGradient(function, function_key(function), int(by)) if by else function


_BY = ", differentiated by "


# -- derivatives
def extras_of(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The extra matrices among the arguments of a product, by their names."""
    return {name: given[name] for name in ("extra0", "extra1") if given.get(name) is not None}


def check_differentiable(given: Mapping[str, Any]) -> None:
    """Raises ProblemError for a product with an epilogue that has no backward pass."""
    function, extras = function_of(given.get("epilogue")), extras_of(given)
    if function is None:
        return
    if isinstance(function, EpilogueGradient):
        raise ProblemError("a product with an epilogue is not differentiated twice: leave out create_graph=True")
    if len(extras) >= MOST_EXTRAS:
        raise ProblemError(
            f"an epilogue with {len(extras)} extra matrices has no backward pass, which takes one more than "
            f"{MOST_EXTRAS}: call under torch.no_grad(), or leave one of them to PyTorch"
        )
    _check(EpilogueGradient(function, function_key(function), 0), len(extras))


def gradients(
    given: Mapping[str, Any],
    gradient: torch.Tensor,
    alpha: Any,
    wanted: frozenset[str],
    multiply: Callable[..., torch.Tensor],
    then: Callable[..., torch.Tensor],
) -> dict[str, torch.Tensor]:
    """The gradients of a product with an epilogue, by the tensors ``wanted``.

    The gradient of the epilogue's sum is the same product through another epilogue; those of a, b and the bias follow
    as without one.
    """
    if torch.is_grad_enabled():
        raise ProblemError("a product with an epilogue is not differentiated twice: leave out create_graph=True")
    a, b, extras, epilogue = given["a"], given["b"], extras_of(given), given["epilogue"]
    others = dict(zip(("extra0", "extra1"), (gradient.to(a.dtype), *extras.values()), strict=False))
    named = isinstance(epilogue, str)  # in graphs

    def of(by: int, out_dtype: Any = None) -> torch.Tensor:
        own = f"{epilogue}{_BY}{by}" if named else EpilogueGradient(epilogue, function_key(epilogue), by)
        number = {"alpha_tensor": alpha} if named and isinstance(alpha, torch.Tensor) else {"alpha": alpha}
        return multiply(a, b, bias=given.get("bias"), epilogue=own, out_dtype=out_dtype, **number, **others)

    def of_extra(by: int, extra: torch.Tensor) -> torch.Tensor:
        """Of a value for a row or a column the sum of its elements' gradients."""
        whole = extra.dtype == a.dtype and extra.shape == gradient.shape
        if whole:
            return of(by)
        shape, dtype = extra.shape, extra.dtype
        return then(lambda x: x.sum_to_size(shape).to(dtype), of(by, "f32"))

    found = {name: of_extra(i, x) for i, (name, x) in enumerate(extras.items(), 1) if name in wanted}
    by_product = wanted - found.keys()
    return found | (gradients_of_product(a, b, of(0), alpha, by_product, multiply, then) if by_product else {})
