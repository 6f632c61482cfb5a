"""PyTorch operators: what ``torch.compile`` and ``torch.export`` see of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def operator_of(name: str) -> Callable[..., Any]:
    """The function that PyTorch traces in place of a public one, with the same arguments. Imports PyTorch.

    It is found by import statements, which PyTorch traces; :func:`importlib.import_module` would break the graph.
    """
    if name.startswith(("attention", "append")):
        from warploom.operators import attention as module
    elif name == "matmul":
        from warploom.operators import matmul as module
    elif name in ("matmul_reduce", "linear_cross_entropy", "row_gradients"):
        from warploom.operators import reduce as module
    else:
        from warploom.operators import graphs as module
    return getattr(module, name)
