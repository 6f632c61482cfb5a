"""How an operator of this package is registered with PyTorch, its derivative and its part in autocast included.

With ``torch.library.Library``: of the ways there are, the shortest from a caller to the function (``custom_op`` takes
several times as long).

Source: PyTorch, "Custom Python Operators" and ``torch.library``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch._functorch.utils import enable_single_level_autograd_function

from warploom.core.errors import ProblemError
from warploom.interop.refusals import NESTED, NO_BACKWARD, NO_TANGENT, NOT_TWICE, refuse_derivatives, refuse_tangent
from warploom.interop.tracing import forward_mode, is_tracing, transforms

_NAMESPACE = "warploom"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")  # operators live as long as this object
_DEVICES = ("CUDA", "CPU")
_ONE_DEVICE = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)) for key in _DEVICES]
_BELOW_AUTOGRAD = torch._C._after_autograd_keyset
_EXACT = frozenset({"sinks", "k_scale", "v_scale", "scale_tensor", "softcap_tensor", "alpha_tensor"})
"""Arguments that autocast leaves as they are, whatever operator has them: few numbers, which kernels take in f32."""

Named = Mapping[str, Any]


@dataclass(frozen=True)
class Derivative:
    """How an operator is differentiated, by the tensors ``by``; others that require gradients are refused.

    ``backward`` takes the arguments by name, the results (none where they are not ``kept``), their gradients (None for
    those that nothing depends on) and the names of the arguments whose gradients are wanted; it gives those gradients
    by name. It is itself made of operators, so that it is traced and, where they are differentiable, differentiated.
    ``check`` raises ProblemError for arguments, by name, that have no derivative.
    """

    by: frozenset[str]
    backward: Callable[[Named, tuple[Any, ...], tuple[torch.Tensor | None, ...], frozenset[str]], Named]
    kept: bool = True
    check: Callable[[Named], None] | None = None


_SPLIT = frozenset({"window_left", "window_right", "scale_tensor", "softcap_tensor", "alpha_tensor"})


def names_of(schema: str) -> frozenset[str]:
    """The names of an operator's arguments."""
    return frozenset(_Parameters.of("operator" + schema).names)


def _public(given: dict[str, Any]) -> dict[str, Any]:
    """An operator's arguments as those of a public function, which has one for a window, and one for each number."""
    if _SPLIT.isdisjoint(given):
        return given
    for name in ("scale", "softcap", "alpha"):
        tensor = given.pop(f"{name}_tensor", None)
        if tensor is not None:
            given[name] = tensor
    left, right = given.pop("window_left", None), given.pop("window_right", None)
    return given if left is right is None else {**given, "window": (left, right)}


@dataclass(frozen=True)
class _Parameters:
    """The parameters of an operator: names in the order of its schema, and defaults."""

    names: tuple[str, ...]
    defaults: Named

    @classmethod
    def of(cls, schema: str) -> _Parameters:
        listed = torch._C.parse_schema(schema).arguments
        defaults = {x.name: x.default_value for x in listed if x.has_default_value()}
        return cls(tuple([x.name for x in listed]), defaults)

    def given(self, arguments: tuple[Any, ...], named: Named) -> dict[str, Any]:
        """Those arguments by their names; PyTorch leaves out others, which have their defaults."""
        found = dict(zip(self.names, arguments))  # noqa: B905  (what strict=False costs, in every call)
        if named:
            found.update(named)
        return found

    def every(self, arguments: tuple[Any, ...], named: Named) -> dict[str, Any]:
        """All arguments."""
        return {**self.defaults, **self.given(arguments, named)}


@dataclass(frozen=True)
class _Eager:
    """How an operator is called outside of graphs: by its function, past PyTorch's dispatcher."""

    operator: Any
    names: tuple[str, ...]
    run: Callable[..., Any]
    function: Any
    of_gradients: bool

    def __call__(self, arguments: tuple[Any, ...], named: Named) -> Any:
        tensors, others = dict[str, Any](), dict[str, Any]()
        for name, x in (*zip(self.names, arguments, strict=False), *named.items()):
            if x.__class__ in _PLAIN:
                tensors[name] = x
            elif isinstance(x, torch.Tensor):  # of a subclass
                return self.operator(*arguments, **named)
            else:
                others[name] = x
        kind = next(iter(tensors.values())).device.type if tensors else ""
        if kind not in ("cuda", "cpu") or not others.keys() <= set(self.names):  # PyTorch says what is wrong
            return self.operator(*arguments, **named)
        if not self.of_gradients and torch.is_autocast_enabled(kind):
            tensors = dict(
                zip(tensors, _cast([*tensors], [*tensors.values()], torch.get_autocast_dtype(kind)), strict=True)
            )
        if not torch.is_grad_enabled() or True not in [x.requires_grad for x in tensors.values()]:
            return self.run(**tensors, **others)
        if self.function is None:
            raise ProblemError(NO_BACKWARD)
        for x in tensors.values():
            refuse_tangent(x)
        return self.function.apply(self.run, tuple(tensors), others, *tensors.values())


