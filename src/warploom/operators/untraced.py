"""Public calls that no operator stands for, while PyTorch watches operators.

``torch.compile`` breaks the graph at them, and they run as they are. Were they traced, PyTorch would follow warploom's
own Python down into the emulator. With ``fullgraph=True``, which allows no break, PyTorch raises an error with the
reason given here; ``make_fx``, ``torch.jit.trace`` and the transforms of ``torch.func``, which know no breaks and would
lose the call, get it as a ProblemError. Other dispatch modes (those that count or log) do not see the call.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _disable_current_modes

from warploom.core.errors import ProblemError
from warploom.interop.torch_internals import is_recorded, transforms
from warploom.ops import attention as of_attention
from warploom.ops import attention_backward as of_backward
from warploom.ops import attention_paged as of_paged
from warploom.ops import launch as of_launch
from warploom.ops import loss as of_loss
from warploom.ops import matmul as of_matmul
from warploom.ops import reduce as of_reduce


def untraced(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """``function``, which ``torch.compile`` breaks the graph at, and what records or transforms calls is refused."""
    function = unwrap(function)  # the public one would come back here
    disable: Callable[..., Callable[..., Any]] = torch.compiler.disable
    try:
        breaking = disable(function, reason=reason)
    except TypeError:  # an older PyTorch takes no reason
        breaking = disable(function)

    def call(*arguments: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return breaking(*arguments, **named)
        if is_recorded() or get_proxy_mode() is not None or transforms():
            raise ProblemError(f"this call cannot be recorded or transformed by PyTorch: {reason}")
        with _disable_current_modes():
            return function(*arguments, **named)

    return call


launch = untraced(
    of_launch.launch,
    "a launch is a PyTorch operator if its kernel declares what it writes, as in @kernel(threads=128, outputs=['y']), "
    "and its arguments are tensors and numbers: declare it, or compile without fullgraph=True",
)
matmul = untraced(
    of_matmul.matmul,
    "warploom.matmul takes no out in PyTorch's graphs and transforms: leave it away, or compile without fullgraph=True",
)
attention_backward = untraced(
    of_backward.attention_backward,
    "warploom.attention_backward is no PyTorch operator: compile without fullgraph=True",
)
_PLANNED = "plans are made outside of graphs: call it before the compiled function, or compile without fullgraph=True"
plan = untraced(of_attention.plan, _PLANNED)
plan_attention_paged = untraced(of_paged.plan_attention_paged, _PLANNED)
plan_attention_backward = untraced(of_backward.plan_attention_backward, _PLANNED)
plan_matmul = untraced(of_matmul.plan_matmul, _PLANNED)
plan_matmul_reduce = untraced(of_reduce.plan_matmul_reduce, _PLANNED)
plan_linear_cross_entropy = untraced(of_loss.plan_linear_cross_entropy, _PLANNED)
