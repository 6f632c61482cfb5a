"""A launch's arguments in the order of a Program's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from warploom.core.arguments import MOST_STRIDE, check_names
from warploom.core.errors import ProblemError
from warploom.ir.program import Parameter, Program

Strides = Sequence[int]


def in_order(
    program: Program,
    arguments: Sequence[Any] | Mapping[str, Any],
    layout: Callable[[Parameter, Any], tuple[Sequence[int], Strides]],
) -> list[Any]:
    """An argument for each parameter. Strides that are not given, by name, are those of their arrays.

    ``layout``: (shape, strides in elements) of the array that is given for a parameter. Raises ProblemError for too
    many, too few or unknown arguments, and for arrays of other dimensions than the kernel's.
    """
    named = arguments if isinstance(arguments, Mapping) else _by_name(program, arguments)
    taken = {p.name: p.stride_of is None for p in program.parameters}
    missing = [name for name, must in taken.items() if must and name not in named]
    check_names(program.name, missing, sorted(set(named) - set(taken)))
    found = dict(named)
    strides = {p.name: p.stride_of for p in program.parameters if p.stride_of and p.name not in named}
    arrays = {name for name, _ in strides.values()}
    known = {p.name: _strides(p, *layout(p, named[p.name])) for p in program.parameters if p.name in arrays}
    found |= {name: known[array][dimension] for name, (array, dimension) in strides.items()}
    return [found[name] for name in taken]


def _by_name(program: Program, arguments: Sequence[Any]) -> dict[str, Any]:
    names = [p.name for p in program.parameters if p.stride_of is None]
    if len(arguments) != len(names):
        raise ProblemError(f"{program.name} takes {len(names)} arguments ({', '.join(names)}), not {len(arguments)}")
    return dict(zip(names, arguments, strict=True))


def _strides(of: Parameter, shape: Sequence[int], strides: Strides) -> Strides:
    """The strides that a kernel takes of an array; 0 for one that says nothing and is none that it takes."""
    name, count, last = of.name, of.strides, f"{of.strides + 1} whose last elements lie side by side"
    if len(shape) not in (count, count + 1):
        raise ProblemError(f"argument {name} has {len(shape)} dimensions; the kernel takes {count}, or {last}")
    tells = [size > 1 and 0 not in shape for size in shape]
    if len(shape) > count and tells[-1] and strides[-1] != 1:
        raise ProblemError(
            f"argument {name} has the stride {strides[-1]} between its last elements; the kernel takes {count} "
            f"dimensions, or {last}: copy it"
        )
    found = [stride if 0 <= stride <= MOST_STRIDE else 0 for stride in strides[:count]]
    for dimension, stride in enumerate(strides[:count]):
        if tells[dimension] and found[dimension] != stride:
            raise ProblemError(
                f"argument {name} has the stride {stride} in dimension {dimension}; kernels take 0 to {MOST_STRIDE}: "
                "copy it"
            )
    return found
