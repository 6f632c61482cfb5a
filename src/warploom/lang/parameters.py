"""Annotations of a kernel's parameters, and the parameters of a Program that they become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, reduce
from operator import add
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, get_type_hints

from warploom.core.arguments import stride_name
from warploom.core.dtypes import DType, u32, u64
from warploom.core.errors import TraceError, shown
from warploom.ir.program import Parameter
from warploom.lang.hopper import Kernel, TensorMapHandle
from warploom.lang.memory import GlobalPointer
from warploom.lang.values import Number, Traced

T = TypeVar("T")


@dataclass(frozen=True)
class PointerType:
    """A pointer parameter to elements of ``dtype``, and how many strides of its array come with it."""

    dtype: DType
    strides: int = 0


class Global(GlobalPointer, Generic[T]):
    """Annotation of a pointer parameter: ``a: Global[bf16]``."""

    if not TYPE_CHECKING:

        def __class_getitem__(cls, dtype: DType) -> PointerType:
            return PointerType(_element(dtype, "Global[f32]"))


if TYPE_CHECKING:
    from typing import Annotated as Strided  # pyright: ignore[reportUnusedImport] it takes a number
else:

    class Strided:
        """Annotation of an array parameter: ``x: Strided[bf16, 2]``, a :class:`StridedPointer` with so many strides.

        A launch takes an array of so many dimensions, or of one more whose last elements lie side by side.
        """

        def __class_getitem__(cls, given: Any) -> PointerType:
            dtype, count = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
            if not isinstance(count, int) or count < 1:
                raise TraceError(f"Strided takes a type and a count of strides (Strided[f32, 2]), not {shown(given)}")
            return PointerType(_element(dtype, "Strided[f32, 2]"), count)


@dataclass(frozen=True, eq=False, repr=False)
class StridedPointer(GlobalPointer):
    """A pointer to the first element of an array, and the array's ``strides`` (u32) in elements."""

    strides: tuple[Traced, ...] = ()

    def __getitem__(self, *_: object) -> NoReturn:
        raise TraceError("an array is not indexed: write x.at(i, j).load() and x.at(i, j).store(value)")

    __setitem__ = __getitem__

    def at(self, *indices: Number) -> GlobalPointer:
        """The pointer to an element: an index (u32) for each dimension; those that are left out are 0."""
        element = self + self.offset(*indices)
        return GlobalPointer(self.words, element.address, self.dtype)  # without strides

    def offset(self, *indices: Number) -> Traced:
        """The distance of an element from the first one, in elements (u64)."""
        k, count = self.words, len(self.strides)
        if not 1 <= len(indices) <= count + 1:
            raise TraceError(f"an array with {count} strides takes 1 to {count + 1} indices, not {len(indices)}")
        if below := [index for index in indices if isinstance(index, int) and index < 0]:
            raise TraceError(f"an index counts from the first element: {below[0]} is before it")
        steps = (k.mul_wide(index, stride) for index, stride in zip(indices, (*self.strides, 1), strict=False))
        return reduce(add, steps)


def hints_of(of: Any, name: str) -> dict[str, Any]:
    """The annotations of a kernel's function or of a class. Raises TraceError for what is no type, as ``X | None``."""
    try:
        return get_type_hints(of)
    except TypeError as error:
        raise TraceError(
            f"an annotation of {name} is no type ({error}); a launch gives every argument, those apart that "
            "@kernel(drop_unused=True) finds without use in a configuration"
        ) from error


def _element(dtype: Any, example: str) -> DType:
    if not isinstance(dtype, DType):
        raise TraceError(
            f"{example[: example.index('[')]} takes a type of warploom.lang ({example}), not {shown(dtype)}"
        )
    return dtype


class TensorMap(TensorMapHandle):
    """Annotation of a TMA descriptor parameter."""


class Compound:
    """Base of annotations that stand for several parameters: those that a class annotates, named ``parameter_field``.

    Where ``prefixed`` is False their names are the fields' alone. They are annotated as parameters are. The value that
    the kernel gets has them as attributes and, in their order, as ``values``; its ``k`` is the language.
    """

    prefixed = True

    @classmethod
    @cache
    def fields(cls) -> dict[str, Any]:
        """The annotations, by name. Raises TraceError where there are none, and for one that hides something else."""
        found = hints_of(cls, cls.__name__)
        if not found:
            raise TraceError(f"{cls.__name__} has no fields: annotate some in it (x: Global[f32])")
        if hiding := [name for name in found if name in ("k", "values") or hasattr(cls, name)]:
            raise TraceError(
                f"field {hiding[0]!r} of {cls.__name__} hides an attribute of that name, or has a default, but a "
                "launch gives every argument: rename it, or leave its default out"
            )
        return found

    def __init__(self, k: Kernel, *values: Any) -> None:
        self.k, self.values = k, values
        for name, value in zip(self.fields(), values, strict=True):
            setattr(self, name, value)


@dataclass
class Parameters:
    """The parameters of a kernel being traced: as they are written, then numbers of compound ones, then strides."""

    k: Kernel
    kernel: str
    written: list[Parameter] = field(default_factory=list[Parameter])
    numbers: list[Parameter] = field(default_factory=list[Parameter])
    strides: list[Parameter] = field(default_factory=list[Parameter])

    @property
    def all(self) -> list[Parameter]:
        """All parameters in the order of the Program."""
        return [*self.written, *self.numbers, *self.strides]

    def argument(self, name: str, kind: Any, *, within: str | None = None) -> Any:
        """The value that the kernel gets for a parameter; ``within`` begins the name of one of a compound parameter."""
        k, prefix = self.k, within or ""
        name = prefix + name
        if isinstance(kind, PointerType):
            address = self._new(self.written, name, "pointer", kind.dtype, u64, strides=kind.strides)
            if not kind.strides:
                return GlobalPointer(k, address, kind.dtype)
            strides = [
                self._new(self.strides, stride_name(name, i), "scalar", u32, u32, stride_of=(name, i))
                for i in range(kind.strides)
            ]
            return StridedPointer(k, address, kind.dtype, tuple(strides))
        if isinstance(kind, DType):
            return self._new(self.written if within is None else self.numbers, name, "scalar", kind, kind)
        if isinstance(kind, type) and issubclass(kind, Compound):
            own = kind.fields().items()
            prefix = f"{name}_" if kind.prefixed else prefix
            return kind(k, *[self.argument(field, of, within=prefix) for field, of in own])
        if kind is TensorMap:
            return TensorMapHandle(self._new(self.written, name, "tensor_map", u64, u64))
        raise TraceError(
            f"parameter {name!r} of {self.kernel} needs a type: Global[bf16], Strided[bf16, 2], u32, f32 …, TensorMap "
            "or a subclass of Compound; trace-time configuration goes into keyword-only parameters (after *)"
        )

    def _new(self, to: list[Parameter], name: str, what: Any, dtype: DType, held: DType, **more: Any) -> Traced:
        if name in {p.name for p in self.all}:
            raise TraceError(f"two parameters are called {name}, one by what it is part of: rename it")
        value = self.k.new_value(held, name)
        to.append(Parameter(name, what, dtype, value, **more))
        return Traced(self.k, value)


def used_parameters(parameters: list[Parameter], used: Callable[[Parameter], bool]) -> list[Parameter]:
    """Parameters that the kernel uses; a stride's pointer counts as used with it."""
    kept = {p.name for p in parameters if used(p)} | {p.stride_of[0] for p in parameters if p.stride_of and used(p)}
    return [p for p in parameters if p.name in kept]
