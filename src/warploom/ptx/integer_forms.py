"""Integers beyond single registers, and within them: carries, ``dp4a`` and ``dp2a``, ``mul24``.

Source: PTX ISA, "Extended-Precision Integer Arithmetic Instructions", "Integer Arithmetic Instructions".
"""

from __future__ import annotations

from warploom.core.dtypes import pred, u32
from warploom.ir.statements import Operand as Value
from warploom.isa.alu import Binary, Select
from warploom.isa.conversion import Move
from warploom.isa.scalar import Scalar
from warploom.ptx.builder import Builder, form
from warploom.ptx.forms import Form
from warploom.ptx.types import TYPE, constant, unsigned


@form("addc", "subc", "madc")
def carried(b: Builder, f: Form) -> None:
    """A sum, difference or ``mad`` that takes the carry of the one before; with ``.cc`` it leaves its own."""
    extended(b, f, takes=True, leaves=f.flag("cc"))


def extended(b: Builder, f: Form, *, takes: bool, leaves: bool) -> None:
    """``{add, sub, mad}[c][.cc]`` of 32 or 64 bits. A difference carries what it borrows."""
    kind, op = f.type(), f.opcode.removesuffix("c")
    if op not in ("add", "sub", "mad") or kind not in ("u32", "s32", "u64", "s64"):
        raise f.refusal()
    dtype = unsigned(TYPE[kind])
    if op == "mad":
        how = f.one_of("lo", "hi")
        target, x, y, z = f.operands(4)
        if not how:
            raise f.refusal()
        whole = Binary("mul", dtype) if how == "lo" else Scalar(f"mul.hi.{kind}")
        product = b.op(whole, *(b.read(v, t) for v, t in zip((x, y), whole.operand_types, strict=True)))
        op, a, c = "add", b.cast(product, dtype), b.read(z, dtype)
    else:
        target, x, y = f.operands(3)
        a, c = b.read(x, dtype), b.read(y, dtype)

    def step(a: Value, c: Value) -> tuple[Value, Value]:
        result = b.binary(op, a, c)
        return result, b.op(Binary("lt", dtype), *((result, a) if op == "add" else (a, c)))

    result, carry = step(a, c)
    if takes:
        result, again = step(result, b.extend(b.carry, dtype))
        carry = b.op(Binary("or", pred), carry, again)
    if leaves:
        b.emit(Move(u32), (b.op(Select(u32), carry, constant(1, u32), constant(0, u32)),), (b.carry,))
    b.assign(target, result)


@form("dp4a", "dp2a")
def dot_product(b: Builder, f: Form) -> None:
    """Four (two) products of bytes, added up."""
    which = f.one_of("lo", "hi") if f.opcode == "dp2a" else ""
    b.apply(f.operands(4), Scalar(".".join(x for x in (f.opcode, which, *f.types()) if x)))


@form("mul24", "mad24")
def multiply24(b: Builder, f: Form) -> None:
    """Products of the low 24 bits."""
    adds, instruction = f.opcode == "mad24", Scalar(f"mul24.{f.one_of('lo', 'hi')}.{f.type()}")
    target, x, y, *more = f.operands(3 + adds)
    dtype = instruction.result_types[0]
    product = b.op(instruction, b.read(x, dtype), b.read(y, dtype))
    b.assign(target, b.binary("add", product, b.read(more[0], dtype)) if adds else product)


@form("cnot")
def logical_not(b: Builder, f: Form) -> None:
    """``cnot``: 1 for 0, else 0."""
    dtype = unsigned(TYPE[f.type()])
    target, x = f.operands(2)
    is_zero = b.op(Binary("eq", dtype), b.read(x, dtype), constant(0, dtype))
    b.assign(target, b.op(Select(dtype), is_zero, constant(1, dtype), constant(0, dtype)))
