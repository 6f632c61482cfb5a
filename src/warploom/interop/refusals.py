"""Tensors and numbers that no kernel takes, refused by name.

No framework is imported: whoever passes a tensor or a tracer has imported its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from warploom.core.errors import ProblemError
from warploom.interop.torch_internals import tangents_are_on

NO_BACKWARD = (
    "this tensor requires a gradient, and this call has no backward pass: call under torch.no_grad(), or pass "
    "tensor.detach()"
)
NO_TANGENT = (
    "this tensor carries a tangent (torch.func.jvp, jacfwd and linearize, torch.autograd.forward_ad), and warploom has "
    "no forward-mode derivatives yet: pass torch.autograd.forward_ad.unpack_dual(tensor).primal"
)
NOT_TWICE = "this call is differentiated once: its gradients have no backward pass of their own"
NESTED = "nested tensors are not supported: pass their tensors one by one, or padded to one shape"


class DerivativeError(ProblemError):
    """A tensor's gradient is wanted of what computes none."""


def refuse_derivatives(tensor: Any) -> None:
    """Raises DerivativeError for a tensor whose gradient is wanted, ProblemError for one with a tangent."""
    if tensor.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise DerivativeError(NO_BACKWARD)
    refuse_tangent(tensor)


def refuse_tangent(tensor: Any, name: str = "") -> None:
    """Raises ProblemError for a tensor with a tangent, at any level of ``torch.func``, which its ``name`` begins.

    Within a function with a backward pass PyTorch would drop those of the levels below.
    """
    if not tangents_are_on():
        return
    torch: Any = sys.modules["torch"]
    outer = None
    while tensor is not outer:  # each transform of torch.func wraps the tensor of the one around it
        if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
            raise ProblemError(f"{name}: {NO_TANGENT}" if name else NO_TANGENT)
        outer, tensor = tensor, torch.func.debug_unwrap(tensor, recurse=False)


def refuse_watched(name: str, value: Any) -> None:
    """Raises ProblemError for a number or array of them that JAX traces, or that PyTorch wraps or differentiates by.

    What is read of it would lose its derivative, or cannot be read. It is a DerivativeError where a tensor requires a
    gradient, and is not asked where gradients are off.
    """
    core = getattr(sys.modules.get("jax"), "core", None)
    if core is not None and isinstance(value, core.Tracer):
        raise ProblemError(
            f"{name} is traced by JAX (grad, jvp, jit or vmap), and has no derivative here: pass a number, which jit "
            "takes as a static argument"
        )
    if not hasattr(value, "requires_grad"):
        return
    torch = sys.modules["torch"]
    if value.requires_grad and torch.is_grad_enabled():
        raise DerivativeError(
            f"{name} requires a gradient, and this call has no backward pass by it: pass {name}.detach()"
        )
    if torch.func.debug_unwrap(value, recurse=False) is not value:
        raise ProblemError(f"{name} is transformed by torch.func or torch.vmap, and a kernel needs it: pass a number")
    refuse_tangent(value, name)


def reads_tensors(call: Callable[[], Any]) -> bool:
    """Whether a call computes with tensors of PyTorch, or asks for their elements; it ends there, or wherever it fails.

    Shapes, types and other attributes may be read.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    asked = list[Any]()

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = (*args, *(kwargs or {}).values())
            if getattr(func, "__name__", "") != "__get__" and any(isinstance(x, torch.Tensor) for x in given):
                asked.append(func)
                raise DerivativeError(NO_BACKWARD)
            return func(*args, **(kwargs or {}))

    with suppress(Exception), Watch():
        call()
    return bool(asked)


def has_memory(tensor: Any) -> bool:
    """Whether a tensor of PyTorch is no part of a batch, which operators see one by one (``is_grads_batched=True``)."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        return tensor.layout is not sys.modules["torch"].strided
    return True


def without_memory(tensor: Any, error: str = "") -> ProblemError:
    """Why a tensor has no plain memory, and what to pass instead; ``error`` is what PyTorch said."""
    if tensor.is_nested:
        return ProblemError(NESTED)
    if sys.modules["torch"].func.debug_unwrap(tensor, recurse=False) is not tensor or not has_memory(tensor):
        return ProblemError(
            "inside torch.vmap, torch.func.jvp, is_grads_batched=True and the like tensors have no memory of their "
            "own: call this outside"
        )
    if error:
        return ProblemError(f"a torch tensor without plain memory cannot be passed to a kernel: {error}")
    return ProblemError(
        f"this {type(tensor).__name__} has no memory of its own (a fake or wrapped tensor): pass the tensor that it "
        "stands for; PyTorch traces the operators in torch.ops.warploom"
    )
