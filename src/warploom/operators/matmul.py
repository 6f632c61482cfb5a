"""``warploom::matmul`` as a PyTorch operator: what ``torch.compile`` and ``torch.export`` see of a product.

:func:`warploom.matmul` takes this way by itself while a graph is traced, where tensors have no memory to point at, and
where autograd keeps a history of an eager call.
An operator's arguments are tensors and numbers, so an ``epilogue`` (a Python function) cannot be part of it: such calls
break the graph (:mod:`warploom.operators.untraced`).
"""

from __future__ import annotations

from inspect import unwrap
from typing import Any

import torch

from warploom.core.dtypes import DType, dtype_of
from warploom.operators import epilogues
from warploom.operators.eager import EagerOperation, autocast, runs_eagerly, wants_gradient
from warploom.operators.fakes import for_operator, if_sizes_are_known, seen
from warploom.operators.products import gradients_of_product
from warploom.operators.registration import EXACT, Derivative, Named, define
from warploom.ops import matmul as eager
from warploom.ops.matmul_arrays import checked_config, checked_shape, result_types

_KINDS = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
_SCHEMA = (
    "(Tensor a, Tensor b, Tensor? bias=None, str? out_dtype=None, str accumulate='f32', float alpha=1.0, "
    "str? config=None, Tensor? alpha_tensor=None) -> Tensor"
)


def _fake(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: str | None,
    accumulate: str,
    alpha: float,
    config: str | None,
    **_: Any,
) -> torch.Tensor:
    views = [seen(x) for x in (a, b, bias) if x is not None]
    dtype = result_types(views[0], views[1], None, out_dtype, accumulate, alpha)[0]
    shape = if_sizes_are_known(lambda: checked_shape(views, bias is not None))
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
    return {} if gradient is None else gradients_of_product(given["a"], given["b"], gradient, alpha, wanted)


_DERIVATIVE = Derivative(frozenset({"a", "b", "bias"}), _backward, kept=False)
_eager = EagerOperation("matmul", eager.matmul, _DERIVATIVE)
matmul_operator = define("matmul", _SCHEMA, eager.matmul, _fake, _DERIVATIVE)
"""alpha · a·b + bias by :func:`warploom.matmul`; ``config`` in the notation that ``str(config)`` prints."""


def matmul(a: torch.Tensor, b: torch.Tensor, **options: Any) -> torch.Tensor:
    """:func:`warploom.matmul` where PyTorch keeps a history, or inside a traced graph: one node.

    With arguments that no operator takes (``epilogue``, ``extras`` and ``out``) the graph is broken and the call runs
    as it is; with ``fullgraph=True`` PyTorch raises an error that says what to do instead.
    """
    own = options.get("epilogue") is not None or options.get("extras") or options.get("out") is not None
    if runs_eagerly(a):
        if own:
            return epilogues.matmul(a, b, **options)
        tensors = autocast({"a": a, "b": b, "bias": options.pop("bias", None)}, EXACT)
        return _eager(tensors, options) if wants_gradient(tensors) else unwrap(eager.matmul)(**tensors, **options)
    if own:
        from warploom.operators import untraced

        return untraced.matmul(a, b, **options)
    for name in ("epilogue", "extras", "out"):
        options.pop(name, None)
    if options.get("out_dtype") is not None:
        options["out_dtype"] = _word(options["out_dtype"])
    if "accumulate" in options:
        options["accumulate"] = _word(options["accumulate"])
    operators: Any = torch.ops.warploom
    return operators.matmul(a, b, **for_operator(**options))


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
