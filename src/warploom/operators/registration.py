"""How an operator of this package is registered with PyTorch.

With ``torch.library.Library`` and without a kernel for autograd: of the ways there are, the shortest from a caller to
the function (2 to 3 µs on the host of an H200, 14 by ``custom_op``). A gradient is refused by the function itself, as
in an eager call, and while a graph is traced by its fake.

Source: PyTorch, "Custom Python Operators" and ``torch.library``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from warploom.core.errors import ProblemError
from warploom.interop.arrays import NO_BACKWARD

_NAMESPACE = "warploom"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")  # operators live as long as this object


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """``torch.ops.warploom.<name>``: what ``run`` computes, and what ``fake`` says of its shapes while tracing.

    ``schema`` is PyTorch's signature of it, "(Tensor a, …) -> Tensor"; arguments that have their default value are left
    out of a call, so both functions have the same defaults. Nothing is mutated. ``run`` refuses tensors whose gradient
    is wanted; tracing raises ProblemError for them.
    """

    def traced(*arguments: Any, **named: Any) -> Any:
        wanted = torch.is_grad_enabled() and not torch.compiler.is_exporting()  # what is exported may never need one
        if wanted and any(isinstance(x, torch.Tensor) and x.requires_grad for x in arguments):
            raise ProblemError(NO_BACKWARD)
        return fake(*arguments, **named)

    # Known to torch.compile as what it may trace through: the operator has a fake and keeps to its schema.
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", traced, lib=_LIBRARY)
    return getattr(getattr(torch.ops, _NAMESPACE), name).default
