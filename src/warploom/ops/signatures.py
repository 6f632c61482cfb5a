"""Types of the public functions: the options that all overloads of one share, and what they return for which array.

For type checkers alone: a result has the first array's type, and NumPy's arrays the dtype where it is known. Overloads
for NumPy come after those for others, so that an array of unknown type gives a result of unknown type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypedDict, TypeVar

import numpy as np

from warploom.kernels.attention.choice import PackedConfig
from warploom.kernels.attention.problem import AttentionConfig
from warploom.kernels.matmul.features import EpilogueFunction
from warploom.kernels.matmul.problem import MatmulConfig
from warploom.ops.attention_arrays import Layout, Window
from warploom.ops.loss_options import Reduction


class CudaArray(Protocol):
    """What torch's, CuPy's and Numba's arrays have and NumPy's have not."""

    @property
    def __cuda_array_interface__(self) -> Any: ...


class JaxArray(Protocol):
    """What JAX's arrays have and NumPy's have not."""

    def block_until_ready(self) -> Any:
        """Wait for the array."""
        ...


Array = TypeVar("Array", bound=CudaArray | JaxArray)
NumpyArray = TypeVar("NumpyArray", bound="np.ndarray[Any, Any]")
Out = TypeVar("Out")


class AttentionOptions(TypedDict, total=False):
    """What :func:`warploom.attention` takes beside its arrays and ``return_lse``."""

    causal: bool
    scale: float | None
    window: Window | None
    softcap: float | None
    sinks: Any
    layout: Layout
    config: AttentionConfig | str | None


class VarlenOptions(TypedDict, total=False):
    """What :func:`warploom.attention_varlen` takes beside its arrays and ``return_lse``."""

    seqused_q: Any
    seqused_k: Any
    max_seqlen_q: Any
    max_seqlen_k: Any
    causal: bool
    window: Window | None
    softcap: float | None
    scale: float | None
    sinks: Any
    out: Any
    check: bool
    config: PackedConfig | str | None


class MatmulOptions(TypedDict, total=False):
    """What :func:`warploom.matmul` takes beside its two matrices and ``out``."""

    out_dtype: Any
    accumulate: Any
    bias: Any
    epilogue: EpilogueFunction | None
    extras: Sequence[Any]
    alpha: float
    config: MatmulConfig | str | None


class LossOptions(TypedDict, total=False):
    """What :func:`warploom.linear_cross_entropy` takes beside its arrays and ``return_lse``."""

    bias: Any
    ignore_index: int
    reduction: Reduction
    label_smoothing: float
    z_loss: float
    softcap: float | None
    config: MatmulConfig | str | None


class ReduceOptions(TypedDict, total=False):
    """What :func:`warploom.matmul_reduce` takes beside its two matrices, ``op`` and ``return_index``."""

    scale: float
    bias: Any
    config: MatmulConfig | str | None
