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
from warploom.isa.form import Open

Array = NDArray[Any]


def undefined(context: Context, op: Op) -> Callable[[Frame], None] | None:
    """The check of an operation that is not defined for all operands; None for those that are."""
    rules = [rule for rule in op.instruction.open if _may_hold(rule, op)]
    if not rules:
        return None
    name, keys = op.instruction.mnemonic, context.keys(op)

    def check(frame: Frame) -> None:
        for rule in rules:
            key = keys[rule.operand]
            bad = rule.where(frame.env[keys[0]], frame.env[key])
            if not bad.any():
                continue
            if key in frame.shadows:  # what it holds means nothing, and is told elsewhere
                bad = bad & (frame.shadows[key] == 0)
            text = f"{name} {rule.what}: the result on a GPU is undefined; {rule.cure}"
            context.report.of_lanes("undefined", frame, op.where, frame.acting(bad), text, frame.env[key])

    return check


def _may_hold(rule: Open, op: Op) -> bool:
    """Whether a rule is for the program to decide: constants of which it does not hold need no look at each run."""
    decides = op.operands[rule.operand]
    if not isinstance(decides, Const) or not rule.alone:
        return True
    value = np.array([[decides.value]]).astype(decides.dtype.numpy)
    return bool(rule.where(value, value).any())


LARGE = 1 << 32
"""Bytes from which on an array cannot be addressed in 32 bits."""


class WideAddresses:
    """Knows the operation that makes each value of a program, to work out addresses without an end to integers."""

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
        # Exact, as addresses are far below 2^53.
        wrapped = frame.env[self.context.key(address)].astype(np.float64) != self._exact(frame, address)
        message = (
            f"the address of {op.instruction.mnemonic} has wrapped around: an index does not fit its type, and another "
            "element is meant. Compute it in 64 bits (k.mul_wide, or k.convert before the product), or add it to the "
            "pointer in parts"
        )
        self.context.report.of_lanes("overflow", frame, op.where, frame.acting(wrapped), message)

    def _exact(self, frame: Frame, x: Operand) -> Array:
        if isinstance(x, Const):
            return np.array([[float(x.value)]])
        op = self.made.get(x)
        exact = op.instruction.exact if op is not None else None
        if op is not None and exact is not None and not x.dtype.is_float:
            return exact(*(self._exact(frame, o) for o in op.operands))
        return frame.env[self.context.key(x)].astype(np.float64)
