"""TMA descriptors of GPU arrays, through ``cuda.core``."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from warploom.core.dtypes import DType
from warploom.core.errors import ConfigError, UnsupportedDeviceError
from warploom.cuda.device import require_driver

if TYPE_CHECKING:
    from warploom.layout.tensor_map import TensorMapSpec

_TYPES = {
    "bf16": "BFLOAT16", "f16": "FLOAT16", "f32": "FLOAT32", "f64": "FLOAT64", "u8": "UINT8", "u16": "UINT16",
    "u32": "UINT32", "s32": "INT32", "u64": "UINT64", "s64": "INT64",
}  # fmt: skip
"""The driver's names of the types that the TMA moves."""


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

    def __init__(self, pointer: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": shape,
            "strides": tuple(size * stride for stride in strides),
            "typestr": f"<u{size}",  # the descriptor's own type says what the bits are
            "data": (pointer, False),
            "stream": None,
        }


def encode(
    pointer: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: DType,
    box: tuple[int, ...],
    *,
    swizzle_bytes: int | None = None,
) -> Any:
    """The tensor map of GPU memory for boxes of ``box`` elements, outermost dimension first.

    ``strides`` count elements; but for the last, which is 1, they are multiples of 16 bytes. Rows of a box are swizzled
    over ``swizzle_bytes``, 128, 64, 32 or 0; by default over their width. The descriptor holds the address and nothing
    else: it is good for any such array there. Raises ConfigError with the driver's reason for what the TMA does not
    take.
    """
    from cuda.core.utils import StridedMemoryView

    kinds = _kinds()
    width = dtype.bytes * box[-1] if swizzle_bytes is None else swizzle_bytes
    memory = _Memory(pointer, shape, strides, dtype.bytes)
    try:
        return StridedMemoryView.from_cuda_array_interface(memory, stream_ptr=-1).as_tensor_map(
            box_dim=box,
            data_type=getattr(kinds.TensorMapDataType, _TYPES[dtype.name]),
            swizzle=getattr(kinds.TensorMapSwizzle, f"SWIZZLE_{width}B" if width else "NONE"),
            l2_promotion=kinds.TensorMapL2Promotion.L2_256B,
        )
    except (KeyError, AttributeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"the TMA does not take this array ({dtype}, shape {shape}, box {box}): {error}") from error


class DriverMap:
    """A tensor map as the driver makes it, for :class:`warploom.cuda.packed.PackedLaunch` alone.

    cuda.core's view of memory has no strides that wrap around.
    """

    def __init__(self, pointer: int, spec: TensorMapSpec) -> None:
        """Raises ConfigError with the driver's reason for what the TMA does not take."""
        driver = require_driver()
        words, halves = driver.cuuint64_t, driver.cuuint32_t
        width = spec.swizzle_bytes
        swizzle = f"CU_TENSOR_MAP_SWIZZLE_{width}B" if width else "CU_TENSOR_MAP_SWIZZLE_NONE"
        status, self._map = driver.cuTensorMapEncodeTiled(
            getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[spec.dtype.name]}"),
            len(spec.shape),
            pointer,
            [words(n) for n in spec.shape],
            [words(n) for n in spec.strides],
            [halves(n) for n in spec.box],
            [halves(1) for _ in spec.box],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(driver.CUtensorMapSwizzle, swizzle),
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
        if int(status) != 0:
            raise ConfigError(f"the TMA does not take this array ({spec}): {status.name}")

    @property
    def address(self) -> int:
        """Where the 128 bytes lie, as long as this object lives."""
        return int(self._map.getPtr())


def encode_spec(pointer: int, spec: TensorMapSpec) -> Any:
    """:func:`encode` of what a spec says, whose dimensions are innermost first and its strides bytes."""
    if spec.wraps:
        return DriverMap(pointer, spec)
    strides = tuple(stride // spec.dtype.bytes for stride in reversed(spec.strides))
    return encode(
        pointer, spec.shape[::-1], (*strides, 1), spec.dtype, spec.box[::-1], swizzle_bytes=spec.swizzle_bytes
    )
