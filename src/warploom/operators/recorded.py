"""Eager calls of which PyTorch's autograd keeps a history: one node, past the dispatcher, which costs more than a call.

Calls that PyTorch traces, transforms or watches by a dispatch mode are operators (:mod:`.registration`). A repeated
call is known by the comparison of its tensors (:class:`~warploom.ops.calls.CallCache`), and keeps what its backward
pass launches: a repeated backward pass is another such comparison, new gradients, and launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from warploom.core.errors import ProblemError
from warploom.interop.refusals import NO_BACKWARD, refuse_tangent, refuse_watched
from warploom.interop.torch_internals import recogniser
from warploom.interop.tracing import is_tracing
from warploom.operators.registration import Derivative
from warploom.operators.schema import Named, Schema
from warploom.ops.calls import Caller, PreparedCall, together

Gradients = Sequence[torch.Tensor | None]
Backward = Callable[["RecordedCall", "Tape", Gradients], Named]
"""Computes gradients by name, of what a node saved and of the gradients of its results, by :meth:`Tape.run`."""
Repeat = Callable[[tuple[torch.Tensor, ...], Gradients], "tuple[Any, ...] | None"]
"""The gradients of a node, of what it saved and of the gradients of its results; None where these must be read."""

Finish = tuple[
    Callable[["RecordedCall", Sequence[torch.Tensor], list[Any]], tuple[list[Any], tuple[torch.Tensor, ...]]],
    Callable[["RecordedCall", tuple[torch.Tensor, ...], Gradients], Gradients],
]
"""What a node makes of the results of a call, of its tensors, and keeps for the other: the gradients of the results."""

Transform = Callable[[torch.Tensor], torch.Tensor]
Origin = tuple[int, Transform | None]
"""Which of a node's tensors and the results of its calls a gradient is, -1 if there is none, or is computed of."""

_TRIALS = 8
"""Backward passes of a recorded call that are looked at for what may be repeated."""


class RecordedCall:
    """A call with a history, which calls on tensors like its first ones repeat.

    ``hidden``: how many of its last results the backward pass needs, and the caller does not.
    """

    def __init__(
        self,
        of: Recorder,
        arrays: tuple[Any, ...],
        options: tuple[Any, ...],
        config: Any,
        more: dict[str, Any],
        check: Any,
        hidden: int,
    ) -> None:
        self.of, self.options, self.config, self.more, self.check = of, options, config, more, check
        self.hidden = hidden
        named = of.caller.declaration.named(arrays)
        self.count = len(arrays)
        self.places = [i for i, x in enumerate(arrays) if x is not None]
        self.names = tuple([name for name, x in named.items() if x is not None])
        self.wanted = frozenset([name for name, x in named.items() if x is not None and x.requires_grad])
        self.asked = of.caller.asked(options)
        self.prepared: PreparedCall | None = None
        self.repeats = dict[tuple[bool, ...], Repeat]()
        self.trials = _TRIALS
        for name in self.names:
            if name in self.wanted and name not in of.derivative.by:
                raise ProblemError(f"{name}: {NO_BACKWARD}")
        if of.derivative.check is not None:
            of.derivative.check({**named, **of.named_options(self)})

    def on(self, tensors: Sequence[Any]) -> list[Any]:
        """The results for tensors like the first ones, with a history."""
        found = self.of.apply(self, *tensors)
        return list(found) if found.__class__ is tuple else [found]

    def run(self, tensors: Sequence[Any]) -> list[Any]:
        """The results, the hidden ones too, without a history."""
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

    def gradients(self, saved: tuple[torch.Tensor, ...], by_results: Gradients) -> tuple[Any, ...]:
        """The gradients of the node, without a history: by the call itself none, and by each tensor."""
        key = (torch.are_deterministic_algorithms_enabled(), *[x is None for x in by_results])
        if self.of.finish is not None:
            by_results = self.of.finish[1](self, saved, by_results)
        repeat = self.repeats.get(key)
        found = None if repeat is None else repeat(saved, by_results)
        if found is None:
            tape = Tape(saved, by_results)
            named = self.of.backward(self, tape, (*by_results, *[None] * self.hidden))
            found = None, *[named.get(name) for name in self.names]
            if self.trials and (repeat := tape.repeat(found)) is not None:
                self.repeats[key] = repeat
            self.trials = max(0, self.trials - 1)
        return found


