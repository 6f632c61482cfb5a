"""Tensor maps that a kernel makes: ``tensormap.replace``, ``tensormap.cp_fenceproxy``.

Source: PTX ISA, "Data Movement and Conversion Instructions" (``tensormap``), "membar / fence".
"""

from __future__ import annotations

from typing import Literal, cast

from warploom.core.dtypes import u32, u64
from warploom.ir.statements import Const
from warploom.isa.form import named
from warploom.isa.memory import load, store
from warploom.isa.special import FULL_MASK, special
from warploom.isa.tensor_map import FIELDS, MAP_BYTES, tensor_map_replace
from warploom.ptx.builder import FlowBuilder, form
from warploom.ptx.forms import ModifierReader
from warploom.ptx.syntax import Integer, Operand
from warploom.ptx.types import constant

_DEFAULTS = ("interleave_layout", "fill_mode")
"""Fields of which the first choice is supported alone."""


@form("tensormap")
def tensor_map(b: FlowBuilder, f: ModifierReader) -> None:
    """``tensormap.{replace, cp_fenceproxy}``."""
    (_replace if f.which("replace", "cp_fenceproxy") == "replace" else _publish)(b, f)


def _space(f: ModifierReader) -> Literal["shared", "global"]:
    return cast(
        "Literal['shared', 'global']", f.one_of("shared::cta", "global", default="global").removesuffix("::cta")
    )


def _replace(b: FlowBuilder, f: ModifierReader) -> None:
    name, space = f.which(*FIELDS), _space(f)
    f.need("tile", "b1024")
    field = FIELDS[name]
    address, *which, value = f.operands(2 + (field.count > 1))
    if f.type() != f"b{field.dtype.bits}" or any(not isinstance(x, Integer) for x in which):
        raise f.refusal()
    given = b.read(value, field.dtype)
    if field.immediate and not isinstance(given, Const):
        raise f.refusal(f"{name} must be a constant")
    if name in _DEFAULTS and given != constant(0, u32):
        raise f.refusal(f"{name} other than 0 is not supported")
    index = which[0].value if which and isinstance(which[0], Integer) else 0
    base, offset, within = b.address(address, space)
    if offset:
        base = b.binary("add", base, offset)
    b.emit(tensor_map_replace(space, name, index), (base, given), within=within)


def _size(b: FlowBuilder, f: ModifierReader, size: Operand) -> None:
    if b.read(size, u32) != constant(MAP_BYTES, u32):
        raise f.refusal(f"a tensor map has {MAP_BYTES} bytes")


def _publish(b: FlowBuilder, f: ModifierReader) -> None:
    """A warp copies a map from shared to global memory, 4 bytes a lane, and publishes it."""
    f.need("global", "shared::cta", "tensormap::generic", "release", "sync", "aligned")
    f.which("gpu", "sys")
    target, source, size = f.operands(3)
    _size(b, f, size)
    (to, to_offset, _), (base, offset, within) = b.address(target, "global"), b.address(source, "shared")
    place = b.binary("shl", b.binary("and", b.once(special("tid.x")), 31), 2)
    word = b.fresh(u32)
    b.emit(load("shared", u32).at(offset=offset), (b.binary("add", base, place),), (word,), within)
    b.emit(store("global", u32).at(offset=to_offset), (b.binary("add", to, b.extend(place, u64)), word))
    b.emit(named("fence.proxy.tensormap::generic.release.gpu"))
    b.emit(named("bar.warp.sync"), (Const(u32, FULL_MASK),))