_PLAIN = (torch.Tensor, torch.nn.Parameter)
_EAGER: dict[str, _Eager] = {}


def call(name: str, *arguments: Any, **named: Any) -> Any:
    """``torch.ops.warploom.<name>`` of these arguments, recorded for a backward pass where a gradient is wanted.

    In graphs, under dispatch modes and for tensors of subclasses it is the operator. Other calls run its function,
    inside a ``torch.autograd.Function`` if a gradient is wanted, at a fraction of what the dispatcher costs the host.
    """
    if is_tracing():
        return getattr(torch.ops.warploom, name)(*arguments, **named)
    return _EAGER[name](arguments, named)


def _cast(names: Sequence[str], values: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """The arguments of these names as autocast takes them: floats but for :data:`_EXACT` in its type."""
    return [
        x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and name not in _EXACT else x
        for name, x in zip(names, values, strict=False)
    ]


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    derivative: Derivative | None = None,
    *,
    of_gradients: bool = False,
) -> Any:
    """``torch.ops.warploom.<name>``: what ``run`` computes, and what ``fake`` says of its shapes while tracing.

    ``schema`` is PyTorch's signature of it, "(Tensor a, …) -> Tensor". ``run`` is called with what is given, by the
    names of public functions: "window_left" and "window_right" are "window", "scale_tensor" is "scale" where there is
    one, as are "softcap_tensor" and "alpha_tensor"; it has the schema's defaults. ``fake`` is called with all arguments
    by the schema's names. Nothing is mutated. Without a ``derivative`` whoever asks for one gets a ProblemError, and so
    does who asks for one in forward mode. An operator ``of_gradients`` may be recorded (``create_graph``,
    ``torch.func.grad``), and refuses once its own derivative is asked for. It takes no part in autocast: the forward
    pass has chosen the types, and torch.compile traces both passes under its autocast.
    """
    parameters, compute = _Parameters.of(name + schema), unwrap(run)  # PyTorch does not watch a kernel of its own
    if of_gradients:
        derivative = Derivative(frozenset(parameters.names), _refuse_twice, kept=False)

    def kernel(*arguments: Any, **named: Any) -> Any:
        return compute(**_public(parameters.given(arguments, named)))

    # Known to torch.compile as what it may trace through: the operator has a fake and keeps to its schema.
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in _DEVICES:
        _LIBRARY.impl(name, kernel, key)
        if not of_gradients:
            _LIBRARY.impl(name, _autocast(key, lambda: operator, parameters.names), f"Autocast{key}")
    function = None if derivative is None else _function(name, parameters, derivative)
    differentiable = None if function is None else _below_transforms(function, parameters)
    _LIBRARY.impl(name, _autograd(kernel, differentiable, lambda: operator), "Autograd", with_keyset=True)
    torch.library.register_fake(
        f"{_NAMESPACE}::{name}", lambda *given, **named: fake(**parameters.every(given, named)), lib=_LIBRARY
    )
    operator: Any = getattr(getattr(torch.ops, _NAMESPACE), name).default
    _EAGER[name] = _Eager(operator, parameters.names, kernel, function, of_gradients)
    return operator


def _autograd(
    kernel: Callable[..., Any], differentiable: Callable[..., Any] | None, operator: Callable[[], Any]
) -> Callable[..., Any]:
    """The kernel of the Autograd keys: every way to a derivative leads past it.

    Those are ``backward``, ``torch.func`` and forward-mode tensors, compiled or not; nothing below it sees whether one
    is wanted.
    """

    def run(keyset: Any, *arguments: Any, **named: Any) -> Any:
        below = keyset & _BELOW_AUTOGRAD
        given = (*arguments, *named.values())
        wanted = torch.is_grad_enabled() and True in [getattr(x, "requires_grad", False) for x in given]
        if below in _ONE_DEVICE and not wanted:  # the dispatcher would come to it 2 µs later
            return kernel(*arguments, **named)
        for x in given:
            if isinstance(x, torch.Tensor):
                if x.is_nested:
                    raise ProblemError(NESTED)
                refuse_tangent(x)
        if not wanted:
            return operator().redispatch(below, *arguments, **named)
        if forward_mode(torch):  # below a function with a backward pass PyTorch would drop the tangents
            raise ProblemError(NO_TANGENT)
        if differentiable is not None:
            return differentiable(operator(), below, arguments, named)
        # What is exported may never need a gradient; if it does, the exported operator refuses.
        if transforms(torch) or not torch.compiler.is_exporting():
            raise ProblemError(NO_BACKWARD)
        return operator().redispatch(below, *arguments, **named)

    return run


