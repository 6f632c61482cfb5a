"""What loads give: one value, or a vector of several."""

from __future__ import annotations

from typing import NoReturn, TypeGuard

from warploom.core.dtypes import DType
from warploom.core.errors import TraceError
from warploom.lang.values import Traced


class Element(Traced):
    """One element of memory in a register, a value; ``element`` is its type in memory.

    An element of fewer than 32 bits arrives as bits in u32: ``k.convert(x, f32)`` gives its value.
    """

    __slots__ = ("element",)

    def __init__(self, value: Traced, element: DType) -> None:
        super().__init__(value.builder, value.ir, value.definition, value.sources)
        self.element = element


def holds_bits(value: object) -> TypeGuard[Element]:
    """Whether ``value`` was loaded as the bits of something that u32 is not: a 16-bit float, a short signed integer."""
    return isinstance(value, Element) and value.dtype is not value.element and value.element.kind in ("float", "signed")


class Vector(list[Traced]):
    """The values of one access to several elements. It is no value: arithmetic goes element by element."""

    def _refuse(self, *_: object) -> NoReturn:
        here = f" ({self[0].builder.here()})" if self else ""
        raise TraceError(
            f"a load of {len(self)} elements gives {len(self)} values, which have no arithmetic together{here}: "
            "compute with each, as in [x * 2.0 for x in values]"
        )

    __add__ = __iadd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __imul__ = _refuse
    __truediv__ = __rtruediv__ = __neg__ = __and__ = __or__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
