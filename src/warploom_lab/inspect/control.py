"""What ptxas tells the scheduler: the control bits of an instruction, and who an instruction waits for.

Since compute capability 7.0 an instruction is 128 bits, of which 105 to 121 are for the scheduler: how many cycles the
warp waits before its next instruction, which of six counters ("scoreboards") the instruction holds until its result is
written or its operands are read, and which counters must be free before it issues. NVIDIA does not document them; the
places are those of Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking" (2018), section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_NONE = 7
"""The number of a counter that means: no counter."""


@dataclass(frozen=True, slots=True)
class ControlBits:
    """The scheduler's bits of one instruction.

    ``stall`` is in cycles. ``written`` and ``read`` are the counters (0 … 5) held until the result is there and until
    the operands have been read, or None; ``waits`` are the counters that must be free before the instruction issues.
    """

    stall: int
    written: int | None
    read: int | None
    waits: tuple[int, ...]

    @property
    def holds(self) -> tuple[int, ...]:
        """The counters the instruction holds."""
        return tuple(number for number in (self.written, self.read) if number is not None)


def decode_control(upper: int) -> ControlBits:
    """The control bits of an instruction whose upper 64 bits are ``upper``, as ``nvdisasm -hex`` prints them second."""
    bits = upper >> 41
    written, read, waits = bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63
    return ControlBits(
        bits & 15, None if written == _NONE else written, None if read == _NONE else read, tuple(_numbers(waits))
    )


def _numbers(mask: int) -> Iterator[int]:
    return (number for number in range(6) if mask >> number & 1)
