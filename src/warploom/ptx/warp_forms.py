"""Barriers, and the matrix products of a warp.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions", "Warp Level Matrix Instructions".
"""

from __future__ import annotations

from typing import Literal, cast

from warploom.core.dtypes import DTYPES, pred, u32
from warploom.ir.statements import Const
from warploom.isa.matrix import MmaSync
from warploom.isa.matrix_exact import MmaDouble, MmaInteger
from warploom.isa.sync import BarArrive, BarReduce, BarSync
from warploom.ptx.builder import Builder, form
from warploom.ptx.forms import Form
from warploom.ptx.hopper_forms import cluster_barrier
from warploom.ptx.syntax import Operand, Vector


def _threads(b: Builder, f: Form, count: tuple[Operand, ...]) -> int | None:
    if not count:
        return None
    threads = b.read(count[0], u32)
    if not isinstance(threads, Const):
        raise f.refusal("the count of a barrier's threads must be a constant")
    return int(threads.value)


@form("bar", "barrier")
def barrier(b: Builder, f: Form) -> None:
    """``bar.{sync, arrive, red, warp.sync}``; ``barrier`` by the same names."""
    if "warp" in f.instruction.modifiers:
        b.declared(f.instruction)
        f.drop("")
        return
    if f.flag("cluster"):
        cluster_barrier(b, f)
        return
    f.flag("cta")
    how, aligned = f.which("sync", "arrive", "red"), f.flag("aligned") or f.opcode == "bar"
    if how == "red":
        _barrier_reduction(b, f, aligned)
        return
    number, *count = f.operands(1, 2)
    threads = _threads(b, f, tuple(count))
    if how == "sync":
        b.emit(BarSync(threads, aligned), (b.read(number, u32),))
    elif threads is None:
        raise f.refusal()
    else:
        b.emit(BarArrive(threads, aligned), (b.read(number, u32),))


def _barrier_reduction(b: Builder, f: Form, aligned: bool) -> None:
    op = f.which("popc", "and", "or")
    f.type("u32" if op == "popc" else "pred")
    target, number, *count, holds = f.operands(3, 4)
    instruction = BarReduce(cast("Literal['popc', 'and', 'or']", op), _threads(b, f, tuple(count)), aligned)
    b.set(target, instruction, b.read(number, u32), b.read(holds, pred))


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
