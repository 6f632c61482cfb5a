"""What a TMA tensor map describes: a strided tensor in global memory, and the box of it that one copy moves.

Source: CUDA driver API, ``cuTensorMapEncodeTiled``; PTX ISA, "Tensors" and ``cp.async.bulk.tensor``.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.dtypes import DType
from warploom.core.errors import LayoutError
from warploom.layout.swizzle import NO_SWIZZLE, Swizzle

_LARGEST_BOX = 256


@dataclass(frozen=True)
class TensorMapSpec:
    """Dimensions innermost first: ``shape`` and ``box`` in elements, ``strides`` in bytes of dimensions 1 and up.

    ``swizzle_bytes`` is 0, 32, 64 or 128: the width of the box's innermost dimension that is swizzled in shared
    memory. Elements outside the tensor read as zero and are not written. ``origin``: bytes from the array's first
    element to the tensor's, which may lie outside of the array where no box begins there. Raises LayoutError for what
    the hardware does not take.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 0
    origin: int = 0

    def __post_init__(self) -> None:
        rank = len(self.shape)
        if not 1 <= rank <= 5 or len(self.box) != rank or len(self.strides) != rank - 1:
            raise LayoutError(f"a tensor map has 1 to 5 dimensions, one stride less; got {self}")
        if any(not 1 <= b <= _LARGEST_BOX for b in self.box):
            raise LayoutError(f"a box is 1 to {_LARGEST_BOX} elements along each dimension, not {self.box}")
        if self.origin % 16:
            raise LayoutError(f"a tensor begins at a multiple of 16 bytes, not {self.origin} from its array")
        if any(s % 16 for s in self.strides):
            raise LayoutError(f"the strides of a tensor map are multiples of 16 bytes, not {self.strides}")
        if self.swizzle_bytes not in (0, 32, 64, 128):
            raise LayoutError(f"a box is swizzled over 0, 32, 64 or 128 bytes, not {self.swizzle_bytes}")
        inner = self.box[0] * self.dtype.bytes
        if inner % 16 or (self.swizzle_bytes and inner > self.swizzle_bytes):
            raise LayoutError(f"a box's inner row is a multiple of 16 bytes within the swizzle's width, not {inner}")

    @property
    def box_bytes(self) -> int:
        """Bytes of one box in shared memory: what an mbarrier has to expect."""
        total = self.dtype.bytes
        for extent in self.box:
            total *= extent
        return total

    @property
    def swizzle(self) -> Swizzle:
        """The swizzle of shared addresses."""
        return Swizzle.for_row_bytes(self.swizzle_bytes) if self.swizzle_bytes else NO_SWIZZLE
