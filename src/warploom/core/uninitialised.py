"""Arrays that nobody has written: the emulator finds what depends on them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from warploom.core.dtypes import dtype_of

_BYTE = 0xFD
_sizes: dict[int, int] = {}
"""Address and bytes of each array that :func:`uninitialised` has made and that still lives."""


def uninitialised(shape: int | Sequence[int], dtype: Any = "f32") -> np.ndarray[Any, Any]:
    """An array for the checks of kernels, whose elements count as never written until a kernel, or Python, sets them.

    What a kernel reads of it before and then uses (stores, branches on, takes for an address) is a finding. ``dtype``
    is a name such as ``"bf16"``, or NumPy's. Views of the array, torch's too, are known. Its bytes hold 0xFD.
    """
    kind = dtype_of(dtype if isinstance(dtype, str) else np.dtype(dtype).name).numpy
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    memory = np.full(int(np.prod(sizes)) * kind.itemsize, _BYTE, np.uint8)
    address = int(memory.__array_interface__["data"][0])
    _sizes[address] = memory.nbytes
    weakref.finalize(memory, _sizes.pop, address, None)
    return memory.view(kind).reshape(sizes)


def unwritten(data: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any] | None:
    """The bytes (bool) of memory, with elements of so many bytes, that nobody has written; None if nobody asked so."""
    address = int(data.__array_interface__["data"][0])
    if not any(start <= address and address + data.nbytes <= start + bytes_ for start, bytes_ in _sizes.items()):
        return None
    return np.repeat((data.reshape(-1, size) == _BYTE).all(axis=1), size)
