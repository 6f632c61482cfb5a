"""What operators make of tensors without memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from warploom.interop.arrays import ArrayView, torch_element_type, torch_type
from warploom.operators.schema import Named
from warploom.ops.calls import Shapes, Views
from warploom.ops.declare import Declaration

Result = TypeVar("Result")


def seen(tensor: torch.Tensor) -> ArrayView:
    """A fake tensor as the checks see it, with no address."""
    device = tensor.device.type, tensor.device.index or 0
    dtype = torch_element_type(tensor.dtype)
    return ArrayView(0, tuple(tensor.shape), tuple(tensor.stride()), dtype, device, "torch", tensor)


def arrays_of(declaration: Declaration, given: Named) -> Views:
    """The arrays among an operator's arguments, described, by the kernels' names."""
    found = {name: given.get(name) for name in declaration.arrays}
    return {declaration.kernels(name): seen(x) for name, x in found.items() if x is not None}


def made_of(results: Shapes, given: Named) -> Any:
    """Fake results, one or a tuple."""
    first = next(x for x in given.values() if isinstance(x, torch.Tensor))
    made = [first.new_empty(shape, dtype=torch_type(dtype)) for shape, dtype in results.values()]
    return made[0] if len(made) == 1 else tuple(made)


def if_sizes_are_known(check: Callable[[], Result]) -> Result | None:
    """What ``check`` returns or raises; None where it would depend on sizes that only the data tells."""
    try:
        return check()
    except GuardOnDataDependentSymNode:
        return None
