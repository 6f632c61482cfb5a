"""A cache whose misses are computed by one thread while the others that want the same wait for it.

Tracing holds the interpreter's lock and takes up to a second: with :func:`functools.lru_cache` alone, four threads
whose first calls are equal would trace and compile the same kernel four times, one after the other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, Protocol, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result", covariant=True)


class Once(Protocol[Arguments, Result]):
    """A function whose results are kept."""

    def __call__(self, *arguments: Arguments.args, **named: Arguments.kwargs) -> Result: ...

    def cache_clear(self) -> None:
        """Forget all results."""
        ...

    def known(self) -> list[Any]:
        """The arguments of the calls whose results are kept, oldest first; with names, a pair of both kinds."""
        ...


class _Turns:
    """One lock for each key that a thread is busy with. A forked child, whose threads are gone, starts without any."""

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._guard = threading.Lock()
        self._locks: dict[Hashable, tuple[threading.RLock, list[int]]] = {}

    @contextmanager
    def take(self, key: Hashable) -> Generator[None, None, None]:
        """Hold the key's lock; it is dropped with its last holder."""
        with self._guard:
            lock, holders = self._locks.setdefault(key, (threading.RLock(), [0]))
            holders[0] += 1
        try:
            with lock:
                yield
        finally:
            with self._guard:
                holders[0] -= 1
                if not holders[0]:
                    self._locks.pop(key, None)

    def keep(self, kept: dict[Hashable, Any], key: Hashable, value: Any, maxsize: int) -> None:
        """Add a result, in place of the oldest where there are too many."""
        with self._guard:
            while len(kept) >= maxsize:
                del kept[next(iter(kept))]
            kept[key] = value


_MISSING: Any = object()


def once(maxsize: int) -> Callable[[Callable[Arguments, Result]], Once[Arguments, Result]]:
    """Decorator: the results of the ``maxsize`` newest different calls are kept, and each is computed by one thread.

    Arguments are hashable. An error is raised to the thread that met it; whoever waits then tries for itself. A call
    whose result is kept takes no lock.
    """

    def wrap(function: Callable[Arguments, Result]) -> Once[Arguments, Result]:
        kept: dict[Hashable, Result] = {}
        turns = _Turns()

        @wraps(function)
        def call(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result:
            key = (arguments, tuple(sorted(named.items()))) if named else arguments
            found: Any = kept.get(key, _MISSING)
            if found is not _MISSING:
                return found
            with turns.take(key):
                found = kept.get(key, _MISSING)
                if found is _MISSING:
                    found = function(*arguments, **named)
                    turns.keep(kept, key, found, maxsize)
            return found

        made: Any = call
        made.cache_clear = kept.clear
        made.known = lambda: list(kept)
        return made

    return wrap
