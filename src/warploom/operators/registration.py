"""How an operator of this package is registered with PyTorch, its derivative and its part in autocast included.

With ``torch.library.Library``: of the ways there are, the shortest from a caller to the function (``custom_op`` takes
several times as long).

Source: PyTorch, "Custom Python Operators" and ``torch.library``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from warploom.core.dtypes import f32
from warploom.core.errors import ProblemError
from warploom.interop.arrays import ArrayView, torch_element_type, torch_type
from warploom.interop.refusals import NESTED, NO_BACKWARD, NOT_TWICE, refuse_derivatives, refuse_tangent
from warploom.interop.torch_internals import (
    below_autograd,
    keys_below_autograd,
    keys_of_devices,
    one_level_of_autograd,
    transforms,
)
from warploom.operators.recorded import Derivative, RecordedCall, cast, deterministic, node
from warploom.operators.schema import Named, Schema
from warploom.ops.calls import Caller
from warploom.ops.declare import Arguments, Declaration, Option

Result = TypeVar("Result")
_NAMESPACE = "warploom"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")  # operators live as long as this object
_DEVICES = ("CUDA", "CPU")
_ONE_DEVICE = keys_of_devices(_DEVICES)
_BELOW_AUTOGRAD = keys_below_autograd()


def define(
    name: str,
    caller: Caller,
    schema: Schema,
    results: str,
    run: Callable[[tuple[Any, ...], tuple[Any, ...], Any], Any],
    fake: Callable[[tuple[Any, ...], tuple[Any, ...], Any], Any],
    derivative: Derivative | None = None,
    *,
    of_gradients: bool = False,
) -> Any:
    """``torch.ops.warploom.<name>``: what ``run`` computes, and what ``fake`` says of its shapes while tracing.

    Both are called with arrays, options and the configuration in the order of the declaration. Nothing is mutated.
    Without a ``derivative`` whoever asks for one gets a ProblemError, and so does who asks for one in forward mode. An
    operator ``of_gradients`` may be recorded (``create_graph``, ``torch.func.grad``), and refuses once its own
    derivative is asked for. It takes no part in autocast: the forward pass has chosen the types, and torch.compile
    traces both passes under its autocast.
    """
    if of_gradients:
        derivative = Derivative(frozenset(schema.names), _refuse_twice, kept=False)

    def kernel(*arguments: Any) -> Any:
        return run(*schema.declared(arguments))

    record = None if derivative is None else _recording(name, caller, schema, derivative)
    autograd = _autograd(kernel, record, lambda: operator, schema.names)
    signature = f"({schema.text}) -> {results}"
    operator = _register(
        name, signature, kernel, autograd, lambda *given: fake(*schema.declared(given)), _one_by_one(lambda: operator)
    )
    if not of_gradients:
        for key in _DEVICES:
            _LIBRARY.impl(name, _autocast(key, operator, schema), f"Autocast{key}")
    return operator


def _register(
    name: str,
    signature: str,
    kernel: Callable[..., Any],
    autograd: Callable[..., Any],
    fake: Callable[..., Any],
    vmap: Callable[..., Any],
) -> Any:
    """``torch.ops.warploom.<name>``: the kernel of each device, that of the Autograd keys, and two rules of tracing."""
    # Known to torch.compile as what it may trace through: the operator has a fake and keeps to its schema.
    _LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag,))
    for key in _DEVICES:
        _LIBRARY.impl(name, kernel, key)
    _LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_LIBRARY)
    torch.library.register_vmap(f"{_NAMESPACE}::{name}", vmap, lib=_LIBRARY)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default


def define_call(
    caller: Caller,
    *,
    name: str = "",
    fixed: Named | None = None,
    more: tuple[Option, ...] = (),
    twins: bool = True,
    check: Callable[[Arguments, Any], object] = lambda *_: None,
    derivative: Derivative | None = None,
    of_gradients: bool = False,
    every_result: bool = False,
) -> tuple[Schema, Any]:
    """The schema and the operator of a declared operation, of its name or another.

    The operator has the options but for the ``fixed`` ones, and ``more``; with ``twins`` its floats may be tensors. Its
    results are those that the fixed options make; one ``of_gradients``, or with ``every_result``, has all, those that
    are not made as empty tensors. ``check`` raises for what is wrong with arguments and a configuration beyond their
    declaration.
    """
    declaration, known, every = caller.declaration, dict(fixed or {}), of_gradients or every_result
    schema = Schema(declaration, known, more, twins=twins)
    results = [x for x in declaration.results if every or x.is_made(known)]

    def returned(found: list[Any]) -> Any:
        return found[0] if len(results) == 1 else tuple(found)

    def compute(arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any) -> Any:
        found = caller.made(arrays, deterministic(caller, options), config)
        if not every:
            return returned(found)
        made, like = iter(found), arrays[0]
        given = dict(zip((*caller.array_names, *caller.option_names), (*arrays, *options), strict=True))
        there = [x.is_made(given) for x in results]
        return returned([next(made) if x else like.new_empty((0,), dtype=torch.float32) for x in there])

    def fake(arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any) -> Any:
        found = arguments_of(declaration, arrays, options, checked=not of_gradients)
        if_sizes_are_known(lambda: check(found, config))
        first, forms = arrays[0], found.results
        wanted = [forms.get(x.name, ((0,), f32)) for x in results]
        return returned([first.new_empty(shape, dtype=torch_type(dtype)) for shape, dtype in wanted])

    text = ", ".join(["Tensor"] * len(results))
    operator = define(
        name or caller.name,
        caller,
        schema,
        f"({text})" if len(results) > 1 else text,
        compute,
        fake,
        derivative,
        of_gradients=of_gradients,
    )
    return schema, operator


def define_gradients(
    caller: Caller, fixed: Named | None = None, *, twins: bool = True
) -> tuple[Any, Callable[..., Any]]:
    """The operator of a declared operation that computes gradients, and a function of the arguments by their names.

    The function gives the gradients that are asked for.
    """
    schema, operator = define_call(caller, fixed=fixed, twins=twins, of_gradients=True)
    name, results = caller.name, caller.declaration.results

    def traced(*, config: Any = None, **given: Any) -> Any:
        found = getattr(torch.ops.warploom, name)(**schema.arguments(given, config))
        return tuple([x for x, result in zip(found, results, strict=True) if result.is_made(given)])

    return operator, traced


# -- tensors without memory
def arguments_of(
    declaration: Declaration, arrays: tuple[Any, ...], options: tuple[Any, ...], *, checked: bool = True
) -> Arguments:
    """The arguments of an operation, of arrays and options in the order of its declaration.

    Raises ProblemError for arrays that are not as declared, unless that depends on sizes that only the data tells.
    """
    views = {declaration.kernels(name): _seen(x) for name, x in declaration.named(arrays).items() if x is not None}
    known = {  # a tensor stands for a number that the graph does not know
        x.name: x.default if isinstance(value, torch.Tensor) else value
        for x, value in zip(declaration.options.values(), options, strict=True)
    }
    found = if_sizes_are_known(lambda: declaration.bind(views, known)) if checked else None
    return declaration.bind(views, known, checked=False) if found is None else found


def _seen(tensor: torch.Tensor) -> ArrayView:
    """A fake tensor as the checks see it, with no address."""
    device = tensor.device.type, tensor.device.index or 0
    dtype = torch_element_type(tensor.dtype)
    return ArrayView(0, tuple(tensor.shape), tuple(tensor.stride()), dtype, device, "torch", tensor)


def if_sizes_are_known(check: Callable[[], Result]) -> Result | None:
    """The result of a check, which may raise; None where it would depend on sizes that only the data tells."""
    try:
        return check()
    except GuardOnDataDependentSymNode:
        return None


# -- kernels of dispatch keys
def _one_by_one(operator: Callable[[], Any]) -> Callable[..., Any]:
    """The rule by which ``torch.vmap`` runs an operator: a call for each part of the batch.

    PyTorch's own way to do so warns first, and where the call is refused then, the warning ends in a SystemError.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        parts = [[_part(x, dim, i) for x, dim in zip(arguments, in_dims, strict=True)] for i in range(info.batch_size)]
        found = [operator()(*part) for part in parts]
        if not found:
            raise ProblemError("torch.vmap maps over no element: there is no result")
        if isinstance(found[0], torch.Tensor):
            return torch.stack(found), 0
        return tuple(map(torch.stack, zip(*found, strict=True))), (0,) * len(found[0])

    return rule


