"""Tensor maps that a kernel makes: ``tensormap.replace`` and the fences of the tensor-map proxy (sm_90a).

A tensor map is 128 opaque bytes in memory. What the hardware keeps where in them is its own affair; here each field has
the place that :data:`FIELDS` gives it.

Sources: PTX ISA, "Data Movement and Conversion Instructions" (``tensormap.replace``, ``tensormap.cp_fenceproxy``),
"membar / fence" (``fence.proxy.tensormap::generic``), "Tensor-Map modification".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from warploom.core.dtypes import DType, bf16, f16, f32, f64, s32, s64, u8, u16, u32, u64
from warploom.core.errors import LayoutError, VerifyError
from warploom.isa.base import Array, Instruction, as_words, inline_ptx
from warploom.isa.effects import Effect, TensorMapWrite
from warploom.layout.tensor_map import TensorMapSpec

MAP_BYTES = 128


@dataclass(frozen=True, slots=True)
class Field:
    """Where a field lies in a tensor map: ``count`` values of ``dtype``; ``immediate``: PTX takes constants alone."""

    place: int
    dtype: DType = u32
    count: int = 1
    immediate: bool = False


FIELDS = {
    "global_address": Field(0, u64),
    "rank": Field(8),
    "box_dim": Field(12, count=5),
    "global_dim": Field(32, count=5),
    "elemtype": Field(52, immediate=True),
    "global_stride": Field(56, u64, 4),
    "element_stride": Field(88, count=5),
    "interleave_layout": Field(108, immediate=True),
    "swizzle_mode": Field(112, immediate=True),
    "fill_mode": Field(116, immediate=True),
}
"""The fields by their names in ``tensormap.replace``."""

_ELEMENTS = (u8, u16, u32, s32, u64, s64, f16, f32, f32, f64, bf16, f32, f32)
"""``.elemtype`` by number; f32 with subnormal numbers flushed, and tf32, are moved as they are."""


def decoded(data: bytes) -> tuple[int, TensorMapSpec]:
    """The tensor's address and what the map says of it. Raises LayoutError for what describes no tensor."""

    def field(name: str) -> tuple[int, ...]:
        where = FIELDS[name]
        return struct.unpack_from(f"<{where.count}{'Q' if where.dtype is u64 else 'I'}", data, where.place)

    (address,), (rank,), (kind,), (swizzle,) = map(field, ("global_address", "rank", "elemtype", "swizzle_mode"))
    rank += 1
    if rank > 5 or kind >= len(_ELEMENTS) or swizzle > 3:
        raise LayoutError(f"a tensor map of {rank} dimensions, element type {kind} and swizzle mode {swizzle}")
    if any(n != 1 for n in field("element_stride")[:rank]):
        raise LayoutError("strides between the elements of a box are not supported")
    if not all(field("global_dim")[:rank]):
        raise LayoutError(f"a tensor map of a tensor without elements: {field('global_dim')[:rank]}")
    spec = TensorMapSpec(
        _ELEMENTS[kind],
        field("global_dim")[:rank],
        field("global_stride")[: rank - 1],
        field("box_dim")[:rank],
        (0, 32, 64, 128)[swizzle],
    )
    return address, spec


@dataclass(frozen=True, slots=True)
class TensorMapReplace(Instruction):
    """``tensormap.replace.tile``: one field of a tensor map in memory. Operands: the map's address, the value.

    ``index`` is the dimension, of fields that have one. Values are as PTX has them: ``rank`` is one less than the
    dimensions, strides are bytes.
    """

    space: Literal["shared", "global"]
    field: str
    index: int = 0
    since: ClassVar[str] = "sm_90a"  # pyright: ignore[reportIncompatibleMethodOverride]
    ptx = "tensormap.replace.tile.{self._kind}"

    def __post_init__(self) -> None:
        if self.field not in FIELDS or not 0 <= self.index < FIELDS[self.field].count:
            raise VerifyError(f"a tensor map has no field {self.field}, number {self.index}")

    @property
    def _kind(self) -> str:
        space = "shared::cta" if self.space == "shared" else self.space
        return f"{self.field}.{space}.b1024.b{FIELDS[self.field].dtype.bits}"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """The map's address (u32 in shared, u64 in global memory), and the value."""
        return (u32 if self.space == "shared" else u64, FIELDS[self.field].dtype)

    def effects(self) -> tuple[Effect, ...]:
        """An access to the whole map that changes one field."""
        field = FIELDS[self.field]
        return (TensorMapWrite(self.space, 0, field.place + self.index * field.dtype.bytes, field.dtype.bytes),)

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """Inline PTX; the number of the dimension is an immediate, and some values must be."""
        field, (base, value) = FIELDS[self.field], self.operand_types
        which = f"{self.index}, " if field.count > 1 else ""
        ins = [(base.constraint, operands[0]), ("n" if field.immediate else value.constraint, operands[1])]
        return inline_ptx(f"{self.mnemonic} [%0], {which}%1;", (), ins, memory=True)

    def meaning(self, *operands: Array) -> tuple[Array, ...]:
        """The word to write."""
        return (as_words(operands, np.dtype(f"u{FIELDS[self.field].dtype.bytes}")),)
