"""When two values, or two functions made anew, are the same: in this process, and in any other."""

from __future__ import annotations

import sys
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache, partial
from importlib.machinery import PathFinder
from itertools import count
from operator import is_
from pickle import PicklingError
from typing import Any, cast

import numpy as np

from warploom.core.dtypes import DType

_PACKAGE = __name__.partition(".")[0]
_FIXED_MODULES = ("builtins", "math", _PACKAGE)
"""Modules whose names mean the same wherever the package's sources and Python are the same."""

_UNSEEN = {"__import__", "eval", "exec", "globals", "open", "vars"}
"""Functions by which code reaches values that do not stand in it."""


class UnstableError(ValueError):
    """A value that no text stands for in another process."""


def function_key(function: Any) -> Hashable:
    """The key of a function: its code and the values that the code sees, so that one made anew is recognised.

    Those values are its defaults, what it closes over, and the globals it names; functions among them count by their
    own keys, containers by what is in them, dataclasses by their fields. Of modules, classes and objects, the one that
    a method is of too, those attributes count that the function names itself; not what their methods and properties
    read, nor the elements of arrays. Functions of this package are identified by themselves; one that cannot be read
    equals no other.
    """
    if function.__class__ is types.FunctionType and _is_fixed(function.__module__):
        return function
    return _KeyReader(False).key(function)


def arrays_seen(function: Any) -> dict[str, Any]:
    """The arrays and tensors among the values that a function's key counts, whose elements it does not.

    By the names of the variables or attributes that hold them, or the containers that they are in.
    """
    reader = _KeyReader(False)
    reader.key(function)
    return reader.arrays


class Versioned:
    """Functions whose keys are asked for again and again: cheap as long as all that they see are the same objects."""

    def __init__(self, *functions: Any) -> None:
        self._functions, numbers = functions, count()
        number: Callable[[Hashable], int] = lambda _: next(numbers)  # noqa: E731
        self._number = lru_cache(maxsize=16)(number)  # few: keys keep arrays alive
        self._found: tuple[list[_Seen], int] | None = None

    def version(self) -> int:
        """A number that stands for their keys: another one when what they see is another, and back with it."""
        found = self._found
        if found is None or any(fetch(name) is not value for fetch, name, value in found[0]):
            reader = _KeyReader(True)
            key = tuple([reader.key(function) for function in self._functions])
            self._found = found = reader.seen, self._number(key)
        return found[1]


def importable(what: str, function: Any) -> Any:
    """The function, if pickle finds it by its name. Raises PicklingError that says why not."""
    if isinstance(function, types.FunctionType):
        found: Any = sys.modules.get(function.__module__)
        for name in function.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is not function:
            raise PicklingError(
                f"{what} {function.__qualname__} cannot be pickled: pickle finds them by name in their module, where "
                "lambdas and functions inside others have none. Define it with def at the top of a module"
            )
    return function


_Seen = tuple[Callable[[str], Any], str, Any]
"""How a value is read, its name there, and what it was."""
_Names = tuple[str, ...]


