"""Consecutive bytes of global memory as the source or destination of a bulk copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.dtypes import f32
from warploom.emulate.buffers import GlobalBuffer

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Span:
    """``size`` bytes of a buffer from ``first`` on; ``adds``: what is stored is added to the f32 there."""

    buffer: GlobalBuffer
    first: int
    size: int
    adds: bool = False

    @property
    def box_bytes(self) -> int:
        """What a copy moves."""
        return self.size

    @property
    def element_bytes(self) -> int:
        """Of what one access reaches."""
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
class Words:
    """What a thread stores asynchronously: 16 bytes."""

    words: Array

    @property
    def box_bytes(self) -> int:
        """What the store moves."""
        return self.words.nbytes

    def load(self, _at: tuple[int, ...]) -> Array:
        """The bytes, (1, 16)."""
        return self.words.view(np.uint8).reshape(1, -1)
