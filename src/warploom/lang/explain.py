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

_PACKAGE = __name__.partition(".")[0]
_CALL = re.compile(r"(\w+)\.(\w+)\(\) (.*)", re.DOTALL)


def explain(error: Exception) -> str | None:
    """What a Python error means if a word of this package raised it or was called wrongly; None if it was neither."""
    called = _CALL.match(str(error)) if isinstance(error, TypeError) else None
    if called is not None and (word := _word(called[1], called[2])) is not None:
        return f"{called[2]} {called[3]}; {_parameters(word)}"
    owner = cast("type[object]", type(getattr(error, "obj", None)))
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    inside = _is_ours(frames[-1].f_globals.get("__name__"))
    if isinstance(error, AttributeError) and _is_ours(owner.__module__) and not inside:
        known = [name for name in dir(owner) if not name.startswith("_") and not hasattr(Builder, name)]
        near = difflib.get_close_matches(error.name or "", known, 3)
        hint = f"; near it: {', '.join(near)}" if near else ""
        return f"{owner.__name__} has no {error.name!r}{hint}"
    if not inside:
        return None
    inner = next(i for i in range(len(frames), 0, -1) if not _is_ours(frames[i - 1].f_globals.get("__name__")))
    code = frames[inner].f_code
    word = _word(code.co_qualname.rpartition(".")[0], code.co_name)
    hint = "" if word is None else f"; {_parameters(word)}"
    return f"{code.co_name} does not take these arguments ({type(error).__name__}: {error}){hint}"


def _parameters(word: FunctionType) -> str:
    parameters = list(inspect.signature(word).parameters.values())[1:]
    return f"its parameters are {inspect.Signature([p.replace(annotation=p.empty) for p in parameters])}"


def _is_ours(module: object) -> bool:
    return str(module).startswith(f"{_PACKAGE}.")


def _word(owner: str, name: str) -> FunctionType | None:
    """The method ``owner.name`` of a class of this package."""
    for module in [x for key, x in sys.modules.items() if _is_ours(key)]:
        kind = getattr(module, owner, None)
        method = inspect.getattr_static(kind, name, None) if inspect.isclass(kind) else None
        if isinstance(method, FunctionType):
            return method
    return None
