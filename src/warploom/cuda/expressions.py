"""C++ text of constants and pure expressions, with only the parentheses that a compiler or a reader needs."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from warploom.core.dtypes import DType, f64, pred
from warploom.ir.statements import Const, Op, Operand, Register, Value
from warploom.isa.cpp import ANY, PREFIX, PRIMARY
from warploom.isa.lanewise import binary

_INTEGER_SUFFIX = {"u16": "u", "s16": "", "u32": "u", "s32": "", "u64": "ull", "s64": "ll"}


@dataclass(frozen=True, slots=True)
class Text:
    """An expression and how tightly it binds."""

    text: str
    binds: int = PRIMARY

    def within(self, needed: int) -> str:
        """The text, in parentheses when something that needs ``needed`` stands around it."""
        return self.text if self.binds >= needed else f"({self.text})"


def _float_text(value: float, dtype: DType) -> str:
    if dtype is f64:
        if math.isfinite(value):
            return repr(value)
        return f"__longlong_as_double({struct.unpack('<Q', struct.pack('<d', value))[0]:#x}ll)"
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    bits = struct.unpack("<I", struct.pack("<f", rounded))[0]
    if not math.isfinite(rounded):
        return f"__int_as_float({bits:#x})"
    shortest = repr(rounded.item()) if rounded.item() == value else str(rounded)
    if len(shortest) > 12:
        shortest = str(rounded)
    if "." not in shortest and "e" not in shortest:
        shortest += ".0"
    # Some compilers read decimals as double first: take the decimal only when both ways give the same bits.
    return f"{shortest}f" if np.float32(float(shortest)) == rounded else f"{rounded.item().hex()}f"


def _integer_text(value: int, dtype: DType) -> str:
    suffix = _INTEGER_SUFFIX[dtype.name]
    if dtype.kind == "unsigned":
        value %= 1 << dtype.bits
        digits = f"{value:#x}" if value >= 1 << 31 else str(value)
        return f"(unsigned short){digits}{suffix}" if dtype.bits == 16 else f"{digits}{suffix}"
    value = (value + (1 << dtype.bits - 1)) % (1 << dtype.bits) - (1 << dtype.bits - 1)
    if value == -(1 << dtype.bits - 1):  # C++ has no literal for the lowest value
        return f"(-{-value - 1}{suffix} - 1)"
    return f"{value}{suffix}"


def constant(const: Const) -> Text:
    """An immediate, exactly: floats in decimal when that reads back to the same bits, else in hexadecimal."""
    if const.dtype is pred:
        return Text("true" if const.value else "false")
    if const.dtype.is_float:
        text = _float_text(float(const.value), const.dtype)
    else:
        text = _integer_text(int(const.value), const.dtype)
    prefixed = text.startswith(("-", "(unsigned short)"))
    return Text(text, PREFIX if prefixed else PRIMARY)


def _as_subtraction(op: Op) -> Op:
    """``x + (-64)`` as ``x - 64``, also where the constant has already wrapped to an unsigned value."""
    instruction = op.instruction
    if instruction.operator != "add" or not isinstance(y := op.operands[1], Const) or not y.dtype.is_integer:
        return op
    dtype, value = y.dtype, int(y.value)
    if dtype.kind == "unsigned" and value >= (1 << dtype.bits) - (1 << 20):
        value -= 1 << dtype.bits
    if value >= 0 or value == -(1 << dtype.bits - 1):
        return op
    return Op(binary("sub", dtype), (op.operands[0], Const(dtype, -value)), op.results, op.where)


def expression(op: Op, operand: Callable[[Operand], Text], inner: Callable[[Operand], Op | None]) -> Text:
    """The expression of ``op``. ``operand`` gives operands' texts, ``inner`` the operation inlined as an operand."""
    if op.instruction.copies:
        return operand(op.operands[0])
    op = _as_subtraction(op)
    own, needed = op.instruction.binds
    operator = op.instruction.operator
    texts: list[str] = []
    for position, (x, least) in enumerate(zip(op.operands, needed, strict=True)):
        nested = inner(x)
        same = nested is not None and position == 0 and nested.instruction == op.instruction
        chained = same and operator in ("and", "or", "xor")
        text = operand(x).within(ANY if chained else least)
        if operator in ("shl", "shr") and position == 1 and isinstance(x, Const):
            text = text.removesuffix("u")
        texts.append(f"({text})" if text.startswith("-") and own == PREFIX else text)
    return Text(op.instruction.expression(texts), own)


def inlinable(op: Op) -> bool:
    """Whether ``op`` may be printed inside the statement that uses it: a pure, unnamed integer or predicate.

    16-bit integers would promote to int; ``popc`` and ``clz`` return int where the register is unsigned.
    """
    if len(op.results) != 1 or not op.instruction.pure or not op.instruction.has_expression:
        return False
    result = op.results[0]
    if isinstance(result, Register) or result.name or result.dtype.is_float or result.dtype.bits == 16:
        return False
    return op.instruction.nests


def registers_read(operands: tuple[Operand, ...]) -> frozenset[Value]:
    """The mutable registers among ``operands``."""
    return frozenset(x for x in operands if isinstance(x, Register))
