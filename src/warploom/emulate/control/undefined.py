"""Operations that are defined for some operands alone: divisions, shifts, distances of shuffles, sizes of copies.

And addresses that have wrapped around in 32 bits on their way into a large array, where they land at another element.
An address is worked out once more, without an end to its integers, from the values that it is a sum of products of;
only for launches with an array of 4 GiB or more: in smaller ones an index that wraps was out of bounds in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.context import Context
from warploom.emulate.control.frames import Frame
from warploom.emulate.memory.buffers import GlobalBuffer
from warploom.ir.program import Program
from warploom.ir.statements import Const, Op, Operand, Register, Value
from warploom.isa.alu import Binary, MultiplyWide, Select
from warploom.isa.async_copy import CpAsync
from warploom.isa.conversion import Convert, Move
from warploom.isa.warp import Shuffle

Array = NDArray[Any]


_Rule = tuple[int, Callable[[Array, Array], Array], str, str]
"""Which operand decides, where (the first operand, that one) is left open, what happens, and what to do."""

_GUARD = "guard the operation with k.when, or give those lanes another operand by k.select"


def undefined(context: Context, op: Op) -> Callable[[Frame], None] | None:
    """The check of an operation that is not defined for all operands; None for those that are."""
    rules = [r for r in _rules(op) if not isinstance(op.operands[r[0]], Const) or not isinstance(op.operands[0], Const)]
    if not rules:
        return None
    keys = context.keys(op)

    def check(frame: Frame) -> None:
        for operand, is_open, what, cure in rules:
            value = frame.env[keys[operand]]
            bad = is_open(frame.env[keys[0]], value)
            if bad.any():
                _report(context, frame, op, operand, bad, what, cure)

    return check


def _report(context: Context, frame: Frame, op: Op, operand: int, bad: Array, what: str, cure: str) -> None:
    key = context.key(op.operands[operand])
    acting = frame.full(bad)
    if frame.active is not None:
        acting = acting & frame.active
    if key in frame.shadows:  # what it holds means nothing, and is told elsewhere
        acting = acting & (frame.full(frame.shadows[key]) == 0)
    if not acting.any():
        return
    row, lane = (int(x[0]) for x in np.nonzero(acting))
    value = int(frame.full(frame.env[key])[row, lane])
    text = f"{op.instruction.mnemonic} {what.format(value)}: the result on a GPU is undefined; {cure}"
    context.report.add("undefined", op.where, text, int(frame.flat[row]), lane, count=int(acting.sum()))


def _rules(op: Op) -> list[_Rule]:
    instruction = op.instruction
    if isinstance(instruction, Binary) and instruction.dtype.is_integer:
        bits, by = instruction.dtype.bits, op.operands[1]
        known = int(by.value) if isinstance(by, Const) else None
        if instruction.op in ("shl", "shr") and (known is None or known >= bits):
            return [(1, lambda _, by: by >= bits, f"shifts by {{}} of its {bits} bits", _GUARD)]
        if instruction.op in ("div", "rem"):
            rules: list[_Rule] = [] if known else [(1, lambda _, by: by == 0, "divides by {}", _GUARD)]
            if instruction.dtype.kind == "signed":
                least = np.iinfo(instruction.dtype.numpy).min
                overflow = "divides the least integer by {}, which overflows"
                rules.append((1, lambda x, by: (by == -1) & (x == least), overflow, _GUARD))
            return rules
    if isinstance(instruction, Shuffle):
        cure = "the hardware takes it modulo 32; keep it below"
        return [(1, lambda _, lane: lane > 31, "names lane or distance {} of 32", cure)]
    if isinstance(instruction, CpAsync) and instruction.zero_fill:
        size, cure = instruction.bytes, "clamp it (k.minimum)"
        return [(2, lambda _, valid: valid > size, f"reads {{}} bytes of a copy of {size}", cure)]
    return []


LARGE = 1 << 32
"""Bytes from which on an array cannot be addressed in 32 bits."""


class WideAddresses:
    """What each address of a program is made of."""

    def __init__(self, context: Context, program: Program) -> None:
        self.context = context
        self.made: dict[Value, Op] = {}
        for op in program.ops():
            for result in op.results:
                if not isinstance(result, Register):
                    self.made[result] = op

    @staticmethod
    def needed(buffers: Sequence[GlobalBuffer]) -> bool:
        """Whether there is an array that is large enough."""
        return any(b.data.size >= LARGE for b in buffers)

    def check(self, frame: Frame, op: Op, operand: int) -> None:
        """Compare an address with what it would be if no integer had an end."""
        address = op.operands[operand]
        actual = frame.full(frame.env[self.context.key(address)]).astype(np.float64)
        wrapped = actual != frame.full(self._exact(frame, address))  # exact: addresses are far below 2^53
        if frame.active is not None:
            wrapped = wrapped & frame.active
        if not wrapped.any():
            return
        row, lane = (int(x[0]) for x in np.nonzero(wrapped))
        message = (
            f"the address of {op.instruction.mnemonic} has wrapped around: an index does not fit its type, and another "
            "element is meant. Compute it in 64 bits (k.mul_wide, or k.convert before the product), or add it to the "
            "pointer in parts"
        )
        self.context.report.add("overflow", op.where, message, int(frame.flat[row]), lane, count=int(wrapped.sum()))

    def _exact(self, frame: Frame, x: Operand) -> Array:
        if isinstance(x, Const):
            return np.array([[[float(x.value)]]])
        op = self.made.get(x)
        if op is not None:
            if isinstance(op.instruction, Move) or _widens(op):
                return self._exact(frame, op.operands[0])
            if isinstance(op.instruction, Select):
                chosen = frame.env[self.context.key(op.operands[0])]
                return np.where(chosen, *(self._exact(frame, o) for o in op.operands[1:]))
            if isinstance(op.instruction, MultiplyWide) or (
                isinstance(op.instruction, Binary)
                and op.instruction.dtype.is_integer
                and op.instruction.op in ("add", "sub", "mul", "shl")
            ):
                a, b = (self._exact(frame, o) for o in op.operands)
                what = op.instruction.op if isinstance(op.instruction, Binary) else "mul"
                return {"add": a + b, "sub": a - b, "mul": a * b, "shl": a * 2.0 ** np.minimum(b, 64)}[what]
        return frame.env[self.context.key(x)].astype(np.float64)


def _widens(op: Op) -> bool:
    """Whether an integer becomes one of a larger type, as it is."""
    cast = op.instruction
    return isinstance(cast, Convert) and cast.source.is_integer and cast.dtype.bits >= cast.source.bits
