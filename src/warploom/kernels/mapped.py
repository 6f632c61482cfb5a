"""Arrays as the TMA sees them, and the panels of shared memory that it and ``wgmma`` share. Imports no language."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from warploom.core.dtypes import DType

if TYPE_CHECKING:
    from warploom.layout.tensor_map import TensorMapSpec

PANEL_COLS = 64
"""16-bit elements of a panel's row of 128 bytes: the widest that the TMA and ``wgmma`` swizzle."""
PANEL_BYTES = 2 * PANEL_COLS


@dataclass(frozen=True)
class MappedArray:
    """An array as a tensor map is to see it, outermost dimension first: shape, strides and box in elements.

    The innermost stride is 1; rows of the box are 128, 64 or 32 bytes, swizzled over their width.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    @property
    def spec(self) -> TensorMapSpec:
        """The same innermost first, checked. Raises LayoutError for what the hardware does not take."""
        from warploom.layout.tensor_map import TensorMapSpec

        row_bytes = tuple(self.dtype.bytes * stride for stride in reversed(self.strides[:-1]))
        return TensorMapSpec(self.dtype, self.shape[::-1], row_bytes, self.box[::-1], self.box[-1] * self.dtype.bytes)