class _Same:
    """Something by itself alone, whatever it calls equal."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


class _KeyReader:
    """Makes keys; ``watching``, it remembers what it has ``seen``. Whatever is met again counts by its number."""

    def __init__(self, watching: bool) -> None:
        self._watching = watching
        self.seen: list[_Seen] = []
        self.arrays: dict[str, Any] = {}
        self._at = ""  # the name of what is read
        self._known: dict[tuple[int, _Names], tuple[int, Any]] = {}

    def key(self, function: Any) -> Hashable:
        """The key of a function; where the function cannot be read, one that equals no other."""
        try:
            key = self._value(function, ()) if callable(function) else function
            hash(key)
        except (TypeError, ValueError, RecursionError):  # an empty cell, lists a thousand deep
            return _Same(object())
        return key

    def _value(self, value: Any, names: _Names) -> Hashable:
        """The value with its type, because 2 == 2.0 == True; and floats by their bits, because -0.0 == 0.0.

        ``names``: attributes that count of objects.
        """
        kind = cast("type[Any]", type(value))
        if value is None or kind in (int, bool, str, bytes):
            return kind, value
        if kind in (float, complex) or isinstance(value, np.generic):
            return kind, value.tobytes() if isinstance(value, np.generic) else repr(value)
        if kind is types.FunctionType and _is_fixed(value.__module__):
            return value
        if (known := self._known.get((id(value), names))) is not None:
            return "again", known[0]
        self._known[id(value), names] = len(self._known), value  # kept, so that no other gets its id
        if kind is types.FunctionType:
            return self._function(value, names)
        if kind is types.MethodType:
            names = _names(value.__func__.__code__)
            return kind, self._value(value.__func__, ()), self._value(value.__self__, names)
        if kind is partial:
            return kind, *[self._value(x, names) for x in (value.func, value.args, value.keywords)]
        if isinstance(value, _CONTAINERS):
            parts = _parts(value)
            if not isinstance(value, (tuple, frozenset)):
                self.seen.append((lambda _: _same_objects(_parts(value), parts), "", True))
            keys = [self._value(x, names) for x in parts]
            return kind, *([frozenset(keys)] if isinstance(value, (set, frozenset)) else keys)
        if any(hasattr(kind, name) for name in _ARRAYS):
            self.arrays.setdefault(self._at, value)
        if kind is not types.ModuleType and not isinstance(value, type):
            if _is_fixed(kind.__module__):
                return kind, value if isinstance(value, Hashable) else _Same(value)
            if is_dataclass(value):
                names = tuple(sorted({*names, *[field.name for field in fields(value)]}))
                return kind, *self._attributes(value, names)
        same = value if kind.__hash__ in (object.__hash__, type.__hash__) else _Same(value)
        return kind, same, *self._attributes(value, names)

    def _function(self, function: types.FunctionType, names: _Names) -> Hashable:
        scope, own, cells = function.__globals__, _names(function.__code__), function.__closure__ or ()
        if self._watching:
            itself = function.__getattribute__
            places = [(itself, "__code__"), (itself, "__defaults__"), (itself, "__kwdefaults__")]
            places += [(cell.__getattribute__, "cell_contents") for cell in cells]
            places += [(scope.get, name) for name in own]
            places += [(function.__dict__.get, name) for name in ({*names, *own} if function.__dict__ else ())]
            places.append((lambda _: len(function.__dict__), ""))
            self.seen += [(fetch, name, fetch(name)) for fetch, name in places]
        code, defaults = function.__code__, function.__defaults__ or ()
        values = list[tuple[str, Any]]()
        if defaults:
            values += zip(code.co_varnames[code.co_argcount - len(defaults) :], defaults)  # noqa: B905 - and variables
        if cells:
            values += [(name, cell.cell_contents) for name, cell in zip(code.co_freevars, cells, strict=True)]
        named = [(name, scope[name]) for name in own if name in scope]
        named += sorted((function.__kwdefaults__ or {}).items())
        if function.__dict__:
            named += sorted((name, x) for name, x in function.__dict__.items() if name in names or name in own)
        keys = [self._named(name, x, own) for name, x in values]
        return _FunctionKey((code, *keys, *[(name, self._named(name, x, own)) for name, x in named]))

    def _named(self, name: str, value: Any, names: _Names) -> Hashable:
        self._at = name
        return self._value(value, names)

    def _attributes(self, value: Any, names: _Names) -> Iterator[Hashable]:
        """The attributes with these names of a module, a class or an object, and those that it reads when called."""
        kind = cast("type[Any]", type(value))
        classes = (value if isinstance(value, type) else kind).__mro__[:-1]
        if _is_fixed(value.__name__ if kind is types.ModuleType else classes[0].__module__ if classes else None):
            return
        called = None if isinstance(value, type) else getattr(kind, "__call__", None)  # noqa: B004
        if isinstance(called, types.FunctionType):
            yield self._value(called, ())
            names = tuple(sorted({*names, *_names(called.__code__)}))
        scopes: list[Any] = [] if isinstance(value, type) else [getattr(value, "__dict__", {})]
        scopes += [vars(c) for c in classes]
        for name in names:
            found, computed = None, hasattr(kind, "__getattr__")
            for scope in scopes:
                found = scope.get(name)
                self.seen.append((scope.get, name, found))
                if name in scope:
                    computed = isinstance(found, types.MemberDescriptorType)  # a slot
                    break
            if computed:
                found = _attribute(value, name)
                self.seen.append((partial(_attribute, value), name, found))
            if found is not None:
                yield name, found if isinstance(found, types.FunctionType) else self._named(name, found, names)


_ARRAYS = "__array__", "__dlpack__", "__cuda_array_interface__"
"""What the classes of arrays have, one or another."""
_CONTAINERS = tuple, list, dict, set, frozenset, deque


def _attribute(value: Any, name: str) -> Any:
    """An attribute that the object computes, or keeps in a slot; None if it has none."""
    try:
        return getattr(value, name, None)
    except Exception:  # an author's own code, which is not asked for this
        return None


def _parts(items: Any) -> tuple[Any, ...]:
    """The elements of a container; of a dict its keys and values."""
    return (*items, *(cast("dict[Any, Any]", items).values() if isinstance(items, dict) else ()))


def _same_objects(some: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


@lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> _Names:
    """The names of globals, attributes and imported modules that a function and those inside it use."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return tuple(sorted({*code.co_names}.union(*inner)))


