"""Torch tensors that no kernel takes, refused by name. PyTorch is there: whoever passes a tensor has imported it."""

from __future__ import annotations

import sys
from typing import Any

from warploom.core.errors import ProblemError

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


def refuse_tangent(tensor: Any) -> None:
    """Raises ProblemError for a tensor with a tangent."""
    forward_ad = sys.modules["torch"].autograd.forward_ad
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise ProblemError(NO_TANGENT)


def without_memory(tensor: Any, error: str = "") -> ProblemError:
    """Why a tensor has no plain memory, and what to pass instead; ``error`` is what PyTorch said."""
    if tensor.is_nested:
        return ProblemError(NESTED)
    if sys.modules["torch"]._C._functorch.is_functorch_wrapped_tensor(tensor):
        return ProblemError(
            "inside torch.vmap, torch.func.jvp and the like tensors have no memory of their own: call this outside"
        )
    if error:
        return ProblemError(f"a torch tensor without plain memory cannot be passed to a kernel: {error}")
    return ProblemError(
        f"this {type(tensor).__name__} has no memory of its own (a fake or wrapped tensor): pass the tensor that it "
        "stands for; PyTorch traces the operators in torch.ops.warploom"
    )
