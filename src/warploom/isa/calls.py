"""What a kernel asks the system for: lines to print, and its end where an assertion fails or ``trap`` is met.

Sources: CUDA C++ Programming Guide, "Formatted Output", "Assertion", "Trap function"; PTX ISA, ``trap``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warploom.core.dtypes import u32, u64
from warploom.isa.base import Instruction
from warploom.isa.effects import Abort, Printed


@dataclass(frozen=True, slots=True)
class Print(Instruction):
    """``vprintf``: prints a format and its arguments. Operands: generic addresses of both; the latter may be 0.

    The arguments lie at their natural alignment; the result is their count.
    """

    ptx = "vprintf"
    takes = (u64, u64)
    gives = (u32,)
    does = (Printed(0, 1),)

    @property
    def declaration(self) -> str:
        """NVRTC knows ``printf`` alone."""
        return 'extern "C" __device__ int vprintf(const char *, void *);'

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """A call."""
        return f"{results[0]} = vprintf((const char *)({operands[0]}), (void *)({operands[1]}));"


@dataclass(frozen=True, slots=True)
class AssertFail(Instruction):
    """``__assertfail``: an assertion does not hold. Operands: message, file, line, function, bytes of a character.

    Strings are generic addresses.
    """

    ptx = "__assertfail"
    takes = (u64, u64, u32, u64, u64)
    does = (Abort((0, 1, 2, 3)),)

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """A call of what NVRTC declares."""
        message, file, line, function, size = operands
        strings = (f"(const char *)({x})" for x in (message, file))
        return f"__assertfail({', '.join(strings)}, {line}, (const char *)({function}), {size});"


@dataclass(frozen=True, slots=True)
class Trap(Instruction):
    """``trap``: the launch ends with an error, for all of its threads."""

    ptx = "trap"
    does = (Abort(),)

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """A call of the built-in function."""
        return "__trap();"
