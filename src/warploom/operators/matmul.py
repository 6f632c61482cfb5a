"""``warploom::matmul`` as a PyTorch operator: what ``torch.compile`` and ``torch.export`` see of a product.

:func:`warploom.matmul` takes this way by itself while a graph is traced, where tensors have no memory to point at, and
where autograd keeps a history of an eager call.
An operator's arguments are tensors, numbers and texts: an ``epilogue`` goes by a name
(:func:`warploom.operators.epilogues.name_of`).
"""

from __future__ import annotations

from typing import Any

import torch

from warploom.core.dtypes import DType, dtype_of
from warploom.operators import epilogues
from warploom.operators.eager import EagerOperation, autocast, runs_eagerly, wants_gradient
from warploom.operators.fakes import for_operator, if_sizes_are_known, seen
from warploom.operators.products import gradients_of_product
from warploom.operators.registration import EXACT, Derivative, Named, define
from warploom.ops.matmul_arrays import check_count, check_function, checked_config, checked_shape, result_types
from warploom.ops.options import extra_matrices

_KINDS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
_SCHEMA = (
    "(Tensor a, Tensor b, Tensor? bias=None, str? out_dtype=None, str accumulate='f32', float alpha=1.0, "
    "str? config=None, Tensor? alpha_tensor=None, str? epilogue=None, Tensor? extra0=None, Tensor? extra1=None) -> "
    "Tensor"
)


def _fake(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: str | None,
    accumulate: str,
    alpha: float,
    config: str | None,
    epilogue: str | None,
    extra0: torch.Tensor | None,
    extra1: torch.Tensor | None,
    **_: Any,
) -> torch.Tensor:
    views = [seen(x) for x in (a, b, bias, extra0, extra1) if x is not None]
    dtype = result_types(views[0], views[1], None, out_dtype, accumulate, alpha)[0]
    shape = if_sizes_are_known(lambda: checked_shape(views, bias is not None, epilogues.function_of(epilogue)))
    if config is not None:
        checked_config(config, views[0].dtype, accumulate)
    if shape is None:
        shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    return a.new_empty(shape, dtype=_KINDS[dtype.name])


def _backward(
    given: Named, _: tuple[Any, ...], gradients: tuple[torch.Tensor | None, ...], wanted: frozenset[str]
) -> Named:
    (gradient,), tensor = gradients, given.get("alpha_tensor")
    alpha = given.get("alpha", 1.0) if tensor is None else tensor
    if gradient is None:
        return {}
    if given.get("epilogue") is not None:
        return epilogues.gradients(given, gradient, alpha, wanted)
    return gradients_of_product(given["a"], given["b"], gradient, alpha, wanted)


_DERIVATIVE = Derivative(
    frozenset({"a", "b", "bias", "extra0", "extra1"}), _backward, kept=False, check=epilogues.check_differentiable
)
_eager = EagerOperation("matmul", epilogues.product, _DERIVATIVE)
matmul_operator = define("matmul", _SCHEMA, epilogues.product, _fake, _DERIVATIVE)
"""alpha · a·b + bias by :func:`warploom.matmul`; ``config`` in the notation that ``str(config)`` prints."""


def matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    extras: Any = (),
    out: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """:func:`warploom.matmul` where PyTorch keeps a history, or inside a traced graph: one node.

    With ``out``, which no operator takes, the graph is broken and the call runs as it is; with ``fullgraph=True``
    PyTorch raises an error that says what to do instead.
    """
    if out is not None:
        from warploom.operators import untraced

        return untraced.matmul(a, b, bias=bias, extras=extras, out=out, **options)
    extras = extra_matrices(extras)
    check_count(extras)
    epilogue = options.get("epilogue")
    if epilogue is not None and not callable(epilogue):
        check_function(epilogue, len(extras))
    tensors = {"a": a, "b": b, "bias": bias, **dict(zip(("extra0", "extra1"), extras, strict=False))}
    if runs_eagerly(a):
        tensors = autocast(tensors, EXACT)
        return _eager(tensors, options) if wants_gradient(tensors) else epilogues.product(**tensors, **options)
    if epilogue is not None:
        options["epilogue"] = epilogues.name_of(epilogue)
    if options.get("out_dtype") is not None:
        options["out_dtype"] = _word(options["out_dtype"])
    if "accumulate" in options:
        options["accumulate"] = _word(options["accumulate"])
    operators: Any = torch.ops.warploom
    return operators.matmul(**tensors, **for_operator(**options))


def _word(dtype: Any) -> str:
    """A type's name; of what names none whatever it prints, for the operator to refuse."""
    if isinstance(dtype, str):
        return dtype
    if isinstance(dtype, DType):
        return dtype.name
    try:
        return dtype_of(dtype).name
    except ValueError:
        return str(dtype)
