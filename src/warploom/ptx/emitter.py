"""What every part of reading PTX makes operations with: types, constants, statements, special registers.

A Program's threads are numbered in one dimension; special registers give them theirs back.

Source: PTX ISA, "Special Registers".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from warploom.core.dtypes import DType, pred, u16, u32, u64
from warploom.core.errors import PtxError
from warploom.ir import statements as ir
from warploom.ir.statements import NOWHERE, Const, Op, Operand, Statement, TileRegion, Value
from warploom.isa.conversion import SPECIAL_REGISTERS, convert, special
from warploom.isa.instruction import Instruction, named
from warploom.isa.lanewise import binary


def constant(value: int, dtype: DType) -> Const:
    """An integer as an immediate of a type, wrapped."""
    if dtype is pred:
        return Const(pred, bool(value))
    if dtype.is_float:
        bits = u32 if dtype.bits == 32 else u64
        return Const(dtype, float(np.array(value % (1 << dtype.bits), bits.numpy).view(dtype.numpy)))
    value %= 1 << dtype.bits
    return Const(dtype, value - (1 << dtype.bits) if dtype.kind == "signed" and value >> dtype.bits - 1 else value)


def unsigned(dtype: DType) -> DType:
    """The unsigned integer of a type's width."""
    return {16: u16, 32: u32, 64: u64}[dtype.bits]


class Emitter:
    """Appends operations to a block; values are numbered from ``first`` on."""

    def __init__(self, first: int) -> None:
        self.numbers, self.where = count(first), NOWHERE
        self._out: list[Statement] = []
        self._known: dict[tuple[Instruction, ir.Operand | None], Value] = {}  # casts and special registers of the block

    def fresh(self, dtype: DType, name: str = "") -> Value:
        """A new value."""
        return Value(next(self.numbers), dtype, name)

    def emit(
        self,
        instruction: Instruction,
        operands: Sequence[ir.Operand] = (),
        results: Sequence[Value] = (),
        within: TileRegion | None = None,
    ) -> None:
        """Append an operation, whose first operand is an address in the variable ``within``."""
        tiles = (within, *(None,) * (len(operands) - 1)) if within is not None else ()
        self._out.append(Op(instruction, tuple(operands), tuple(results), self.where, tiles))

    def op(self, instruction: Instruction, *operands: ir.Operand) -> Value:
        """An operation with one result, a new value."""
        result = self.fresh(instruction.result_types[0])
        self.emit(instruction, operands, (result,))
        return result

    def once(self, instruction: Instruction, operand: ir.Operand | None = None) -> Value:
        """The result of an instruction that depends on nothing that changes within the block: it is made once there."""
        if isinstance(operand, ir.Register):
            return self.op(instruction, operand)
        key = (instruction, operand)
        if key not in self._known:
            self._known[key] = self.op(instruction, *(() if operand is None else (operand,)))
        return self._known[key]

    def binary(self, op: str, a: ir.Operand, b: ir.Operand | int) -> ir.Operand:
        """An operation of two operands of one type; an integer is a constant (u32 for shifts), 0 changes nothing."""
        if isinstance(b, int):
            if b == 0 and op in ("add", "xor", "shl", "shr"):
                return a
            b = Const(u32 if op in ("shl", "shr") else a.dtype, b)
        return self.op(binary(op, a.dtype), a, b)

    def refusal(self, why: str) -> PtxError:
        """The error to raise at the current line."""
        return PtxError(f"{self.where}: {why}")


_ONES = 0xFFFFFFFF
_MASKS = {"eq": (1, 0), "ge": (_ONES, 0), "gt": (_ONES - 1, 0), "lt": (_ONES, _ONES), "le": (_ONES - 1, _ONES)}
"""Which lanes a mask names → the bits that are moved up by the lane's number, and those that are then flipped."""


@dataclass(frozen=True, slots=True)
class Specials:
    """Special registers of a launch: threads of a CTA along x, y, z, CTAs of a cluster, bytes of shared memory."""

    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    dynamic_bytes: int
    total_bytes: int

    def read(self, b: Emitter, name: str) -> Operand:
        """The value of a special register (``%tid.x``). Raises PtxError for one that is not known."""
        known = name.removeprefix("%")
        register, _, axis = known.partition(".")
        if register == "tid":
            return self._thread(b, axis)
        fixed = self._fixed(register, axis)
        if fixed is not None:
            return Const(u32, fixed)
        if known in SPECIAL_REGISTERS and known not in ("shared_base", "local_base", "clock64"):
            return b.once(special(known))
        if known in ("clock64", "globaltimer"):
            return b.op(named("mov.u64.clock64", ptx=False))
        if known in ("clock", "globaltimer_lo"):
            return b.op(convert(u64, u32), b.op(named("mov.u64.clock64", ptx=False)))
        lane = b.binary("and", b.once(special("tid.x")), 31)
        if known == "laneid":
            return lane
        if known == "warpid":
            return b.binary("shr", b.once(special("tid.x")), 5)
        if register.startswith("lanemask_") and register[9:] in _MASKS:
            return _lane_mask(b, lane, register[9:])
        raise b.refusal(f"the register {name} is not known")

    def _fixed(self, register: str, axis: str) -> int | None:
        which = "xyz".find(axis) if axis else -1
        if register == "ntid" and which >= 0:
            return self.block[which]
        if register == "cluster_nctaid" and which >= 0:
            return self.cluster[which]
        warps = -(-self.block[0] * self.block[1] * self.block[2] // 32)
        return {
            "nwarpid": warps,
            "dynamic_smem_size": self.dynamic_bytes,
            "total_smem_size": self.total_bytes,
            "is_explicit_cluster": int(self.cluster != (1, 1, 1)),
        }.get(register)

    def _thread(self, b: Emitter, axis: str) -> Operand:
        linear = b.once(special("tid.x"))
        x, y, _ = self.block
        if self.block[1:] == (1, 1):
            return linear if axis == "x" else Const(u32, 0)
        if axis == "x":
            return b.binary("rem", linear, x)
        row = b.binary("div", linear, x)
        return b.binary("rem", row, y) if axis == "y" else b.binary("div", row, y)


def _lane_mask(b: Emitter, lane: Operand, kind: str) -> Operand:
    shifted, flipped = _MASKS[kind]
    return b.binary("xor", b.op(binary("shl", u32), Const(u32, shifted), lane), flipped)
