"""Calls of an operation: each is prepared once, and found again by how its arrays lie and by what is asked.

A repeated call on torch tensors is one comparison (:func:`warploom.interop.torch_internals.recogniser`), new results
and launches. Everything else is read, looked up by that, and prepared where there is nothing yet.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from warploom.core import above
from warploom.core.errors import ProblemError
from warploom.core.identity import function_key
from warploom.interop.arrays import (
    ArrayView,
    address,
    as_if_compact,
    compact,
    describe_all,
    describe_new,
    makers,
    stream_reader,
)
from warploom.interop.overlap import Written, count_write
from warploom.interop.torch_internals import recogniser, tangents_are_on, watches
from warploom.ops.declare import Arguments, Declaration, Views, flag, refuse_unknown, shown_signature
from warploom.ops.steps import Launches, Prepared, run_anew

_KEPT = 4096  # prepared calls of an operation
_ADDRESSES_KEPT = 1024  # of a prepared call
_KINDS_KEPT = 8  # kinds of tensors that differ in more than the first one's shape
_ALIGNED = 16
"""Bytes: calls with tensors at other addresses are looked up by all that they depend on."""


@dataclass(frozen=True)
class Computation:
    """The launches that a call on ``given`` arguments comes to; all arrays go by the kernels' names.

    ``plan`` makes them of arrays in place: those ``taken``, by default all that are only read, those that are written
    to, and the new results. Where these are ``filled``, kernels leave parts of them as they are, in new ones a
    ``value``. Where there is ``nothing`` to compute, ``empty`` makes them by name, by default as they are declared.
    """

    given: Arguments
    plan: Callable[[Views], Launches]
    taken: Views | None = None
    value: float | None = None
    filled: bool = False
    nothing: bool = False
    empty: Callable[[], dict[str, Any]] | None = None

    @cached_property
    def written(self) -> Views:
        """The caller's arrays that receive results."""
        declared = self.given.declaration.arguments_of(self.given.views)
        return {name: view for (name, view), x in zip(self.given.views.items(), declared, strict=True) if x.written}

    @property
    def callers(self) -> Views:
        """The arrays in place, but for the new ones."""
        read = self.given.views if self.taken is None else self.taken
        return {name: view for name, view in read.items() if name not in self.written} | self.written

    @property
    def new(self) -> Views:
        """The results as arrays that are to be made."""
        first = next(iter(self.given.views.values()))
        made = self.given.results.items()
        return {name: as_if_compact(first._replace(shape=tuple(shape), dtype=dtype)) for name, (shape, dtype) in made}

    def planned(self) -> Any:
        """The plan for arrays that lie as those given. Raises ConfigError for a configuration that does not fit."""
        return self.plan(self.callers | self.new)


class Repeatable(Protocol):
    """A kept call that can be repeated on torch tensors."""

    def on(self, tensors: Sequence[Any]) -> list[Any] | None:
        """The new results for tensors like those of the first call; None where these must be read."""
        ...


class PreparedCall:
    """A call on a GPU that was run before: its launches, and what makes the arrays for new results.

    ``written`` tells which arrays may lie where.
    """

    def __init__(
        self, prepared: Prepared, kind: str, make: Callable[[], list[Any]], written: Written | None = None
    ) -> None:
        self.prepared, self.kind, self.make, self._written = prepared, kind, make, written
        self._address: Callable[[Any], int] = sys.modules["torch"].Tensor.data_ptr if kind == "torch" else address
        self._stream = stream_reader(kind, prepared.device)
        self._known, self._queue = prepared.known, prepared.queue
        self._allowed = set[tuple[int, ...]]()  # addresses at which what is written to was looked at

    def on(self, tensors: Sequence[Any]) -> list[Any] | None:
        """The new results for torch tensors that lie as those of the first call, whatever their addresses."""
        made, at = self.make(), self._address
        key = (self._stream(), *map(at, tensors), *map(at, made))
        queued = self._known.get(key)
        if queued is None:
            if not self._fits(key[1 : 1 + len(tensors)]):
                return None
            queued = self.prepared.queueable(key, self.prepared.room(self.kind, key[0]))
        self._queue(queued)
        return made

    def run(self, views: Mapping[str, ArrayView]) -> list[Any]:
        """The new results for arrays in place. Raises ProblemError where one that is written to must not be."""
        pointers = tuple([x.pointer for x in views.values()])
        if self._written is not None:
            self._written.check(views, known=pointers in self._allowed)
            if len(self._allowed) >= _ADDRESSES_KEPT:
                self._allowed.clear()
            self._allowed.add(pointers)
        made = self.make()
        self.prepared.run((*pointers, *map(self._address, made)), self.kind)
        return made

    def _fits(self, pointers: tuple[int, ...]) -> bool:
        """Whether tensors at these addresses are surely aligned, and apart from those that are written to."""
        if pointers in self._allowed:
            return True
        if 0 in pointers or any(x % _ALIGNED for x in pointers):
            return False
        return self._written is None or self._written.apart(pointers)


