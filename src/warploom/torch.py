"""PyTorch's own attention on warploom's kernels: ``warploom.torch.activate()``.

After it ``torch.nn.functional.scaled_dot_product_attention`` and what stands on it (Transformers' ``sdpa``, diffusers,
torchtitan, ``context_parallel``) run on them wherever PyTorch would take its FlashAttention. What they do not take
(dropout, masks, other types) runs on PyTorch's own kernels, as before. Tensors are used in place.

Source: PyTorch, ``torch.nn.attention.register_flash_attention_impl``, and the operators' schemas in
``native_functions.yaml`` of 2.11 and 2.13.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from warploom.core.errors import ProblemError, UnsupportedDeviceError

if TYPE_CHECKING:
    from torch import Tensor

    from warploom.ops.attention import Layout

_NAME = "warploom"


def activate() -> None:
    """Run PyTorch's FlashAttention operators on warploom's kernels, in this process, until :func:`deactivate`.

    Registers "warploom" with ``torch.nn.attention`` (PyTorch 2.11 or newer) and activates it in place of any other
    implementation. ``scaled_dot_product_attention`` chooses FlashAttention before cuDNN from then on.
    """
    from torch.nn import attention as registry

    registry.register_flash_attention_impl(_NAME, register_fn=_Override)
    registry.activate_flash_attention_impl(_NAME)


def deactivate() -> None:
    """Restore what PyTorch had before :func:`activate`; does nothing if warploom is not active."""
    from torch.nn import attention as registry

    if registry.current_flash_attention_impl() == _NAME:
        registry.restore_flash_attention_impl()


class _Override:
    """Kernels of the FlashAttention operators at a dispatch key, until ``remove``."""

    def __init__(self, key: str = "CUDA") -> None:
        import torch

        self._library: Any = torch.library.Library("aten", "IMPL", key)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "[^$]*Overriding a previously registered kernel")
            for name, run in _OPERATORS.items():
                if not hasattr(torch.ops.aten, name):  # newer than this PyTorch
                    continue
                kernel = _with_fallback(run, _current(name, key))
                self._library.impl(name, kernel, key, with_keyset=True, allow_override=True)
        self._priority = _flash_before_cudnn()

    def remove(self) -> None:
        """Put PyTorch's own kernels back."""
        import torch

        self._library._destroy()
        if self._priority is not None:
            torch._C._set_sdp_priority_order(self._priority)


def _current(name: str, key: str) -> Any:
    """The kernel that an operator has at a dispatch key; None where it has none."""
    import torch

    try:
        return torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:  # a PyTorch without GPU kernels
        return None


def _flash_before_cudnn() -> list[int] | None:
    """Let SDPA prefer FlashAttention. Returns the order of its backends before; None where there is no GPU."""
    import torch
    from torch.nn.attention import SDPBackend

    if not torch.cuda.is_available():
        return None
    some = torch.empty(1, 1, 8, 8, dtype=torch.float16, device="cuda")
    torch.ops.aten._fused_sdp_choice(some, some, some)  # PyTorch sets its order at the first choice: not after this one
    order = torch._C._get_sdp_priority_order()
    flash: int = SDPBackend.FLASH_ATTENTION.value
    torch._C._set_sdp_priority_order([flash, *(backend for backend in order if backend != flash)])
    return order


def _with_fallback(run: Callable[..., Any], fallback: Any) -> Callable[..., Any]:
    """``run``; what it refuses goes to the kernel that PyTorch had."""
    import torch

    def kernel(keyset: Any, *arguments: Any, **named: Any) -> Any:
        try:
            with torch.no_grad():  # PyTorch's own derivative of the operator calls its backward operator
                return run(*arguments, **named)
        except (ProblemError, UnsupportedDeviceError):
            if fallback is None:
                raise
            return fallback.call_boxed(keyset, *arguments, **named)

    return kernel


def _refuse(dropout_p: float, return_debug_mask: bool = False, **others: Any) -> None:
    """Raises ProblemError for what PyTorch's kernel has beyond these."""
    if dropout_p or return_debug_mask or any(value is not None for value in others.values()):
        raise ProblemError(f"dropout and {', '.join(others) or 'debug masks'} are left to PyTorch's own kernel")


def _flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    _max_q: int,
    _max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> tuple[Any, ...]:
    """Tensors are (batch, length, heads, head_dim), or with ``cum_seq_q`` (tokens, heads, head_dim)."""
    _refuse(dropout_p, return_debug_mask, alibi_slopes=alibi_slopes)
    options = {"causal": is_causal, "scale": scale, "window": (window_size_left, window_size_right)}
    if cum_seq_q is None:
        _refuse(0.0, seqused_k=seqused_k, block_table=block_table, out=out)
        return *_forward(query, key, value, "bshd", **options), *_unused(query)
    from warploom.ops.attention_paged import attention_paged
    from warploom.ops.attention_varlen import attention_varlen

    call: Any
    if block_table is None:
        call, options["seqused_k"], where = attention_varlen, seqused_k, (cum_seq_q, cum_seq_k)
    else:
        call, where = attention_paged, (seqused_k if cum_seq_k is None or seqused_k is not None else cum_seq_k.diff(),)
        options |= {"block_table": block_table, "cu_seqlens_q": cum_seq_q}
    return *call(query, key, value, *where, return_lse=True, out=out, **options), *_unused(query)


