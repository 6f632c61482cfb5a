"""PTX types as register types of Programs, and integers as constants of them."""

from __future__ import annotations

import numpy as np

from warploom.core.dtypes import DType, pred, u16, u32, u64
from warploom.ir.statements import Const
from warploom.isa.form import REGISTER
from warploom.ptx.syntax import UnknownTypeError


class _Types(dict[str, DType]):
    def __missing__(self, name: str) -> DType:
        raise UnknownTypeError(name)


TYPE = _Types(REGISTER)
"""The register type of a PTX type; bits and 16-bit floats are unsigned integers."""


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
    if dtype.bits not in (16, 32, 64):
        raise UnknownTypeError(dtype.name)
    return {16: u16, 32: u32, 64: u64}[dtype.bits]
