"""Errors of Python that come of a word of the language, in the words of the language."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from traceback import walk_tb
from types import FunctionType
from typing import cast

from warploom.lang.builder import Builder
from warploom.lang.values import Traced

_PACKAGE = __name__.partition(".")[0]
_CALL = re.compile(r"(\w+)\.(\w+)\(\) (.*)", re.DOTALL)


def explain(error: Exception, k: Builder) -> str | None:
    """What a Python error means if a word of this package raised it or was called wrongly; None if it was neither."""
    called = _CALL.match(str(error)) if isinstance(error, TypeError) else None
    if called is not None and (word := _word(called[1], called[2])) is not None:
        return f"{called[1] if called[2] == '__init__' else called[2]} {called[3]}; {_parameters(word)}"
    owner = cast("type[object]", type(getattr(error, "obj", None)))
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    inside = _is_ours(frames[-1].f_globals.get("__name__"))
    if isinstance(error, AttributeError) and _is_ours(owner.__module__) and not inside:
        return f"{owner.__name__} has no {error.name!r}{_near(owner, k, str(error.name))}"
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], Traced):
        return f"{error.args[0]!r} is a value of the running kernel, no key of a dict: k.select chooses between values"
    outer = [i for i, frame in enumerate(frames) if not _is_ours(frame.f_globals.get("__name__"))]
    if not inside or not outer:  # the author's own code, or a kernel of this package
        return None
    code = frames[outer[-1] + 1].f_code
    word = _word(code.co_qualname.rpartition(".")[0], code.co_name)
    hint = "" if word is None else f"; {_parameters(word)}"
    if isinstance(error, AttributeError) and error.name == "ir":
        instead = " (its address is tile.address(row, col))" if hasattr(error.obj, "address") else ""
        return f"{code.co_name} takes a value where a {type(error.obj).__name__} is given{instead}{hint}"
    return f"{code.co_name} does not take these arguments ({type(error).__name__}: {error}){hint}"


def _near(owner: type[object], k: Builder, name: str) -> str:
    """Words like a name that an object does not have: its own, or those of ``k``, which has what takes the object."""
    for kind, of in ((owner, ""), (type(k), "k.")):
        known = [word for word in dir(kind) if not word.startswith("_") and not hasattr(Builder, word)]
        if near := difflib.get_close_matches(name, known, 3):
            return f"; near it: {', '.join(of + word for word in near)}"
    return f"; help(warploom.lang.{owner.__name__}) shows what it has"


def _parameters(word: FunctionType) -> str:
    parameters = list(inspect.signature(word).parameters.values())[1:]
    return f"its parameters are {inspect.Signature([p.replace(annotation=p.empty) for p in parameters])}"


def _is_ours(module: object) -> bool:
    return str(module).startswith(f"{_PACKAGE}.")


def _word(owner: str, name: str) -> FunctionType | None:
    """The method ``owner.name`` of a class of this package: of several, that of the words that an author calls."""
    called = tuple(f"{_PACKAGE}.{part}" for part in ("lang", "tile"))
    ours = sorted(filter(_is_ours, sys.modules), key=lambda key: not key.startswith(called))
    for key in ours:
        kind = getattr(sys.modules[key], owner, None)
        if getattr(kind, "__module__", None) != key:
            continue  # imported there
        method = inspect.getattr_static(kind, name, None) if inspect.isclass(kind) else None
        if isinstance(method, FunctionType):
            return method
    return None