def _flash_attention_forward_no_dropout_inplace(out: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """Run :func:`_flash_attention_forward` into ``out``. Returns the log-sum-exps."""
    return _flash_attention_forward(*arguments, **named, out=out)[1]


def _scaled_dot_product_flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Tensors are (batch, heads, length, head_dim)."""
    _refuse(dropout_p, return_debug_mask)
    out, lse = _forward(query, key, value, "bhsd", causal=is_causal, scale=scale)
    return out, lse, None, None, query.shape[2], key.shape[2], *_unused(query)


def _flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    _max_q: int,
    _max_k: int,
    dropout_p: float,
    is_causal: bool,
    _seed: Tensor,
    _offset: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    _refuse(dropout_p)
    options: Any = {"causal": is_causal, "scale": scale, "window": (window_size_left, window_size_right)}
    tensors = grad_out, query, key, value, out, logsumexp
    if cum_seq_q is None:
        return _backward(*tensors, "bshd", **options)
    import torch

    from warploom.ops.attention_varlen import attention_varlen_backward

    deterministic = torch.are_deterministic_algorithms_enabled()
    return attention_varlen_backward(*tensors, cum_seq_q, cum_seq_k, deterministic=deterministic, **options)


def _scaled_dot_product_flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    _cum_seq_q: Any,
    _cum_seq_k: Any,
    _max_q: int,
    _max_k: int,
    dropout_p: float,
    is_causal: bool,
    _seed: Tensor,
    _offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    _refuse(dropout_p)
    return _backward(grad_out, query, key, value, out, logsumexp, "bhsd", causal=is_causal, scale=scale)


_OPERATORS: dict[str, Callable[..., Any]] = {
    run.__name__: run
    for run in (
        _flash_attention_forward,
        _flash_attention_forward_no_dropout_inplace,
        _flash_attention_backward,
        _scaled_dot_product_flash_attention,
        _scaled_dot_product_flash_attention_backward,
    )
}
"""What takes the place of PyTorch's kernels, by the operators' names."""


def _forward(q: Tensor, k: Tensor, v: Tensor, axes: Layout, **options: Any) -> tuple[Tensor, Tensor]:
    """Attention of tensors with such axes. The result lies in memory as q does, as PyTorch's own."""
    from warploom.ops.attention import attention

    layout = _layout(q, axes)
    if layout == axes:
        return attention(q, k, v, layout=layout, return_lse=True, **options)
    out, lse = attention(*(x.transpose(1, 2) for x in (q, k, v)), layout=layout, return_lse=True, **options)
    return out.transpose(1, 2), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, axes: Layout, **options: Any
) -> tuple[Tensor, ...]:
    """The gradients by q, k and v, each in memory as its tensor lies."""
    import torch

    from warploom.ops.attention import attention_backward

    layout = _layout(q, axes)
    tensors: Any = (x if layout == axes else x.transpose(1, 2) for x in (dout, q, k, v, out))
    deterministic = torch.are_deterministic_algorithms_enabled()
    found = attention_backward(*tensors, lse=lse, layout=layout, deterministic=deterministic, **options)
    gradients = (x if layout == axes else x.transpose(1, 2) for x in found)
    return tuple(
        grad if _layout(x, axes) == layout else torch.empty_like(x).copy_(grad)
        for grad, x in zip(gradients, (q, k, v), strict=True)
    )


def _layout(x: Tensor, axes: Layout) -> Layout:
    """Return the memory layout of a tensor: heads within a position ("bshd") or positions within a head ("bhsd").

    Raises ProblemError where its batches are not outermost: results would lie otherwise than PyTorch's.
    """
    batch, first, second, _ = x.stride()
    if x.shape[0] > 1 and batch < max(first, second):
        raise ProblemError(f"the batches of a tensor with strides {x.stride()} are not outermost")
    kept = first >= second if x.shape[1] > 1 and x.shape[2] > 1 else True
    return axes if kept else "bhsd" if axes == "bshd" else "bshd"


def _unused(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Seed and offset of a dropout that is not there, and no mask for debugging, of the types that PyTorch expects."""
    import torch

    seed = torch.empty(2, dtype=torch.uint64, device=q.device)
    return seed, torch.empty((), dtype=torch.uint64, device=q.device), q.new_empty(0)
