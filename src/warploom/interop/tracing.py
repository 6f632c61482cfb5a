"""What a call becomes while PyTorch watches operators: one operator, or a break of the graph. Imports no framework.

Traced tensors have no memory to point at, and what is read past PyTorch it does not record. Eager calls do not take the
way through an operator: PyTorch's dispatcher costs more than the rest of a call. The operators stand on the functions
that they call, so who they are is told from above, when the package is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

operator_of: Callable[[str], Callable[..., Any]]
"""What stands for a public function, by its name, with the same arguments (``warploom.operators.names``)."""


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


def transforms(torch: Any) -> bool:
    """Whether ``torch.func`` transforms the function that is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None