class Tape:
    """The calls of a backward pass, to be repeated as one: on what the node ``saved`` and the gradients it is given."""

    def __init__(self, saved: tuple[torch.Tensor, ...], by_results: Gradients) -> None:
        self.saved = saved
        self._given = (*saved, *by_results)
        self._calls = list[tuple[PreparedCall, list[torch.Tensor], list[torch.Tensor]]]()
        self._others = dict[int, tuple[Transform, torch.Tensor, torch.Tensor]]()
        self._whole = True

    def run(self, caller: Caller, arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any = None) -> list[Any]:
        """The results of a call."""
        known = caller.cache.known(caller.asked(options), config, arrays)
        made = caller.made(arrays, options, config)
        if known is not None and isinstance(known[0], PreparedCall):
            self._calls.append((known[0], known[1], made))
        else:
            self._whole = False
        return made

    def then(self, function: Transform, x: torch.Tensor) -> torch.Tensor:
        """A gradient that a function of PyTorch computes of what the node has, or of a result."""
        found = function(x)
        self._others[id(found)] = function, x, found
        return found

    def repeat(self, gradients: tuple[Any, ...]) -> Repeat | None:
        """A function that gives ``gradients`` for other tensors by the same calls; None where these came otherwise.

        They are results of the calls, their transposes or what came :meth:`then`, and the calls took nothing but views
        of what the node has and of each other's results: what lies where follows from how the node's tensors lie.
        """
        if not self._whole or not self._calls:
            return None
        numbered = [(i, x) for i, x in enumerate(self._given) if x is not None]
        places = {x.data_ptr(): i for i, x in numbered}
        if len(places) < len({id(x) for _, x in numbered}):
            return None
        made, taken = list[torch.Tensor](), list[list[int]]()
        for _, given, results in self._calls:
            taken.append([places.get(x.data_ptr(), -1) for x in given])
            for x in results:
                places[x.data_ptr()] = len(self._given) + len(made)
                made.append(x)
        if any(-1 in own for own in taken):
            return None
        call, sources = self._calls[0][0], taken[0]
        if len(taken) > 1:
            sources = sorted({i for own in taken for i in own if i < len(self._given)})
            new = {i: n for n, i in enumerate([*sources, *range(len(self._given), len(self._given) + len(made))])}
            joint = [(one, [new[i] for i in own]) for (one, _, _), own in zip(self._calls, taken, strict=True)]
            call = together(joint, len(sources))
        same = recogniser([self._given[i] for i in sources])
        origins = [self._origin(x, made) for x in gradients]
        if call is None or same is None or None in origins:
            return None
        return _repeated(call, same, sources, [x for x in origins if x is not None])

    def _origin(self, gradient: torch.Tensor | None, made: Sequence[torch.Tensor]) -> Origin | None:
        if gradient is None:
            return -1, None
        function, gradient, _ = self._others.get(id(gradient), (None, gradient, None))
        for i, x in enumerate((*self._given, *made)):
            if x is None or x.data_ptr() != gradient.data_ptr() or x.dtype != gradient.dtype:
                continue
            if x.shape == gradient.shape and x.stride() == gradient.stride():
                return i, function
            turned = x.mT if function is None and x.dim() > 1 else x
            if turned.shape == gradient.shape and turned.stride() == gradient.stride():
                return i, _transposed
        return None


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return x.mT


