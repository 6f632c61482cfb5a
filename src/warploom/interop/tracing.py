"""What a call becomes while PyTorch traces a graph: one operator, or a break of the graph. Imports no framework.

Traced tensors have no memory to point at. Eager calls do not take the way through an operator: PyTorch's dispatcher
costs more than the rest of a call. The operators stand on the functions that they call, so who they are is told from
above, when the package is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

operator_of: Callable[[str], Callable[..., Any]]
"""What stands for a public function, by its name, with the same arguments (``warploom.operators.names``)."""


def is_tracing() -> bool:
    """Whether PyTorch traces a graph (``torch.compile``, ``torch.export``) in this thread."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()
