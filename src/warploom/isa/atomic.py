"""Atomics of global and shared memory.

Sources: PTX ISA, ``atom`` and ``red``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from warploom.core.dtypes import DTYPES, DType, f32, f64, s32, s64, u16, u32, u64
from warploom.core.errors import VerifyError
from warploom.isa.alu import flush_subnormal
from warploom.isa.base import Array, Instruction, address, braces, takes
from warploom.isa.effects import Access, Effect, MemoryOrder, Scope, Space
from warploom.isa.memory import address_type, check_vector

_ATOMIC_TYPES: dict[str, Sequence[DType]] = {
    "add": (u32, s32, u64, s64, f32, f64),
    **dict.fromkeys(("min", "max"), (u32, s32, u64, s64)),
    **dict.fromkeys(("and", "or", "xor"), (u32, s32, u64, s64)),
    **dict.fromkeys(("exch", "cas"), (u32, s32, u64, s64, f32, f64)),
    **dict.fromkeys(("inc", "dec"), (u32,)),
}
_COMBINED: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "exch": lambda _, new: new,
    "inc": lambda old, most: np.where(old >= most, np.zeros_like(old), old + np.ones_like(old)),
    "dec": lambda old, most: np.where((old == 0) | (old > most), most, old - np.ones_like(old)),
}


@dataclass(frozen=True, slots=True)
class Atomic(Instruction):
    """``atom.{op}``: returns the old value. Operands address, value (``cas``: address, compare, value).

    ``cas`` compares bits; ``inc`` counts up to the value and from 0 again, ``dec`` down to 0 and from the value. Sums
    of f32 in global memory flush subnormals to zero (PTX ISA, ``atom``). The order in which lanes and warps apply is
    not defined; the emulator applies lanes in ascending order. ``halves`` is what a sum of bits adds: ``f16``,
    ``bf16x2`` and their like; ``remote`` as of :class:`Load`. The first element of a ``vector`` of so many has its
    alignment.
    """

    space: Space
    op: str
    dtype: DType
    offset: int = 0
    order: MemoryOrder = "relaxed"
    scope: Scope = "gpu"
    halves: Literal["", "f16", "bf16", "f16x2", "bf16x2"] = ""
    remote: bool = False
    vector: int = 1
    gives = ("dtype",)

    def __post_init__(self) -> None:
        if self.op not in _ATOMIC_TYPES:
            raise VerifyError(f"there is no atomic {self.op!r}; there are {', '.join(_ATOMIC_TYPES)}")
        if self.halves:
            takes(f"atomic add of {self.halves}", self.dtype, (u32 if "x2" in self.halves else u16,))
        else:
            takes(f"atomic {self.op}", self.dtype, _ATOMIC_TYPES[self.op])
        if self.order == "weak":
            raise VerifyError("an atomic is relaxed, acquire, release or acq_rel, not weak")

    @property
    def mnemonic(self) -> str:
        """Order, scope, space, operation, type: ``atom.relaxed.gpu.global.add.f32`` (PTX ISA, "atom")."""
        bits_only = self.op in ("exch", "cas", "and", "or", "xor")
        kind = f"b{self.dtype.bits}" if bits_only else self.dtype.name
        kind = "u64" if self.op == "add" and self.dtype is s64 else kind  # the same bits
        kind = f"noftz.{self.halves}" if self.halves else kind
        space = "shared::cluster" if self.remote else self.space
        return f"atom.{self.order}.{self.scope}.{space}.{self.op}.{kind}"

    @property
    def since(self) -> str:
        """Sums of bf16 came with sm_90."""
        return "sm_90" if self.halves.startswith("bf16") else "sm_80"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """The address, then one value of ``dtype``, two for ``cas``."""
        return (address_type(self.space), *(self.dtype,) * (2 if self.op == "cas" else 1))

    def effects(self) -> tuple[Effect, ...]:
        """One atomic access per lane; atomics of one address do not race with each other."""
        size, order, scope = self.dtype.bytes, self.order, self.scope
        return (Access(self.space, "atomic", 0, size, self.offset, order=order, scope=scope, remote=self.remote),)

    @property
    def template(self) -> str:
        """The old value is always returned, used or not."""
        values = "%2, %3" if self.op == "cas" else "%2"
        return f"{self.mnemonic} %0, {address(1, self.offset)}, {values};"

    def combine(self, old: Array, *values: Array) -> Array:
        """The new memory value from the old one, elementwise."""
        if self.op == "cas":
            bits = f"u{self.dtype.bytes}"
            return np.where(old.view(bits) == values[0].view(bits), values[1], old)
        if self.op == "add" and self.dtype is f32 and self.space == "global":
            return flush_subnormal(flush_subnormal(old) + flush_subnormal(values[0]))
        if self.halves:
            dtype = DTYPES[self.halves.removesuffix("x2")].numpy
            return (np.ascontiguousarray(old).view(dtype) + np.ascontiguousarray(values[0]).view(dtype)).view(old.dtype)
        return _COMBINED[self.op](old, values[0])


@dataclass(frozen=True, slots=True)
class ReduceAdd(Instruction):
    """``red.global.add.f32``: adds ``count`` consecutive f32 to memory; nothing comes back. Vectors need sm_90.

    Operands address, then the values. Each element is one atomic operation.
    """

    count: int = 1
    offset: int = 0
    dtype: ClassVar[DType] = f32

    def __post_init__(self) -> None:
        check_vector(f32, self.count)

    @property
    def mnemonic(self) -> str:
        """With its vector: ``red.relaxed.gpu.global.add.v4.f32`` (PTX ISA, "red")."""
        return f"red.relaxed.gpu.global.add{f'.v{self.count}' if self.count > 1 else ''}.f32"

    @property
    def since(self) -> str:
        """Vectors came with sm_90."""
        return "sm_90" if self.count > 1 else "sm_80"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """The address (u64), then ``count`` values."""
        return (u64, *(f32,) * self.count)

    def effects(self) -> tuple[Effect, ...]:
        """One atomic access per lane; atomics of one address do not race with each other."""
        return (Access("global", "atomic", 0, 4 * self.count, self.offset, words=self.count, order="relaxed"),)

    @property
    def template(self) -> str:
        """Several elements are one vector."""
        source = braces(1, self.count) if self.count > 1 else "%1"
        return f"{self.mnemonic} {address(0, self.offset)}, {source};"

    def combine(self, old: Array, *values: Array) -> Array:
        """The new memory value from the old one, elementwise."""
        return old + values[0]
