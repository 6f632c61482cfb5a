"""A kernel by what it is traced from, and one launch of it: what a configuration makes of a problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from warploom.core.once import once
from warploom.kernels.mapped import MappedArray

if TYPE_CHECKING:
    from warploom.ir.program import Program
    from warploom.lang.kernel import KernelFunction

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class KernelSource:
    """The Program that a kernel function of this package gives for a configuration; nothing is imported before it does.

    ``function`` is ``module:name`` below :mod:`warploom.kernels`, ``arguments`` its keyword-only parameters.
    """

    function: str
    name: str
    arguments: tuple[tuple[str, Any], ...]
    min_ctas: int = 1
    opt_level: int = 3

    @classmethod
    def of(cls, function: str, name: str, *, min_ctas: int = 1, opt_level: int = 3, **arguments: Any) -> KernelSource:
        """The source of a kernel with these arguments."""
        return cls(function, name, tuple(arguments.items()), min_ctas, opt_level)

    @property
    def program(self) -> Program:
        """The traced kernel; each is traced once in a process."""
        return traced(self)


@once(maxsize=512)
def traced(source: KernelSource) -> Program:
    """The Program of a source, traced once in a process."""
    module, _, name = source.function.partition(":")
    function: KernelFunction = getattr(import_module(f"warploom.kernels.{module}"), name)
    program = function.trace(name=source.name, **dict(source.arguments))
    return replace(program, min_ctas=source.min_ctas, opt_level=source.opt_level)


@dataclass(frozen=True)
class KernelCall:
    """A kernel, its grid, and its arguments but for the arrays: numbers by the names of its scalar parameters.

    ``maps``: how the TMA sees the first arrays, in the order of the kernel's parameters.
    """

    source: KernelSource
    grid: Grid
    scalars: Mapping[str, int]
    maps: tuple[MappedArray, ...] = ()
