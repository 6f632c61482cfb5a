"""Read a DLPack capsule: pointer, shape, strides, type and device of any array that speaks the protocol.

NumPy's own ``from_dlpack`` takes neither GPU arrays nor bfloat16, so the structure is read directly. Source: DLPack 0.x
``DLManagedTensor`` and 1.x ``DLManagedTensorVersioned`` (dlpack.h).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from warploom.core.dtypes import DTYPES, DType, foreign_dtype
from warploom.core.errors import ProblemError

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13  # DLDeviceType
_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6  # DLDataTypeCode
_FOREIGN = {_INT: "int", _UINT: "uint", _FLOAT: "float", _COMPLEX: "complex"}
_NAMES = {
    _INT: ("s8", "s16", "s32", "s64"),
    _UINT: ("u8", "u16", "u32", "u64"),
    _FLOAT: ("f16", "f32", "f64"),
    _BFLOAT: ("bf16",),
}
_TYPES = {(code, DTYPES[name].bits): DTYPES[name] for code, names in _NAMES.items() for name in names}
_TYPES[_BOOL, 8] = DTYPES["pred"]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


Read = tuple[int, tuple[int, ...], tuple[int, ...], DType, tuple[str, int], bool, Any]
"""(pointer, shape, strides in elements, type, device, whether it is read-only, capsule); a device is ("cpu", 0) or
("cuda", index)."""


_api: Any = ctypes.pythonapi
_api.PyCapsule_IsValid.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_IsValid.restype = ctypes.c_int
_api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Element strides of a contiguous array of ``shape``, last dimension fastest."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def read(array: Any, current_stream: Callable[[int], int]) -> Read:
    """What the capsule of ``array`` says, and the capsule. Keep it, or the array, alive while the pointer is used.

    For a GPU array the producer is asked to make its data ready on ``current_stream(device index)``. The capsule is not
    consumed, so whoever drops it last releases the producer's memory. Raises ProblemError for a device that warploom
    does not know.
    """
    try:
        return _read(array, current_stream)
    except ProblemError:
        raise
    except Exception as error:  # whatever the producer raises: of deleted arrays, types without an equivalent …
        raise ProblemError(f"{type(array).__name__} cannot be read through DLPack: {error}") from error


def _read(array: Any, current_stream: Callable[[int], int]) -> Read:
    device_type, device_id = (int(part) for part in array.__dlpack_device__())
    if device_type in (CUDA, CUDA_MANAGED):
        # The protocol's numbers: 1 is the legacy default stream, 0 is not allowed.
        capsule = _export(array, stream=current_stream(device_id) or 1)
    elif device_type in (CPU, CUDA_HOST):
        capsule = _export(array)
    else:
        raise ProblemError(
            f"{type(array).__name__} lies on DLPack device type {device_type}; warploom reads CPU and CUDA"
        )
    tensor, readonly = _tensor_of(capsule)
    dtype = _TYPES.get((tensor.code, tensor.bits)) if tensor.lanes == 1 else None
    if dtype is None:
        name = f"{_FOREIGN.get(tensor.code, f'DLPack type {tensor.code} of bits ')}{tensor.bits}"
        lanes = "" if tensor.lanes == 1 else f"x{tensor.lanes}"
        dtype = foreign_dtype(name + lanes, max(1, tensor.bits * tensor.lanes // 8))
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else row_major_strides(shape)
    device = ("cuda", device_id) if device_type in (CUDA, CUDA_MANAGED) else ("cpu", 0)
    return (tensor.data or 0) + tensor.byte_offset, shape, strides, dtype, device, readonly, capsule


def _export(array: Any, **stream: int) -> Any:
    try:
        return array.__dlpack__(max_version=(1, 0), **stream)
    except TypeError:  # a producer from before DLPack 1.0
        return array.__dlpack__(**stream)


def _tensor_of(capsule: Any) -> tuple[_Tensor, bool]:
    if _api.PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        address = _api.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        versioned = _Versioned.from_address(address)
        if versioned.major != 1:
            raise ProblemError(
                f"the array speaks DLPack {versioned.major}.{versioned.minor}; warploom reads 0.x and 1.x"
            )
        return versioned.tensor, bool(versioned.flags & _READ_ONLY)
    if _api.PyCapsule_IsValid(capsule, b"dltensor"):
        return _Tensor.from_address(_api.PyCapsule_GetPointer(capsule, b"dltensor")), False
    raise ProblemError("__dlpack__ returned no DLPack capsule that can be read")
