"""A kernel by what it is traced from, and one launch of it: what a configuration makes of a problem."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from warploom.core.dtypes import DType
from warploom.core.once import once

if TYPE_CHECKING:
    from warploom.ir.program import Program
    from warploom.lang.kernel import KernelFunction
    from warploom.layout.tensor_map import TensorMapSpec

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class KernelSource:
    """The Program that a kernel function of this package gives for a configuration; nothing is imported before it does.

    ``function`` is ``module:name``, ``arguments`` its keyword-only parameters.
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


def named(place: str) -> Any:
    """The object of ``module:name``, imported now."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


@once(maxsize=512)
def traced(source: KernelSource) -> Program:
    """The Program of a source, traced once in a process."""
    function: KernelFunction = named(source.function)
    program = function.trace(source.name, **dict(source.arguments))
    return replace(program, min_ctas=source.min_ctas, opt_level=source.opt_level)


@dataclass(frozen=True)
class MappedArray:
    """An array as a tensor map is to see it, outermost dimension first: shape, strides and box in elements.

    The innermost stride is 1; rows of the box are 128, 64 or 32 bytes, ``swizzled`` over their width, or any.

    ``ragged``: the first dimension's rows are those of sequences (:meth:`TensorMapSpec.ragged`).
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzled: bool = True
    ragged: bool = False

    @cached_property
    def spec(self) -> TensorMapSpec:
        """The tensor map, innermost dimension first. Raises LayoutError for what the hardware does not take."""
        from warploom.layout.tensor_map import TensorMapSpec

        row_bytes = tuple(self.dtype.bytes * stride for stride in reversed(self.strides[:-1]))
        swizzle = self.box[-1] * self.dtype.bytes if self.swizzled else 0
        make = TensorMapSpec.ragged if self.ragged else TensorMapSpec
        return make(self.dtype, self.shape[::-1], row_bytes, self.box[::-1], swizzle)


@dataclass(frozen=True)
class KernelCall:
    """A kernel, its grid, and its arguments but for the arrays: numbers by the names of its scalar parameters.

    ``maps``: how the TMA sees the first arrays, in the order of the kernel's parameters. ``arrays``: what each array
    parameter is given, by the operation's names, where there are several kernels or memory of their own.
    ``workspace``: memory between the kernels that this one is the first to use, in 32-bit words by its names;
    ``zeroed``, one of those, holds zeros at the start. ``overlaps``: it may begin before the launch before it ends, for
    which it waits itself. ``at_once``: its CTAs wait for each other, so all of them run at one time. ``offsets``: bytes
    from an array's first element to where this launch finds its first. ``flops``: its work, about.
    """

    source: KernelSource
    grid: Grid
    scalars: Mapping[str, int]
    maps: tuple[MappedArray, ...] = ()
    arrays: tuple[str, ...] = ()
    workspace: Mapping[str, int] = field(default_factory=dict[str, int])
    zeroed: str = ""
    overlaps: bool = False
    at_once: bool = False
    offsets: Mapping[str, int] = field(default_factory=dict[str, int])
    flops: int = 0

    @property
    def kernel(self) -> Hashable:
        """The launch but for the arrays that it is given: equal ones are one kernel on a GPU."""
        return self.source, self.grid, tuple(self.scalars.items()), self.maps, self.overlaps, self.at_once


def workspace_of(calls: Iterable[KernelCall]) -> dict[str, int]:
    """Words of the memory between kernels, by name; launches that follow each other use it in turn."""
    found: dict[str, int] = {}
    for call in calls:
        for name, words in call.workspace.items():
            found[name] = max(words, found.get(name, 0))
    return found
