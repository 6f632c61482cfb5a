"""XOR swizzles of byte offsets in shared memory, in CUTLASS's notation ``Swizzle<B, M, S>``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from warploom.core.errors import LayoutError
from warploom.layout.linear import LinearMap, log2_exact

BANK_CYCLE_BYTES = 128
"""Bytes after which shared-memory banks repeat: 32 banks of 4 bytes."""


@dataclass(frozen=True, slots=True)
class Swizzle:
    """``offset ^ (((offset >> (base + shift)) & (2^bits - 1)) << base)`` on byte offsets.

    ``bits`` source bits that begin at bit ``base + shift`` are XORed onto the bits that begin at ``base``; with base 4
    whole 16-byte chunks move. ``<3,4,3>`` takes bits 9–7 (the row, for 128-byte rows) onto bits 6–4. The shift must be
    at least ``bits``, which makes the swizzle its own inverse. The notation is CUTLASS's, applied to bytes.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if min(self.bits, self.base, self.shift) < 0:
            raise LayoutError(f"the swizzle {self} has a negative parameter")
        if self.shift < self.bits:
            raise LayoutError(f"the swizzle {self} overlaps its own source bits; its shift must be at least its bits")

    @classmethod
    def for_row_bytes(cls, row_bytes: int) -> Swizzle:
        """The swizzle with which eight consecutive rows of ``row_bytes`` are read 16 bytes each without conflict.

        Rows shorter than the 128 bytes of a bank cycle share one, so their source bits begin at bit 7 and fewer bits
        need to move: 64 → <2,4,3>, 128 → <3,4,3>, 256 → <3,4,4>. ``row_bytes`` is a power of two; 0 is no swizzle.
        """
        if not row_bytes:
            return NO_SWIZZLE
        width = log2_exact(row_bytes, "the row in bytes")
        if width <= 4:
            return NO_SWIZZLE
        cycle = BANK_CYCLE_BYTES.bit_length() - 1
        return cls(min(3, width - 4), 4, max(cycle, width) - 4)

    @property
    def source_mask(self) -> int:
        """The bits of the offset that are read."""
        return ((1 << self.bits) - 1) << (self.base + self.shift)

    @property
    def row_bytes(self) -> int | None:
        """The width of 128, 64 or 32 bytes over which the hardware swizzles so; 0 for none, None for other swizzles."""
        return next((n for n in (0, 32, 64, 128) if self == Swizzle.for_row_bytes(n)), None)

    @property
    def period(self) -> int:
        """Bytes after which the pattern repeats; a base aligned to it keeps the pattern on absolute addresses."""
        return 1 << (self.base + self.shift + self.bits) if self.bits else 1

    def apply(self, offset: Any) -> Any:
        """The swizzled byte offset: an integer, array or traced value, like ``offset``."""
        return offset ^ ((offset & self.source_mask) >> self.shift) if self.bits else offset

    def map(self, n_bits: int) -> LinearMap:
        """The swizzle as a map ``byte → byte`` of offsets below ``2^n_bits``."""
        return LinearMap({"byte": [(self.apply(1 << bit),) for bit in range(n_bits)]}, {"byte": 1 << n_bits})

    def __str__(self) -> str:
        return f"<{self.bits},{self.base},{self.shift}>"


NO_SWIZZLE = Swizzle(0, 4, 3)
"""Offsets as they are."""
