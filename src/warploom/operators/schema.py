"""PyTorch's schema of an operation, from its declaration, and the ways between its arguments and the declaration's.

An operator's arguments are tensors, numbers and texts: a window is two numbers, and a float has a twin, a tensor for a
number that a graph does not know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from warploom.interop.refusals import refuse_watched
from warploom.ops.declare import Declaration, Option, type_name

_TYPES = {"bool": "bool", "int": "SymInt", "float": "float"}
Named = Mapping[str, Any]


class Schema:
    """The arguments of an operator: needed arrays, options, ``config``, other arrays, and what a tensor may stand for.

    ``fixed`` are options that the operator does not have, by their values; ``more`` it has beside the declaration's.
    Arrays that are written to are left out. Where there are no ``twins``, floats are numbers alone.
    """

    def __init__(
        self, declaration: Declaration, fixed: Named | None = None, more: tuple[Option, ...] = (), *, twins: bool = True
    ) -> None:
        fixed = dict(fixed or {})
        own = [x for x in declaration.options.values() if x.name not in fixed]
        options = self._options = {x.name: x for x in (*own, *more)}
        self.more = tuple([x.name for x in more])
        floats = [x.name for x in own if x.kind == "float"] if twins else []
        twin_of = {name: f"{name}_tensor" for name in floats}
        arrays = list[str]()
        for name, array in declaration.arrays.items():
            if not array.written:
                arrays += array.numbered(2) if array.many else [name]
        self._arrays = " ".join(arrays)
        self._rows = " ".join(
            f"{x.name}:{x.kind}:{twin_of.get(x.name, '') or '|'.join(x.choices)}" for x in options.values()
        )
        others = [*[name for name in arrays if name not in declaration.needed], *twin_of.values()]
        listed = [f"Tensor {name}" for name in arrays if name in declaration.needed]
        self.defaults: dict[str, Any] = {"config": None, **dict.fromkeys(others)}
        for x in options.values():
            said, defaults = _arguments(x)
            listed += said
            self.defaults |= defaults
        self.text = ", ".join([*listed, "str? config=None", *[f"Tensor? {name}=None" for name in others]])
        self.names = tuple([x.partition("=")[0].rpartition(" ")[2] for x in self.text.split(", ")])
        self.exact = frozenset(twin_of.values()) | {name for name in arrays if declaration.is_exact(name)}
        self._padding = tuple([self.defaults.get(name) for name in self.names])
        places = {name: i for i, name in enumerate(self.names)}
        known, numbered = declaration.arrays, enumerate(declaration.options)
        self._taken = [places.get(name, -1) for name in known if not known[name].many]
        self._many = [places[name] for name in arrays if name not in known]
        self._plain = [(places.get(name, -1), fixed.get(name)) for name in declaration.options]
        self._pairs = list[tuple[int, int, int]]()
        self._twins = list[tuple[int, int]]()
        for i, name in numbered:
            if f"{name}_left" in places:
                self._pairs.append((i, places[f"{name}_left"], places[f"{name}_right"]))
            if name in twin_of:
                self._twins.append((i, places[twin_of[name]]))
        self._config = places["config"]

    # -- from an operator
    def every(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """All arguments by their names; PyTorch leaves out those that equal their defaults."""
        return {**self.defaults, **dict(zip(self.names, arguments, strict=False))}

    def declared(self, arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
        """(arrays, options, configuration) in the order of the declaration."""
        arguments += self._padding[len(arguments) :]
        arrays = [arguments[i] if i >= 0 else None for i in self._taken]
        arrays += [x for i in self._many if (x := arguments[i]) is not None]
        options = [arguments[i] if i >= 0 else known for i, known in self._plain]
        for i, left, right in self._pairs:
            if arguments[left] is not None or arguments[right] is not None:
                options[i] = arguments[left], arguments[right]
        for i, twin in self._twins:
            if arguments[twin] is not None:
                options[i] = arguments[twin]
        return tuple(arrays), tuple(options), arguments[self._config]

    # -- to an operator
    def arguments(self, given: Named, config: Any) -> dict[str, Any]:
        """The arguments for what is given by the declaration's names. A number that a graph does not know is a tensor.

        That is read when the graph runs. NumPy's numbers are tensors to ``torch.compile``: what they are it does not
        know. What ``torch.compile`` reads of this object are texts: it guards on each thing that it reads.
        """
        compiling = torch.compiler.is_compiling()
        found: dict[str, Any] = {name: given[name] for name in self._arrays.split() if given.get(name) is not None}
        for row in self._rows.split():
            name, kind, more = row.split(":")
            if name not in given:
                continue
            value = given[name]
            if kind == "float" and more and (isinstance(value, torch.Tensor) or (compiling and _is_numpy(value))):
                if not compiling and isinstance(value, torch.Tensor) and value.requires_grad:
                    refuse_watched(name, value)
                found[more] = torch.as_tensor(value)
                continue
            if not compiling or (kind == "choice" and value not in more.split("|")):
                value = self._options[name].plain(value)
            if kind == "window" and value is not None:
                found[f"{name}_left"], found[f"{name}_right"] = value
            elif kind == "word":
                found[name] = None if value is None else type_name(value)
            elif kind != "window":
                found[name] = value
        if config is not None:
            found["config"] = str(config)
        return found


def _is_numpy(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic))


def _arguments(option: Option) -> tuple[list[str], dict[str, Any]]:
    """An option as PyTorch's arguments, and their defaults."""
    name, default = option.name, option.default
    if option.kind == "window":
        sides = f"{name}_left", f"{name}_right"
        return [f"SymInt? {side}=None" for side in sides], dict.fromkeys(sides)
    kind = _TYPES.get(option.kind, "str") + "?" * (option.optional or default is None)
    said = f"'{default}'" if isinstance(default, str) else default
    return [f"{kind} {name}={said}"], {name: default}