class _FunctionKey(tuple[Hashable, ...]):
    """The key of a function: its code, the keys of its defaults and cells, (name, key) of the globals it names."""

    __slots__ = ()

    def text(self) -> str:
        """:func:`stable_text` of the function. Raises UnstableError if it may import: no key sees what it gets."""
        code = cast("types.CodeType", self[0])
        known: set[Any] = {x[0] for x in self[1:] if isinstance(x, tuple) and x}
        for name in _names(code):
            if name in _UNSEEN or (name not in known and _is_module(name)):
                raise UnstableError(f"{code.co_name} looks things up when it runs, which no key can see")
        return f"function({','.join(map(stable_text, self))})"


@lru_cache(maxsize=1024)
def _is_module(name: str) -> bool:
    """Whether ``import name`` could find a module, so that a function with that name may import it."""
    return (
        "." in name or name in sys.modules or name in sys.builtin_module_names or PathFinder.find_spec(name) is not None
    )


def stable_text(value: Any) -> str:
    """A text that stands for ``value`` in every process with these sources: equal texts are equal values.

    Takes numbers, strings, tuples, code objects, this package's dataclasses (the fields that are compared) and enums,
    and what has a name in this package, in ``builtins`` or in ``math``. Raises UnstableError for everything else.
    """
    if value is None or type(value) in (bool, int, str, bytes):
        return repr(value)
    if type(value) is float:
        return value.hex()
    if isinstance(value, np.generic):
        number = cast("np.generic[Any]", value)
        return f"numpy {number.dtype.str} {number.tobytes().hex()}"
    if isinstance(value, DType):
        return f"DType {value.name}"
    if isinstance(value, types.CodeType):
        return _code_text(value)
    if isinstance(value, _FunctionKey):
        return value.text()
    if isinstance(value, Enum):
        return f"{_name_text(type(value))}.{value.name}"
    if isinstance(value, tuple | frozenset):
        parts = cast("tuple[Any, ...] | frozenset[Any]", value)
        texts = [stable_text(x) for x in parts]
        return f"{_name_text(type(parts))}({','.join(texts if isinstance(parts, tuple) else sorted(texts))})"
    if is_dataclass(value) and not isinstance(value, type):
        compared = [f"{f.name}={stable_text(getattr(value, f.name))}" for f in fields(value) if f.compare]
        return f"{_name_text(type(value))}({','.join(compared)})"
    return _name_text(value)


def _code_text(code: types.CodeType) -> str:
    """Everything of a code object that decides what it does; not the file and the lines it stands in."""
    parts = (
        code.co_code,
        code.co_argcount,
        code.co_posonlyargcount,
        code.co_kwonlyargcount,
        code.co_flags,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        code.co_cellvars,
        code.co_consts,
        getattr(code, "co_exceptiontable", b""),
    )
    return f"code{stable_text(parts)}"


def _name_text(value: Any) -> str:
    """A module, class or function by its name, where the package's sources and Python fix what the name means."""
    if isinstance(value, types.ModuleType):
        module, name = value.__name__, ""
    elif isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        module, name = str(value.__module__), value.__qualname__
    else:
        module, name = "", ""
    if not _is_fixed(module) or "<" in name:  # the name of a local function or class does not determine it
        raise UnstableError(f"{value!r} has no text that stands for it in another process")
    return f"{type(value).__name__} {module}:{name}"


def _is_fixed(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _FIXED_MODULES