def _repeated(call: PreparedCall, same: Callable[..., bool], sources: list[int], origins: list[Origin]) -> Repeat:
    pick, order = itemgetter(*sources, sources[0]), itemgetter(*[i for i, _ in origins])
    functions = [(place, function) for place, (_, function) in enumerate(origins) if function is not None]

    def repeat(saved: tuple[torch.Tensor, ...], by_results: Gradients) -> tuple[Any, ...] | None:
        given = (*saved, *by_results)
        *tensors, _ = pick(given)
        made = call.on(tensors) if same(*tensors) else None
        if made is None:
            return None
        found = order((*given, *made, None))  # the last is the gradient of what has none
        if functions:
            found = list(found)
            for place, function in functions:
                found[place] = function(found[place])
        return tuple(found)

    return repeat


class Recorder:
    """An operation whose eager calls are nodes of autograd's graph.

    ``needs`` are options without which there is no gradient, by their values. ``backward`` computes gradients that have
    no history; for those that shall have one (``create_graph=True``) ``derivative`` serves, which is made of operators
    and takes what ``schema`` makes of the arguments. A node may ``finish`` its results.
    """

    def __init__(
        self,
        caller: Caller,
        schema: Schema,
        derivative: Derivative,
        backward: Backward,
        needs: Named | None = None,
        finish: Finish | None = None,
    ) -> None:
        self.caller, self.schema, self.derivative, self.backward = caller, schema, derivative, backward
        self.finish = finish
        self._needs = {i: needs[name] for i, name in enumerate(caller.option_names) if needs and name in needs}
        # Past Function.apply, which looks for transforms of torch.func: calls in such come here as no eager ones.
        base: Any = super(torch.autograd.Function, _node(caller.name, derivative, finish))
        self.apply: Callable[..., Any] = base.apply

    def __call__(
        self, arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any, check: Any, more: dict[str, Any]
    ) -> Any:
        """The results of a call. Raises ProblemError for an option without a derivative, and for tangents."""
        caller = self.caller
        given, asked = options, (*caller.asked(options), *more.items())
        known = caller.cache.known(asked, config, arrays) if check is False else None
        made = None if known is None else known[0].on(known[1])
        if made is None:
            for name, x in zip(caller.option_names, options, strict=True):
                if isinstance(x, torch.Tensor):
                    refuse_watched(name, x)
            for name, x in caller.declaration.named(arrays).items():
                if x is not None:
                    refuse_tangent(x, name)
            options = tuple(caller.declaration.plain(options).values())  # as they are now: lists and tensors may change
            needed = tuple([self._needs.get(i, x) for i, x in enumerate(options)])
            hidden = 0 if all(options[i] for i in self._needs) else 1
            call = RecordedCall(self, arrays, needed, config, more, check, hidden)
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


def _node(name: str, derivative: Derivative, finish: Finish | None) -> Any:
    kept = derivative.kept

    def forward(ctx: Any, call: RecordedCall, *tensors: torch.Tensor) -> Any:
        results, more = call.run(tensors), ()
        saved = (*tensors, *results) if kept else tensors
        if finish is not None:
            results, more = finish[0](call, tensors, results)
        ctx.call = call
        ctx.save_for_backward(*saved, *more)
        ctx.set_materialize_grads(False)
        if call.hidden:
            results = results[: -call.hidden]
        return results[0] if len(results) == 1 else tuple(results)

    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        call, saved = ctx.call, ctx.saved_tensors
        if not torch.is_grad_enabled():
            return call.gradients(saved, gradients)
        count = len(call.names)
        named = {**dict(zip(call.names, saved, strict=False)), **call.of.named_options(call)}
        given = call.of.schema.arguments(named, call.config)
        by_results = (*gradients, *[None] * call.hidden)
        if finish is not None:
            by_results = tuple(finish[1](call, saved, by_results))
        found = derivative.backward(given, saved[count:], by_results, call.wanted)
        return None, *[found.get(name) for name in call.names]

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(f"warploom_{name}", (torch.autograd.Function,), members)


def by_names(call: RecordedCall, saved: Sequence[torch.Tensor]) -> Named:
    """The arguments that a node saved, and the options and the configuration of its call, by their names."""
    return {**dict(zip(call.names, saved, strict=False)), **call.of.named_options(call), "config": call.config}


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
