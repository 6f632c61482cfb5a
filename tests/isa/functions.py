"""The functions of one f32 that the language has words for, by the names of their operations."""

from __future__ import annotations

from warploom.core.dtypes import f32
from warploom.isa.instruction import Instruction, named
from warploom.isa.lanewise import unary

_NAMES = {
    **{op: f"{op}.approx.ftz.f32" for op in ("ex2", "lg2", "rcp", "rsqrt")},
    "sqrt": "sqrt.rn.f32",
    "tanh": "tanh.approx.f32",
    "tf32": "cvt.rna.tf32.f32",
}


def function(op: str) -> Instruction:
    """``ex2 lg2 rcp rsqrt sqrt tanh tf32``, and the operators ``neg abs``."""
    return named(_NAMES[op]) if op in _NAMES else unary(op, f32)
