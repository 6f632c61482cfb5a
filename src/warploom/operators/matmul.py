"""``warploom::matmul`` as a PyTorch operator, and the gradients of products.

:func:`warploom.matmul` takes this way by itself while a graph is traced, where tensors have no memory to point at, and
where autograd keeps a history of an eager call. An operator's arguments are tensors, numbers and texts: an ``epilogue``
goes by a name (:func:`name_of`).

A traced epilogue is a small graph of f32 operations. Its derivative is another epilogue, of the same product: the
backward pass multiplies again rather than keeping what the epilogue was given, so that nothing of the result's size is
stored between the passes, and the epilogue's argument is not rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from warploom.core.dtypes import f32
from warploom.core.errors import ProblemError
from warploom.core.identity import function_key
from warploom.interop.arrays import torch_type
from warploom.interop.torch_internals import is_batched
from warploom.kernels.matmul.features import MOST_EXTRAS, EpilogueFunction
from warploom.lang.arithmetic import Arithmetic
from warploom.lang.functions import as_f32, vector_jacobian
from warploom.lang.values import Number, Traced
from warploom.operators.recorded import Gradients, RecordedCall, Recorder, Tape, by_names, eagerly, runs_eagerly
from warploom.operators.registration import Derivative, arguments_of, define, if_sizes_are_known
from warploom.operators.schema import Named, Schema
from warploom.ops import matmul as public
from warploom.ops.matmul import (
    check_count,
    check_epilogue,
    check_function,
    checked_config,
    matmul_call,
    result_types,
)


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


# -- names of epilogues
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
    """The function of a name of :func:`name_of` or a gradient; functions and None as they are.

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


# -- gradients
def gradients_of_product(
    a: torch.Tensor,
    b: torch.Tensor,
    gradient: torch.Tensor,
    alpha: Any,
    wanted: frozenset[str],
    multiply: Callable[..., torch.Tensor] = public.matmul,
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


def _extras_of(given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The extra matrices among the arguments of a product, by their names."""
    return {name: given[name] for name in ("extra0", "extra1") if given.get(name) is not None}


def _check_differentiable(given: Mapping[str, Any]) -> None:
    """Raises ProblemError for a product with an epilogue that has no backward pass."""
    function, extras = function_of(given.get("epilogue")), _extras_of(given)
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


def _gradients_of_epilogue(
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
    a, b, extras, epilogue = given["a"], given["b"], _extras_of(given), given["epilogue"]
    others = dict(zip(("extra0", "extra1"), (gradient.to(a.dtype), *extras.values()), strict=False))
    named = isinstance(epilogue, str)  # in graphs

    def of(by: int, out_dtype: Any = None) -> torch.Tensor:
        own = f"{epilogue}{_BY}{by}" if named else EpilogueGradient(epilogue, function_key(epilogue), by)
        number = {"alpha_tensor": alpha} if named and isinstance(alpha, torch.Tensor) else {"alpha": alpha}
        return multiply(a, b, bias=given.get("bias"), epilogue=own, out_dtype=out_dtype, **number, **others)

    def of_extra(by: int, extra: torch.Tensor) -> torch.Tensor:
        """The gradient of an extra matrix; that of a value for a row or a column is the sum of its elements'."""
        whole = extra.dtype == a.dtype and extra.shape == gradient.shape
        if whole:
            return of(by)
        shape, dtype = extra.shape, extra.dtype
        return then(lambda x: x.sum_to_size(shape).to(dtype), of(by, "f32"))

    found = {name: of_extra(i, x) for i, (name, x) in enumerate(extras.items(), 1) if name in wanted}
    by_product = wanted - found.keys()
    return found | (gradients_of_product(a, b, of(0), alpha, by_product, multiply, then) if by_product else {})


# -- the operator
def _run(arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any) -> torch.Tensor:
    """A product whose epilogue may be a name."""
    out_dtype, accumulate, epilogue, alpha = options
    return matmul_call.computed(arrays, (out_dtype, accumulate, function_of(epilogue), alpha), config)


def _fake(given: Named) -> torch.Tensor:
    a, b, accumulate = (given[name] for name in ("a", "b", "accumulate"))
    found = arguments_of(matmul_call.declaration, given, epilogue=function_of(given["epilogue"]))
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
        return _gradients_of_epilogue(given, gradient, alpha, wanted, *how)
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
    frozenset({"a", "b", "bias", "extra0", "extra1"}), _backward, kept=False, check=_check_differentiable
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
        from warploom.operators import graphs

        return graphs.matmul(out=out, config=config, **given)
    extras, epilogue = given["extras"], given["epilogue"]
    check_count(extras)
    if epilogue is not None and not callable(epilogue):
        check_function(epilogue, len(extras))
    if runs_eagerly(given["a"]):
        return eagerly(_recorder, *matmul_call.positions(given), config)
    if epilogue is not None:
        given["epilogue"] = name_of(epilogue)
    given |= dict(zip(("extra0", "extra1"), extras, strict=False))
    operators: Any = torch.ops.warploom
    return operators.matmul(**_SCHEMA.arguments(given, config))
