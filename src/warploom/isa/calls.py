"""What a kernel asks the system for: lines to print, and its end where an assertion fails or ``trap`` is met.

Sources: CUDA C++ Programming Guide, "Formatted Output", "Assertion", "Trap function"; PTX ISA, ``trap``.
"""

from __future__ import annotations

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
    call = "vprintf((const char *)({0}), (void *)({1}))"
    takes = (u64, u64)
    gives = (u32,)
    does = (Printed(0, 1),)

    @property
    def declaration(self) -> str:
        """NVRTC knows ``printf`` alone."""
        return 'extern "C" __device__ int vprintf(const char *, void *);'


@dataclass(frozen=True, slots=True)
class AssertFail(Instruction):
    """``__assertfail``: an assertion does not hold. Operands: message, file, line, function, bytes of a character.

    Strings are generic addresses.
    """

    ptx = "__assertfail"
    call = "__assertfail((const char *)({0}), (const char *)({1}), {2}, (const char *)({3}), {4})"
    takes = (u64, u64, u32, u64, u64)
    does = (Abort((0, 1, 2, 3)),)


@dataclass(frozen=True, slots=True)
class Trap(Instruction):
    """``trap``: the launch ends with an error, for all of its threads."""

    ptx = "trap"
    call = "__trap()"
    does = (Abort(),)
