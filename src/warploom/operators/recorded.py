"""Eager calls of which PyTorch's autograd keeps a history: one node, past the dispatcher, which costs more than a call.

Calls that PyTorch traces, transforms or watches by a dispatch mode are operators (:mod:`.registration`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from warploom.core.errors import ProblemError
from warploom.interop.refusals import NO_BACKWARD, refuse_tangent, refuse_watched
from warploom.interop.tracing import is_tracing
from warploom.operators.registration import Derivative
from warploom.operators.schema import Named, Schema
from warploom.ops.calls import Caller, PreparedCall

Backward = Callable[["RecordedCall", Sequence[torch.Tensor], Sequence[torch.Tensor | None]], Named]
"""Computes gradients by name, of what a node saved and of the gradients of its results."""


class RecordedCall:
    """A call with a history, which calls on tensors like its first ones repeat."""

    def __init__(
        self,
        of: Recorder,
        arrays: tuple[Any, ...],
        options: tuple[Any, ...],
        config: Any,
        more: dict[str, Any],
        check: Any,
    ) -> None:
        self.of, self.options, self.config, self.more, self.check = of, options, config, more, check
        named = of.caller.declaration.named(arrays)
        self.count = len(arrays)
        self.places = [i for i, x in enumerate(arrays) if x is not None]
        self.names = tuple([name for name, x in named.items() if x is not None])
        self.wanted = frozenset([name for name, x in named.items() if x is not None and x.requires_grad])
        self.asked = of.caller.asked(options)
        self.prepared: PreparedCall | None = None
        self.known: Any = None  # of the backward pass
        for name in self.names:
            if name in self.wanted and name not in of.derivative.by:
                raise ProblemError(f"{name}: {NO_BACKWARD}")
        if of.derivative.check is not None:
            of.derivative.check({**named, **of.named_options(self)})

    def on(self, tensors: Sequence[Any]) -> list[Any]:
        """The results for these tensors, with a history; a caller who asks for fewer takes the first."""
        found = self.of.node.apply(self, *tensors)
        return list(found) if isinstance(found, tuple) else [found]

    def run(self, tensors: Sequence[Any]) -> list[Any]:
        """The results, without one."""
        made = None if self.prepared is None else self.prepared.on(tensors)
        if made is None:
            arrays: list[Any] = [None] * self.count
            for i, x in zip(self.places, tensors, strict=True):
                arrays[i] = x
            made, self.check = self.of.caller.made(tuple(arrays), self.options, self.config, self.check), False
            known = self.of.caller.cache.known(self.asked, self.config, tuple(arrays))
            if known is not None and isinstance(known[0], PreparedCall):
                self.prepared = known[0]
        return made


class Recorder:
    """An operation whose eager calls are nodes of autograd's graph.

    ``needs`` are options without which there is no gradient, by their values. ``backward`` computes gradients that have
    no history; for those that shall have one (``create_graph=True``) ``derivative`` serves, which is made of operators
    and takes what ``schema`` makes of the arguments.
    """

    def __init__(
        self, caller: Caller, schema: Schema, derivative: Derivative, backward: Backward, needs: Named | None = None
    ) -> None:
        self.caller, self.schema, self.derivative, self.backward = caller, schema, derivative, backward
        self._needs = {i: needs[name] for i, name in enumerate(caller.option_names) if needs and name in needs}
        self.node = _node(caller.name, derivative)

    def __call__(
        self, arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any, check: Any, more: dict[str, Any]
    ) -> Any:
        """The results of a call. Raises ProblemError for an option without a derivative, and for tangents."""
        caller = self.caller
        given, asked = options, (*caller.asked(options), *more.items())
        made = caller.cache.again(asked, config, arrays) if check is False else None
        if made is None:
            for name, x in zip(caller.option_names, options, strict=True):
                if isinstance(x, torch.Tensor):
                    refuse_watched(name, x)
            for name, x in caller.declaration.named(arrays).items():
                if x is not None:
                    refuse_tangent(x, name)
            options = tuple(caller.declaration.plain(options).values())  # as they are now: lists and tensors may change
            needed = tuple([self._needs.get(i, x) for i, x in enumerate(options)])
            call: Any = RecordedCall(self, arrays, needed, config, more, check)
            if not all(options[i] for i in self._needs):
                call = _Fewer(call)
            made = call.on([x for x in arrays if x is not None])
            if asked[: len(given)] == given and not any(map(_may_change, given)):
                caller.cache.recognise(asked, config, arrays, call, True)
        return caller.returned(made, arrays)

    def named_options(self, call: RecordedCall) -> dict[str, Any]:
        """The options of a call by their names."""
        return {**dict(zip(self.caller.option_names, call.options, strict=True)), **call.more}


def _may_change(option: Any) -> bool:
    """Whether an option is one object that may stand for another value later."""
    return isinstance(option, torch.Tensor) or (isinstance(option, tuple | list) and any(map(_may_change, option)))


class _Fewer:
    """A call whose last result the backward pass needs, and the caller does not."""

    def __init__(self, call: RecordedCall) -> None:
        self._call = call

    def on(self, tensors: Sequence[Any]) -> list[Any]:
        """The results but for the last."""
        return self._call.on(tensors)[:-1]


def _node(name: str, derivative: Derivative) -> Any:
    kept = derivative.kept

    def forward(ctx: Any, call: RecordedCall, *tensors: torch.Tensor) -> Any:
        results = call.run(tensors)
        ctx.call = call
        ctx.save_for_backward(*tensors, *(results if kept else ()))
        ctx.set_materialize_grads(False)
        return results[0] if len(results) == 1 else tuple(results)

    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call, saved = ctx.call, ctx.saved_tensors
        if torch.is_grad_enabled():
            count = len(call.names)
            named = {**dict(zip(call.names, saved, strict=False)), **call.of.named_options(call)}
            given = call.of.schema.arguments(named, call.config)
            found = derivative.backward(given, saved[count:], gradients, call.wanted)
        else:
            found = call.of.backward(call, saved, gradients)
        return None, *[found.get(name) for name in call.names]

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"warploom_{name}", (torch.autograd.Function,), members)


def by_names(call: RecordedCall, saved: Sequence[torch.Tensor], run: Callable[..., Named], gradients: Any) -> Named:
    """The gradients through a function of arguments by name, results, their gradients, and what is wanted."""
    given = {**dict(zip(call.names, saved, strict=False)), **call.of.named_options(call), "config": call.config}
    return run(given, saved[len(call.names) :], gradients, call.wanted)


def runs_eagerly(first: Any) -> bool:
    """Whether a call whose first array is ``first`` is no operator: PyTorch neither traces nor watches it."""
    return isinstance(first, torch.Tensor) and not is_tracing()


def eagerly(
    recorder: Recorder, arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any, check: Any = False, **more: Any
) -> Any:
    """The results of an eager call, in the types of autocast where that is on, with a history where one is wanted."""
    caller, kind = recorder.caller, arrays[0].device.type
    if torch.is_autocast_enabled(kind):
        arrays = cast(caller, arrays)
        with torch.autocast(kind, enabled=False):
            return eagerly(recorder, arrays, options, config, check, **more)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays):
        return recorder(arrays, options, config, check, more)
    return caller.computed(arrays, options, config, check)


def cast(caller: Caller, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Floating-point tensors but the exact ones in the type of autocast."""
    dtype, declaration = torch.get_autocast_dtype(arrays[0].device.type), caller.declaration
    return tuple(
        [
            x.to(dtype) if x is not None and x.is_floating_point() and not declaration.is_exact(name) else x
            for name, x in declaration.named(arrays).items()
        ]
    )
