"""Operations that are defined for some operands alone: divisions, shifts, distances of shuffles, sizes of copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.context import Context
from warploom.emulate.frames import Frame
from warploom.ir.statements import Const, Op
from warploom.isa.base import Open

Array = NDArray[Any]


def undefined(context: Context, op: Op) -> Callable[[Frame], None] | None:
    """The check of an operation that is not defined for all operands; None for those that are."""
    rules = [rule for rule in op.instruction.open if _may_hold(rule, op)]
    if not rules:
        return None
    keys = context.keys(op)

    def check(frame: Frame) -> None:
        for rule in rules:
            bad = rule.where(frame.env[keys[0]], frame.env[keys[rule.operand]])
            if bad.any():
                _report(context, frame, op, rule, bad)

    return check


def _may_hold(rule: Open, op: Op) -> bool:
    """Whether a rule is for the program to decide: constants of which it does not hold need no look at each run."""
    decides = op.operands[rule.operand]
    if not isinstance(decides, Const) or not rule.alone:
        return True
    value = np.array([[decides.value]]).astype(decides.dtype.numpy)
    return bool(rule.where(value, value).any())


def _report(context: Context, frame: Frame, op: Op, rule: Open, bad: Array) -> None:
    key = context.key(op.operands[rule.operand])
    acting = frame.full(bad)
    if frame.active is not None:
        acting = acting & frame.active
    if key in frame.shadows:  # what it holds means nothing, and is told elsewhere
        acting = acting & (frame.full(frame.shadows[key]) == 0)
    if not acting.any():
        return
    row, lane = (int(x[0]) for x in np.nonzero(acting))
    value = int(frame.full(frame.env[key])[row, lane])
    text = f"{op.instruction.mnemonic} {rule.what.format(value)}: the result on a GPU is undefined; {rule.cure}"
    context.report.add("undefined", op.where, text, int(frame.flat[row]), lane, count=int(acting.sum()))
