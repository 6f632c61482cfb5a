"""What operators make of tensors without memory and of numbers that a graph does not know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from warploom.interop.arrays import ArrayView, torch_element_type
from warploom.interop.refusals import refuse_watched
from warploom.ops.attention_arrays import Options
from warploom.ops.options import flag, number, whole

Result = TypeVar("Result")
_NUMPY = np.ndarray, np.generic
_READ: dict[str, Callable[[str, Any], Any]] = {
    "causal": flag,
    "deterministic": flag,
    "interleaved": flag,
    "fixed_split": lambda name, x: None if x is None else whole(name, x),
}
"""How options that an operator takes as plain values are read; PyTorch would read a tensor by itself, and silently."""


def seen(tensor: torch.Tensor) -> ArrayView:
    """A fake tensor as the checks see it, with no address."""
    device = tensor.device.type, tensor.device.index or 0
    dtype = torch_element_type(tensor.dtype)
    return ArrayView(0, tuple(tensor.shape), tuple(tensor.stride()), dtype, device, "torch", tensor)


def options_of(given: Mapping[str, Any], return_lse: bool) -> Options:
    """What the arguments of an operator of attention ask for; the sides of a window may be symbols."""
    left, right = given["window_left"], given["window_right"]
    layout = given.get("layout", "bshd")
    options = Options(given["causal"], given["scale"], None, given["softcap"], return_lse, layout).plain()
    return replace(options, window=None if left is right is None else (left, right))


def if_sizes_are_known(check: Callable[[], Result]) -> Result | None:
    """What ``check`` returns or raises; None where it would depend on sizes that only the data tells."""
    try:
        return check()
    except GuardOnDataDependentSymNode:
        return None


def for_operator(**options: Any) -> dict[str, Any]:
    """Options of a public function as its operator takes them: two for a window, a configuration's notation.

    A number that a graph does not know is a tensor, which it is read from when the graph runs. NumPy's numbers are
    tensors to ``torch.compile``: what they are it does not know.
    """
    compiling = torch.compiler.is_compiling()
    if not compiling:
        options = {name: _READ[name](name, x) if name in _READ else x for name, x in options.items()}
    if options.get("window") is not None:
        options["window_left"], options["window_right"] = options["window"]
    options.pop("window", None)
    if options.get("config") is not None:
        options["config"] = str(options["config"])
    for name in ("scale", "softcap", "alpha"):
        value = options.pop(name, None)
        if isinstance(value, torch.Tensor):
            if not compiling and value.requires_grad:
                refuse_watched(name, value)
            options[f"{name}_tensor"] = value
        elif compiling and isinstance(value, _NUMPY):
            options[f"{name}_tensor"] = torch.as_tensor(value)
        elif value is not None:
            options[name] = value if compiling else number(name, value)
    return options
