"""FlashAttention's functions by their names, order and defaults, on warploom's kernels.

``from warploom.flash_attn import flash_attn_func`` stands where ``from flash_attn import flash_attn_func`` stood. The
positional order is that of FlashAttention-2; what FlashAttention-3 and -4 add or call otherwise is taken by name.
Options that only steer their schedule (``num_splits``, ``pack_gqa``, ``sm_margin``, …) are taken and not used; what
warploom does not compute is refused by name.

Source: https://github.com/Dao-AILab/flash-attention, ``flash_attn/flash_attn_interface.py``,
``hopper/flash_attn_interface.py`` and ``flash_attn/cute/interface.py`` of August 2026.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warploom.core.errors import ProblemError
from warploom.ops.attention import attention

if TYPE_CHECKING:
    from torch import Tensor

    from warploom.ops.attention_arrays import Window

_HINTS = frozenset({
    "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata", "disable_scheduler_metadata", "min_seqlen_k",
    "fa_version",
})  # fmt: skip
"""Options of FlashAttention-3 and -4 that change how something is computed, and not what."""

_NOT_COMPUTED = frozenset({
    "qv", "q_descale", "k_descale", "v_descale", "attention_chunk", "gather_kv_indices", "score_mod", "score_mod_bwd",
    "mask_mod", "aux_tensors", "aux_scalars", "block_sparse_tensors", "block_sparse_tensors_bwd",
    "learnable_sink", "s_aux",
})  # fmt: skip
"""Options of FlashAttention-3 and -4 that change the result."""


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, return_lse: bool = False, **others: Any,
) -> Any:  # fmt: skip
    """Attention of q (batch, q_len, heads, head_dim) and k, v (batch, kv_len, kv_heads, head_dim), float16 or bfloat16.

    ``causal`` and ``window_size`` (left, right) are aligned with the last query and the last key; -1 or None is open.
    ``softcap`` of 0 is none. ``deterministic`` asks for gradients with equal bits. Any head_dim up to 256.

    Returns the result, shaped like q; with ``return_lse`` (FlashAttention-4's) and its log-sum-exps, float32 (batch,
    heads, q_len); with ``return_attn_probs`` (FlashAttention-2's) a third tensor too, which is empty as theirs is
    without dropout.

    Raises ProblemError for dropout, ALiBi, what else is not computed, and arrays that :func:`warploom.attention` does
    not take; TypeError for options that no FlashAttention has.
    """
    _refuse("flash_attn_func", dropout_p, alibi_slopes, others)
    head_dim = q.shape[-1]
    if head_dim % 8:
        softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        q, k, v = (_padded(x) for x in (q, k, v))
    call = _deterministic if deterministic else attention
    found = call(
        q, k, v, causal=causal, scale=softmax_scale, window=window_size, softcap=softcap or None,
        return_lse=return_lse or return_attn_probs,
    )  # fmt: skip
    out, *lse = found if isinstance(found, tuple) else (found,)
    if head_dim % 8:
        out = out[..., :head_dim]
    if return_attn_probs:
        return out, lse[0], q.new_empty(0)
    return (out, lse[0]) if return_lse else out


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, **others: Any,
) -> Any:  # fmt: skip
    """:func:`flash_attn_func` with k and v in one tensor, (batch, kv_len, 2, kv_heads, head_dim), read in place."""
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, **others,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, *, num_heads_q: int | None = None, **others: Any,
) -> Any:  # fmt: skip
    """:func:`flash_attn_func` with q, k and v in one tensor, (batch, length, 3, heads, head_dim), read in place.

    With ``num_heads_q`` (FlashAttention-3's) it is (batch, length, num_heads_q + 2 · kv_heads, head_dim).
    """
    if num_heads_q is None:
        q, k, v = qkv.unbind(2)
    else:
        kv_heads = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split((num_heads_q, kv_heads, kv_heads), dim=2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs, **others,
    )  # fmt: skip


def _refuse(name: str, dropout_p: float, alibi_slopes: Any, others: dict[str, Any]) -> None:
    """Raises ProblemError for what is not computed, TypeError for what is no option of FlashAttention."""
    if dropout_p:
        raise ProblemError(
            f"dropout_p is {dropout_p}, and warploom has no dropout. The positional order here is FlashAttention-2's: "
            "dropout_p comes before softmax_scale; pass options by name"
        )
    if alibi_slopes is not None:
        raise ProblemError("alibi_slopes: warploom has no ALiBi; leave it out")
    for option, value in others.items():
        if option in _NOT_COMPUTED:
            if value is not None and not (isinstance(value, int) and value == 0):
                raise ProblemError(f"{option}: warploom does not compute this option of FlashAttention; leave it out")
        elif option not in _HINTS:
            raise TypeError(f"{name}() got an unexpected keyword argument {option!r}")


def _padded(x: Tensor) -> Tensor:
    """With zeros up to the next head_dim that kernels take, a multiple of 8."""
    from torch.nn.functional import pad

    return pad(x, (0, -x.shape[-1] % 8))


def _deterministic(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """:func:`warploom.attention`, whose gradients have equal bits from run to run."""
    from warploom.operators.attention import call

    return call(q, k, v, deterministic=True, **options)
