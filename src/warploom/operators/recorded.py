"""Calls of which PyTorch's autograd keeps a history: a call is one node of its graph, eager or as an operator.

An eager call goes past the dispatcher, which costs more than the rest of it. A repeated one is known by the comparison
of its tensors (:class:`~warploom.ops.calls.CallCache`), and so are the calls of its backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch

from warploom.core import above
from warploom.core.errors import ProblemError, WarploomError
from warploom.interop import tracing
from warploom.interop.refusals import NO_BACKWARD, has_memory, refuse_tangent
from warploom.interop.torch_internals import recogniser, run_backward_by, tangents_are_on
from warploom.operators.schema import Named
from warploom.ops.backends import Processor
from warploom.ops.calls import Caller, Repeatable
from warploom.ops.steps import Launches
from warploom.ops.warmup import compile_meanwhile

Tensors = Sequence[torch.Tensor | None]
Function = Callable[[torch.Tensor], torch.Tensor]


class Place:
    """A tensor of a backward pass, and where another pass finds it: by its ``number``, through a ``function``.

    Numbers count what the node saved, the gradients of its results, and the results of the pass's calls, from 1; 0 is a
    gradient that there is not, -1 what is found nowhere.
    """

    def __init__(self, tensor: torch.Tensor, number: int = -1, function: Function | None = None) -> None:
        self.tensor, self.number, self.function = tensor, number, function

    def then(self, function: Function) -> Place:
        """Apply a function of PyTorch to the tensor, such as one that makes a view."""
        before = self.function
        both = function if before is None else lambda x: function(before(x))
        return Place(function(self.tensor), self.number, both)


def deterministic(caller: Caller, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The options of a call, deterministic where PyTorch asks for it."""
    if not torch.are_deterministic_algorithms_enabled():
        return options
    return tuple([True if name == "deterministic" else x for name, x in zip(caller.option_names, options, strict=True)])


Places = Sequence[Place | None]
_NO_GRADIENTS = 0, 0
"""The numbers of the gradients by the arguments of a node that come before its tensors: there are none."""
Repeat = Callable[[list[Any]], "tuple[Any, ...] | None"]
"""What a node returns, of what it saved and the gradients it is given; None where these lie otherwise."""


class BackwardPass:
    """The calls of a backward pass, which are repeated on what the node ``saved`` and the gradients it is given.

    Calls have a history where gradients shall have one (``create_graph=True``), and are operators where PyTorch
    watches; such passes are not repeated, nor those that take what is no view of a tensor with a number. ``formed``
    are gradients that the forward pass has formed, which this pass alone may change and give away.
    """

    def __init__(
        self, saved: Sequence[torch.Tensor], by_results: Tensors, hidden: int = 0, formed: Sequence[torch.Tensor] = ()
    ) -> None:
        self._tensors: list[torch.Tensor | None] = [None, *saved, *formed, *by_results]
        self._given = len(self._tensors)
        places = [None if x is None else Place(x, i) for i, x in enumerate(self._tensors)]
        after = 1 + len(saved)
        self.saved: list[Any] = places[1:after]
        self.formed: list[Any] = places[after : after + len(formed)]
        self.by_results = places[after + len(formed) :]
        self.by_results += [None] * hidden
        self._calls: list[tuple[Repeatable, list[int]]] | None = []
        self._asks = False  # whether an algorithm is to be deterministic

    def run(self, caller: Caller, arrays: Places, options: tuple[Any, ...], config: Any = None) -> list[Place]:
        """The results of a call, deterministic where PyTorch asks for it."""
        if "deterministic" in caller.option_names:
            self._asks, options = True, deterministic(caller, options)
        tensors = tuple([None if x is None else x.tensor for x in arrays])
        if torch.is_grad_enabled() or not runs_eagerly(*tensors):
            found = above.operator_of(caller.name)(**caller.named(tensors, options, config))
            self._calls = None
            return list(map(Place, found if isinstance(found, tuple) else (found,)))
        made = caller.made(tensors, options, config)
        known = caller.cache.known(caller.asked(options), config, tensors)
        numbers = [self._number_of(x) for x in arrays if x is not None]
        if self._calls is None or known is None or -1 in numbers:
            self._calls = None
        else:
            self._calls.append((known[0], numbers))
        first = len(self._tensors)
        self._tensors += made
        return [Place(x, first + i) for i, x in enumerate(made)]

    def _number_of(self, place: Place) -> int:
        """The number of the tensor in whose memory one begins; -1 if it has none."""
        base = self._tensors[place.number] if place.number > 0 else None
        return -1 if base is None or base.data_ptr() != place.tensor.data_ptr() else place.number

    def repetition(self, gradients: Places) -> Repeat | None:
        """A function that returns the ``gradients`` of other passes; None for a pass that is not repeated."""
        given, numbers = self._tensors[: self._given], [0 if x is None else x.number for x in gradients]
        if not self._calls or -1 in numbers:
            return None
        there = [i for i, x in enumerate(given) if x is not None]
        absent = [i for i, x in enumerate(given) if x is None][1:]
        same, asks = recogniser([given[i] for i in there]), self._asks
        if same is None:
            return None
        pick, order = itemgetter(*there), itemgetter(*_NO_GRADIENTS, *numbers)
        enabled = torch.are_deterministic_algorithms_enabled
        certain = enabled()
        calls = [(call, itemgetter(*own)) for call, own in self._calls]  # each of two tensors at least
        functions = [(i, x.function) for i, x in enumerate(gradients, len(_NO_GRADIENTS)) if x and x.function]

        def repeat(tensors: list[Any]) -> tuple[Any, ...] | None:
            for i in absent:
                if tensors[i] is not None:
                    return None
            if not same(*pick(tensors)) or tangents_are_on() or (asks and enabled() is not certain):
                return None
            for call, take in calls:
                made = call.on(take(tensors))
                if made is None:
                    return None
                tensors += made
            found = order(tensors)
            if not functions:
                return found
            changed = list(found)
            for i, function in functions:
                changed[i] = function(changed[i])
            return tuple(changed)

        return repeat


