"""Simplifications while tracing: constants fold, identities vanish, immediates stay outermost in sums.

Addresses end as ``base + immediate`` this way, with the base shared: the form ``ldmatrix`` and ``cp.async`` take.
Floating-point arithmetic is never reordered or simplified.
"""

from __future__ import annotations

import numpy as np

from warploom.core.dtypes import DType, pred, u32
from warploom.isa.conversion import special
from warploom.isa.lanewise import COMPARISONS, binary
from warploom.lang.values import Number, TileAddress, Traced, ValueBuilder, defining_op

COMMUTATIVE = {"add", "mul", "and", "or", "xor", "min", "max"}
"""Operators whose operands may be exchanged."""


def wrap(dtype: DType, value: int) -> int:
    """``value`` modulo the type's range; unsigned values in the upper half stay negative, so that offsets read well."""
    bits = dtype.bits
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def fold_constants(op: str, dtype: DType, a: int | float | bool, b: int | float | bool) -> int | float | bool:
    """The value of ``op`` on two immediates, computed by the instruction's own meaning."""
    unsigned = (1 << dtype.bits) - 1
    as_array = [
        np.array([[int(x) & unsigned]], np.uint64).astype(f"u{dtype.bytes}").view(dtype.numpy)
        if dtype.is_integer
        else np.array([[x]], dtype.numpy)
        for x in (a, b)
    ]
    with np.errstate(all="ignore"):
        result = binary(op, dtype).meaning(*as_array)[0].reshape(-1)[0].item()
    if dtype.is_integer and op not in COMPARISONS and not isinstance(result, bool):
        return wrap(dtype, int(result))
    return result


def split_sum(value: Traced) -> tuple[Traced, int]:
    """``(base, constant)`` with value = base + constant: the constant is 0 when nothing is known.

    The base of an address in a tile remembers the tile.
    """
    definition = defining_op(value)
    if definition is not None and definition.instruction is binary("add", value.dtype):
        constant = value.sources[1].constant
        if constant is not None:
            base = value.sources[0]
            return TileAddress(base, value.within) if isinstance(value, TileAddress) else base, int(constant)
    return value, 0


def least(value: Number) -> int | None:
    """A number that a u32 index is at least, or None where nothing is known (signed ones, sums that may wrap)."""
    return _range(value)[0] if isinstance(value, Traced) else int(value)


def _range(value: Traced) -> tuple[int | None, int]:
    """(least, greatest) of an unsigned value; (None, 0) where it is not known."""
    unknown = None, 0
    if value.constant is not None:
        return int(value.constant), int(value.constant)
    definition = defining_op(value)
    if definition is None or value.dtype is not u32:
        return unknown
    if definition.instruction == special("tid.x"):
        return 0, 1023
    op = definition.instruction.operator
    if not op:
        return unknown
    a, b = value.sources
    (low, high), c = _range(a), b.constant
    if op == "and" and c is not None and int(c) >= 0:
        return 0, int(c)
    if op == "rem" and c is not None and int(c) > 0:
        return 0, int(c) - 1
    if op == "add":
        other_low, other_high = _range(b)
        if low is None or other_low is None:
            return unknown
        low, high = low + other_low, high + other_high
        return (low, high) if low >= 0 and high < 2**32 else unknown
    if low is None or low < 0 or c is None or not 0 <= int(c) < 32:
        return unknown
    if op == "shr":
        return low >> int(c), high >> int(c)
    return (low << int(c), high << int(c)) if op == "shl" and high << int(c) < 2**32 else unknown


def fold_binary(builder: ValueBuilder, op: str, a: Traced, b: Traced) -> Traced | None:
    """A simpler equal value, or None. Swaps are the caller's: a constant operand of a commutative op comes second."""
    dtype = a.dtype
    ca, cb = a.constant, b.constant
    if ca is not None and cb is not None:
        return builder.constant(fold_constants(op, dtype, ca, cb), pred if op in COMPARISONS else dtype)
    if not dtype.is_integer:
        return None
    if cb is not None:
        found = _identity(builder, op, a, int(cb))
        if found is not None:
            return found
    if op == "sub" and cb is not None:
        return builder.binary("add", a, wrap(dtype, -int(cb)))
    if op == "add":
        return _fold_add(builder, a, b)
    if op in ("mul", "shl") and cb is not None and dtype.kind == "unsigned":
        base, constant = split_sum(a)
        if constant:
            scaled = constant << int(cb) if op == "shl" else constant * int(cb)
            return builder.binary("add", builder.binary(op, base, int(cb)), wrap(dtype, scaled))
    return None


def _identity(builder: ValueBuilder, op: str, a: Traced, c: int) -> Traced | None:
    """``a op c`` where the constant decides the result."""
    all_ones = c == -1 or c == (1 << a.dtype.bits) - 1
    if c == 0:
        if op in ("add", "sub", "or", "xor", "shl", "shr"):
            return a
        if op in ("mul", "and"):
            return builder.constant(0, a.dtype)
    if c == 1 and op in ("mul", "div"):
        return a
    if all_ones and op == "and":
        return a
    if a.dtype.kind == "unsigned" and c > 0 and c & (c - 1) == 0:
        shift = {"mul": "shl", "div": "shr"}.get(op)
        if shift:
            return builder.binary(shift, a, c.bit_length() - 1)
        if op == "rem":
            return builder.binary("and", a, c - 1)
    return None


def _fold_add(builder: ValueBuilder, a: Traced, b: Traced) -> Traced | None:
    """Constants move outward: (x + c) + d, x + (y + c), (x + c) + y."""
    dtype = a.dtype
    base_a, constant_a = split_sum(a)
    if b.constant is not None:
        if constant_a:
            return builder.binary("add", base_a, wrap(dtype, constant_a + int(b.constant)))
        return None
    base_b, constant_b = split_sum(b)
    total = wrap(dtype, constant_a + constant_b)
    if constant_a or constant_b:
        return builder.binary("add", builder.binary("add", base_a, base_b), total)
    return None
