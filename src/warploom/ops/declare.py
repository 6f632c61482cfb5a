"""An operation as its public function declares it: names, order, defaults and kinds of the arguments are said once.

The annotations of the function's parameters say what each is: ``q: Annotated[Any, ArrayArgument()]`` is an array,
``scale: float | None`` an option. Arrays' names for the kernels, how options are read, PyTorch's schema and what
autocast leaves alone are all taken from here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from warploom.core.dtypes import DType, dtype_of
from warploom.core.errors import ProblemError, shown
from warploom.ops.options import flag, number, whole, window_sides


@dataclass(frozen=True)
class ArrayArgument:
    """An array argument.

    ``kernel`` is the kernels' name for it, where that is another. Autocast leaves an ``exact`` array as it is. A
    ``written`` array takes a result. ``many`` arrays come as a tuple, and are numbered.
    """

    kernel: str = ""
    exact: bool = False
    written: bool = False
    many: bool = False


class Word:
    """Marks an option that is passed on as it is; a graph has it by its name."""


@dataclass(frozen=True)
class Option:
    """A keyword argument that is no array: ``kind`` is bool, float, int, window, choice or word."""

    name: str
    kind: str
    default: Any
    optional: bool = False
    choices: tuple[str, ...] = ()

    def plain(self, value: Any) -> Any:
        """The value as Python's own: arrays of one number are read. Raises ProblemError for other kinds."""
        if value is None and self.optional:
            return None
        if self.kind == "choice":
            if not isinstance(value, str) or value not in self.choices:
                *first, last = [f"{x!r}{_SAID.get(x, '')}" for x in self.choices]
                said = f"{', '.join(first)} or {last}"
                raise ProblemError(f"{self.name} is {said}, not {shown(value)}")
            return value
        read = _READERS.get(self.kind)
        return value if read is None else read(self.name, value)


_READERS: dict[str, Callable[[str, Any], Any]] = {"bool": flag, "float": number, "int": whole, "window": window_sides}
_SAID = {"bshd": " (batch, sequence, heads, head_dim)"}


@dataclass(frozen=True)
class Declaration:
    """The arguments of an operation by their names, in order; ``needed``: the arrays without a default."""

    name: str
    arrays: dict[str, ArrayArgument]
    needed: frozenset[str]
    options: dict[str, Option]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Declaration:
        """The arguments of a function with annotated parameters; several arrays under one name come last.

        Parameters annotated ``Any``, and ``config``, are no part.
        """
        hints = get_type_hints(function, include_extras=True)
        arrays, needed, options = dict[str, ArrayArgument](), set[str](), dict[str, Option]()
        for name, parameter in inspect.signature(function).parameters.items():
            hint, metadata = hints[name], tuple[Any, ...]()
            if get_origin(hint) is Annotated:
                hint, *metadata = get_args(hint)
            said = next((x for x in metadata if isinstance(x, ArrayArgument | Word)), None)
            if isinstance(said, ArrayArgument):
                arrays[name] = said
                if parameter.default is inspect.Parameter.empty:
                    needed.add(name)
            elif said is not None:
                options[name] = Option(name, "word", parameter.default)
            elif hint is not Any and name not in _ELSEWHERE:
                options[name] = _option(name, hint, parameter.default)
        arrays = dict(sorted(arrays.items(), key=lambda x: x[1].many))
        return cls(function.__name__, arrays, frozenset(needed), options)

    def plain(self, options: tuple[Any, ...]) -> dict[str, Any]:
        """The options by their names, as Python's own values. Raises ProblemError for one that is of another kind."""
        return {x.name: x.plain(value) for x, value in zip(self.options.values(), options, strict=True)}

    def named(self, arrays: tuple[Any, ...]) -> dict[str, Any]:
        """The arrays of a call by their names; those that are not given are None, and the last may be several."""
        names = list(self.arrays)
        if self.arrays[names[-1]].many:
            last = names.pop()
            names += [f"{last.removesuffix('s')}{i}" for i in range(len(arrays) - len(names))]
        return dict(zip(names, arrays, strict=True))

    def is_exact(self, name: str) -> bool:
        """Whether autocast leaves an array as it is."""
        return name in self.arrays and self.arrays[name].exact

    def kernels(self, name: str) -> str:
        """The kernels' name of an array."""
        array = self.arrays.get(name)
        return name if array is None else array.kernel or name


_ELSEWHERE = "config", "check"
_KINDS = {bool: "bool", float: "float", int: "int", tuple: "window", Callable: "function"}


def type_name(dtype: Any) -> str:
    """A type's name; of what names none whatever it prints, for the operator to refuse."""
    if isinstance(dtype, str):
        return dtype
    try:
        return dtype.name if isinstance(dtype, DType) else dtype_of(dtype).name
    except ValueError:
        return str(dtype)


Tensor = Annotated[Any, ArrayArgument()]
"""An array whose type autocast chooses."""
Few = Annotated[Any, ArrayArgument(exact=True)]
"""A few numbers that kernels take as they are."""
Output = Annotated[Any, ArrayArgument(written=True)]
ElementType = Annotated[Any, Word()]


def _option(name: str, hint: Any, default: Any) -> Option:
    parts = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
    (kind,) = [x for x in parts if x is not NoneType]
    optional = NoneType in parts
    if get_origin(kind) is Literal:
        return Option(name, "choice", default, optional, get_args(kind))
    return Option(name, _KINDS[get_origin(kind) or kind], default, optional)