@dataclass(frozen=True)
class Derivative:
    """The derivative of an operation, by the arrays ``by``; others that require gradients are refused.

    ``backward`` takes a call and a backward pass, for which the node saved the tensors of the call, and its results
    where they are ``kept``; it gives gradients by name. ``check`` raises ProblemError for arguments, by name, that have
    no derivative. ``needs`` are options, by their values, without which results are missing that the backward pass
    takes: last ones, which the caller does not see. ``formed`` names the very last of these, which are gradients: the
    node does not save them, and its first backward pass takes them.
    ``ahead`` plans the backward pass of a call with arguments, by name, so that its kernels compile beside those of the
    call.
    """

    by: frozenset[str]
    backward: Callable[[RecordedCall, BackwardPass], Mapping[str, Place]]
    kept: bool = True
    check: Callable[[Named], None] | None = None
    needs: Named = field(default_factory=dict[str, Any])
    formed: frozenset[str] = frozenset()
    ahead: Callable[[Named], Launches] | None = None


class RecordedCall:
    """A call with a history. ``names`` are those of the tensors it takes, ``wanted`` those with gradients.

    It lives as long as its node, and keeps no tensor: the node saves them, until its backward pass or elsewhere.
    ``hidden``: how many of the last results the backward pass needs, and the caller does not; the last of these are
    ``formed`` gradients.
    """

    hidden = formed = 0

    def __init__(
        self,
        caller: Caller,
        derivative: Derivative,
        arrays: tuple[Any, ...],
        options: Named,
        config: Any,
    ) -> None:
        given = {**caller.declaration.named(arrays), **options}
        tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
        self.caller, self.config, self.names = caller, config, tuple(tensors)
        self.options = {name: x for name, x in options.items() if name not in tensors}
        self.wanted = frozenset([name for name, x in tensors.items() if x.requires_grad])
        for name in sorted(self.wanted - derivative.by):
            raise ProblemError(f"{name}: {NO_BACKWARD}")
        if derivative.check is not None:
            derivative.check(given)
        self._backward = derivative.backward

    def gradients(
        self, saved: tuple[torch.Tensor, ...], by_results: Tensors, formed: Sequence[torch.Tensor] = ()
    ) -> tuple[Any, ...]:
        """Return the gradients of the node's arguments, from its saved tensors and the gradients of its results.

        ``formed``: those of the forward pass, in the first backward pass.
        """
        how = BackwardPass(saved, by_results, self.hidden, formed)
        named = self._backward(self, how)
        found = [named.get(name) for name in self.names]
        if len(formed) == self.formed:
            self._learn(how, found)
        return (None, None, *[None if x is None else x.tensor for x in found])

    def _learn(self, how: BackwardPass, gradients: Places) -> None:
        """See what of a backward pass can be repeated."""

    def given(self, saved: Places) -> dict[str, Any]:
        """The options, and the tensors that the node saved, by their names."""
        return {**self.options, **dict(zip(self.names, saved, strict=False))}


