"""Addresses from one state space to another.

Source: PTX ISA, "Data Movement and Conversion Instructions" (``cvta``, ``isspacep``).
"""

from __future__ import annotations

from typing import cast

from warploom.core.dtypes import pred, s32, u32, u64
from warploom.ir.statements import Operand as Value
from warploom.isa.operators import binary, unary
from warploom.isa.spaces import Window, from_generic, is_space, to_generic
from warploom.ptx.builder import FlowBuilder, form
from warploom.ptx.forms import ModifierReader


def byte(b: FlowBuilder, x: Value, signed: bool) -> Value:
    """The low byte of a u32 as a number, u32 or s32."""
    if not signed:
        return b.binary("and", x, 255)
    high = b.cast(b.binary("shl", x, 24), s32)
    return b.binary("shr", high, 24)


@form("cvta")
def convert_address(b: FlowBuilder, f: ModifierReader) -> None:
    """``cvta[.to]``: a global address is its own generic one."""
    back = f.flag("to")
    space = f.one_of("global", "const", "param", "shared", "shared::cta", "shared::cluster", "local").split("::")[0]
    if not space or f.type() != "u64" or (back and space == "param"):
        raise f.refusal("generic addresses of this space are not supported")
    target, source = f.operands(2)
    if space in ("shared", "local"):
        window = cast("Window", space)
        generic = b.op(from_generic(window), b.read(source, u64)) if back else None
        b.assign(target, generic if generic is not None else b.op(to_generic(window), b.read(source, u32)))
        return
    address = b.read(source, u64)
    b.assign(target, b.generic(address) if space == "param" else address)


@form("isspacep")
def space_test(b: FlowBuilder, f: ModifierReader) -> None:
    """``isspacep``: what lies in no other space is global."""
    space = f.one_of("global", "shared", "shared::cta", "local").removesuffix("::cta")
    target, source = f.operands(2)
    address = b.read(source, u64)
    if space in ("shared", "local"):
        b.set(target, is_space(cast("Window", space)), address)
    elif space:
        inside = (b.op(is_space(window), address) for window in ("shared", "local"))
        b.set(target, unary("not", pred), b.op(binary("or", pred), *inside))
    else:
        raise f.refusal()
