"""What a TMA tensor map describes: a strided tensor in global memory, and the box of it that one copy moves.

Source: CUDA driver API, ``cuTensorMapEncodeTiled``; PTX ISA, "Tensors" and ``cp.async.bulk.tensor``.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.dtypes import DType
from warploom.core.errors import LayoutError

_LARGEST_BOX = 256
RAGGED_ROWS = 1 << 30
"""Rows that a ragged tensor has by its tensor map, and how often its address wraps around (:attr:`wraps`)."""
_ADDRESSES = 1 << 64


@dataclass(frozen=True)
class TensorMapSpec:
    """Dimensions innermost first: ``shape`` and ``box`` in elements, ``strides`` in bytes of dimensions 1 and up.

    ``swizzle_bytes`` is 0, 32, 64 or 128: the width of the box's innermost dimension that is swizzled in shared
    memory. Elements outside the tensor read as zero and are not written. Addresses wrap
    around at 2^64, so that strides can lead back. Raises LayoutError for what the hardware does not take.
    """

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 0

    def __post_init__(self) -> None:
        rank = len(self.shape)
        if not 1 <= rank <= 5 or len(self.box) != rank or len(self.strides) != rank - 1:
            raise LayoutError(
                f"a tensor map has 1 to 5 dimensions, one stride less: not shape={self.shape}, "
                f"box={self.box}, strides={self.strides}"
            )
        if any(not 1 <= b <= _LARGEST_BOX for b in self.box):
            raise LayoutError(f"a box is 1 to {_LARGEST_BOX} elements along each dimension, not box={self.box}")
        if any(s % 16 for s in self.strides):
            raise LayoutError(
                f"strides of a tensor map are multiples of 16 bytes, not strides={self.strides}: pad the rows"
            )
        if self.swizzle_bytes not in (0, 32, 64, 128):
            raise LayoutError(f"a box is swizzled over 0, 32, 64 or 128 bytes, not swizzle_bytes={self.swizzle_bytes}")
        inner = self.box[0] * self.dtype.bytes
        if inner % 16:
            raise LayoutError(
                f"box={self.box} has an inner row of {inner} bytes ({self.dtype}), which must be a multiple of 16: "
                f"make box[0] a multiple of {16 // self.dtype.bytes}"
            )
        if self.swizzle_bytes and inner > self.swizzle_bytes:
            wider = f"swizzle_bytes={inner}, or " if inner in (64, 128) else ""
            raise LayoutError(
                f"box={self.box} has an inner row of {inner} bytes ({self.dtype}), wider than swizzle_bytes="
                f"{self.swizzle_bytes}: write {wider}box[0]={self.swizzle_bytes // self.dtype.bytes} and copy a box "
                "for each panel of so many columns"
            )

    @classmethod
    def ragged(
        cls, dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle_bytes: int
    ) -> TensorMapSpec:
        """An array whose outermost rows are those of sequences, one behind the other, for boxes that see one sequence.

        Rows beyond its end read as zero and are not written. The tensor has two dimensions more: the box at row r of
        the sequence of so many rows from ``begin`` on lies at (…, RAGGED_ROWS - rows + r, RAGGED_ROWS, begin + rows).
        The bound of the first of these is the sequence's end; the other two lead from there to its place, by way of
        2^64. (A map that begins as far before the array instead is refused by the TMA where no memory lies there.)
        """
        pitch = strides[-1]
        back = _ADDRESSES // RAGGED_ROWS - pitch
        return cls(
            dtype,
            (*shape[:-1], RAGGED_ROWS, RAGGED_ROWS + 1, shape[-1] + 1),
            (*strides, back, pitch),
            (*box, 1, 1),
            swizzle_bytes,
        )

    @property
    def wraps(self) -> bool:
        """Whether some coordinates within the shape lead around: which bytes a box reaches, only its place says."""
        return sum((n - 1) * s for n, s in zip(self.shape[1:], self.strides, strict=True)) >= _ADDRESSES // 2

    @property
    def box_bytes(self) -> int:
        """Bytes of one box in shared memory: what an mbarrier has to expect."""
        total = self.dtype.bytes
        for extent in self.box:
            total *= extent
        return total