class CallCache(dict[tuple[Any, ...], PreparedCall]):
    """Prepared calls of an operation, by everything that they depend on beside addresses."""

    def __init__(self) -> None:
        super().__init__()
        self._alike: dict[tuple[Any, ...], list[tuple[Callable[..., bool], bool | None, Any, Repeatable]]] = {}

    def known(
        self, asked: tuple[Any, ...], config: Any, arrays: tuple[Any, ...]
    ) -> tuple[Repeatable, list[Any]] | None:
        """An earlier call with torch tensors like these, and the tensors; None where there was none.

        Nothing is left to refuse in such a call: of its tensors no more is read than their addresses.
        """
        tensors = [x for x in arrays if x is not None]
        try:
            for x in tensors:
                x.stride()  # a nested or sparse tensor has no strides, and their comparison in C++ ends the process
            alike = self._alike.get((asked, tensors[0].shape, *map(type, arrays)))
        except (AttributeError, IndexError, RuntimeError, TypeError):  # no array, a nested tensor, no key
            return None
        if alike is None or tangents_are_on():
            return None
        for same, recorded, its, call in alike:
            if not (its is config or (its.__class__ is config.__class__ and its == config)) or not same(*tensors):
                continue
            if recorded is None or recorded is sys.modules["torch"].is_grad_enabled():
                return call, tensors
        return None

    def find(
        self, asked: tuple[Any, ...], config: Any, views: Mapping[str, ArrayView], arrays: tuple[Any, ...] | None = None
    ) -> PreparedCall | None:
        """The call prepared for arrays like these; None where there is none, or an option is nothing to look up.

        ``arrays``: the arguments, of which ``views`` are the descriptions: calls with tensors like these are then
        :meth:`known`. Those that are not aligned have other kernels, and ``views`` of negated ones are of copies.
        """
        try:
            ready = self.get((asked, config, *_lying(views)))
        except TypeError:  # an array of one number, say
            return None
        if ready is None or arrays is None or any(x.pointer % _ALIGNED for x in views.values()):
            return ready
        described = {id(x.owner) for x in views.values()}
        if all(x is None or id(x) in described for x in arrays) and self.known(asked, config, arrays) is None:
            self.recognise(asked, config, arrays, ready, False)
        return ready

    def keep(self, asked: tuple[Any, ...], config: Any, views: Mapping[str, ArrayView], ready: PreparedCall) -> None:
        """Have ``ready`` found."""
        if len(self) >= _KEPT:
            self.clear()
        with suppress(TypeError):
            self[asked, config, *_lying(views)] = ready

    def clear(self) -> None:
        """Forget all calls."""
        super().clear()
        self._alike.clear()

    def recognise(
        self, asked: tuple[Any, ...], config: Any, arrays: tuple[Any, ...], call: Repeatable, recorded: bool
    ) -> None:
        """Have calls with tensors like these ``known``; ``recorded`` ones have a history."""
        tensors = [x for x in arrays if x is not None]
        same = _recogniser_under_autocast(tensors)
        if same is None:
            return
        if len(self._alike) >= _KEPT:
            self._alike.clear()
        with suppress(TypeError):
            known = self._alike.setdefault((asked, tensors[0].shape, *map(type, arrays)), [])
            wanted = recorded if any(x.requires_grad for x in tensors) else None
            known[:] = [x for x in known if not (x[1] is wanted and x[2] == config and x[0](*tensors))]
            del known[: 1 - _KINDS_KEPT]
            known.append((same, wanted, config, call))


def _recogniser_under_autocast(tensors: list[Any]) -> Callable[..., bool] | None:
    """:func:`recogniser` of tensors; where autocast is on, they are like these under the same type of it alone."""
    same, torch = recogniser(tensors), sys.modules.get("torch")
    if same is None or torch is None or not _casts(torch, tensors[0]):
        return same
    kind, ask = tensors[0].device.type, torch.get_autocast_dtype
    dtype = ask(kind)
    return lambda *others: same(*others) and ask(kind) == dtype


def _casts(torch: Any, tensor: Any) -> bool:
    """Whether autocast is on for the device of a tensor: PyTorch refuses the question for devices that have none."""
    kind = tensor.device.type
    return kind in ("cuda", "cpu") and torch.is_autocast_enabled(kind)


def _lying(views: Mapping[str, ArrayView]) -> tuple[Any, ...]:
    """Everything that launches depend on beside addresses: names, shapes, strides, types, devices and alignment."""
    return (*views, *[(x[1:6], x[0] % _ALIGNED) for x in views.values()])


