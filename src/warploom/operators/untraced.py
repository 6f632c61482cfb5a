"""Public calls that no operator stands for, while PyTorch traces: they break the graph, and run as they are.

Were they traced, PyTorch would follow warploom's own Python down into the emulator. With ``fullgraph=True``, which
allows no break, PyTorch raises an error with the reason given here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from warploom.ops import attention as of_attention
from warploom.ops import launch as of_launch
from warploom.ops import matmul as of_matmul
from warploom.ops import reduce as of_reduce


def _untraced(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    disable: Callable[..., Callable[..., Any]] = torch.compiler.disable
    try:
        return disable(function, reason=reason)
    except TypeError:  # an older PyTorch takes no reason
        return disable(function)


launch = _untraced(
    of_launch.launch,
    "warploom.launch is no PyTorch operator: compile without fullgraph=True, or make the launch an operator of your "
    "own with torch.library.custom_op",
)
matmul = _untraced(
    of_matmul.matmul,
    "warploom.matmul takes no epilogue, extras or out under torch.compile: leave what follows the product to PyTorch "
    "there (torch.compile fuses it on its own), or compile without fullgraph=True",
)
_PLANNED = "plans are made outside of graphs: call it before the compiled function, or compile without fullgraph=True"
plan = _untraced(of_attention.plan, _PLANNED)
plan_matmul = _untraced(of_matmul.plan_matmul, _PLANNED)
plan_matmul_reduce = _untraced(of_reduce.plan_matmul_reduce, _PLANNED)