def differentiated(*tensors: torch.Tensor | None) -> bool:
    """Whether a gradient by one of these may be asked for: which of two operators a call is to be.

    Where torch.compile traces ``torch.func.grad``, tensors do not say that they require one.
    """
    return torch.is_grad_enabled() and (_transformed() or any(x is not None and x.requires_grad for x in tensors))


@torch.compiler.assume_constant_result
def _transformed() -> bool:
    """:func:`transforms`, asked while torch.compile traces: Dynamo itself would take what it answers for an object."""
    return transforms(torch)


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

    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in _DEVICES:
        _LIBRARY.impl(name, run, key)
    _LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_LIBRARY)
    operator: Any = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return operator


def _function(name: str, parameters: _Parameters, derivative: Derivative) -> Any:
    """The ``torch.autograd.Function`` of an operator.

    It takes what computes the results of arguments by name, the names of the tensors, the other arguments by name, and
    the tensors.
    """

    class Operation(torch.autograd.Function):
        """One call."""

        @staticmethod
        def forward(
            ctx: Any, run: Callable[..., Any], names: tuple[str, ...], others: Named, *tensors: torch.Tensor
        ) -> Any:
            for other in sorted(_needed(ctx, names) - derivative.by):
                raise ProblemError(f"{other}: {NO_BACKWARD}")
            given = {**others, **dict(zip(names, tensors, strict=True))}
            if derivative.check is not None:
                derivative.check({**parameters.defaults, **given})
            result = run(**given)
            results = (result if isinstance(result, tuple) else (result,)) if derivative.kept else ()
            ctx.names, ctx.others = names, others
            ctx.save_for_backward(*tensors, *results)
            ctx.set_materialize_grads(False)
            return result

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
            names, saved, wanted = ctx.names, ctx.saved_tensors, _needed(ctx, ctx.names)
            given = {**parameters.defaults, **ctx.others, **dict(zip(names, saved, strict=False))}
            found = derivative.backward(given, saved[len(names) :], gradients, wanted)
            return None, None, None, *[found.get(name) if name in wanted else None for name in names]

    Operation.__name__ = Operation.__qualname__ = f"warploom_{name}"
    return Operation


def _needed(ctx: Any, names: tuple[str, ...]) -> frozenset[str]:
    """The tensors by which a call is differentiated."""
    return frozenset([name for name, needs in zip(names, ctx.needs_input_grad[3:], strict=True) if needs])


def _below_transforms(function: Any, parameters: _Parameters) -> Callable[..., Any]:
    """What runs a function of :func:`_function` from the dispatcher: (operator, keys below autograd, arguments)."""
    # The dispatcher has lowered torch.func's transforms already: not through Function.apply, which would do it again.
    base: Any = super(torch.autograd.Function, function)

    def apply(operator: Any, below: Any, arguments: tuple[Any, ...], named: Named) -> Any:
        def redispatch(**given: Any) -> Any:
            # PyTorch runs this without grad mode, by which levels of torch.func below this one would record nothing.
            with torch.set_grad_enabled(transforms(torch)), torch._C._AutoDispatchBelowAutograd():
                return operator.redispatch(below, **given)

        given = parameters.given(arguments, named)
        tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
        others = {name: x for name, x in given.items() if name not in tensors}
        with enable_single_level_autograd_function():
            return base.apply(redispatch, tuple(tensors), others, *tensors.values())

    return apply


def _autocast(key: str, operator: Callable[[], Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """The kernel of an Autocast key: floats but for :data:`_EXACT` in the type that autocast has now."""
    excluded = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{key}"))

    def run(*arguments: Any, **named: Any) -> Any:
        dtype = torch.get_autocast_dtype(key.lower())

        with torch._C._ExcludeDispatchKeyGuard(excluded):
            own = _cast([*named], [*named.values()], dtype)
            return operator()(*_cast(names, arguments, dtype), **dict(zip(named, own, strict=True)))

    return run
