"""``mov``: registers, constants, addresses, special registers, and parts of registers.

Source: PTX ISA, "Data Movement and Conversion Instructions" (``mov``).
"""

from __future__ import annotations

from warploom.core.dtypes import pred, u32, u64
from warploom.ir.statements import Operand as Value
from warploom.isa.conversion import combine, half_of
from warploom.ptx.builder import FlowBuilder, form
from warploom.ptx.forms import ModifierReader
from warploom.ptx.syntax import TYPES, Operand, PtxVector
from warploom.ptx.types import TYPE, unsigned


@form("mov")
def move(b: FlowBuilder, f: ModifierReader) -> None:
    """``mov``: registers, constants, addresses, special registers; vectors pack and unpack."""
    kind = f.type()
    target, source = f.operands(2)
    if isinstance(source, PtxVector):
        b.assign(target, _packed(b, f, kind, source))
    elif isinstance(target, PtxVector):
        _unpack(b, f, kind, target, source)
    elif kind == "pred":
        b.assign(target, b.read(source, pred))
    else:
        dtype = unsigned(TYPE[kind]) if TYPE[kind].is_integer else TYPE[kind]
        b.assign(target, b.read(source, b.home(target, dtype)))


def _packed(b: FlowBuilder, f: ModifierReader, kind: str, source: PtxVector) -> Value:
    bits, count = TYPES[kind], len(source.items)
    if bits == 64 and count == 4:  # two halves of two quarters
        halves = [_packed(b, f, "b32", PtxVector(source.items[i : i + 2])) for i in (0, 2)]
        return b.op(combine(u64), *halves)
    if count != 2 or bits not in (32, 64):
        raise f.refusal()
    instruction = combine(u32 if bits == 32 else u64)
    return b.op(instruction, *(b.read(x, t) for x, t in zip(source.items, instruction.operand_types, strict=True)))


def _unpack(b: FlowBuilder, f: ModifierReader, kind: str, target: PtxVector, source: Operand) -> None:
    bits, count = TYPES[kind], len(target.items)
    whole = b.read(source, TYPE[f"b{bits}"])
    if bits == 64 and count == 4:
        parts = [b.op(half_of(u32, q), b.op(half_of(u64, h), whole)) for h in (0, 1) for q in (0, 1)]
    elif count == 2 and bits in (32, 64):
        parts = [b.op(half_of(u32 if bits == 32 else u64, which), whole) for which in (0, 1)]
    else:
        raise f.refusal()
    for register, part in zip(target.items, parts, strict=True):
        b.assign(register, part)
