"""The matrix products of a warp.

Source: PTX ISA, "Warp Level Matrix Instructions".
"""

from __future__ import annotations

from warploom.core.dtypes import DTYPES
from warploom.isa.matrix import MmaSync
from warploom.isa.matrix_exact import MmaDouble, MmaInteger
from warploom.ptx.builder import Builder, form
from warploom.ptx.forms import Form
from warploom.ptx.syntax import Vector


@form("mma")
def matrix_product(b: Builder, f: Form) -> None:
    """``mma.sync``."""
    f.need("sync", "aligned", "row", "col")
    shape, types = f.which(*_SHAPES), f.types()
    if len(types) != 4 or types[0] != types[3]:
        raise f.refusal()
    d, a, c = (DTYPES.get(types[i]) for i in (0, 1, 2))
    operands = f.operands(4)
    if d is None or a is None or c is None or not all(isinstance(x, Vector) for x in operands):
        raise f.refusal()
    instruction = (
        MmaDouble(shape) if a.name == "f64" else (MmaInteger(shape, a, c) if a.is_integer else MmaSync(shape, a, d))
    )
    if types != [x.name for x in (*(slot.dtype for slot in (instruction.slots[2], *instruction.slots)),)]:
        raise f.refusal()
    target, *sources = (x.items for x in operands if isinstance(x, Vector))
    given = [x for items in sources for x in items]
    if len(given) != len(instruction.operand_types):
        raise f.refusal("its registers are not as many as its shape has")
    values = [b.read(x, t) for x, t in zip(given, instruction.operand_types, strict=True)]
    b.set_all(target, instruction, values)


_SHAPES = ("m16n8k4", "m16n8k8", "m16n8k16", "m16n8k32", "m8n8k4", "m8n8k16")
