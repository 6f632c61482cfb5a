"""Public calls while PyTorch watches operators: launches of users' kernels, and calls that no operator stands for.

A launch is the operator ``warploom::launch`` where its kernel declares what it writes: it names the kernel by its key,
and changes the declared tensors in place, which PyTorch's functionalisation sees. ``torch.compile`` breaks the graph at
other calls, and they run as they are: were they traced, PyTorch would follow warploom's own Python down into the
emulator. With ``fullgraph=True``, which allows no break, PyTorch raises an error with the reason given here;
``make_fx``, ``torch.jit.trace`` and the transforms of ``torch.func``, which know no breaks and would lose the call, get
it as a ProblemError. Other dispatch modes (those that count or log) do not see the call.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from inspect import unwrap
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from warploom.core.errors import ProblemError
from warploom.interop.torch_internals import past_modes, transforms
from warploom.lang.kernel import WITH_OUTPUTS, KernelFunction
from warploom.operators.registration import define_mutating
from warploom.ops import attention as of_attention
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
        recorded = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        if recorded or get_proxy_mode() is not None or transforms():
            raise ProblemError(f"this call cannot be recorded or transformed by PyTorch: {reason}")
        with past_modes():
            return function(*arguments, **named)

    return call


_untraced_launch = untraced(
    of_launch.launch,
    "a launch is a PyTorch operator if its kernel declares what it writes, as in @kernel(threads=128, outputs=['y']), "
    "and its arguments are tensors and numbers: declare it, or compile without fullgraph=True",
)
matmul = untraced(
    of_matmul.matmul,
    "warploom.matmul takes no out in PyTorch's graphs and transforms: leave it away, or compile without fullgraph=True",
)
_PLANNED = "plans are made outside of graphs: call it before the compiled function, or compile without fullgraph=True"
plan = untraced(of_attention.plan, _PLANNED)
plan_attention_paged = untraced(of_paged.plan_attention_paged, _PLANNED)
plan_attention_backward = untraced(of_attention.plan_attention_backward, _PLANNED)
plan_matmul = untraced(of_matmul.plan_matmul, _PLANNED)
plan_matmul_reduce = untraced(of_reduce.plan_matmul_reduce, _PLANNED)
plan_linear_cross_entropy = untraced(of_loss.plan_linear_cross_entropy, _PLANNED)


# -- launches
_LAUNCH_SCHEMA = (
    "(str kernel, SymInt[] grid, str kinds, Tensor(a!)[] written, Tensor[] read, SymInt[] integers, float[] floats, "
    "str configuration) -> ()"
)
_PLAIN = (int, float, str, bool, type(None))


def _run_launch(
    kernel: str,
    grid: Sequence[int],
    kinds: str,
    written: Sequence[torch.Tensor],
    read: Sequence[torch.Tensor],
    integers: Sequence[int],
    floats: Sequence[float],
    configuration: str,
) -> None:
    """Launch: ``kinds`` tells for each argument in which list it is, by the list's first letter."""
    found = WITH_OUTPUTS.get(kernel)
    if found is None:
        raise ProblemError(f"the kernel {kernel} of this graph is not defined in this process: import its module first")
    lists = {"w": iter(written), "r": iter(read), "i": iter(integers), "f": iter(floats)}
    arguments: list[Any] = [next(lists[kind]) for kind in kinds]
    settings: dict[str, Any] = ast.literal_eval(configuration)
    of_launch.launch(found, list(grid), arguments, **settings)


_LAUNCH = define_mutating("launch", _LAUNCH_SCHEMA, _run_launch, lambda *_: None)


def launch(kernel: Any, grid: Any, arguments: Sequence[Any] | Mapping[str, Any], **configuration: Any) -> None:
    """:func:`warploom.launch` while PyTorch traces: the operator, or a break of the graph where it is none."""
    if not isinstance(kernel, KernelFunction) or not kernel.outputs or callable(grid):
        return _untraced_launch(kernel, grid, arguments, **configuration)
    names = kernel.names
    if len(arguments) != len(names) or (isinstance(arguments, Mapping) and set(arguments) != set(names)):
        return _untraced_launch(kernel, grid, arguments, **configuration)
    given = [arguments[name] for name in names] if isinstance(arguments, Mapping) else list(arguments)
    kinds = ""
    lists: dict[str, list[Any]] = {"w": [], "r": [], "i": [], "f": []}
    for name, x in zip(names, given, strict=True):
        if isinstance(x, torch.Tensor):
            kind = "w" if name in kernel.outputs else "r"
        elif isinstance(x, int | torch.SymInt):
            kind = "i"
        elif isinstance(x, float):
            kind = "f"
        else:
            return _untraced_launch(kernel, grid, arguments, **configuration)
        kinds += kind
        lists[kind].append(x)
    if not all(isinstance(value, _PLAIN) for value in configuration.values()):
        return _untraced_launch(kernel, grid, arguments, **configuration)
    extents = [grid] if isinstance(grid, int | torch.SymInt) else list(grid)
    _LAUNCH(kernel.key, extents, kinds, lists["w"], lists["r"], lists["i"], lists["f"], repr(configuration))
    return None
