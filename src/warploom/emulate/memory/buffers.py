"""NumPy arrays as global memory at made-up addresses, zero-copy."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import ProblemError
from warploom.core.uninitialised import unwritten
from warploom.isa.memory import MOST_BYTES

Array = NDArray[Any]

ADDRESS_BITS = 40
"""Buffer i lives at (i + 1) · 2^40: arithmetic on pointers can never wander from one array into another unnoticed."""

_ALIGNMENT = MOST_BYTES  # of arrays that own their memory, in this process
_ALLOCATION = 256  # bytes that what a GPU allocates is aligned to


@dataclass(eq=False)
class GlobalBuffer:
    """The memory of one pointer parameter: its bytes, writable in place, and the place of its first one.

    ``skew`` is the offset from an aligned allocation (a view that starts in the middle of an array is aligned no better
    than on a GPU); ``real`` the process's address, by which overlapping arguments are recognised.
    """

    name: str
    data: NDArray[np.uint8]
    address: int
    skew: int
    real: int
    writable: bool
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    between: NDArray[np.bool_] | None = field(default=None, repr=False)
    """Which bytes lie between the elements, of a view with gaps."""
    unwritten: NDArray[np.bool_] | None = field(default=None, repr=False)
    """Which bytes nobody has written, of an array that is marked so."""

    @property
    def start(self) -> int:
        """The address that the kernel gets for the array's first byte."""
        return self.address + self.skew

    def element(self, byte: int) -> str:
        """The element that a byte belongs to, ``x[3, 17]``; beyond the array as its outermost dimension goes on."""
        if byte < 0 or not self.shape:
            return self.name
        index = [0] * len(self.shape)
        for axis in sorted(range(len(index)), key=lambda axis: -self.strides[axis]):
            if self.strides[axis] and self.shape[axis] > 1:
                index[axis], byte = divmod(byte, self.strides[axis])
        return f"{self.name}{index}"

    def in_gaps(self, offsets: Array, size: Array | int) -> Array:
        """The positions of those accesses, of ``size`` bytes each from ``offsets`` on, that reach between elements."""
        if self.between is None or not offsets.size:
            return np.zeros(0, np.int64)
        reach = np.arange(np.max(size))
        reached = np.minimum(offsets[:, None] + reach, self.between.size - 1)
        return np.nonzero((self.between[reached] & (reach < np.reshape(size, (-1, 1)))).any(axis=1))[0]


def address_of(array: Array) -> int:
    """Where an array begins in this process."""
    return int(array.__array_interface__["data"][0])


def root_address(array: Array) -> int:
    """The address of the array that owns the memory."""
    base: Any = array
    while isinstance(base.base, np.ndarray):
        base = base.base
    return address_of(base)


def overlapping(buffers: Iterable[GlobalBuffer]) -> list[list[GlobalBuffer]]:
    """Return the buffers that have elements, in groups that share no byte with each other, by address."""
    groups: list[list[GlobalBuffer]] = []
    end = 0
    for buffer in sorted(buffers, key=lambda buffer: buffer.real):
        if buffer.data.size:
            groups += [[]] if not groups or buffer.real >= end else []
            groups[-1].append(buffer)
            end = max(end, buffer.real + buffer.data.size)
    return groups


def settle(buffers: Iterable[GlobalBuffer]) -> None:
    """Let arrays that share memory be as far apart as they are here, also where each seems to own its memory."""
    for first, *others in overlapping(buffers):
        for buffer in others:
            buffer.skew = (first.skew + buffer.real - first.real) % _ALLOCATION


def align(buffers: Iterable[GlobalBuffer]) -> list[tuple[NDArray[np.uint8], GlobalBuffer]]:
    """Give memory that begins at an odd address in this process a copy at an even one, which all that share it share.

    Returns what was copied, and the buffer that has the copy now.
    """
    copies: list[tuple[NDArray[np.uint8], GlobalBuffer]] = []
    for group in overlapping(buffers):
        start, skew = group[0].real, group[0].skew
        if (start - skew) % _ALIGNMENT == 0:
            continue
        size = max(buffer.real + buffer.data.size for buffer in group) - start
        room = np.empty(size + _ALIGNMENT, np.uint8)
        room = room[(skew - address_of(room)) % _ALIGNMENT :]
        for buffer in group:
            given, first = buffer.data, buffer.real - start
            buffer.data = room[first : first + given.size]
            buffer.data[:], buffer.real = given, address_of(buffer.data)
            copies.append((given, buffer))
    return copies


def memory_around(buffers: Sequence[GlobalBuffer]) -> tuple[int, NDArray[np.uint8]]:
    """The memory of this process from the first of some buffers to the last one, and its address, a multiple of 16.

    So buffers are accessed in place, however far they are apart; what lies between them is for nobody to touch.
    """
    if not buffers:
        return 0, np.zeros(_ALIGNMENT, np.uint8)  # where lanes out of bounds read
    first = min(buffer.real for buffer in buffers) // _ALIGNMENT * _ALIGNMENT
    end = max(buffer.real + buffer.data.size for buffer in buffers)
    size = -(-(end - first) // _ALIGNMENT) * _ALIGNMENT
    return first, np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(first))


def buffer_of(name: str, array: Array, index: int) -> GlobalBuffer:
    """A byte view of everything between an array's first and last element. Raises ProblemError for negative strides."""
    if array.size and any(s < 0 for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
        raise ProblemError(f"argument {name} has a negative stride; pass a view that runs forward")
    real = address_of(array)
    size = array.itemsize if array.size else 0
    size += sum((n - 1) * s for s, n in zip(array.strides, array.shape, strict=True)) if array.size else 0
    writable = bool(array.flags.writeable)
    if array.size:
        flat = np.lib.stride_tricks.as_strided(array, (size // array.itemsize,), (array.itemsize,), writeable=writable)
        data = flat.view(np.uint8)
    else:
        data = np.zeros(0, np.uint8)
    skew = (real - root_address(array)) % _ALLOCATION
    shape, strides, between = array.shape, array.strides, None
    if not array.flags.c_contiguous and data.size:
        between = np.ones(data.size, np.bool_)
        np.lib.stride_tricks.as_strided(between, (*shape, array.itemsize), (*strides, 1))[...] = False
        between = between if between.any() else None  # transposed arrays have no gaps
    marks = unwritten(data, array.itemsize)
    return GlobalBuffer(name, data, (index + 1) << ADDRESS_BITS, skew, real, writable, shape, strides, between, marks)
