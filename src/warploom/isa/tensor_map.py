"""Tensor maps that a kernel makes: ``tensormap.replace`` and the fences of the tensor-map proxy (sm_90a).

A tensor map is 128 opaque bytes in memory. What the hardware keeps where in them is its own affair; here each field has
the place that :data:`FIELDS` gives it.

Sources: PTX ISA, "Data Movement and Conversion Instructions" (``tensormap.replace``, ``tensormap.cp_fenceproxy``),
"membar / fence" (``fence.proxy.tensormap::generic``), "Tensor-Map modification".
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from warploom.core.dtypes import DType, bf16, f16, f32, f64, s32, s64, u8, u16, u32, u64
from warploom.core.errors import LayoutError, VerifyError
from warploom.isa.base import as_words, inline_ptx
from warploom.isa.effects import Effect, TensorMapWrite
from warploom.isa.form import Formed, form, named
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


# One field of a tensor map in memory. Operands: the map's address (u32 in shared, u64 in global memory), the value, as
# PTX has it: ``rank`` is one less than the dimensions, strides are bytes.


def _field(i: Formed) -> dict[str, Any]:
    field = FIELDS[i.member]
    if not 0 <= i.index < field.count:
        raise VerifyError(f"a tensor map has no field {i.member}, number {i.index}")
    return {"of": field, "of_value": field.dtype, "of_map": u64 if i.where == "global" else u32}


def _replaced(i: Formed, _: Sequence[str], operands: Sequence[str]) -> str:
    """Inline PTX; the number of the dimension is an immediate, and some values must be."""
    which = f"{i.index}, " if i.of.count > 1 else ""
    value = "n" if i.of.immediate else i.of_value.constraint
    ins = [(i.of_map.constraint, operands[0]), (value, operands[1])]
    return inline_ptx(f"{i.mnemonic} [%0], {which}%1;", (), ins, memory=True)


def _write(i: Formed) -> tuple[Effect, ...]:
    """An access to the whole map that changes one field."""
    space = "global" if i.where == "global" else "shared"
    return (TensorMapWrite(space, 0, i.of.place + i.index * i.of.dtype.bytes, i.of.dtype.bytes),)


_REPLACED = "tensormap.replace.tile.{member}.{where}.b1024.{bits}"
for bits in ("b32", "b64"):
    form(
        f"{_REPLACED} map:of_map, value:of_value, #^index",
        name=_REPLACED,
        member=" ".join(name for name, f in FIELDS.items() if f"b{f.dtype.bits}" == bits),
        where="shared::cta global",
        bits=bits,
        let=_field,
        choose=lambda i: lambda *values: as_words(values, np.dtype(f"u{i.of.dtype.bytes}")),
        statement=_replaced,
        effects=_write,
        since="sm_90a",
        asm="volatile memory",
        ptx=False,
    )


def tensor_map_replace(space: Literal["shared", "global"], field: str, index: int = 0) -> Formed:
    """``tensormap.replace.tile`` of a field; ``index`` is the dimension, of fields that have one."""
    if field not in FIELDS:
        raise VerifyError(f"a tensor map has no field {field}")
    where = "shared::cta" if space == "shared" else space
    bits = f"b{FIELDS[field].dtype.bits}"
    return named(f"tensormap.replace.tile.{field}.{where}.b1024.{bits}", numbers=(("index", index),), ptx=False)
