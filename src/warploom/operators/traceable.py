"""Public functions that PyTorch can trace: eager on arrays, one operator each while a graph is traced.

Traced tensors have no memory to point at. Eager calls do not take the way through an operator: PyTorch's dispatcher
costs more than the rest of a call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def operator_of(name: str) -> Callable[..., Any]:
    """What stands for a public function while PyTorch traces a graph, with the same arguments. Imports PyTorch.

    Import statements, as PyTorch traces those; :func:`importlib.import_module` would break the graph.
    """
    if name == "attention":
        from warploom.operators.attention import attention

        return attention
    if name == "matmul":
        from warploom.operators.matmul import matmul

        return matmul
    from warploom.operators import reduce

    return reduce.matmul_reduce if name == "matmul_reduce" else reduce.linear_cross_entropy


def traceable(eager: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """``eager`` with its signature and documentation; while PyTorch traces a graph, :func:`operator_of` its name."""
    name = eager.__name__

    @wraps(eager)
    def call(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        torch = sys.modules.get("torch")
        if torch is not None and torch.compiler.is_compiling():
            return operator_of(name)(*arguments, **options)
        return eager(*arguments, **options)

    call.__module__ = "warploom"  # where pickle finds it
    return call
