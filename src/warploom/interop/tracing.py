"""What a call becomes while PyTorch watches operators: one operator, or a break of the graph. Imports no framework.

Traced tensors have no memory to point at, and what is read past PyTorch it does not record. Other eager calls do not
take the way through an operator: PyTorch's dispatcher costs more than the rest of a call. The operators stand on the
functions that they call, so who they are is told from above, when the package is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar, cast

from warploom.core.errors import ProblemError

Public = TypeVar("Public", bound=Callable[..., Any])


def operator_of(name: str) -> Callable[..., Any]:
    """What stands for a public function, with the same arguments: ``warploom.operators.names`` takes this place."""
    raise NotImplementedError(name)


def traced(function: Public) -> Public:
    """A public function that is the operator of its name while PyTorch :func:`is_tracing`."""
    operator = _operator(function)

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return operator(*given, **named) if is_tracing() else function(*given, **named)

    return cast(Public, call)


def recorded(function: Public) -> Public:
    """:func:`traced`, and also the operator where PyTorch must remember the call, or autocast chooses a type.

    It must where an array requires a gradient. What is written to ``out`` has no history.
    """
    operator = _operator(function)

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None:
            return function(*given, **named)
        if (
            _watches(torch)
            or (torch.is_grad_enabled() and named.get("out") is None and _recorded(given, named))
            or (torch._C._is_any_autocast_enabled() and _autocast(torch, given, named))
        ):
            return operator(*given, **named)
        return function(*given, **named)

    return cast(Public, call)


_NO_ARRAYS = frozenset({"accumulate", "out_dtype", "max_seqlen_q", "max_seqlen_k"})
"""Parameters of the public functions that take anything, and yet no arrays."""


def _operator(function: Public) -> Public:
    """The operator of a public function's name, which takes tensors alone: other arrays beside them are refused.

    A call without any tensor is none of PyTorch's concern, and runs as it is.
    """
    parameters = signature(function).parameters
    arrays = {name: p.default is not Parameter.empty for name, p in parameters.items() if p.annotation == "Any"}
    arrays = {name: optional for name, optional in arrays.items() if name not in _NO_ARRAYS}

    def call(*given: Any, **named: Any) -> Any:
        torch: Any = sys.modules["torch"]
        if arrays and not torch.compiler.is_dynamo_compiling():  # which makes tensors of NumPy's arrays
            every = {**dict(zip(parameters, given, strict=False)), **named}
            taken = {name: every[name] for name in arrays if name in every}
            taken = {name: x for name, x in taken.items() if x is not None or not arrays[name]}
            extras = every.get("extras")
            if isinstance(extras, tuple | list):
                taken |= {f"extra{i}": x for i, x in enumerate(extras)}
            others = {name: x for name, x in taken.items() if not isinstance(x, torch.Tensor)}
            if others and len(others) == len(taken):
                return function(*given, **named)
            from warploom.interop.arrays import describe_all  # NumPy, which the import of warploom does not load

            for name, view in describe_all(others).items():
                raise ProblemError(
                    f"{name} is of {view.kind}, beside tensors that PyTorch differentiates, casts or watches: pass "
                    "tensors alone, or call under torch.no_grad() and without autocast"
                )
        return operator_of(function.__name__)(*given, **named)

    return cast(Public, call)


def _recorded(given: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether an argument, or one of a list of them, is a tensor that requires a gradient."""
    for x in (*given, *named.values()):
        if isinstance(x, list | tuple):
            if _recorded(tuple(x), {}):
                return True
        elif getattr(x, "requires_grad", False):
            return True
    return False


def _autocast(torch: Any, given: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether PyTorch's autocast is on where the tensors among the arguments are, and none of them is written to."""
    first = next((x for x in (*given, *named.values()) if isinstance(x, torch.Tensor)), None)
    return first is not None and named.get("out") is None and torch.is_autocast_enabled(first.device.type)


def is_tracing() -> bool:
    """Whether PyTorch watches the operators of this thread.

    It traces a graph (``torch.compile``, ``torch.export``, ``make_fx``, ``torch.jit.trace``), a dispatch mode is
    active, or ``torch.func`` transforms a function.
    """
    torch = sys.modules.get("torch")
    return torch is not None and _watches(torch)


def _watches(torch: Any) -> bool:
    if torch.compiler.is_dynamo_compiling():  # Dynamo looks no further
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
