"""``warploom::matmul`` as a PyTorch operator: what ``torch.compile`` and ``torch.export`` see of a product.

:func:`warploom.matmul` takes this way by itself while a graph is traced, where tensors have no memory to point at, and
where autograd keeps a history of an eager call.
An operator's arguments are tensors, numbers and texts: an ``epilogue`` goes by a name
(:func:`warploom.operators.epilogues.name_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from warploom.core.errors import ProblemError
from warploom.core.identity import function_key
from warploom.interop.arrays import torch_type
from warploom.operators import epilogues
from warploom.operators.fakes import arguments_of, if_sizes_are_known
from warploom.operators.products import gradients_of_product
from warploom.operators.recorded import Gradients, RecordedCall, Recorder, Tape, by_names, eagerly, runs_eagerly
from warploom.operators.registration import Derivative, define
from warploom.operators.schema import Named, Schema
from warploom.ops.matmul import (
    check_count,
    check_epilogue,
    check_function,
    checked_config,
    matmul_call,
    result_types,
)


def _run(arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any) -> torch.Tensor:
    """A product whose epilogue may be a name."""
    out_dtype, accumulate, epilogue, alpha = options
    return matmul_call.computed(arrays, (out_dtype, accumulate, epilogues.function_of(epilogue), alpha), config)


def _fake(given: Named) -> torch.Tensor:
    a, b, accumulate = (given[name] for name in ("a", "b", "accumulate"))
    found = arguments_of(matmul_call.declaration, given, epilogue=epilogues.function_of(given["epilogue"]))
    own = found.views["a"].dtype
    dtype = result_types(own, None, found.options)[0]
    shape = if_sizes_are_known(lambda: check_epilogue(found))
    if given["config"] is not None:
        checked_config(given["config"], own, accumulate)
    if shape is None:
        shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    return a.new_empty(shape, dtype=torch_type(dtype))


def _backward(
    given: Named, _: Sequence[Any], gradients: Gradients, wanted: frozenset[str], *eager: Callable[..., torch.Tensor]
) -> Named:
    """The gradients by products of operators, or by the ``eager`` functions in their place."""
    (gradient,), tensor, operators = gradients, given.get("alpha_tensor"), torch.ops.warploom
    alpha = given.get("alpha", 1.0) if tensor is None else tensor
    if gradient is None:
        return {}
    if given.get("epilogue") is not None:
        how = eager or (operators.matmul, lambda function, x: function(x))
        return epilogues.gradients(given, gradient, alpha, wanted, *how)
    return gradients_of_product(given["a"], given["b"], gradient, alpha, wanted, *eager)


def _eager_backward(call: RecordedCall, tape: Tape, gradients: Gradients) -> Named:
    def multiply(
        a: torch.Tensor, b: torch.Tensor, extra0: Any = None, extra1: Any = None, **options: Any
    ) -> torch.Tensor:
        """A product, with the extra matrices of an epilogue by their names."""
        extras = tuple([x for x in (extra0, extra1) if x is not None])
        (found,) = tape.run(matmul_call, *matmul_call.positions({"a": a, "b": b, "extras": extras, **options}))
        return found

    function = call.options[_EPILOGUE]
    if function is not None and function_key(function) != call.asked[_EPILOGUE]:
        raise ProblemError(
            "the epilogue, or a value that it reads, has changed since the forward pass: the gradient is another's now"
        )
    return _backward(by_names(call, tape.saved), (), gradients, call.wanted, multiply, tape.then)


_EPILOGUE = matmul_call.option_names.index("epilogue")
_SCHEMA = Schema(matmul_call.declaration)
_DERIVATIVE = Derivative(
    frozenset({"a", "b", "bias", "extra0", "extra1"}), _backward, kept=False, check=epilogues.check_differentiable
)
_recorder = Recorder(matmul_call, _SCHEMA, _DERIVATIVE, _eager_backward)
matmul_operator = define("matmul", _SCHEMA, "Tensor", _run, _fake, _DERIVATIVE)
"""alpha · a·b + bias by :func:`warploom.matmul`; ``config`` in the notation that ``str(config)`` prints."""


def matmul(*, out: torch.Tensor | None = None, config: Any = None, **given: Any) -> torch.Tensor:
    """:func:`warploom.matmul` where PyTorch keeps a history, or inside a traced graph: one node.

    With ``out``, which no operator takes, the graph is broken and the call runs as it is; with ``fullgraph=True``
    PyTorch raises an error that says what to do instead.
    """
    if out is not None:
        from warploom.operators import untraced

        return untraced.matmul(out=out, config=config, **given)
    extras, epilogue = given["extras"], given["epilogue"]
    check_count(extras)
    if epilogue is not None and not callable(epilogue):
        check_function(epilogue, len(extras))
    if runs_eagerly(given["a"]):
        return eagerly(_recorder, *matmul_call.positions(given), config)
    if epilogue is not None:
        given["epilogue"] = epilogues.name_of(epilogue)
    given |= dict(zip(("extra0", "extra1"), extras, strict=False))
    operators: Any = torch.ops.warploom
    return operators.matmul(**_SCHEMA.arguments(given, config))
