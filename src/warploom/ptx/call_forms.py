"""Calls of the system, ``vprintf`` and ``__assertfail``. What is passed lies in local memory.

Source: CUDA C++ Programming Guide, "Formatted Output", "Assertion"; PTX ISA, ``call``.
"""

from __future__ import annotations

from warploom.core.dtypes import DType
from warploom.ir.statements import Operand as Value
from warploom.isa.effects import Space
from warploom.isa.form import Formed, named
from warploom.isa.memory import load, store
from warploom.ptx.builder import FlowBuilder, form
from warploom.ptx.forms import ModifierReader
from warploom.ptx.syntax import Operand

SYSTEM = {name: named(name, ptx=False) for name in ("vprintf", "__assertfail")}
"""Functions without a body that are known."""


@form("call")
def call(b: FlowBuilder, f: ModifierReader) -> None:
    """A call of the system; others have been replaced by the bodies of their functions."""
    instruction = SYSTEM[f.one_of(*SYSTEM)]
    results = len(instruction.result_types)
    operands = f.operands(results + len(instruction.operand_types))
    given = [_passed(b, x, t) for x, t in zip(operands[results:], instruction.operand_types, strict=True)]
    found = [b.fresh(t) for t in instruction.result_types]
    b.emit(instruction, given, found)
    for place, value in zip(operands, found, strict=False):
        b.access(place, "local", lambda _, offset, x=value: (store("local", x.dtype).at(offset=offset), (x,)), ())


def _passed(b: FlowBuilder, place: Operand, dtype: DType) -> Value:
    def make(_: Space, offset: int) -> tuple[Formed, tuple[Value, ...]]:
        return load("local", dtype).at(offset=offset), ()

    return b.access(place, "local", make, [dtype])[0]
