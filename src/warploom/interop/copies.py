"""Row-major copies of arrays that no kernel reads in place, and what a plan takes in their place."""

from __future__ import annotations

import math
import sys

import numpy as np

from warploom.core.arguments import MOST_STRIDE
from warploom.core.errors import ProblemError
from warploom.interop.arrays import ArrayView, as_numpy, describe
from warploom.interop.dlpack import row_major_strides


def settled(view: ArrayView) -> ArrayView:
    """The view with row-major strides where a dimension has one element: its own say nothing, and may be anything.

    Where those are too far for a kernel, the next dimension's. Nor do any say something of an array without elements.
    """
    if 0 in view.shape:
        return view._replace(strides=row_major_strides(tuple(view.shape)))
    if 1 not in view.shape:
        return view
    found: list[int] = []  # the last first
    for size, own, plain in [*zip(view.shape, view.strides, row_major_strides(tuple(view.shape)), strict=True)][::-1]:
        found.append(own if size != 1 else plain if plain <= MOST_STRIDE else found[-1])
    strides = tuple(found[::-1])
    return view if strides == tuple(view.strides) else view._replace(strides=strides)


def in_float32(view: ArrayView) -> ArrayView:
    """A copy of the array in float32, of its own kind."""
    if view.kind == "torch":
        return describe(view.array.float())
    if view.kind == "cupy":
        return describe(view.array.astype(np.float32))
    if view.kind == "jax":
        with sys.modules["jax"].ensure_compile_time_eval():
            return describe(view.array.astype(np.float32))
    if view.device[0] == "cpu":
        return describe(as_numpy(view).astype(np.float32))
    raise ProblemError("this array must be float32, and its framework is unknown: convert it")


def as_if_compact(view: ArrayView) -> ArrayView:
    """The view that :func:`compact` gives, without a copy and without memory: for plans, which only look at it."""
    return view._replace(pointer=0, strides=row_major_strides(tuple(view.shape)), owner=None)


def compact(view: ArrayView) -> ArrayView:
    """A row-major copy of the array, of its own kind: for kernels that need aligned or plain rows.

    Raises ProblemError where the memory of the CPU does not hold it; a framework's own error where a GPU's does not.
    """
    try:
        return _compact(view)
    except (MemoryError, RuntimeError) as error:
        if view.device[0] != "cpu":
            raise
        size = math.prod(view.shape) * view.dtype.bytes / 2**30
        raise ProblemError(
            f"an array of shape {tuple(view.shape)} and strides {tuple(view.strides)} must be copied first, and the "
            f"copy of {size:.1f} GiB does not fit in memory: pass one with contiguous, aligned rows"
        ) from error


def _compact(view: ArrayView) -> ArrayView:
    owner = view.array
    if view.kind == "torch":
        return describe(owner.clone(memory_format=sys.modules["torch"].contiguous_format))
    if view.kind == "cupy":
        return describe(sys.modules["cupy"].array(owner, order="C"))
    if view.kind == "jax":
        with sys.modules["jax"].ensure_compile_time_eval():
            return describe(sys.modules["jax"].numpy.array(owner, copy=True))
    if view.device[0] == "cpu":
        return describe(np.array(as_numpy(view), order="C"))
    raise ProblemError("rows of this array are not 16-byte aligned, and its framework is unknown: pass an aligned copy")
