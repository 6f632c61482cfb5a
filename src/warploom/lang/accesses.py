"""Words of ``k`` for accesses by address: what pointers and tiles load and store by."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from types import UnionType

from warploom.core.dtypes import DType, u32, u64
from warploom.core.errors import TraceError, shown
from warploom.isa import memory as isa
from warploom.isa.effects import MemoryOrder, Space
from warploom.isa.memory import register_type
from warploom.isa.special import special
from warploom.lang.arithmetic import Arithmetic
from warploom.lang.fold import split_sum
from warploom.lang.values import Mutable, Number, Traced


def is_kind(value: object, kind: type | UnionType) -> bool:
    """``isinstance``, of arguments that callers without a type checker may get wrong."""
    return isinstance(value, kind)


class Accesses(Arithmetic):
    """Loads and stores by address."""

    @property
    def shared_base(self) -> Traced:
        """The address of the CTA's dynamic shared memory (u32)."""
        return self.emit(special("shared_base"), ())[0]

    def advance(self, address: Traced, elements: Number, size: int) -> Traced:
        """``address`` + elements · size, widened to 64 bits."""
        if not isinstance(elements, Traced):
            if not isinstance(elements, Integral):
                raise TraceError(f"an index is an integer, not {shown(elements)} ({self.here()})")
            return address + elements * size
        if isinstance(elements, Mutable):
            elements = elements.get()
        if not elements.dtype.is_integer:
            raise TraceError(
                f"an index is an integer, not {elements!r} ({self.here()}): convert it (k.convert(x, u32))"
            )
        if elements.dtype is u32:
            return address + self._wide_bytes(elements, size)
        return address + self.convert(elements, u64) * size

    def _wide_bytes(self, elements: Traced, size: int) -> Traced:
        base, constant = split_sum(elements)
        if constant >= 0:  # element counts do not wrap, so a constant may leave the widening
            return self.mul_wide(base, size) + constant * size
        return self.mul_wide(elements, size)

    def load(
        self, space: Space, address: Traced, dtype: DType, count: int, cache: str, order: MemoryOrder
    ) -> list[Traced]:
        """Loads by address; see :meth:`GlobalPointer.load` and :meth:`SharedTile.load`."""
        base, offset = split_sum(address)
        return list(self.emit(isa.load(space, dtype, count, cache, order).at(offset=offset), (base,)))

    def store(
        self, space: Space, address: Traced, dtype: DType, values: Sequence[Number], cache: str, order: MemoryOrder
    ) -> None:
        """Stores by address; see :meth:`GlobalPointer.store` and :meth:`SharedTile.store`."""
        kind = register_type(dtype)
        for x in values:
            if kind is not dtype and is_kind(x, Traced | float) and not (isinstance(x, Traced) and x.dtype.is_integer):
                raise TraceError(
                    f"an element of {dtype} is stored as its bits, not as {x!r} ({self.here()}): "
                    f"store k.convert(x, {dtype})"
                )
        base, offset = split_sum(address)
        operands = (base, *(self.operand(v, kind) for v in values))
        self.emit(isa.store(space, dtype, len(values), cache, order).at(offset=offset), operands)
