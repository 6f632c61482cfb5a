"""Everything that PyTorch tells by no public name, or not at a price that a call can pay, is asked in this file.

Of what a call asks, with PyTorch 2.13 on one core of a CPU, in µs of the host:

| private name | tells or does | by public names |
|---|---|---|
| ``_len_torch_dispatch_stack`` | a dispatch mode is on | cannot be asked |
| ``forward_ad._current_level`` | a tensor may carry a tangent | ``unpack_dual``, 0.2 for each tensor of every call |
| ``_functorch.peek_interpreter_stack`` | ``torch.func`` transforms what runs | ``debug_unwrap``, of one tensor alone |
| ``_dynamo.guards.TensorGuards`` | three tensors are like others: 0.28 | 1.8, and no word of modes and transforms |
| ``_dynamo.guards._empty_strided_cuda`` | a new tensor: 0.36 | ``torch.empty_strided`` 0.8, ``torch.empty`` 1.1 |
| ``_cuda_getDevice`` | the GPU that it would lie on | ``torch.cuda.current_device``, which initialises CUDA |
| ``_cuda_getCurrentRawStream`` | a stream's handle: 0.1 | 1 to 2: builds a ``Stream`` |
| ``_after_autograd_keyset``, ``DispatchKeySet`` | an operator's call without gradients: 2.3 | 4.4, and below |
| ``_AutoDispatchBelowAutograd`` | the call within its node of autograd | below |
| ``enable_single_level_autograd_function`` | that node within ``torch.func`` | below |
| ``_disable_current_modes`` | a call that modes do not see | no way |
| ``_backward_cls`` | a node's backward pass past what looks for its function: 0.35 | no way |

``torch.library.register_autograd``, which is public, refuses ``torch.func.grad`` of an operator and loses tangents in
silence. No framework is imported: whoever asks has imported PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def _internals() -> Any:
    """PyTorch's module of C++ functions."""
    return sys.modules["torch"]._C


# -- what PyTorch does with operators
def watches() -> bool:
    """Whether ``torch.func``, a dispatch mode or ``torch.jit.trace`` sees the operators of this thread."""
    jit: Any = sys.modules["torch"].jit
    return transforms() or _internals()._len_torch_dispatch_stack() > 0 or jit.is_tracing()


def transforms() -> bool:
    """Whether ``torch.func`` transforms the function that is running."""
    return _internals()._functorch.peek_interpreter_stack() is not None


def tangents_are_on() -> bool:
    """Whether some tensor may carry a tangent."""
    return sys.modules["torch"].autograd.forward_ad._current_level >= 0


def past_modes() -> Any:
    """A ``with`` block whose operators no dispatch mode sees."""
    return sys.modules["torch"].utils._python_dispatch._disable_current_modes()


# -- tensors like others
def recogniser(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    """A function that tells whether so many tensors are like these; None for arrays of which that cannot be told so.

    Like each other are tensors of one class, shape, strides, type and device, that both require a gradient or not,
    whose values are those in memory, where PyTorch does the same with operators (autocast, ``torch.func``, dispatch
    modes, inference mode). Addresses may be others. Of tangents it knows nothing.

    It is the comparison by which PyTorch guards compiled code, in C++.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or any(x.__class__ not in (torch.Tensor, torch.nn.Parameter) for x in tensors):
        return None
    places = [next(i for i, y in enumerate(tensors) if y is x) for x in tensors]
    own = sorted(set(places))  # the guards take no tensor twice
    shapes, strides = zip(*[(list(tensors[i].shape), list(tensors[i].stride())) for i in own], strict=True)
    try:
        guards = _internals()._dynamo.guards.TensorGuards(
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
    raw = getattr(_internals(), "_cuda_getCurrentRawStream", None)
    return raw or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))


def cuda_allocator() -> tuple[Callable[..., Any], Callable[[], int]] | None:
    """The allocator of PyTorch's compiled code on the current GPU, and a function that tells that GPU's index.

    None in another PyTorch. The allocator takes sizes, strides and a type.
    """
    c = _internals()
    raw, current = getattr(c._dynamo.guards, "_empty_strided_cuda", None), getattr(c, "_cuda_getDevice", None)
    return None if raw is None or current is None else (raw, current)


# -- operators and autograd
def run_backward_by(node: Any, backward: Callable[..., Any]) -> None:
    """Let PyTorch's engine itself call the ``backward`` function of a class of ``torch.autograd.Function``."""
    of_engine = getattr(node, "_backward_cls", None)
    if of_engine is not None:
        of_engine.apply = backward


def keys_of_devices(names: Sequence[str]) -> list[Any]:
    """A set of one dispatch key for each name."""
    c = _internals()
    return [c.DispatchKeySet(getattr(c.DispatchKey, name)) for name in names]


def keys_below_autograd() -> Any:
    """The dispatch keys below those of autograd."""
    return _internals()._after_autograd_keyset


def below_autograd() -> Any:
    """A ``with`` block in which operators run below autograd."""
    return _internals()._AutoDispatchBelowAutograd()


def one_level_of_autograd() -> Any:
    """A ``with`` block for nodes of operators: the dispatcher has lowered the transforms of ``torch.func`` by then."""
    return sys.modules["torch"]._functorch.utils.enable_single_level_autograd_function()
