"""When two values, or two functions made anew, are the same: in this process, and in any other."""

from __future__ import annotations

import sys
import types
from collections.abc import Hashable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
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
    own keys. Attributes of modules and objects are not followed. Functions of this package and other callables are
    identified by themselves, and so are functions that see a value which cannot be hashed.
    """
    if not isinstance(function, types.FunctionType):
        return function
    try:
        key = _function_parts(function, ())
        hash(key)
    except (TypeError, ValueError):  # an unhashable value, an empty cell
        return function
    return key


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


def _function_parts(function: types.FunctionType, outer: tuple[types.FunctionType, ...]) -> Hashable:
    if _is_fixed(function.__module__):
        return function
    if function in outer:  # it calls itself
        return "recursion", len(outer) - outer.index(function)
    scope, inner = function.__globals__, (*outer, function)
    seen: list[Any] = [*(function.__defaults__ or ()), *(cell.cell_contents for cell in function.__closure__ or ())]
    named = [(name, scope[name]) for name in _names(function.__code__) if name in scope]
    named += sorted((function.__kwdefaults__ or {}).items())
    values = [_value_key(x, inner) for x in seen]
    return (function.__code__, *values, *[(name, _value_key(x, inner)) for name, x in named])


def _value_key(value: Any, outer: tuple[types.FunctionType, ...]) -> Hashable:
    """The value with its type, because 2 == 2.0 == True; and floats by their bits, because -0.0 == 0.0."""
    if isinstance(value, types.FunctionType):
        return _function_parts(value, outer)
    if type(value) is float:
        return float, value.hex()
    if type(value) is tuple:
        return tuple(_value_key(x, outer) for x in cast("tuple[Any, ...]", value))
    return cast("type[Any]", type(value)), value


@lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals, and of attributes, that a function and those inside it use."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= set(_names(constant))
    return tuple(sorted(names))


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
