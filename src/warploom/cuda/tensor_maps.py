"""TMA descriptors of GPU arrays, through ``cuda.core``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from warploom.core.dtypes import DType
from warploom.core.errors import ConfigError, UnsupportedDeviceError


@lru_cache(maxsize=1)
def _kinds() -> Any:
    """cuda.core's enumerations for tensor maps."""
    try:
        import cuda.core._tensor_map as kinds
    except ImportError as error:
        raise UnsupportedDeviceError(
            'this cuda.core has no tensor maps: pip install "cuda-core>=1.2" (kernels for sm_90a need them)'
        ) from error
    return kinds


class _Memory:
    """GPU memory by address alone: a descriptor made from it keeps nobody's array alive."""

    def __init__(self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "strides": tuple(2 * stride for stride in strides),
            "typestr": "<u2",  # 16-bit data; the descriptor's own type says which
            "data": (pointer, False),
            "stream": None,
        }


def encode(pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, box: tuple[int, ...]) -> Any:
    """The tensor map of 16-bit GPU memory for boxes of ``box`` elements, outermost dimension first.

    ``strides`` count elements and are multiples of 8 but for the last, which is 1. Rows of the box's last dimension
    are 128, 64 or 32 bytes, swizzled over their width. The descriptor holds the address and nothing else: it is good
    for any such array there. Raises ConfigError with the driver's reason for what the TMA does not take.
    """
    from cuda.core.utils import StridedMemoryView

    kinds = _kinds()
    names = {"bf16": "BFLOAT16", "f16": "FLOAT16"}
    try:
        return StridedMemoryView.from_cuda_array_interface(
            _Memory(pointer, shape, strides), stream_ptr=-1
        ).as_tensor_map(
            box_dim=box,
            data_type=getattr(kinds.TensorMapDataType, names[dtype.name]),
            swizzle=getattr(kinds.TensorMapSwizzle, f"SWIZZLE_{2 * box[-1]}B"),
            l2_promotion=kinds.TensorMapL2Promotion.L2_256B,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"the TMA does not take this array (shape {shape}, box {box}): {error}") from error
