"""The one table of element and register types: bits, CUDA C++, PTX, NumPy.

A register of a kernel has one of the *register types* (``pred``, ``u16``, ``s16``, ``u32``, ``s32``, ``u64``, ``s64``,
``f32``, ``f64``). 16-bit floats and smaller types are *element types*: they live in memory and, packed, in ``u32``
registers, which is what tensor-core instructions take. Generated CUDA needs no header for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

F32_MAX = float(np.finfo(np.float32).max)
"""The largest finite float32: what a kernel's factors must not exceed."""


@dataclass(frozen=True, slots=True, eq=False)  # compared and hashed by identity: there is one object per type
class DType:
    """One scalar type.

    ``cuda`` and ``ptx`` are its spellings in CUDA C++ and as a PTX type suffix, ``constraint`` the letter of an inline
    asm operand ('' for types that are never asm operands by themselves).
    """

    name: str
    bits: int
    cuda: str
    ptx: str
    constraint: str
    numpy: np.dtype[Any]
    kind: str  # 'pred', 'unsigned', 'signed', 'float', 'foreign'

    @property
    def bytes(self) -> int:
        """Size in bytes of one element in memory."""
        return max(1, self.bits // 8)

    @property
    def is_integer(self) -> bool:
        """Whether it is a signed or unsigned integer; a predicate is none."""
        return self.kind in ("unsigned", "signed")

    @property
    def array_name(self) -> str:
        """The name for callers with arrays: of integers and truth values NumPy's, ``int64``."""
        return self.name if self.kind in ("float", "foreign") else self.numpy.name

    @property
    def is_float(self) -> bool:
        """Whether it is a floating-point type."""
        return self.kind == "float"

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return dtype_of, (self.name,)  # a copy, and one from another process, is the same object


def _dtype(name: str, bits: int, cuda: str, ptx: str, constraint: str, numpy: Any, kind: str) -> DType:
    return DType(name, bits, cuda, ptx, constraint, np.dtype(numpy), kind)


pred = _dtype("pred", 1, "bool", "pred", "", np.bool_, "pred")
u8 = _dtype("u8", 8, "unsigned char", "u8", "", np.uint8, "unsigned")
s8 = _dtype("s8", 8, "signed char", "s8", "", np.int8, "signed")
u16 = _dtype("u16", 16, "unsigned short", "u16", "h", np.uint16, "unsigned")
s16 = _dtype("s16", 16, "short", "s16", "h", np.int16, "signed")
u32 = _dtype("u32", 32, "unsigned", "u32", "r", np.uint32, "unsigned")
s32 = _dtype("s32", 32, "int", "s32", "r", np.int32, "signed")
u64 = _dtype("u64", 64, "unsigned long long", "u64", "l", np.uint64, "unsigned")
s64 = _dtype("s64", 64, "long long", "s64", "l", np.int64, "signed")
f16 = _dtype("f16", 16, "unsigned short", "f16", "h", np.float16, "float")
bf16 = _dtype("bf16", 16, "unsigned short", "bf16", "h", ml_dtypes.bfloat16, "float")
tf32 = _dtype("tf32", 32, "unsigned", "tf32", "r", np.float32, "float")
f32 = _dtype("f32", 32, "float", "f32", "f", np.float32, "float")
f64 = _dtype("f64", 64, "double", "f64", "d", np.float64, "float")

# Of fp8 the language has elements; arrays come as bytes (a view as uint8).
e4m3 = _dtype("e4m3", 8, "unsigned char", "e4m3", "", ml_dtypes.float8_e4m3fn, "float")
e5m2 = _dtype("e5m2", 8, "unsigned char", "e5m2", "", ml_dtypes.float8_e5m2, "float")

DTYPES: dict[str, DType] = {t.name: t for t in (pred, u8, s8, u16, s16, u32, s32, u64, s64, f16, bf16, tf32, f32, f64)}


@cache
def foreign_dtype(name: str, size: int) -> DType:
    """The type of an array whose elements, of ``size`` bytes, are none of these: good for a message, and no more."""
    return _dtype(name, 8 * size, "", "", "", f"V{size}", "foreign")


_ALIASES = {
    "float16": f16,
    "half": f16,
    "fp16": f16,
    "bfloat16": bf16,
    "float32": f32,
    "float": f32,
    "fp32": f32,
    "float64": f64,
    "double": f64,
    "int32": s32,
    "int": s32,
    "int64": s64,
    "uint32": u32,
    "uint64": u64,
    "uint16": u16,
    "int16": s16,
    "int8": s8,
    "uint8": u8,
    "bool": pred,
}


def dtype_of(what: Any) -> DType:
    """The :class:`DType` that ``what`` names: a DType, a name, or a dtype or type that NumPy takes.

    Frameworks' dtypes are recognised by the last part of their name (``torch.bfloat16`` → ``bf16``). Raises ValueError
    for a type that is not in the table, and for NumPy's short texts: its "f8" is float64, others mean fp8.
    """
    if isinstance(what, DType):
        return what
    name = what if isinstance(what, str) else getattr(what, "name", None) or str(what)
    name = str(name).rsplit(".", 1)[-1].lower()
    if name in DTYPES:
        return DTYPES[name]
    if name in ("e4m3", "e5m2"):
        return e4m3 if name == "e4m3" else e5m2
    if name in _ALIASES:
        return _ALIASES[name]
    try:
        name = "" if isinstance(what, str) else np.dtype(what).name
    except TypeError:
        name = ""
    if name in _ALIASES:
        return _ALIASES[name]
    raise ValueError(f"{what!r} is not a type warploom knows; it knows {', '.join(DTYPES)}, e4m3, e5m2")
