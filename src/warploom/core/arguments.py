"""What a launch takes on the emulator and on a GPU alike: grids that CUDA takes, numbers of their types, strides."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from warploom.core.dtypes import F32_MAX, DType
from warploom.core.errors import ConfigError, ProblemError, shown

GRID_LIMITS = (2**31 - 1, 65535, 65535)
"""The most CTAs along x, y and z (CUDA C++ Programming Guide, "Compute Capabilities"; the same from sm_30 on)."""
MOST_STRIDE = 2**32 - 1
"""The most elements that a kernel takes from one row to the next: strides are u32."""


def stride_name(array: str, dimension: int) -> str:
    """Return the name of the kernel parameter that holds a stride of an array parameter."""
    return f"{array}_stride{dimension}"


def strides(**arrays: Sequence[int]) -> dict[str, int]:
    """The numbers of strides that come with array parameters, by the names of these."""
    return {stride_name(array, i): stride for array, of in arrays.items() for i, stride in enumerate(of)}


def fields(compound: str, **values: int) -> dict[str, int]:
    """The numbers of a compound parameter's fields."""
    return {f"{compound}_{name}": value for name, value in values.items()}


def check_names(kernel: str, missing: Sequence[str], unknown: Sequence[str]) -> None:
    """Raises ProblemError where arguments are missing or unknown, naming them."""
    kinds = (("missing", missing), ("unknown", unknown))
    if said := [f"{kind} arguments {list(names)}" for kind, names in kinds if names]:
        raise ProblemError(f"{kernel}: {', '.join(said)}")


def grid_of(grid: Any) -> tuple[int, int, int]:
    """The CTAs along x, y and z of ``grid``: one integer of any kind, or one to three.

    Raises ProblemError for anything else, ConfigError for more CTAs than a GPU takes.
    """
    sizes: list[Any] = list(cast("Sequence[Any]", grid)) if _several(grid) else [grid]
    try:
        whole = tuple([operator.index(size) for size in sizes])
    except TypeError:
        whole = ()
    if not 1 <= len(whole) <= 3 or any(size < 1 for size in whole):
        raise ProblemError(f"a grid is one to three positive counts of CTAs, as integers; not {shown(grid)}")
    x, y, z = (*whole, 1, 1)[:3]
    if x > GRID_LIMITS[0] or y > GRID_LIMITS[1] or z > GRID_LIMITS[2]:
        raise ConfigError(
            f"the grid {(x, y, z)} is larger than any GPU takes: at most {GRID_LIMITS} CTAs along x, y and z; where y "
            "or z is too large, count those CTAs along x"
        )
    return x, y, z


def _several(grid: object) -> bool:
    if isinstance(grid, np.ndarray):
        return grid.ndim > 0
    return isinstance(grid, Sequence) and not isinstance(grid, str)


def scalar_value(name: str, dtype: DType, value: Any) -> int | float:
    """``value`` as the number of a scalar parameter: a Python or NumPy number, or an array or tensor of one.

    Raises ProblemError for what is no number, for fractions where integers are taken, and for what is out of range.
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and any(size != 1 for size in cast("tuple[int, ...]", shape)):
        raise ProblemError(f"argument {name} must be one number, not an array of shape {shape}")
    found = value.item() if hasattr(value, "item") else value
    if dtype.is_float:
        return _float(name, dtype, found)
    least, most = (0, 1) if dtype.kind == "pred" else _range(dtype)
    try:
        whole = operator.index(found)
    except TypeError:
        raise ProblemError(f"argument {name} must be an integer ({dtype}), not {shown(found)}") from None
    if not least <= whole <= most:
        raise ProblemError(f"argument {name} = {whole} does not fit {dtype}: it holds {least} to {most}")
    return whole


def _float(name: str, dtype: DType, value: Any) -> float:
    if isinstance(value, str | bytes) or (not hasattr(value, "__float__") and not hasattr(value, "__index__")):
        raise ProblemError(f"argument {name} must be a number ({dtype}), not {shown(value)}")
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise ProblemError(f"argument {name} must be a number ({dtype}), not {shown(value)}") from None
    except OverflowError:
        raise ProblemError(f"argument {name} = {shown(value)} does not fit {dtype}") from None
    if dtype.bits == 32 and abs(found) > F32_MAX and not math.isinf(found):
        raise ProblemError(f"argument {name} = {found} does not fit {dtype}: its largest number is {F32_MAX}")
    return found


def _range(dtype: DType) -> tuple[int, int]:
    if dtype.kind == "signed":
        return -(1 << (dtype.bits - 1)), (1 << (dtype.bits - 1)) - 1
    return 0, (1 << dtype.bits) - 1