class EagerCall(RecordedCall):
    """A call that is no operator, which calls on tensors like its first ones repeat."""

    def __init__(
        self, of: Recorder, arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any, more: Named, check: Any
    ) -> None:
        names, needs = of.caller.option_names, of.derivative.needs
        self._options = tuple([needs.get(name, x) for name, x in zip(names, options, strict=True)])
        named = {**dict(zip(names, self._options, strict=True)), **more}
        super().__init__(of.caller, of.derivative, arrays, named, config)
        given = {**of.caller.declaration.named(arrays), **dict(zip(names, options, strict=True))}
        results = [x for x in of.caller.declaration.results if x.is_made({**given, **needs})]
        self.hidden = sum(x.inner or not x.is_made(given) for x in results)
        self.formed = sum(x.name in of.derivative.formed for x in results)
        self._apply, self._check = of.apply, check
        self._given = [x is not None for x in arrays]
        self.asked = of.caller.asked(self._options)
        self._prepared: Repeatable | None = None
        self._repeat: Repeat | None = None

    def on(self, tensors: Sequence[Any]) -> list[Any]:
        """The results for tensors like the first ones, with a history."""
        found = self._apply(self, self._run, *tensors)
        return list(found) if found.__class__ is tuple else [found]

    def _run(self, tensors: Sequence[Any]) -> list[Any]:
        """The results, by the launches that were prepared for tensors like these."""
        made = None if self._prepared is None else self._prepared.on(tensors)
        if made is None:
            rest = iter(tensors)
            arrays = tuple([next(rest) if given else None for given in self._given])
            made, self._check = self.caller.made(arrays, self._options, self.config, self._check), False
            known = self.caller.cache.known(self.asked, self.config, arrays)
            self._prepared = None if known is None else known[0]
        return made

    def gradients(
        self, saved: tuple[torch.Tensor, ...], by_results: Tensors, formed: Sequence[torch.Tensor] = ()
    ) -> tuple[Any, ...]:
        """Return the gradients of the node's arguments, by the calls of an earlier backward pass if they fit."""
        repeat = self._repeat
        if repeat is not None and len(formed) == self.formed and not torch.is_grad_enabled():
            found = repeat([None, *saved, *formed, *by_results])
            if found is not None:
                return found
        return super().gradients(saved, by_results, formed)

    def _learn(self, how: BackwardPass, gradients: Places) -> None:
        self._repeat = how.repetition(gradients) or self._repeat


def node(name: str, *, kept: bool) -> Callable[..., Any]:
    """A function of a :class:`RecordedCall`, what runs it, and its tensors, as one node of autograd's graph.

    The second computes all results, the hidden ones too, of the tensors. The node does not keep it. Gradients that it
    has formed are no saved tensors: the first backward pass hands them on, and autograd takes them as they are.

    It goes past ``Function.apply``, which looks for transforms of ``torch.func``: eager calls are never in one, and for
    operators the dispatcher has lowered them already. The results are ``kept`` for the backward pass.
    """

    def forward(ctx: Any, call: Any, run: Callable[..., list[Any]], *tensors: torch.Tensor) -> Any:
        results = run(tensors)
        seen, saved = len(results) - call.hidden, len(results) - call.formed
        ctx.call, ctx.formed = call, results[saved:]
        ctx.save_for_backward(*tensors, *(results[:saved] if kept else ()))
        ctx.set_materialize_grads(False)
        results = results[:seen]
        return results[0] if len(results) == 1 else tuple(results)

    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        formed, ctx.formed = ctx.formed, ()
        return ctx.call.gradients(ctx.saved_tensors, gradients, formed)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    kind = type(f"warploom_{name}", (torch.autograd.Function,), members)
    run_backward_by(kind, backward)
    base: Any = super(torch.autograd.Function, kind)
    return base.apply


