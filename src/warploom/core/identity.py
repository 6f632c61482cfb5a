"""When two values, or two functions made anew, are the same: in this process, and in any other."""

from __future__ import annotations

import dis
import inspect
import sys
import types
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache, partial
from itertools import count
from opcode import opmap
from pickle import PicklingError
from typing import Any, cast

import numpy as np

from warploom.core.dtypes import DType

_PACKAGE = __name__.partition(".")[0]
_FIXED_MODULES = ("builtins", "math", _PACKAGE)
"""Modules whose names mean the same wherever the package's sources and Python are the same."""

_IMPORT = opmap["IMPORT_NAME"]
_UNSEEN = {"__import__", "eval", "exec", "globals", "open", "vars"}
"""Functions by which code reaches values that do not stand in it."""


class UnstableError(ValueError):
    """A value that no text stands for in another process."""


def function_key(function: Any) -> Hashable:
    """What identifies a function: its code and the values that the code sees, so that one made anew is recognised.

    Those values are its defaults, what it closes over, and the globals it names; functions among them count by their
    own keys, lists and dicts by what is in them. Of modules, classes and objects, the one that a method is of too,
    those attributes count that the function names itself; not what their methods and properties read, nor the elements
    of arrays. Functions of this package are identified by themselves, and so are functions that have no key.
    """
    return _Reader().key(function)


class Watched:
    """Functions whose keys are asked for again and again: cheap as long as all that they see are the same objects."""

    def __init__(self, *functions: Any) -> None:
        self._functions, self._numbers = functions, count()
        self._versions: dict[Hashable, int] = {}
        self._found: tuple[list[_Seen], int] | None = None

    def version(self) -> int:
        """A number that stands for their keys: another one when what they see is another, and back with it."""
        found = self._found
        if found is None or any(fetch(name) is not value for fetch, name, value in found[0]):
            reader = _Reader()
            key = tuple([reader.key(function) for function in self._functions])
            found = reader.seen, self._versions.setdefault(key, next(self._numbers))
            self._found = found if reader.lasts else None
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
_Outer = tuple[types.FunctionType, ...]


class _Same:
    """Something that cannot be hashed, by itself alone."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


class _Reader:
    """Makes keys, and remembers what it has ``seen``; that ``lasts`` unless something was read piece by piece."""

    def __init__(self) -> None:
        self.seen, self.lasts = list[_Seen](), True

    def key(self, function: Any) -> Hashable:
        """That of a function, or itself."""
        try:
            key = self._value(function) if callable(function) else function
            hash(key)
        except (AttributeError, TypeError, ValueError, RecursionError):  # an empty cell, a list in itself
            return function
        return key

    def _function(self, function: types.FunctionType, outer: _Outer) -> Hashable:
        if _is_fixed(function.__module__):
            return function
        if function in outer:  # it calls itself
            return "recursion", len(outer) - outer.index(function)
        scope, inner, (of_globals, names) = function.__globals__, (*outer, function), _names(function.__code__)
        cells = [(partial(getattr, cell), "cell_contents") for cell in function.__closure__ or ()]
        own = partial(getattr, function)
        places = [(own, "__code__"), (own, "__defaults__"), (own, "__kwdefaults__"), *cells]
        places += [(scope.get, name) for name in of_globals]
        self.seen += [(fetch, name, fetch(name)) for fetch, name in places]
        seen: list[Any] = [*(function.__defaults__ or ()), *(fetch(name) for fetch, name in cells)]
        named = [(name, scope[name]) for name in of_globals if name in scope]
        named += sorted((function.__kwdefaults__ or {}).items())
        values = [self._value(x, inner, names) for x in seen]
        return (function.__code__, *values, *[(name, self._value(x, inner, names)) for name, x in named])

    def _value(self, value: Any, outer: _Outer = (), names: tuple[str, ...] = ()) -> Hashable:
        """The value with its type, because 2 == 2.0 == True; and floats by their bits, because -0.0 == 0.0.

        ``names``: attributes that count of what is equal to nothing but itself.
        """
        kind = cast("type[Any]", type(value))
        if kind is types.FunctionType:
            return self._function(value, outer)
        if kind is types.MethodType:
            named = _names(value.__func__.__code__)[1]
            return "method", self._value(value.__func__, outer), self._value(value.__self__, outer, named)
        if kind is partial:
            return partial, self._value((value.func, value.args, value.keywords), outer, names)
        if kind is float:
            return float, value.hex()
        if kind in (tuple, list, dict):
            self.lasts &= kind is tuple
            parts: Iterable[Any] = value.items() if kind is dict else value
            return kind, *[self._value(x, outer, names) for x in parts]
        same = value if isinstance(value, Hashable) else _Same(value)
        by_value = same is value and kind.__hash__ is not object.__hash__
        return kind, same, *(() if by_value else self._attributes(value, outer, names))

    def _attributes(self, value: Any, outer: _Outer, names: tuple[str, ...]) -> Iterator[Hashable]:
        """Of a module, a class or an object those with these names, and those that it reads when it is called."""
        kind = cast("type[Any]", type(value))
        classes = inspect.getmro(value if kind is type else kind)[:-1]
        if _is_fixed(value.__name__ if kind is types.ModuleType else classes[0].__module__ if classes else None):
            return
        called = inspect.getattr_static(kind, "__call__", None)
        if isinstance(called, types.FunctionType):
            yield self._function(called, outer)
            names += _names(called.__code__)[1]
        scopes = [] if kind is type else [getattr(value, "__dict__", {})]
        for name in names:
            for scope in scopes + [vars(c) for c in classes]:
                found = scope.get(name)
                self.seen.append((scope.get, name, found))
                if name in scope:
                    others = tuple(x for x in names if x != name)
                    yield name, found if isinstance(found, types.FunctionType) else self._value(found, outer, others)
                    break


@lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of globals, and all names with those of attributes, that a function and those inside it use."""
    of_globals = {i.argval for i in dis.get_instructions(code) if "GLOBAL" in i.opname or i.opname == "LOAD_NAME"}
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names(constant)
            of_globals |= set(inner[0])
            names |= set(inner[1])
    return tuple(sorted(of_globals)), tuple(sorted(names))


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
    if _IMPORT in code.co_code[::2] or _UNSEEN & set(code.co_names):
        raise UnstableError(f"{code.co_name} looks things up when it runs, which no key can see")
    parts = (
        code.co_code, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags, code.co_names,
        code.co_varnames, code.co_freevars, code.co_cellvars, code.co_consts, getattr(code, "co_exceptiontable", b""),
    )  # fmt: skip
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
