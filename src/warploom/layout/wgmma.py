"""Shared-memory operands of ``wgmma``: matrix descriptors and where each element lies.

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions": "Shared Memory Matrix Layout", "Matrix Descriptor
Format". Swizzling acts on the bits of the absolute shared address, so a tile starts at a multiple of the swizzle's
period (1024 bytes for 128-byte rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import LayoutError
from warploom.layout.swizzle import Swizzle

_MODES = {128: 1, 64: 2, 32: 3, 0: 0}
_CORE_ROWS = 8
_CORE_BYTES = 16


@dataclass(frozen=True)
class MatrixDescriptor:
    """The constant part of a descriptor, all in bytes.

    ``row_bytes`` is the width of a swizzled row (128, 64, 32, or 0 for unswizzled 8×16-byte core matrices), ``stride``
    the distance between groups of 8 rows, ``leading`` the distance between neighbouring row-wide panels (operands
    whose contiguous dimension is not K) or, unswizzled, between core matrices along the contiguous dimension.
    """

    row_bytes: int
    stride: int
    leading: int = 0

    def __post_init__(self) -> None:
        if self.row_bytes not in _MODES:
            raise LayoutError(f"a wgmma operand has rows of 128, 64, 32 (swizzled) or 0 bytes, not {self.row_bytes}")
        for what, value in (("stride", self.stride), ("leading", self.leading)):
            if value % 16 or not 0 <= value >> 4 < 1 << 14:
                raise LayoutError(f"a descriptor's {what} offset is a multiple of 16 below 262144 bytes, not {value}")

    @property
    def swizzle(self) -> Swizzle:
        """The swizzle the hardware applies."""
        return Swizzle.for_row_bytes(self.row_bytes)

    @property
    def high_word(self) -> int:
        """Bits 32 … 63: stride offset and swizzle mode."""
        return (self.stride >> 4) | _MODES[self.row_bytes] << 30

    def low_word(self, address: Any) -> Any:
        """Bits 0 … 31 for a shared address (an int or a traced u32): start and leading offset, in 16-byte units."""
        start = (address & 0x3FFFF) >> 4
        return start + ((self.leading >> 4) << 16)


def decode(descriptor: int) -> tuple[int, MatrixDescriptor]:
    """(start address, constant part) of a 64-bit descriptor. Raises LayoutError for a mode that does not exist."""
    row_bytes = {mode: size for size, mode in _MODES.items()}[descriptor >> 62 & 3]
    start, leading, stride = ((descriptor >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
    return start, MatrixDescriptor(row_bytes, stride, leading)


def element_addresses(
    descriptor: int, rows: int, k: int, *, k_contiguous: bool, element_bytes: int = 2
) -> NDArray[np.int64]:
    """Shared byte address of each element of an operand, int64 [rows, k]; rows are M for A and N for B."""
    start, shape = decode(descriptor)
    row, depth = np.arange(rows, dtype=np.int64)[:, None], np.arange(k, dtype=np.int64)[None, :]
    along, across = (depth, row) if k_contiguous else (row, depth)  # along: the contiguous dimension
    offset = _linear_offset(shape, along * element_bytes, across, k_contiguous)
    return shape.swizzle.apply(start + offset)


def _linear_offset(shape: MatrixDescriptor, byte: Any, line: Any, k_contiguous: bool) -> Any:
    """Offset before swizzling of byte ``byte`` along the contiguous dimension in line ``line`` across it."""
    group, within = line // _CORE_ROWS, line % _CORE_ROWS
    if shape.row_bytes == 0:
        return group * shape.stride + within * _CORE_BYTES + byte // _CORE_BYTES * shape.leading + byte % _CORE_BYTES
    if k_contiguous:  # the K steps of one row lie within the swizzled row; the start address moves along it
        return group * shape.stride + within * shape.row_bytes + byte
    panel = byte // shape.row_bytes
    return panel * shape.leading + group * shape.stride + within * shape.row_bytes + byte % shape.row_bytes
