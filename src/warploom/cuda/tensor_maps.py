"""TMA descriptors of GPU arrays, as the driver makes them."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from warploom.core.errors import ConfigError
from warploom.cuda.device import require_driver
from warploom.cuda.launch import on_device

if TYPE_CHECKING:
    from warploom.layout.tensor_map import TensorMapSpec

_TYPES = {
    "bf16": "BFLOAT16",
    "f16": "FLOAT16",
    "f32": "FLOAT32",
    "f64": "FLOAT64",
    "u8": "UINT8",
    "u16": "UINT16",
    "u32": "UINT32",
    "s32": "INT32",
    "u64": "UINT64",
    "s64": "INT64",
}
"""The driver's names of the types that the TMA moves."""
_BYTES = 128


@lru_cache(maxsize=1024)
def _described(spec: TensorMapSpec) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the arguments of ``cuTensorMapEncodeTiled`` before the address, and those after it."""
    driver = require_driver()
    words, halves = driver.cuuint64_t, driver.cuuint32_t
    swizzle = f"{spec.swizzle_bytes}B" if spec.swizzle_bytes else "NONE"
    kind = getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[spec.dtype.name]}")
    return (kind, len(spec.shape)), (
        [words(n) for n in spec.shape],
        [words(n) for n in spec.strides or (16,)],  # a vector has none, but the driver takes no empty list
        [halves(n) for n in spec.box],
        [halves(1) for _ in spec.box],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


def encode(pointer: int, spec: TensorMapSpec, device: int) -> Any:
    """The tensor map of memory on GPU ``device`` from ``pointer`` on, as a kernel argument of 128 bytes.

    The driver encodes a spec once on each GPU; of other arrays it replaces the address in a copy, at a fraction of the
    host's time. The map keeps no array alive. Raises ConfigError with the driver's reason for what the TMA does not
    take.
    """
    driver = require_driver()
    # on_device: a process without a framework has no context of its own
    first = _first.get((spec, device))
    if first is not None:
        made = driver.CUtensorMap()
        ctypes.memmove(int(made.getPtr()), ctypes.addressof(first), _BYTES)
        (status,) = on_device(driver, device, driver.cuTensorMapReplaceAddress, made, pointer)
        if int(status) == 0:
            return _argument(made)
    if spec.dtype.name not in _TYPES:
        raise ConfigError(f"the TMA moves no {spec.dtype}: use one of {', '.join(_TYPES)}")
    before, after = _described(spec)
    status, made = on_device(driver, device, driver.cuTensorMapEncodeTiled, *before, pointer, *after)
    if int(status) != 0:
        raise ConfigError(f"the TMA does not take this array (at {pointer:#x}, {spec}): {status.name}")
    if len(_first) >= _FIRST_KEPT:
        _first.clear()
    argument = _first[spec, device] = _argument(made)
    return argument


_first: dict[tuple[TensorMapSpec, int], Any] = {}
_FIRST_KEPT = 1024


def _argument(made: Any) -> Any:
    argument: Any = (ctypes.c_uint8 * _BYTES).from_address(int(made.getPtr()))
    argument.owner = made  # lives as long as the argument
    return argument
