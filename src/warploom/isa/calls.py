"""What a kernel asks the system for: lines to print, and its end where an assertion fails or ``trap`` is met.

Sources: CUDA C++ Programming Guide, "Formatted Output", "Assertion", "Trap function"; PTX ISA, ``trap``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warploom.core.dtypes import DType, u32, u64
from warploom.isa.base import Instruction
from warploom.isa.effects import Abort, Effect, Printed


@dataclass(frozen=True, slots=True)
class Print(Instruction):
    """``vprintf``: prints a format and its arguments. Operands: generic addresses of both; the latter may be 0."""

    @property
    def mnemonic(self) -> str:
        """The function's name."""
        return "vprintf"

    @property
    def declaration(self) -> str:
        """NVRTC knows ``printf`` alone."""
        return 'extern "C" __device__ int vprintf(const char *, void *);'

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """Where the format is, and where the arguments are, each at its natural alignment."""
        return (u64, u64)

    @property
    def result_types(self) -> tuple[DType, ...]:
        """The count of arguments."""
        return (u32,)

    def effects(self) -> tuple[Effect, ...]:
        """A line of each thread."""
        return (Printed(0, 1),)

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """A call."""
        return f"{results[0]} = vprintf((const char *)({operands[0]}), (void *)({operands[1]}));"


@dataclass(frozen=True, slots=True)
class AssertFail(Instruction):
    """``__assertfail``: an assertion does not hold. Operands: message, file, line, function, bytes of a character."""

    @property
    def mnemonic(self) -> str:
        """The function's name."""
        return "__assertfail"

    @property
    def operand_types(self) -> tuple[DType, ...]:
        """Generic addresses of strings, a number, and a size."""
        return (u64, u64, u32, u64, u64)

    def effects(self) -> tuple[Effect, ...]:
        """The launch fails."""
        return (Abort((0, 1, 2, 3)),)

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """A call of what NVRTC declares."""
        message, file, line, function, size = operands
        strings = (f"(const char *)({x})" for x in (message, file))
        return f"__assertfail({', '.join(strings)}, {line}, (const char *)({function}), {size});"


@dataclass(frozen=True, slots=True)
class Trap(Instruction):
    """``trap``: the launch ends with an error, for all of its threads."""

    @property
    def mnemonic(self) -> str:
        """As in PTX."""
        return "trap"

    def effects(self) -> tuple[Effect, ...]:
        """The launch fails."""
        return (Abort(),)

    def cuda(self, results: Sequence[str], operands: Sequence[str]) -> str:
        """A call of the built-in function."""
        return "__trap();"
