"""What a call becomes while PyTorch watches operators: one operator, or a break of the graph. Imports no framework.

Traced tensors have no memory to point at, and what is read past PyTorch it does not record. Other eager calls do not
take the way through an operator: PyTorch's dispatcher costs more than the rest of a call. The operators stand on the
functions that they call, so who they are is told from above, when the package is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

operator_of: Callable[[str], Callable[..., Any]]
"""What stands for a public function, by its name, with the same arguments (``warploom.operators.names``)."""


def is_watched(*arrays: Any) -> bool:
    """Whether PyTorch must see a call with these arrays as an operator.

    It does where it has to remember the call, because one of them requires a gradient; where autocast chooses their
    type; and wherever it :func:`is_tracing`.
    """
    if is_tracing():
        return True
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.is_grad_enabled():
        for x in arrays:
            if isinstance(x, torch.Tensor) and x.requires_grad:
                return True
    if not torch._C._is_any_autocast_enabled():
        return False
    first = arrays[0]
    return isinstance(first, torch.Tensor) and torch.is_autocast_enabled(first.device.type)


def is_tracing() -> bool:
    """Whether PyTorch watches the operators of this thread.

    It traces a graph (``torch.compile``, ``torch.export``, ``make_fx``, ``torch.jit.trace``), a dispatch mode is
    active, or ``torch.func`` transforms a function.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    if torch.compiler.is_compiling():  # Dynamo looks no further
        return True
    c = torch._C
    transformed = c._functorch.peek_interpreter_stack() is not None
    return transformed or c._len_torch_dispatch_stack() > 0 or c._get_tracing_state() is not None


def forward_mode(torch: Any) -> bool:
    """Whether one of the transforms of ``torch.func`` that are running differentiates in forward mode."""
    functorch = torch._C._functorch
    return any(level.key() == functorch.TransformType.Jvp for level in functorch.get_interpreter_stack() or ())


def transforms(torch: Any) -> bool:
    """Whether ``torch.func`` transforms the function that is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None
