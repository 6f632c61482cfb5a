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
from warploom.ops.declare import Declaration, Option

_TYPES = {"bool": "bool", "int": "SymInt", "float": "float"}
_NUMPY = np.ndarray, np.generic
Named = Mapping[str, Any]


class Schema:
    """The arguments of an operator: needed arrays, options, ``config``, other arrays, and what a tensor may stand for.

    ``fixed`` are options that the operator does not have, by their values; ``more`` it has beside the declaration's.
    Arrays that are written to are left out. Where there are no ``twins``, floats are numbers alone.
    """

    def __init__(
        self, declaration: Declaration, fixed: Named | None = None, more: tuple[Option, ...] = (), *, twins: bool = True
    ) -> None:
        self.declaration, self._fixed = declaration, dict(fixed or {})
        self._options = tuple([x for x in declaration.options.values() if x.name not in self._fixed])
        self._more = more
        floats = [x.name for x in self._options if x.kind == "float"] if twins else []
        self._twins = {name: f"{name}_tensor" for name in floats}
        arrays = list[str]()
        for name, array in declaration.arrays.items():
            arrays += [f"{name.removesuffix('s')}{i}" for i in range(2)] if array.many else [name]
        arrays = [name for name in arrays if name not in declaration.arrays or not declaration.arrays[name].written]
        self._arrays = tuple(arrays)
        needed = [f"Tensor {name}" for name in arrays if name in declaration.needed]
        given = [_argument(x) for x in (*self._options, *more)]
        others = [*[name for name in arrays if name not in declaration.needed], *self._twins.values()]
        listed = [*needed, *[x for one in given for x in one], "str? config=None"]
        self.text = ", ".join([*listed, *[f"Tensor? {name}=None" for name in others]])
        self.defaults: dict[str, Any] = {"config": None, **dict.fromkeys(others)}
        for x in (*self._options, *more):
            if x.kind == "window":
                self.defaults |= {f"{x.name}_left": None, f"{x.name}_right": None}
            else:
                self.defaults[x.name] = x.default
        self.names = tuple([x.partition("=")[0].rpartition(" ")[2] for x in self.text.split(", ")])
        self.exact = frozenset(self._twins.values()) | {name for name in arrays if declaration.is_exact(name)}
        self._padding = tuple([self.defaults.get(name) for name in self.names])
        places = {name: i for i, name in enumerate(self.names)}
        declared = [name for name in declaration.arrays if not declaration.arrays[name].many]
        self._taken = [places.get(name, -1) for name in declared]
        self._taken_many = [places[name] for name in arrays if name not in declaration.arrays]
        self._plain = [places.get(x.name, -1) for x in declaration.options.values()]
        self._windows = [
            (i, places[f"{x.name}_left"], places[f"{x.name}_right"])
            for i, x in enumerate(declaration.options.values())
            if x.kind == "window" and x.name not in self._fixed
        ]
        self._tensors = [
            (i, places[self._twins[x.name]])
            for i, x in enumerate(declaration.options.values())
            if x.name in self._twins
        ]
        self._config = places["config"]
        self._known = tuple([self._fixed.get(x.name) for x in declaration.options.values()])

    # -- from an operator
    def every(self, arguments: tuple[Any, ...], named: Named) -> dict[str, Any]:
        """All arguments by their names; PyTorch leaves out those that equal their defaults."""
        found = dict(self.defaults)
        found.update(zip(self.names, arguments, strict=False))
        found.update(named)
        return found

    def declared(
        self, arguments: tuple[Any, ...], named: Named | None = None
    ) -> tuple[tuple[Any, ...], tuple[Any, ...], Any]:
        """(arrays, options, configuration) in the order of the declaration."""
        if named:
            every = self.every(arguments, named)
            arguments = tuple([every[name] for name in self.names])
        else:
            arguments += self._padding[len(arguments) :]
        arrays = [arguments[i] if i >= 0 else None for i in self._taken]
        arrays += [x for i in self._taken_many if (x := arguments[i]) is not None]
        options = [arguments[i] if i >= 0 else known for i, known in zip(self._plain, self._known, strict=True)]
        for i, left, right in self._windows:
            if arguments[left] is not None or arguments[right] is not None:
                options[i] = arguments[left], arguments[right]
        for i, twin in self._tensors:
            if arguments[twin] is not None:
                options[i] = arguments[twin]
        return tuple(arrays), tuple(options), arguments[self._config]

    # -- to an operator
    def arguments(self, arrays: Named, options: Named, config: Any) -> dict[str, Any]:
        """The arguments for arrays and options by their names. A number that a graph does not know is a tensor.

        That is read when the graph runs. NumPy's numbers are tensors to ``torch.compile``: what they are it does not
        know.
        """
        compiling = torch.compiler.is_compiling()
        found: dict[str, Any] = {name: arrays[name] for name in self._arrays if arrays.get(name) is not None}
        for x in (*self._options, *self._more):
            if x.name not in options:
                continue
            value = options[x.name]
            if x.kind == "window":
                value = value if compiling else x.plain(value)
                if value is not None:
                    found[f"{x.name}_left"], found[f"{x.name}_right"] = value
            elif x.name in self._twins and isinstance(value, torch.Tensor):
                if not compiling and value.requires_grad:
                    refuse_watched(x.name, value)
                found[self._twins[x.name]] = value
            elif x.name in self._twins and compiling and isinstance(value, _NUMPY):
                found[self._twins[x.name]] = torch.as_tensor(value)
            elif x.kind == "choice":
                found[x.name] = x.plain(value)
            elif x.text is not None:
                found[x.name] = None if value is None else x.text(value)
            else:
                found[x.name] = value if compiling else x.plain(value)
        if config is not None:
            found["config"] = str(config)
        return found


def _argument(option: Option) -> list[str]:
    """An option as PyTorch's arguments."""
    name = option.name
    if option.kind == "window":
        return [f"SymInt? {name}_left=None", f"SymInt? {name}_right=None"]
    kind = _TYPES.get(option.kind, "str") + "?" * (option.optional or option.default is None)
    default = f"'{option.default}'" if isinstance(option.default, str) else option.default
    return [f"{kind} {name}={default}"]