class Caller:
    """An operation that is called with its arrays and its options, each in the order of the declaration.

    ``function`` is the public one, whose signature declares it. ``work`` makes the computation of checked arguments and
    a configuration. ``look`` reads what only the device's memory tells, where a caller asks for it, and raises
    ProblemError. ``recorded`` operations have a derivative.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        work: Callable[[Arguments, Any], Computation],
        *,
        look: Callable[[Arguments], None] | None = None,
        recorded: bool = False,
    ) -> None:
        signature = vars(function)["__signature__"] = shown_signature(function)  # what help and editors show
        self.function, self.declaration = function, (declaration := Declaration.of(function))
        self.parameters = tuple(signature.parameters)
        self.name, self.recorded, self.work, self.look = declaration.name, recorded, work, look
        self._hints = {x.name: f"{x.name} ({x.hint})" for x in declaration.arrays.values() if x.late and x.hint}
        self.cache = CallCache()
        names, options = list(declaration.arrays), list(declaration.options.values())
        self.array_names, self.option_names = tuple(names), tuple(declaration.options)
        self._option_words = " ".join(self.option_names)
        self.many = names.pop() if declaration.arrays[names[-1]].many else ""
        self._looked_at = tuple([i for i, x in enumerate(options) if x.kind in ("function", "float")])
        self._words = " ".join(names)
        self._defaults = tuple([(x.name, x.default) for x in options])
        self._written = tuple([i for i, name in enumerate(names) if declaration.arrays[name].written])
        self._out = names.index("out") if "out" in names and declaration.arrays["out"].written else -1
        self._refuse = declaration.refuse_writes if self._written else None

    def __call__(
        self,
        arrays: tuple[Any, ...],
        options: tuple[Any, ...],
        config: Any = None,
        check: Any = False,
        unknown: Iterable[str] = (),
    ) -> Any:
        """The results of a call; where PyTorch must see it, or remember it, those of its operator.

        Raises TypeError for ``unknown`` keywords.
        """
        if unknown:
            refuse_unknown(self.name, unknown, self.parameters)
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return self.computed(arrays, options, config, check)
        if torch.compiler.is_dynamo_compiling():
            return above.operator_of(self.name)(**self.named(arrays, options, config, check))
        if check is False:
            known = self.cache.known(self.asked(options), config, arrays)
            if known is not None and (made := known[0].on(known[1])) is not None:
                return self.returned(made, arrays)
        if self._concerns(torch, arrays, options):
            return above.operator_of(self.name)(**self.named(arrays, options, config, check))
        return self.computed(arrays, options, config, check)

    def computed(
        self, arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any = None, check: Any = False
    ) -> Any:
        """The results of a call that PyTorch does not watch."""
        return self.returned(self.made(arrays, options, config, check), arrays)

    def made(
        self, arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any = None, check: Any = False
    ) -> list[Any]:
        """The new results of a call that PyTorch does not watch."""
        asked = self.asked(options)
        known = None if check is not False else self.cache.known(asked, config, arrays)
        found = None if known is None else known[0].on(known[1])
        return self._read(arrays, options, asked, config, check) if found is None else found

    def repeated(
        self, call: Repeatable, tensors: Sequence[Any], arrays: tuple[Any, ...], options: tuple[Any, ...]
    ) -> Any:
        """The results of a call of which the ``known`` one was found."""
        made = call.on(tensors)
        return self(arrays, options) if made is None else self.returned(made, arrays)

    def asked(self, options: tuple[Any, ...]) -> tuple[Any, ...]:
        """The options as a part of a key: functions count by what they compute, and True is no number like 1."""
        for i in self._looked_at:
            option = options[i]
            if option is not None and option.__class__ is not float:
                key = (bool, option) if option.__class__ is bool else option
                options = (*options[:i], function_key(key) if callable(key) else key, *options[i + 1 :])
        return options

    def named(
        self, arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any, check: Any = False
    ) -> dict[str, Any]:
        """The arguments of the public function. ``torch.compile`` guards on each text that it reads here."""
        names = self._words.split()
        found = dict(zip(names, arrays, strict=False))
        if self.many:
            found[self.many] = arrays[len(names) :]
        found.update(zip(self._option_words.split(), options, strict=True))
        found["config"] = config
        if check is not False:
            found["check"] = check
        return found

    def positions(self, given: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Arrays and options by their names, those that are not given by their defaults, in order."""
        arrays = [given.get(name) for name in self.array_names if name != self.many]
        if self.many:
            arrays += given.get(self.many, ())
        return tuple(arrays), tuple([given.get(name, default) for name, default in self._defaults])

    def returned(self, made: list[Any], arrays: tuple[Any, ...]) -> Any:
        """The results as a caller has them: the ``out`` that was given first, several as a tuple."""
        for i in self._written:
            if arrays[i] is not None:
                count_write(arrays[i])
        if self._out >= 0 and arrays[self._out] is not None:
            made = [arrays[self._out], *made]
        return made[0] if len(made) == 1 else tuple(made) if made else None

    def computation(self, given: Mapping[str, Any]) -> Computation:
        """The computation of a call that is planned alone; arguments that are not given have their defaults."""
        known = *self.array_names, *self.option_names, "config"
        if unknown := [name for name in given if name not in known]:
            refuse_unknown(f"a plan of {self.name}", unknown, known)
        arrays, options = self.positions(given)
        plain, views = self.declaration.plain(options), self.views(arrays)
        if self._refuse is not None:
            self._refuse(views)
        return self.work(self.declaration.bind(views, plain, as_if_compact), given.get("config"))

    def views(self, arrays: tuple[Any, ...]) -> Views:
        """The arrays described, by the kernels' names. Raises ProblemError that begins with an array's name."""
        declaration, named = self.declaration, self.declaration.named(arrays)
        given = {name: x for name, x in named.items() if x is not None or name in declaration.needed}
        found = describe_all(given, self._hints)
        return {declaration.kernels(name): x for name, x in found.items()}

    def _read(
        self, arrays: tuple[Any, ...], options: tuple[Any, ...], asked: tuple[Any, ...], config: Any, check: Any
    ) -> list[Any]:
        """The new results by what was prepared for arrays that lie like these, or for the first time."""
        views = self.views(arrays)
        looks = check if check.__class__ is bool else flag("check", check)
        ready = None if looks else self.cache.find(asked, config, views, arrays)
        if ready is not None:
            return ready.run(views)
        if self._refuse is not None:
            self._refuse(views)
        plain = self.declaration.plain(options)
        given = self.declaration.bind(views, plain, compact)
        if looks and self.look is not None:
            self.look(given)
        key, lying = (self.asked(tuple(plain.values())), config), given.views
        ready = self.cache.find(*key, lying)
        if ready is None:
            work = self.work(given, config)
            if not work.nothing:
                return self._first(work, lying, key)
            if config is not None:
                work.planned()  # refuses what does not fit
            return list((work.empty or given.made)().values())
        if all(x.pointer == y.pointer for x, y in zip(views.values(), lying.values(), strict=True)):
            self.cache.keep(*key, views, ready)
        return ready.run(lying)

    def _first(self, work: Computation, views: Views, key: tuple[tuple[Any, ...], Any]) -> list[Any]:
        """Run launches for the first time, and keep what calls like this one need."""
        lying = list(views.values())
        callers, results, first = work.callers, work.given.results, lying[0]
        kind, device = first.kind, first.device
        make = makers(kind, results.values(), device, work.value)
        made = dict(zip(results, make(), strict=True))
        new = {name: describe_new(x) for name, x in made.items()}
        prepared = run_anew(
            lambda arrays: work.plan(arrays).steps, callers | new, (*work.written, *made), filled=work.filled
        )
        places = {name: i for i, name in enumerate(views)}
        own = [places.get(name, next((i for i, y in enumerate(lying) if y is x), -1)) for name, x in callers.items()]
        if prepared and all(
            i >= 0 and lying[i].pointer == x.pointer for i, x in zip(own, callers.values(), strict=True)
        ):
            order = (*own, *range(len(lying), len(lying) + len(made)))
            prepared = replace(prepared, order=order, known={}, rooms={})
            refuse = self._refuse
            written = None if refuse is None or not work.written else Written.of(views, tuple(work.written), refuse)
            self.cache.keep(*key, views, PreparedCall(prepared, kind, make, written))
        return list(made.values())

    def _concerns(self, torch: Any, arrays: tuple[Any, ...], options: tuple[Any, ...]) -> bool:
        """Whether PyTorch must see a call of tensors: to trace, transform or remember it, or to choose types.

        What is written to ``out`` has no history. Raises ProblemError for other arrays beside such tensors.
        """
        watched = watches()
        if not watched:
            if not self.recorded or (self._out >= 0 and arrays[self._out] is not None):
                return False
            first = next((x for x in arrays if isinstance(x, torch.Tensor)), None)
            wanted = torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in (*arrays, *options))
            if not wanted and (first is None or not _casts(torch, first)):
                return False
        needed = self.declaration.needed
        given = {n: x for n, x in self.declaration.named(arrays).items() if x is not None or n in needed}
        others = {name: x for name, x in given.items() if not isinstance(x, torch.Tensor)}
        if len(others) == len(given):
            return False
        for name, view in describe_all(others, self._hints).items():
            raise ProblemError(
                f"{name} is of {view.kind}, beside tensors that PyTorch differentiates, casts or watches: pass "
                "tensors alone, or call under torch.no_grad() and without autocast"
            )
        return True
