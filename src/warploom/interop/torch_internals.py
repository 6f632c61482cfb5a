"""Everything that PyTorch tells by no public name, or not at a price that a call can pay, is asked in this file.

No framework is imported: whoever asks has imported PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def internals() -> Any:
    """PyTorch's module of C++ functions."""
    return sys.modules["torch"]._C


# -- what PyTorch does with operators
def watches() -> bool:
    """Whether ``torch.func``, a dispatch mode or ``torch.jit.trace`` sees the operators of this thread."""
    c = internals()
    transformed = c._functorch.peek_interpreter_stack() is not None
    return transformed or c._len_torch_dispatch_stack() > 0 or is_recorded()


def is_recorded() -> bool:
    """Whether ``torch.jit.trace`` records operators."""
    jit: Any = sys.modules["torch"].jit
    return jit.is_tracing()


def transforms() -> bool:
    """Whether ``torch.func`` transforms the function that is running."""
    return internals()._functorch.peek_interpreter_stack() is not None


def forward_mode() -> bool:
    """Whether one of the transforms of ``torch.func`` that are running differentiates in forward mode."""
    functorch = internals()._functorch
    return any(level.key() == functorch.TransformType.Jvp for level in functorch.get_interpreter_stack() or ())


def tangents_are_on() -> bool:
    """Whether some tensor may carry a tangent."""
    return sys.modules["torch"].autograd.forward_ad._current_level >= 0


def is_wrapped(tensor: Any) -> bool:
    """Whether a tensor stands for another inside of ``torch.func`` or ``torch.vmap``, and has no memory."""
    functorch = internals()._functorch
    return functorch.is_functorch_wrapped_tensor(tensor) or is_batched(tensor)


def is_batched(tensor: Any) -> bool:
    """Whether a tensor is one of ``is_grads_batched=True``, which operators see one by one."""
    return internals()._functorch.is_legacy_batchedtensor(tensor)


# -- tensors like others
def recogniser(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """A function that tells whether so many tensors are like these; None for arrays of which that cannot be told so.

    Like each other are tensors of one class, shape, strides, type and device, that both require a gradient or not,
    whose values are those in memory, where PyTorch does the same with operators (autocast, ``torch.func``, dispatch
    modes, inference mode). Addresses may be others. Of tangents it knows nothing.

    It is the comparison by which PyTorch guards compiled code, in C++: a fifth of the cost of reading the tensors.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or any(x.__class__ not in (torch.Tensor, torch.nn.Parameter) for x in tensors):
        return None
    places = [next(i for i, y in enumerate(tensors) if y is x) for x in tensors]
    own = sorted(set(places))  # the guards take no tensor twice
    shapes, strides = zip(*[(list(tensors[i].shape), list(tensors[i].stride())) for i in own], strict=True)
    try:
        guards = internals()._dynamo.guards.TensorGuards(
            *[tensors[i] for i in own], dynamic_dims_sizes=[*shapes], dynamic_dims_strides=[*strides]
        )
    except (AttributeError, TypeError):  # of another PyTorch
        return None
    same = guards.check
    if len(own) == len(places):
        return same
    return lambda *others: (
        all(others[i] is x for i, x in zip(places, others, strict=True)) and same(*[others[i] for i in own])
    )


# -- streams and memory
@lru_cache(maxsize=1)
def stream_handles() -> Callable[[int], int]:
    """A function that tells PyTorch's current stream on a GPU."""
    torch: Any = sys.modules["torch"]
    # The raw accessor costs 0.1 µs, the public one builds a Stream object for 1–2 µs.
    raw = getattr(internals(), "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))


def cuda_allocator() -> tuple[Callable[..., Any], Callable[[], int]] | None:
    """The allocator of PyTorch's compiled code on the current GPU, and a function that tells that GPU's index.

    None in another PyTorch. The allocator takes sizes, strides and a type, at half the cost of ``torch.empty``.
    """
    c = internals()
    raw, current = getattr(c._dynamo.guards, "_empty_strided_cuda", None), getattr(c, "_cuda_getDevice", None)
    return None if raw is None or current is None else (raw, current)


# -- operators
def keys_of_devices(names: Sequence[str]) -> list[Any]:
    """A set of one dispatch key for each name."""
    c = internals()
    return [c.DispatchKeySet(getattr(c.DispatchKey, name)) for name in names]


def keys_below_autograd() -> Any:
    """The dispatch keys below those of autograd."""
    return internals()._after_autograd_keyset


def below_autograd() -> Any:
    """A ``with`` block in which operators run below autograd."""
    return internals()._AutoDispatchBelowAutograd()
