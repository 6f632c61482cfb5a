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
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from warploom.core.dtypes import f32
from warploom.core.errors import ProblemError
from warploom.core.identity import function_key
from warploom.interop.arrays import torch_type
from warploom.kernels.matmul.features import MOST_EXTRAS, EpilogueFunction
from warploom.lang.arithmetic import Arithmetic
from warploom.lang.functions import as_f32, vector_jacobian
from warploom.lang.values import Number, Traced
from warploom.operators.recorded import (
    BackwardPass,
    Derivative,
    EagerCall,
    Place,
    RecordedCall,
    Recorder,
    runs_eagerly,
)
from warploom.operators.registration import arguments_of, define, if_sizes_are_known
from warploom.operators.schema import Schema
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
class _Products:
    """The products of a backward pass."""

    def __init__(self, how: BackwardPass, alpha: Any) -> None:
        self._how, self._alpha = how, alpha

    def product(
        self,
        a: Place,
        b: Place,
        bias: Place | None = None,
        extras: Sequence[Place] = (),
        epilogue: Any = None,
        out_dtype: Any = None,
    ) -> Place:
        """A product by :func:`warploom.matmul`, or by its operator with an epilogue that has a name."""
        if isinstance(epilogue, str):
            named = {"a": a, "b": b, "bias": bias, **dict(zip(("extra0", "extra1"), extras, strict=False))}
            given: dict[str, Any] = {name: x.tensor for name, x in named.items() if x is not None}
            given |= {"out_dtype": out_dtype, "epilogue": epilogue, "alpha": self._alpha}
            return Place(torch.ops.warploom.matmul(**_SCHEMA.arguments(given, None)))
        arrays, options = (a, b, bias, None, *extras), (out_dtype, "f32", epilogue, self._alpha)
        (found,) = self._how.run(matmul_call, arrays, options)
        return found

    def gradients(self, a: Place, b: Place, d: Place, wanted: frozenset[str]) -> dict[str, Place]:
        """The gradients by a, b and bias of alpha · a·b + bias: products again, with a and b read where they lie.

        The result's gradient d enters them in the type of a and b; the bias's is summed in f32. Sums over the
        dimensions that were broadcast are in f32 too.
        """
        dtype, given, found = a.tensor.dtype, d, dict[str, Place]()
        if d.tensor.dtype != dtype:
            d = d.then(lambda x: x.to(dtype))
        if "a" in wanted:
            found["a"] = self._like(a, d, b.then(_turned))
        if "b" in wanted and b.tensor.dim() == 2:  # the rows of all batches are those of one product
            found["b"] = self._like(b, a.then(lambda x: _rows(x).mT), d.then(_rows))
        elif "b" in wanted:
            found["b"] = self._like(b, a.then(_turned), d)
        if "bias" in wanted:
            found["bias"] = given.then(lambda x: _rows(x).sum(0, dtype=torch.float32).to(dtype))
        return found

    def _like(self, array: Place, left: Place, right: Place) -> Place:
        """left·right, in memory as an array lies: of w.T the gradient by w is not copied to lie as w does."""
        like = array.tensor
        turned, shape, dtype = like.stride(-2) == 1 < like.stride(-1), like.shape, like.dtype
        if turned:
            left, right, shape = right.then(_turned), left.then(_turned), like.mT.shape
        x, y = left.tensor.shape[:-2], right.tensor.shape[:-2]
        if x == y == () or torch.broadcast_shapes(x, y) == shape[:-2]:
            found = self.product(left, right)
        else:
            found = self.product(left, right, out_dtype="f32").then(lambda x: x.sum_to_size(shape).to(dtype))
        return found.then(_turned) if turned else found


