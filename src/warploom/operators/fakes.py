"""What operators make of tensors without memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from warploom.interop.arrays import ArrayView, torch_element_type, torch_type
from warploom.operators.schema import Named
from warploom.ops.arrays import Shapes
from warploom.ops.declare import Arguments, Declaration

Result = TypeVar("Result")


def seen(tensor: torch.Tensor) -> ArrayView:
    """A fake tensor as the checks see it, with no address."""
    device = tensor.device.type, tensor.device.index or 0
    dtype = torch_element_type(tensor.dtype)
    return ArrayView(0, tuple(tensor.shape), tuple(tensor.stride()), dtype, device, "torch", tensor)


def arguments_of(declaration: Declaration, given: Named, **fixed: Any) -> Arguments:
    """The arguments of an operation, of those of its operator; options that this one does not have are ``fixed``.

    Raises ProblemError for arrays that are not as declared, unless that depends on sizes that only the data tells.
    """
    names = [x for name, y in declaration.arrays.items() for x in (y.numbered(2) if y.many else [name])]
    views = {declaration.kernels(name): seen(x) for name in names if (x := given.get(name)) is not None}
    options = {x.name: given.get(x.name, x.default) for x in declaration.options.values()} | fixed
    if "window_left" in given:
        sides = given["window_left"], given["window_right"]
        options["window"] = None if sides == (None, None) else sides
    found = if_sizes_are_known(lambda: declaration.bind(views, options))
    return declaration.bind(views, options, checked=False) if found is None else found


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
