"""Statements of a function, one after another: what every part of reading PTX makes operations with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from warploom.core.dtypes import DType, u32
from warploom.core.errors import PtxError
from warploom.ir import statements as ir
from warploom.ir.statements import NOWHERE, Const, Op, Statement, TileRegion, Value
from warploom.isa.base import Instruction as Isa
from warploom.isa.operators import binary


class Emitter:
    """Appends operations to a block; values are numbered from ``first`` on."""

    def __init__(self, first: int) -> None:
        self.numbers, self.where = count(first), NOWHERE
        self._out: list[Statement] = []
        self._known: dict[tuple[Isa, ir.Operand | None], Value] = {}  # casts and special registers of the block

    def fresh(self, dtype: DType, name: str = "") -> Value:
        """A new value."""
        return Value(next(self.numbers), dtype, name)

    def emit(
        self,
        instruction: Isa,
        operands: Sequence[ir.Operand] = (),
        results: Sequence[Value] = (),
        within: TileRegion | None = None,
    ) -> None:
        """Append an operation, whose first operand is an address in the variable ``within``."""
        tiles = (within, *(None,) * (len(operands) - 1)) if within is not None else ()
        self._out.append(Op(instruction, tuple(operands), tuple(results), self.where, tiles))

    def op(self, instruction: Isa, *operands: ir.Operand) -> Value:
        """An operation with one result, a new value."""
        result = self.fresh(instruction.result_types[0])
        self.emit(instruction, operands, (result,))
        return result

    def once(self, instruction: Isa, operand: ir.Operand | None = None) -> Value:
        """The same for an instruction that depends on nothing that changes within the block: made once."""
        if isinstance(operand, ir.Register):
            return self.op(instruction, operand)
        key = (instruction, operand)
        if key not in self._known:
            self._known[key] = self.op(instruction, *(() if operand is None else (operand,)))
        return self._known[key]

    def binary(self, op: str, a: ir.Operand, b: ir.Operand | int) -> ir.Operand:
        """An operation of two operands of one type; an integer is a constant of it (of u32, for shifts)."""
        if isinstance(b, int):
            b = Const(u32 if op in ("shl", "shr") else a.dtype, b)
        return self.op(binary(op, a.dtype), a, b)

    def refusal(self, why: str) -> PtxError:
        """The error to raise at the current line."""
        return PtxError(f"{self.where}: {why}")
