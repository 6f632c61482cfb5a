"""Tensor maps as arguments, and the boxes that bulk tensor copies move."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.dtypes import f32
from warploom.core.errors import ProblemError
from warploom.emulate.memory.buffers import GlobalBuffer
from warploom.layout.swizzle import Swizzle
from warploom.layout.tensor_map import TensorMapSpec

Array = NDArray[Any]
_ALIGNMENT = 16  # bytes (CUDA driver API, cuTensorMapEncodeTiled)
CHUNK = 16
"""Bytes that stay together under every swizzle."""


@dataclass(eq=False)
class TensorMapArgument:
    """The argument of a ``tensor_map`` parameter: an array whose first element is the tensor's, and what the map says.

    ``spec`` lists dimensions innermost first. An ``(array, spec)`` pair means the same.
    """

    array: Array
    spec: TensorMapSpec
    buffer: GlobalBuffer | None = field(default=None, repr=False)
    reduction: str = ""

    def bound(self, buffer: GlobalBuffer) -> TensorMapArgument:
        """Bind the map to a buffer. Raises ProblemError for a tensor that does not lie within the array."""
        spec = self.spec
        if self.array.dtype.itemsize != spec.dtype.bytes:
            raise ProblemError(
                f"argument {buffer.name} has elements of {self.array.dtype.itemsize} bytes ({self.array.dtype}); "
                f"its tensor map's are {spec.dtype.name}"
            )
        found = TensorMapArgument(self.array, spec, buffer)
        if found.refusal:
            raise ProblemError(f"argument {buffer.name}: {found.refusal}")
        return found

    @property
    def refusal(self) -> str:
        """Why the tensor does not lie within the buffer; '' if it does."""
        spec, buffer = self.spec, self.buffer
        assert buffer is not None
        if buffer.skew % _ALIGNMENT:
            return (
                f"a tensor map's array starts at a multiple of {_ALIGNMENT} bytes, this one "
                f"{buffer.skew % _ALIGNMENT} bytes behind: pass one that does, and move the box"
            )
        if spec.wraps:  # what a box reaches is known when it is copied
            return ""
        last = sum((n - 1) * s for n, s in zip(spec.shape, (spec.dtype.bytes, *spec.strides), strict=True))
        if last + spec.dtype.bytes <= buffer.data.size:
            return ""
        return (
            f"the tensor map reaches byte {last + spec.dtype.bytes} of an array of {buffer.data.size}; correct its "
            "shape or strides"
        )

    # -- global memory -------------------------------------------------------------------------------------------

    @property
    def buffer_name(self) -> str:
        """The array's name in messages."""
        return "" if self.buffer is None else self.buffer.name

    @property
    def adds(self) -> bool:
        """Whether a box that is stored is combined with what is there."""
        return bool(self.reduction)

    def combining(self, reduction: str) -> TensorMapArgument:
        """Return the map for a store that combines ("add", "min", "max"), or for one that replaces ('')."""
        return replace(self, reduction=reduction) if reduction else self

    @property
    def box_bytes(self) -> int:
        """The bytes that a copy moves into shared memory, or out of it."""
        return self.spec.box_bytes

    @property
    def element_bytes(self) -> int:
        """The bytes of one element."""
        return self.spec.dtype.bytes

    @property
    def _strides(self) -> tuple[int, ...]:
        """Bytes between elements, outermost dimension first."""
        return (self.spec.dtype.bytes, *self.spec.strides)[::-1]

    def _span(self, source: tuple[slice, ...]) -> tuple[int, int]:
        """(first, one past the last) byte of a part of the tensor, counted from the array's first element."""
        first = sum(part.start * stride for part, stride in zip(source, self._strides, strict=True))
        first = (first + 2**63) % 2**64 - 2**63
        reach = sum((part.stop - part.start - 1) * n for part, n in zip(source, self._strides, strict=True))
        return first, first + reach + self.spec.dtype.bytes

    def _part(self, source: tuple[slice, ...]) -> Array:
        """A part of the tensor, outermost dimension first, as unsigned integers, over the argument's memory."""
        assert self.buffer is not None
        shape, kind = tuple(part.stop - part.start for part in source), f"u{self.spec.dtype.bytes}"
        return np.ndarray(shape, kind, self.buffer.data, self._span(source)[0], self._strides)  # type: ignore[arg-type]

    def outside(self, at: tuple[int, ...]) -> int | None:
        """The first byte beyond the array that a copy of the box at ``at`` reaches; None if there is none.

        Only a tensor whose addresses wrap around may reach beyond it.
        """
        parts = self.inside(at) if self.spec.wraps else None
        if parts is None:
            return None
        assert self.buffer is not None
        first, end = self._span(parts[0])
        return first if first < 0 else self.buffer.data.size if end > self.buffer.data.size else None

    def inside(self, at: tuple[int, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """Return what exists of the box at ``at`` (innermost first): slices of the tensor and of the box, or None."""
        source: list[slice] = []
        target: list[slice] = []
        for start, extent, length in zip(at[::-1], self.spec.box[::-1], self.spec.shape[::-1], strict=True):
            low, high = max(start, 0), min(start + extent, length)
            if high <= low:
                return None
            source.append(slice(low, high))
            target.append(slice(low - start, high - start))
        return tuple(source), tuple(target)

    def bytes_inside(self, at: tuple[int, ...]) -> int:
        """Bytes of global memory that a copy of the box at ``at`` reads or writes."""
        parts = self.inside(at)
        if parts is None:
            return 0
        return math.prod(part.stop - part.start for part in parts[0]) * self.spec.dtype.bytes

    def load(self, at: tuple[int, ...]) -> Array:
        """The box's bytes in the order of its elements, u8 (chunks, 16); zeros outside the tensor."""
        box = np.zeros(self.spec.box[::-1], f"u{self.spec.dtype.bytes}")
        parts = self.inside(at)
        if parts is not None:
            box[parts[1]] = self._part(parts[0])
        return box.view(np.uint8).reshape(-1, CHUNK)

    def store(self, at: tuple[int, ...], chunks: Array) -> None:
        """Write what exists of the box."""
        parts = self.inside(at)
        if parts is not None:
            box = chunks.reshape(-1).view(f"u{self.spec.dtype.bytes}").reshape(self.spec.box[::-1])
            part = self._part(parts[0])
            part[...] = self._combined(part, box[parts[1]])

    def _combined(self, old: Array, new: Array) -> Array:
        if not self.reduction:
            return new
        combine: Any = {"add": np.add, "min": np.minimum, "max": np.maximum}[self.reduction]
        kind = self.spec.dtype.numpy
        return combine(old.view(kind), new.view(kind)).view(old.dtype)

    def element_offsets(self, at: tuple[int, ...]) -> Array:
        """Byte offsets in the buffer of the box's elements that exist."""
        parts = self.inside(at)
        if parts is None:
            return np.zeros(0, np.int64)
        total = np.full((1,) * len(self.spec.box), self._span(parts[0])[0], np.int64)
        for axis, (part, stride) in enumerate(zip(parts[0], self._strides, strict=True)):
            shape = [1] * len(self._strides)
            shape[axis] = -1
            total = total + (np.arange(part.stop - part.start, dtype=np.int64) * stride).reshape(shape)
        return total.reshape(-1)

    # -- shared memory -------------------------------------------------------------------------------------------

    @cached_property
    def _offsets(self) -> Array:
        inner = self.spec.box[0] * self.spec.dtype.bytes
        pitch = self.spec.swizzle_bytes or inner  # rows narrower than the swizzle still start a whole width apart
        rows = self.spec.box_bytes // inner
        chunks = np.arange(0, inner, CHUNK, dtype=np.int64)
        return (np.arange(rows, dtype=np.int64)[:, None] * pitch + chunks).reshape(-1)

    def chunk_addresses(self, address: int) -> Array:
        """Shared address of each of the box's chunks when it lies at ``address``."""
        return Swizzle.for_row_bytes(self.spec.swizzle_bytes).apply(address + self._offsets)


@dataclass(frozen=True, eq=False)
class ByteRange:
    """``size`` bytes of a buffer from ``first`` on; ``adds``: what is stored is added to the f32 there."""

    buffer: GlobalBuffer
    first: int
    size: int
    adds: bool = False

    @property
    def box_bytes(self) -> int:
        """The bytes that the copy moves."""
        return self.size

    @property
    def element_bytes(self) -> int:
        """The bytes of one element."""
        return f32.bytes

    def element_offsets(self, _at: tuple[int, ...]) -> Array:
        """Byte offsets in the buffer of the elements."""
        return np.arange(self.first, self.first + self.size, f32.bytes)

    def load(self, _at: tuple[int, ...]) -> Array:
        """The bytes, (chunks, 16)."""
        return self.buffer.data[self.first : self.first + self.size].reshape(-1, 16)

    def store(self, _at: tuple[int, ...], chunks: Array) -> None:
        """Write the bytes, or add them."""
        target, source = self.buffer.data[self.first : self.first + self.size], chunks.reshape(-1)
        if self.adds:
            target.view(np.float32)[:] += source.view(np.float32)
        else:
            target[:] = source


@dataclass(frozen=True, eq=False)
class StoredWords:
    """The bytes that a thread stores asynchronously, 4 to 16."""

    words: Array

    @property
    def box_bytes(self) -> int:
        """The bytes that the store moves."""
        return self.words.nbytes

    def load(self, _at: tuple[int, ...]) -> Array:
        """The bytes, (1, bytes)."""
        return self.words.view(np.uint8).reshape(1, -1)
