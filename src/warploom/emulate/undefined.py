"""Operations that are defined for some operands alone: divisions, shifts, distances of shuffles, sizes of copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.context import Context
from warploom.emulate.frames import Frame
from warploom.ir.statements import Const, Op
from warploom.isa.alu import Binary
from warploom.isa.async_copy import CpAsync
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