class Recorder:
    """An operation whose eager calls are nodes of autograd's graph."""

    def __init__(self, caller: Caller, derivative: Derivative) -> None:
        self.caller, self.derivative = caller, derivative
        self.apply = node(caller.name, kept=derivative.kept)
        self._begun = set[Any]()

    def __call__(
        self,
        arrays: tuple[Any, ...],
        options: tuple[Any, ...],
        config: Any,
        check: Any = False,
        public: tuple[Caller, tuple[Any, ...]] | None = None,
        **more: Any,
    ) -> Any:
        """The results of a call, in the types of autocast where that is on, with a history where one is wanted.

        ``public``: the operation that the user called, with its options, if that was another one. Raises ProblemError
        for an option that requires a gradient, and for tangents, where there is a history.
        """
        caller, kind = self.caller, arrays[0].device.type
        if torch.is_autocast_enabled(kind):
            declaration = caller.declaration
            arrays = cast(kind, declaration.is_exact, declaration.named(arrays).items())
            with torch.autocast(kind, enabled=False):
                return self(arrays, options, config, check, **more)
        if not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in arrays)):
            return caller.computed(arrays, options, config, check)
        given, asked = options, (*caller.asked(options), *more.items())
        known = caller.cache.known(asked, config, arrays) if check is False else None
        made = None if known is None else known[0].on(known[1])
        if made is None:
            for name, x in caller.declaration.named(arrays).items():
                if x is not None:
                    refuse_tangent(x, name)
            options = tuple(caller.declaration.plain(options).values())  # as they are now: lists and tensors may change
            call = EagerCall(self, arrays, options, config, more, check)
            self._compile_backward(arrays, options, more, config)
            made = call.on([x for x in arrays if x is not None])
            if asked[: len(given)] == given and not any(map(_may_change, given)):
                caller.cache.recognise(asked, config, arrays, call, True)
                if public is not None and not any(map(_may_change, public[1])):
                    public[0].cache.recognise(public[0].asked(public[1]), config, arrays, call, True)
        return caller.returned(made, arrays)

    def _compile_backward(self, arrays: tuple[Any, ...], options: tuple[Any, ...], more: Named, config: Any) -> None:
        """Have the backward pass compiled meanwhile, for the first call on a GPU with such options and last sizes."""
        if self.derivative.ahead is None or config is not None or any(map(_may_change, (*options, *more.values()))):
            return
        device = arrays[0].device
        gpu = Processor.of((device.type, device.index or 0)).gpu
        kind = options, *more.items(), *[x is not None and (x.dtype, x.shape[-1:]) for x in arrays]
        if gpu is None or kind in self._begun:
            return
        self._begun.add(kind)
        named = dict(zip(self.caller.option_names, options, strict=True))
        with suppress(WarploomError), torch.no_grad():  # the call itself raises what is wrong
            plan = self.derivative.ahead({**self.caller.declaration.named(arrays), **named, **more})
            compile_meanwhile(plan, gpu)


def _may_change(option: Any) -> bool:
    """Whether an option is one object that may stand for another value later."""
    return isinstance(option, torch.Tensor) or (isinstance(option, tuple | list) and any(map(_may_change, option)))


def runs_eagerly(*arrays: Any) -> bool:
    """Whether a call is no operator: PyTorch neither traces nor watches it, nor takes batches of its arrays apart."""
    plain = isinstance(arrays[0], torch.Tensor) and not tracing.is_tracing()
    return plain and all(x is None or has_memory(x) for x in arrays)


def cast(kind: str, is_exact: Callable[[str], bool], given: Iterable[tuple[str, Any]]) -> tuple[Any, ...]:
    """Arguments by their names, floating-point tensors but the exact ones in the type of autocast on a device."""
    dtype = torch.get_autocast_dtype(kind)

    def typed(name: str, x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and not is_exact(name) else x

    return tuple([typed(name, x) for name, x in given])
