"""Tensor maps that a kernel makes: ``tensormap.replace`` and the fences of the tensor-map proxy (sm_90a).

A tensor map is 128 opaque bytes in memory. What the hardware keeps where in them is its own affair; here each field has
the place that :data:`FIELDS` gives it.

Sources: PTX ISA, "Data Movement and Conversion Instructions" (``tensormap.replace``, ``tensormap.cp_fenceproxy``),
"membar / fence" (``fence.proxy.tensormap::generic``), "Tensor-Map modification".
"""

# pyright: reportUnknownLambdaType=false, reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false
from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.core.dtypes import DType, bf16, f16, f32, f64, s32, s64, u8, u16, u32, u64
from warploom.core.errors import LayoutError, VerifyError
from warploom.isa.base import as_words
from warploom.isa.effects import Effect, TensorMapFence, TensorMapWrite, WarpSync
from warploom.isa.form import Formed, form
from warploom.layout.tensor_map import TensorMapSpec

MAP_BYTES = 128


def whole_map(i: Formed) -> dict[str, Any]:
    """Refuse another size than that of a tensor map."""
    if i.size != MAP_BYTES:
        raise VerifyError(f"a tensor map has {MAP_BYTES} bytes")
    return {}


@dataclass(frozen=True, slots=True)
class Field:
    """Where a field lies in a tensor map: ``count`` values of ``dtype``; ``immediate``: PTX takes constants alone."""

    place: int
    dtype: DType = u32
    count: int = 1
    immediate: bool = False

    @property
    def operands(self) -> tuple[str, str]:
        """PTX's type of a value, and the operands after the map's address."""
        return f"b{self.dtype.bits}", "#value" if self.immediate else "#index, value" if self.count > 1 else "value"


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


# One field of a tensor map in memory. Values are as PTX has them: ``rank`` is one less than the dimensions, strides are
# bytes.

_DEFAULTS = ("interleave_layout", "fill_mode")
"""Fields of which the first choice is supported alone."""


def _field(i: Formed) -> dict[str, Any]:
    field, index = FIELDS[i.member], i.fields.get("index", 0)
    if not 0 <= index < field.count:
        raise VerifyError(f"a tensor map has no field {i.member}, number {index}")
    if i.member in _DEFAULTS and i.value:
        raise VerifyError(f"{i.member} other than 0 is not supported")
    return {"size": field.dtype.bytes, "place": field.place + index * field.dtype.bytes}


def _written(i: Formed) -> Any:
    """The word that is written, shape (warps, lanes, words): of a register, or the immediate."""
    word = np.dtype(f"u{i.size}")
    return lambda *registers: as_words(registers or [np.full((1, 32), i.value, word)], word)


def _write(i: Formed) -> tuple[Effect, ...]:
    """An access to the whole map that changes one field."""
    return (TensorMapWrite("shared" if "shared" in i.space else "global", 0, i.place, i.size),)


MAP: dict[str, Any] = {"since": "sm_90a", "asm": "volatile memory"}
for bits, operands in dict.fromkeys(field.operands for field in FIELDS.values()):
    form(
        f"tensormap.replace.tile.{{member}}{{.space}}.b1024.{bits} [map], {operands}",
        member=" ".join(name for name, field in FIELDS.items() if field.operands == (bits, operands)),
        space="global shared::cta",
        let=_field,
        choose=_written,
        effects=_write,
        **MAP,
    )
form(
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.{scope}.sync.aligned "
    "[to]:u64, [from]:u32, #size",
    scope="gpu sys",
    let=whole_map,
    effects=(WarpSync(aligned=True), TensorMapFence()),
    **MAP,
)
