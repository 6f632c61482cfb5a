"""Calls that come again: what an earlier one prepared on a GPU, found by how arrays lie and what is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from warploom.core.dtypes import DType
from warploom.interop.alike import recogniser
from warploom.interop.arrays import ArrayView, Device, address, describe_new, maker
from warploom.interop.overlap import Written
from warploom.ops.steps import Steps, run_anew

_KEPT = 4096  # prepared calls of an operation
_ADDRESSES_KEPT = 1024  # of a prepared call
_KINDS_KEPT = 8  # kinds of tensors that differ in more than the first one's shape
_ALIGNED = 16
"""Bytes: calls with tensors at other addresses are looked up by all that they depend on."""


@dataclass(frozen=True)
class Ready:
    """What a repeated call on a GPU needs: launches, and what makes the arrays for new results."""

    launch: Callable[[tuple[int, ...], str], None]
    """Queues the kernels on arrays at addresses: the caller's, then the new ones."""
    results: tuple[Callable[[], Any], ...]
    """Each makes an array."""
    given: tuple[int, ...] | None = None
    """Numbers of the caller's arrays that the launches take, if these are not all as they come."""
    written: Written | None = None
    seen: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])
    """Addresses of calls that were looked at, and taken."""

    def run(self, views: Mapping[str, ArrayView]) -> list[Any]:
        """Queue the launches on arrays in place; the new results. Raises ProblemError as :class:`Written` does."""
        first, pointers = next(iter(views.values())), tuple([x.pointer for x in views.values()])
        if self.written is not None:
            self.written.check(views, known=pointers in self.seen)
        self._see(pointers)
        return self.run_at(pointers, first.kind)

    def takes(self, pointers: tuple[int, ...]) -> bool:
        """Whether of arrays at new addresses, which lie as those of the first call, nothing is to be checked."""
        if self.written is not None or any(x % _ALIGNED or not x for x in pointers):
            return False
        self._see(pointers)
        return True

    def _see(self, pointers: tuple[int, ...]) -> None:
        if len(self.seen) >= _ADDRESSES_KEPT:
            self.seen.clear()
        self.seen.add(pointers)

    def run_at(self, pointers: tuple[int, ...], kind: str) -> list[Any]:
        """:meth:`run` by the addresses of all arrays of the call, where nothing is left to check."""
        taken = pointers if self.given is None else tuple([pointers[i] for i in self.given])
        made: list[Any] = []
        for make in self.results:  # no comprehension: this is most of what a call costs beside the driver
            made.append(one := make())
            taken += (one.data_ptr() if kind == "torch" else address(one),)
        self.launch(taken, kind)
        return made


class Kept(dict[tuple[Any, ...], Ready]):
    """Prepared calls of an operation, by everything that they depend on beside addresses."""

    def __init__(self) -> None:
        super().__init__()
        self._alike: dict[tuple[Any, ...], list[tuple[Callable[..., bool], Ready, Any]]] = {}

    def again(self, asked: tuple[Any, ...], config: Any, given: Mapping[str, Any]) -> list[Any] | None:
        """The new results of a call with torch tensors like those of an earlier one; None where there was none.

        Of the tensors nothing is read but their addresses.
        """
        found = self.known(asked, config, given)
        return None if found is None else found[0].run_at(found[1], "torch")

    def known(
        self, asked: tuple[Any, ...], config: Any, given: Mapping[str, Any]
    ) -> tuple[Ready, tuple[int, ...]] | None:
        """What :meth:`again` runs, and at which addresses: in such a call nothing is left to refuse."""
        arrays = tuple(given.values())
        try:
            alike = self._alike.get((asked, tuple(given), arrays[0].shape))
        except (AttributeError, RuntimeError, TypeError):  # no array, a nested tensor, an option that is no key
            return None
        for same, ready, its in alike or ():
            if (its is config or (its.__class__ is config.__class__ and its == config)) and same(*arrays):
                pointers = tuple([x.data_ptr() for x in arrays])
                return (ready, pointers) if pointers in ready.seen or ready.takes(pointers) else None
        return None

    def find(self, asked: tuple[Any, ...], config: Any, views: Mapping[str, ArrayView]) -> Ready | None:
        """The call prepared for arrays like these; None where there is none, or an option is nothing to look up."""
        try:
            ready = self.get((asked, config, *_lying(views)))
        except TypeError:  # an array of one number, say
            return None
        if ready is not None:
            self._recognise(asked, config, views, ready)
        return ready

    def keep(self, asked: tuple[Any, ...], config: Any, views: Mapping[str, ArrayView], ready: Ready) -> None:
        """Have ``ready`` found."""
        if len(self) >= _KEPT:
            self.clear()
        with suppress(TypeError):
            self[asked, config, *_lying(views)] = ready

    def clear(self) -> None:
        """Forget all calls."""
        super().clear()
        self._alike.clear()

    def _recognise(self, asked: tuple[Any, ...], config: Any, views: Mapping[str, ArrayView], ready: Ready) -> None:
        """Have calls with tensors like these known :meth:`again`; those that are not aligned have other kernels."""
        if any(x.pointer % _ALIGNED for x in views.values()):
            return
        arrays = [x.owner for x in views.values()]
        known = self._alike.setdefault((asked, tuple(views), arrays[0].shape), [])
        if any(its == config and same(*arrays) for same, _, its in known):
            return
        same = recogniser(arrays)
        if same is not None:
            del known[: 1 - _KINDS_KEPT]
            known.append((same, ready, config))


def _lying(views: Mapping[str, ArrayView]) -> tuple[Any, ...]:
    """What launches depend on beside addresses: names, shapes, strides, types, devices and alignment."""
    return (*views, *[(x[1:6], x[0] % _ALIGNED) for x in views.values()])


def run_and_keep(
    kept: Kept,
    key: tuple[tuple[Any, ...], Any],
    steps: Callable[[dict[str, ArrayView]], Steps],
    given: tuple[Mapping[str, ArrayView], Mapping[str, ArrayView], Mapping[str, Any]],
    *,
    make: Callable[[str, Sequence[int], DType, Device], Callable[[], Any]] | None = None,
    filled: bool = False,
    refuse: Callable[[Mapping[str, ArrayView]], None] | None = None,
) -> None:
    """Run launches for the first time, and keep what calls like this one need.

    ``key``: what is asked, and the configuration. ``given``: the caller's arrays, what the kernels take of them or in
    their place, and the results, all by the kernels' names; results that are not among the caller's arrays are new, as
    ``make`` makes them. ``filled``: parts of them may stay as they are. ``refuse``: as of :class:`Written`, where some
    are the caller's.
    """
    views, inputs, results = given
    new = {name: describe_new(x) for name, x in results.items() if name not in views}
    callers = {**inputs, **{name: views[name] for name in results if name in views and name not in inputs}}
    prepared = run_anew(steps, {**callers, **new}, tuple(results), filled=filled)
    places, lying = {name: i for i, name in enumerate(views)}, list(views.values())
    own = [places.get(name, next((i for i, y in enumerate(lying) if y is x), -1)) for name, x in callers.items()]
    if prepared and all(i >= 0 and lying[i].pointer == x.pointer for i, x in zip(own, callers.values(), strict=True)):
        make, plain = make or maker, own == list(range(len(lying)))
        makers = tuple([make(x.kind, x.shape, x.dtype, lying[0].device) for x in new.values()])
        written = None if refuse is None else Written.of(views, [n for n in results if n in views], refuse)
        kept.keep(*key, views, Ready(prepared.launch, makers, None if plain else tuple(own), written))
