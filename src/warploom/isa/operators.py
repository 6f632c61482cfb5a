"""The language's arithmetic by its own names: which form of which type an operator is.

``binary("lt", u32)`` is ``setp.lt.u32``, ``a / b`` of floats ``div.rn``, ``!=`` of floats ``neu``. Programs and C++
have operators that PTX lacks: shifts that are undefined beyond the width, and comparisons of predicates.
"""

from __future__ import annotations

from functools import lru_cache

from warploom.core.dtypes import DType, f32, pred, u32
from warploom.core.errors import VerifyError
from warploom.isa.base import REGISTERS, takes
from warploom.isa.form import Formed, RefusedError, named

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_BINARY = {
    **{op: (f"{op}.{{t}}", f"{op}.{{t}}") for op in ("add", "sub", "min", "max")},
    **{op: (f"{op}.b{{n}}", "") for op in ("and", "or", "xor")},
    **{op: (f"setp.{op}.{{t}}", f"setp.{op}.{{t}}") for op in COMPARISONS},
    **{op: (f"{op}.{{t}}", "") for op in ("rem", "shl", "shr")},
    "mul": ("mul.lo.{t}", "mul.{t}"),
    "div": ("div.{t}", "div.rn.{t}"),
    "ne": ("setp.ne.{t}", "setp.neu.{t}"),
}
"""Operator → PTX's name of it for integers of a type ``{t}`` of ``{n}`` bits, and for floats; '' for none."""
_UNARY = {
    "neg": ("neg.s{n}", "neg.{t}"),
    "not": ("not.b{n}", ""),
    "abs": ("abs.{t}", "abs.{t}"),
    **{op: (f"{op}.b{{n}}", "") for op in ("popc", "clz", "brev")},
}
_OF_F32 = {
    **{op: f"{op}.approx.ftz.f32" for op in ("ex2", "lg2", "rcp", "rsqrt")},
    "sqrt": "sqrt.rn.f32",
    "tanh": "tanh.approx.f32",
    "tf32": "cvt.rna.tf32.f32",
}
_NOT_PTX = ("shl", "shr")


@lru_cache(maxsize=1 << 10)
def _found(op: str, names: tuple[str, str], dtype: DType) -> Formed | None:
    """The instruction of an operator for a type, None where there is none."""
    if dtype is pred:
        name, ptx = f"{op}.pred", op not in ("eq", "ne")
    else:
        name, ptx = names[dtype.is_float].format(t=dtype.name, n=dtype.bits), op not in _NOT_PTX
    try:
        return named(name, dtype if dtype.is_integer else None, ptx=ptx) if name else None
    except RefusedError:
        return None


def _made(op: str, names: tuple[str, str], dtype: DType) -> Formed:
    found = _found(op, names, dtype)
    if found is None:
        allowed = ", ".join(t.name for t in REGISTERS if _found(op, names, t) is not None)
        raise VerifyError(f"{op} takes {allowed}, not {dtype}: convert the operand first")
    return found


def binary(op: str, dtype: DType) -> Formed:
    """``add sub mul div rem and or xor min max shl shr`` and the comparisons ``lt le gt ge eq ne`` of one type.

    The count of a shift is u32. Raises VerifyError for a type that the operator does not take.
    """
    return _made(op, _BINARY[op], dtype)


def unary(op: str, dtype: DType) -> Formed:
    """``neg not abs popc clz brev``; of f32 ``sqrt ex2 lg2 rcp rsqrt tanh`` and rounding to ``tf32``, a u32.

    ``popc`` and ``clz`` give a u32, ``brev`` an unsigned integer. ``ex2 lg2 rcp rsqrt`` are the ``.approx.ftz`` forms:
    the hardware's error is at most 2 ulp (PTX ISA). Raises VerifyError for a type that the operator does not take.
    """
    if op in _OF_F32:
        takes(op, dtype, (f32,))
        return named(_OF_F32[op])
    return _made(op, _UNARY[op], dtype)


def fma(dtype: DType = f32) -> Formed:
    """a·b + c of f32 or f64, rounded once."""
    return _made("fma", ("", "fma.rn.{t}"), dtype)


def multiply_wide(dtype: DType = u32) -> Formed:
    """The product of two integers, in twice their width."""
    return _made("mul.wide", ("mul.wide.{t}", ""), dtype)


def select(dtype: DType) -> Formed:
    """The second operand where the predicate, the first one, holds, else the third."""
    if dtype is pred:
        raise VerifyError("selp takes integers and floats, not pred")
    return named(f"selp.b{dtype.bits}", dtype)


def pair_arithmetic(op: str, half: DType) -> Formed:
    """Packed 16-bit arithmetic, ``fma add mul min max`` on f16x2 or bf16x2 (bf16 has add and mul from sm_90 on)."""
    return named(f"{op}{'' if op in ('min', 'max') else '.rn'}.{half}x2")
