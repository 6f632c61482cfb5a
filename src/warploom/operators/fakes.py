"""What operators make of tensors without memory and of numbers that a graph does not know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from warploom.interop.arrays import ArrayView, torch_element_type
from warploom.ops.options import number

Result = TypeVar("Result")
_NUMPY = np.ndarray, np.generic


def seen(tensor: torch.Tensor) -> ArrayView:
    """A fake tensor as the checks see it, with no address."""
    device = tensor.device.type, tensor.device.index or 0
    dtype = torch_element_type(tensor.dtype)
    return ArrayView(0, tuple(tensor.shape), tuple(tensor.stride()), dtype, device, "torch", tensor)


def if_sizes_are_known(check: Callable[[], Result]) -> Result | None:
    """What ``check`` returns or raises; None where it would depend on sizes that only the data tells."""
    try:
        return check()
    except GuardOnDataDependentSymNode:
        return None


def known(name: str, value: Any) -> tuple[Any, torch.Tensor | None]:
    """A number for an operator: as such, or as a tensor that it is read from when the graph runs.

    NumPy's numbers are tensors to ``torch.compile``: what they are it does not know.
    """
    if isinstance(value, torch.Tensor):
        return None, value
    if torch.compiler.is_compiling():
        return (None, torch.as_tensor(value)) if isinstance(value, _NUMPY) else (value, None)
    return None if value is None else number(name, value), None