def _turned(x: torch.Tensor) -> torch.Tensor:
    return x.mT


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The rows of all batches as those of one matrix; gradients that are batched cannot be flattened."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _extras_of(given: Mapping[str, Any]) -> dict[str, Any]:
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
    products: _Products, given: Mapping[str, Any], d: Place, wanted: frozenset[str]
) -> dict[str, Place]:
    """The gradients of a product with an epilogue, by the tensors ``wanted``.

    The gradient of the epilogue's sum is the same product through another epilogue; those of a, b and the bias follow
    as without one.
    """
    if torch.is_grad_enabled():
        raise ProblemError("a product with an epilogue is not differentiated twice: leave out create_graph=True")
    a, b, extras, epilogue = given["a"], given["b"], _extras_of(given), given["epilogue"]
    dtype, shape = a.tensor.dtype, d.tensor.shape
    taken = d if d.tensor.dtype == dtype else d.then(lambda x: x.to(dtype)), *extras.values()

    def of(by: int, out_dtype: Any = None) -> Place:
        named = isinstance(epilogue, str)  # in graphs
        own = f"{epilogue}{_BY}{by}" if named else EpilogueGradient(epilogue, function_key(epilogue), by)
        return products.product(a, b, given.get("bias"), taken, own, out_dtype)

    def of_extra(by: int, extra: torch.Tensor) -> Place:
        """The gradient of an extra matrix; that of a value for a row or a column is the sum of its elements'."""
        own, kind = extra.shape, extra.dtype  # what is kept of it to be repeated: not the tensor
        if kind == dtype and own == shape:
            return of(by)
        return of(by, "f32").then(lambda x: x.sum_to_size(own).to(kind))

    found = {name: of_extra(i, x.tensor) for i, (name, x) in enumerate(extras.items(), 1) if name in wanted}
    by_product = wanted - found.keys()
    return found | (products.gradients(a, b, of(0), by_product) if by_product else {})


def _gradients(call: RecordedCall, how: BackwardPass) -> dict[str, Place]:
    """The gradients of a node."""
    (d,), given = how.by_results, call.given(how.saved)
    epilogue, alpha = given["epilogue"], given["alpha"]
    if d is None:
        return {}
    if isinstance(call, EagerCall) and epilogue is not None and function_key(epilogue) != call.asked[_EPILOGUE]:
        raise ProblemError(
            "the epilogue, or a value that it reads, has changed since the forward pass: the gradient is another's now"
        )
    products = _Products(how, alpha.tensor if isinstance(alpha, Place) else alpha)
    if epilogue is not None:
        return _gradients_of_epilogue(products, given, d, call.wanted)
    return products.gradients(given["a"], given["b"], d, call.wanted)


# -- the operator
def _run(arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any) -> torch.Tensor:
    """A product whose epilogue may be a name."""
    out_dtype, accumulate, epilogue, alpha = options
    return matmul_call.computed(arrays, (out_dtype, accumulate, function_of(epilogue), alpha), config)


def _fake(arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any) -> torch.Tensor:
    (a, b, *_), (out_dtype, accumulate, epilogue, alpha) = arrays, options
    found = arguments_of(matmul_call.declaration, arrays, (out_dtype, accumulate, function_of(epilogue), alpha))
    own = found.views["a"].dtype
    dtype = result_types(own, None, found.options)[0]
    shape = if_sizes_are_known(lambda: check_epilogue(found))
    if config is not None:
        checked_config(config, own, accumulate)
    if shape is None:
        shape = (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    return a.new_empty(shape, dtype=torch_type(dtype))


_EPILOGUE = matmul_call.option_names.index("epilogue")
_SCHEMA = Schema(matmul_call.declaration)
_DERIVATIVE = Derivative(
    frozenset({"a", "b", "bias", "extra0", "extra1"}), _gradients, kept=False, check=_check_differentiable
)
_recorder = Recorder(matmul_call, _DERIVATIVE)
matmul_operator = define("matmul", matmul_call, _SCHEMA, "Tensor", _run, _fake, _DERIVATIVE)
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
    if runs_eagerly(given["a"], given["b"]):
        return _recorder(*matmul_call.positions(given), config)
    if epilogue is not None:
        given["epilogue"] = name_of(epilogue)
    given |= dict(zip(("extra0", "extra1"), extras, strict=False))
    operators: Any = torch.ops.warploom
    return operators.matmul(**_SCHEMA.arguments(given, config))
