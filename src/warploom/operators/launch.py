"""A launch of a user's own kernel as a PyTorch operator, ``warploom::launch``, where the kernel declares its outputs.

The operator names the kernel by its key, and changes the declared tensors in place: PyTorch's functionalisation sees
which.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from warploom.core.errors import ProblemError
from warploom.lang.kernel import WITH_OUTPUTS, KernelFunction
from warploom.operators import untraced
from warploom.operators.registration import define_mutating
from warploom.ops import launch as eager

_SCHEMA = (
    "(str kernel, SymInt[] grid, str kinds, Tensor(a!)[] written, Tensor[] read, SymInt[] integers, float[] floats, "
    "str configuration) -> ()"
)
_PLAIN = (int, float, str, bool, type(None))


def _run(
    kernel: str,
    grid: Sequence[int],
    kinds: str,
    written: Sequence[torch.Tensor],
    read: Sequence[torch.Tensor],
    integers: Sequence[int],
    floats: Sequence[float],
    configuration: str,
) -> None:
    """Launch: ``kinds`` tells for each argument in which list it is, by the list's first letter."""
    found = WITH_OUTPUTS.get(kernel)
    if found is None:
        raise ProblemError(f"the kernel {kernel} of this graph is not defined in this process: import its module first")
    lists = {"w": iter(written), "r": iter(read), "i": iter(integers), "f": iter(floats)}
    arguments: list[Any] = [next(lists[kind]) for kind in kinds]
    settings: dict[str, Any] = ast.literal_eval(configuration)
    eager.launch(found, list(grid), arguments, **settings)


def _fake(*_: Any) -> None:
    """Nothing is returned."""


_LAUNCH = define_mutating("launch", _SCHEMA, _run, _fake)


def launch(kernel: Any, grid: Any, arguments: Sequence[Any] | Mapping[str, Any], **configuration: Any) -> None:
    """:func:`warploom.launch` while PyTorch traces: the operator, or a break of the graph where it is none."""
    if not isinstance(kernel, KernelFunction) or not kernel.outputs:
        return untraced.launch(kernel, grid, arguments, **configuration)
    names = kernel.names
    if len(arguments) != len(names) or (isinstance(arguments, Mapping) and set(arguments) != set(names)):
        return untraced.launch(kernel, grid, arguments, **configuration)
    given = [arguments[name] for name in names] if isinstance(arguments, Mapping) else list(arguments)
    kinds = ""
    lists: dict[str, list[Any]] = {"w": [], "r": [], "i": [], "f": []}
    for name, x in zip(names, given, strict=True):
        if isinstance(x, torch.Tensor):
            kind = "w" if name in kernel.outputs else "r"
        elif isinstance(x, int | torch.SymInt):
            kind = "i"
        elif isinstance(x, float):
            kind = "f"
        else:
            return untraced.launch(kernel, grid, arguments, **configuration)
        kinds += kind
        lists[kind].append(x)
    if not all(isinstance(value, _PLAIN) for value in configuration.values()):
        return untraced.launch(kernel, grid, arguments, **configuration)
    extents = [grid] if isinstance(grid, int | torch.SymInt) else list(grid)
    _LAUNCH(kernel.key, extents, kinds, lists["w"], lists["r"], lists["i"], lists["f"], repr(configuration))
    return None
