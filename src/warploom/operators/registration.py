"""How an operator of this package is registered with PyTorch.

With ``torch.library.Library``: of the ways there are, the shortest from a caller to the function (``custom_op`` takes
several times as long).

Source: PyTorch, "Custom Python Operators" and ``torch.library``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from warploom.core.errors import ProblemError
from warploom.interop.refusals import NESTED, refuse_derivatives
from warploom.interop.tracing import transforms

_NAMESPACE = "warploom"
_LIBRARY = torch.library.Library(_NAMESPACE, "FRAGMENT")  # operators live as long as this object
_DEVICES = ("CPU", "CUDA")
_ONE_DEVICE = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)) for key in _DEVICES]
_BELOW_AUTOGRAD = torch._C._after_autograd_keyset


def define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """``torch.ops.warploom.<name>``: what ``run`` computes, and what ``fake`` says of its shapes while tracing.

    ``schema`` is PyTorch's signature of it, "(Tensor a, …) -> Tensor"; arguments that have their default value are left
    out of a call, so both functions have the same defaults. Nothing is mutated. Whoever asks for a derivative, in
    whatever way, gets a ProblemError.
    """

    def autograd(keyset: Any, *arguments: Any, **named: Any) -> Any:
        """The kernel of the Autograd keys, where a backward pass belongs: until there is one, it is refused here.

        Every way to a derivative leads past it (``backward``, ``torch.func``, forward-mode tensors, compiled or not),
        and nothing below it sees whether one is wanted.
        """
        below = keyset & _BELOW_AUTOGRAD
        if below in _ONE_DEVICE:  # the dispatcher would come to ``run``, which refuses derivatives itself, 2 µs later
            return run(*arguments, **named)
        # What is exported may never need a gradient; if it does, the exported operator refuses.
        backward = transforms(torch) or not torch.compiler.is_exporting()
        for x in (*arguments, *named.values()):
            if isinstance(x, torch.Tensor):
                if x.is_nested:
                    raise ProblemError(NESTED)
                refuse_derivatives(x, backward=backward)
        return operator.redispatch(below, *arguments, **named)

    # Known to torch.compile as what it may trace through: the operator has a fake and keeps to its schema.
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in _DEVICES:
        _LIBRARY.impl(name, run, key)
    _LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_LIBRARY)
    operator: Any = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return operator