def _part(x: Any, dim: Any, i: int) -> Any:
    """One part of an argument that has its batch in a dimension, and each other argument whole."""
    if isinstance(x, list | tuple):
        return [_part(one, of, i) for one, of in zip(x, dim, strict=True)]
    return x if dim is None else x.select(dim, i)


def _autograd(
    kernel: Callable[..., Any],
    record: Callable[..., Any] | None,
    operator: Callable[[], Any],
    names: tuple[str, ...],
) -> Callable[..., Any]:
    """The kernel of the Autograd keys: every way to a derivative leads past it.

    Those are ``backward``, ``torch.func`` and forward-mode tensors, compiled or not; nothing below it sees whether one
    is wanted.
    """

    def run(keyset: Any, *arguments: Any) -> Any:
        below = keyset & _BELOW_AUTOGRAD
        wanted = torch.is_grad_enabled() and True in [getattr(x, "requires_grad", False) for x in arguments]
        if below in _ONE_DEVICE and not wanted:  # the dispatcher would come to it 2 µs later
            return kernel(*arguments)
        for name, x in zip(names, arguments, strict=False):
            if isinstance(x, torch.Tensor):
                if x.is_nested:
                    raise ProblemError(f"{name}: {NESTED}")
                refuse_tangent(x, name.removesuffix("_tensor"))
        if not wanted:
            return operator().redispatch(below, *arguments)
        if record is not None:
            return record(operator(), below, arguments)
        # What is exported may never need a gradient; if it does, the exported operator refuses.
        if transforms() or not torch.compiler.is_exporting():
            raise ProblemError(NO_BACKWARD)
        return operator().redispatch(below, *arguments)

    return run


