"""PyTorch operators: what ``torch.compile`` and ``torch.export`` see of a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def operator_of(name: str) -> Callable[..., Any]:
    """What stands for a public function while PyTorch traces a graph, with the same arguments. Imports PyTorch.

    By import statements, which PyTorch traces; :func:`importlib.import_module` would break the graph.
    """
    if name == "append_to_cache":
        from warploom.operators.append import append_to_cache

        return append_to_cache
    if name == "attention":
        from warploom.operators.attention import attention

        return attention
    if name == "attention_paged":
        from warploom.operators.attention_paged import attention_paged

        return attention_paged
    if name == "attention_varlen":
        from warploom.operators.varlen import attention_varlen

        return attention_varlen
    if name == "matmul":
        from warploom.operators.matmul import matmul

        return matmul
    if name == "matmul_reduce":
        from warploom.operators.reduce import matmul_reduce

        return matmul_reduce
    if name == "linear_cross_entropy":
        from warploom.operators.loss import linear_cross_entropy

        return linear_cross_entropy
    from warploom.operators import graphs

    return getattr(graphs, name)
