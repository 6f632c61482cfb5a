"""TMA descriptors of GPU arrays, through ``cuda.core``."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

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


def encode(array: Any, box: tuple[int, ...], dtype_name: str) -> Any:
    """The tensor map of a 16-bit GPU array for boxes of ``box`` elements, outermost dimension first.

    Rows of the box's last dimension are 128 bytes, swizzled. ``array`` is a torch tensor or anything with DLPack or
    ``__cuda_array_interface__``; its strides are multiples of 16 bytes. The descriptor holds the address: it is good
    for as long as the memory is.
    """
    from cuda.core.utils import StridedMemoryView

    kinds = _kinds()
    view = StridedMemoryView.from_any_interface(array, stream_ptr=-1)
    names = {"bf16": "BFLOAT16", "f16": "FLOAT16"}
    try:
        return view.as_tensor_map(
            box_dim=box,
            data_type=getattr(kinds.TensorMapDataType, names[dtype_name]),
            swizzle=kinds.TensorMapSwizzle.SWIZZLE_128B,
            l2_promotion=kinds.TensorMapL2Promotion.L2_256B,
        )
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"the TMA does not take this array (shape {view.shape}, box {box}): {error}") from error