def differentiated(*tensors: torch.Tensor | None) -> bool:
    """Whether a gradient by one of these may be asked for: which of two operators a call is to be.

    Where torch.compile traces ``torch.func.grad``, tensors do not say that they require one.
    """
    return torch.is_grad_enabled() and (_transformed() or any(x is not None and x.requires_grad for x in tensors))


@torch.compiler.assume_constant_result
def _transformed() -> bool:
    """:func:`transforms`, asked while torch.compile traces: Dynamo itself would take what it answers for an object."""
    return transforms()


def _refuse_twice(*_: Any) -> Named:
    raise ProblemError(NOT_TWICE)


def define_mutating(name: str, schema: str, run: Callable[..., None], fake: Callable[..., None]) -> Any:
    """``torch.ops.warploom.<name>``, which changes the tensors that ``schema`` marks, lists of them too.

    It has no derivative: whoever asks for one gets a ProblemError.
    """

    def autograd(keyset: Any, *arguments: Any) -> None:
        for x in (x for one in arguments for x in (one if isinstance(one, list | tuple) else (one,))):
            if isinstance(x, torch.Tensor):
                refuse_derivatives(x)
        operator.redispatch(keyset & _BELOW_AUTOGRAD, *arguments)

    operator = _register(name, schema, run, autograd, fake, _refuse_batches)
    return operator


def _refuse_batches(*_: Any, **_named: Any) -> Any:
    raise ProblemError("a call that writes to its arguments has no batches: call it outside of torch.vmap")


def _recording(name: str, caller: Caller, schema: Schema, derivative: Derivative) -> Callable[..., Any]:
    """A function that runs an operator (operator, keys below autograd, arguments) with a history of its results."""
    apply = node(name, kept=derivative.kept)

    def record(operator: Any, below: Any, arguments: tuple[Any, ...]) -> Any:
        arrays, options, config = schema.declared(arguments)
        given = schema.every(arguments)
        named = dict(zip(caller.option_names, options, strict=True)) | {x: given[x] for x in schema.more}

        def run(_: Any) -> list[Any]:
            # PyTorch runs this without grad mode, by which levels of torch.func below this one would record nothing.
            with torch.set_grad_enabled(transforms()), below_autograd():
                found = operator.redispatch(below, *arguments)
            return list(found) if isinstance(found, tuple) else [found]

        call = RecordedCall(caller, derivative, arrays, named, config)
        known = {**caller.declaration.named(arrays), **named}
        with one_level_of_autograd():
            return apply(call, run, *[known[x] for x in call.names])

    return record


def _autocast(key: str, operator: Callable[..., Any], schema: Schema) -> Callable[..., Any]:
    """The kernel of an Autocast key: floats but for the schema's exact ones in the type that autocast has now."""
    kind = key.lower()

    def run(*arguments: Any) -> Any:
        given = cast(kind, schema.exact.__contains__, zip(schema.names, arguments, strict=False))
        with torch.autocast(kind, enabled=False):
            return operator(*given)

    return run
