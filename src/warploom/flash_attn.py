"""FlashAttention's functions by their names, order and defaults, on warploom's kernels.

``from warploom.flash_attn import flash_attn_func`` stands where ``from flash_attn import flash_attn_func`` stood. The
positional order is that of FlashAttention-2; what FlashAttention-3 and -4 add or call otherwise is taken by name.
Options that only steer their schedule (``num_splits``, ``pack_gqa``, ``sm_margin``, …) are taken and not used; what
warploom does not compute is refused by name.

Of all functions: ``causal`` and ``window_size`` (left, right) are aligned with the last query and the last key; -1 or
None is open. ``softcap`` of 0 is none. ``learnable_sink``, or ``s_aux``, is a logit for each query head. With
``return_lse`` (FlashAttention-4's) log-sum-exps are returned beside the result, with ``return_attn_probs``
(FlashAttention-2's) a third tensor too, which is empty as theirs is without dropout. They raise ProblemError for
dropout, ALiBi, what else is not computed, and arrays that the kernels do not take; TypeError for options that no
FlashAttention has.

Source: https://github.com/Dao-AILab/flash-attention, ``flash_attn/flash_attn_interface.py``,
``hopper/flash_attn_interface.py`` and ``flash_attn/cute/interface.py`` of August 2026.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

from warploom.core.errors import ProblemError, shown
from warploom.kernels.attention.problem import MOST_POSITIONS
from warploom.ops.append_to_cache import append_to_cache
from warploom.ops.attention import attention
from warploom.ops.attention_paged import attention_paged
from warploom.ops.attention_varlen import attention_varlen
from warploom.ops.options import whole

if TYPE_CHECKING:
    from torch import Tensor

    from warploom.ops.attention_arrays import Window

_HINTS = frozenset(
    {
        "num_splits",
        "pack_gqa",
        "sm_margin",
        "scheduler_metadata",
        "disable_scheduler_metadata",
        "min_seqlen_k",
        "fa_version",
    }
)
"""Options of FlashAttention-3 and -4 that change how something is computed, and not what."""

_NOT_COMPUTED = frozenset(
    {
        "qv",
        "q_descale",
        "k_descale",
        "v_descale",
        "attention_chunk",
        "gather_kv_indices",
        "score_mod",
        "score_mod_bwd",
        "mask_mod",
        "aux_tensors",
        "aux_scalars",
        "block_sparse_tensors",
        "block_sparse_tensors_bwd",
        "seqlen_k_per_split",
    }
)
"""Options of FlashAttention-3 and -4 that change the result."""


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> Any:
    """Attention of q (batch, q_len, heads, head_dim) and k, v (batch, kv_len, kv_heads, head_dim), float16 or bfloat16.

    Any head_dim up to 256. ``deterministic`` asks for gradients with equal bits. Log-sum-exps are float32 (batch,
    heads, q_len).
    """
    _needed(q=q, k=k, v=v)
    _refuse("flash_attn_func", dropout_p, alibi_slopes, others)
    call: Callable[..., Any] = _deterministic("attention") if deterministic else attention
    found = call(
        *_padded(q, k, v),
        causal=causal,
        scale=_scale(q, softmax_scale),
        window=window_size,
        softcap=_softcap(softcap),
        sinks=_one_of(learnable_sink=learnable_sink, s_aux=s_aux),
        return_lse=return_lse or return_attn_probs,
    )
    return _returned(found, q, return_attn_probs, return_lse)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Any:
    """:func:`flash_attn_func` with k and v in one tensor, (batch, kv_len, 2, kv_heads, head_dim), read in place."""
    k, v = _parts("kv", kv, 2, "(batch, kv_len, 2, kv_heads, head_dim)")
    return flash_attn_func(q, k, v, *options, **named)


def flash_attn_qkvpacked_func(qkv: Tensor, *options: Any, num_heads_q: int | None = None, **named: Any) -> Any:
    """:func:`flash_attn_func` with q, k and v in one tensor, (batch, length, 3, heads, head_dim), read in place.

    With ``num_heads_q`` (FlashAttention-3's) it is (batch, length, num_heads_q + 2 · kv_heads, head_dim).
    """
    if num_heads_q is None:
        q, k, v = _parts("qkv", qkv, 2, "(batch, length, 3, heads, head_dim)")
    else:
        _needed(qkv=qkv)
        num_heads_q = whole("num_heads_q", num_heads_q)
        heads = qkv.shape[2] if qkv.dim() == 4 else -1
        kv_heads = (heads - num_heads_q) // 2
        if min(kv_heads, num_heads_q) < 0 or heads != num_heads_q + 2 * kv_heads:
            form = f"(batch, length, {num_heads_q} + 2 · kv_heads, head_dim), by num_heads_q"
            raise ProblemError(f"qkv has shape {tuple(qkv.shape)}; it must be {form}")
        q, k, v = qkv.split((num_heads_q, kv_heads, kv_heads), dim=2)
    return flash_attn_func(q, k, v, *options, **named)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> Any:
    """Attention of sequences packed one behind the other: q (total_q, heads, head_dim), k, v (total_k, kv_heads, …).

    ``cu_seqlens_q`` and ``cu_seqlens_k``, int32 (batch + 1,), are where sequences begin, ``seqused_q`` and
    ``seqused_k``, int32 (batch,), how much of each counts. ``max_seqlen_q`` and ``max_seqlen_k`` are not needed:
    lengths are read on the device. With ``block_table`` (or ``page_table``), int32 (batch, pages of a sequence), k and
    v are pages (pages, page_size, kv_heads, head_dim), and all queries count: there is no ``seqused_q``. Log-sum-exps
    are float32 (heads, total_q).
    """
    _needed(q=q, k=k, v=v)
    _refuse("flash_attn_varlen_func", dropout_p, alibi_slopes, others)
    options: dict[str, Any] = {
        "causal": causal,
        "scale": _scale(q, softmax_scale),
        "window": window_size,
        "softcap": _softcap(softcap),
        "sinks": _one_of(learnable_sink=learnable_sink, s_aux=s_aux),
        "return_lse": return_lse or return_attn_probs,
        "out": out,
    }
    once = deterministic and out is None
    call: Callable[..., Any] = _deterministic("attention_varlen") if once else attention_varlen
    table = _one_of(block_table=block_table, page_table=page_table)
    if table is not None:
        if seqused_q is not None:
            raise ProblemError("seqused_q beside pages is not supported: pass the queries that count and their starts")
        lengths = cu_seqlens_k.diff() if seqused_k is None and cu_seqlens_k is not None else seqused_k
        if lengths is None:
            raise ProblemError("pages of no lengths: pass seqused_k, int32 (batch,), or cu_seqlens_k")
        found = attention_paged(q, k, v, lengths, block_table=table, cu_seqlens_q=cu_seqlens_q, **options)
    else:
        options |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
        found = call(*_padded(q, k, v), cu_seqlens_q, cu_seqlens_k, **options)
    return _returned(found, q, return_attn_probs, return_lse)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *options: Any, **named: Any) -> Any:
    """:func:`flash_attn_varlen_func` with k and v in one tensor, (total_k, 2, kv_heads, head_dim), read in place."""
    k, v = _parts("kv", kv, 1, "(total_k, 2, kv_heads, head_dim)")
    return flash_attn_varlen_func(q, k, v, *options, **named)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: Any = None, *options: Any, **named: Any
) -> Any:
    """:func:`flash_attn_varlen_func` with q, k and v in one tensor, (total, 3, heads, head_dim), read in place."""
    q, k, v = _parts("qkv", qkv, 1, "(total, 3, heads, head_dim)")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options, **named)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: Any = None,
    cu_seqlens_k_new: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    **others: Any,
) -> Any:
    """Attention of q (batch, q_len, heads, head_dim) on the first ``cache_seqlens`` keys and values of a cache.

    k_cache and v_cache are (batch, capacity, kv_heads, head_dim), or with ``block_table`` (or ``page_table``), int32
    (batch, pages of a sequence), pages (pages, page_size, kv_heads, head_dim); ``cache_batch_idx`` says which of their
    rows is whose. k and v (batch, new, kv_heads, head_dim) are written behind the first ``cache_seqlens`` before, by
    :func:`warploom.append_to_cache`: what there is no room for is left out.
    ``rotary_cos`` and ``rotary_sin`` (positions, rotary_dim / 2) turn k, and q: at its own positions if the mask is
    causal or a window, all at the first otherwise. With ``cu_seqlens_q`` q is (queries, heads, head_dim).

    Nothing waits for the GPU. Returns the result, and with ``return_softmax_lse`` log-sum-exps, float32 (batch, heads,
    q_len). There are no gradients. Raises ProblemError for ``cache_leftpad`` and for new keys of uneven lengths.
    """
    _needed(q=q, k_cache=k_cache, v_cache=v_cache)
    _refuse("flash_attn_with_kvcache", 0.0, alibi_slopes, others)
    if cache_leftpad is not None or cu_seqlens_k_new is not None or (k is not None and cu_seqlens_q is not None):
        raise ProblemError(
            "cache_leftpad, cu_seqlens_k_new, and k beside cu_seqlens_q are not supported: begin caches at 0, append "
            "first"
        )
    if (k is None) != (v is None):
        raise ProblemError("k and v, the new keys and values, come together: pass both or none")
    rows = None if cache_batch_idx is None else cache_batch_idx[:, None]  # each is a page
    table = _one_of(block_table=block_table, page_table=page_table, cache_batch_idx=rows)
    lengths = _lengths(cache_seqlens, k_cache, table)
    if k is not None and v is not None:
        if rotary_cos is not None and rotary_sin is not None:
            masked = causal or any(side not in (-1, None) for side in window_size or ())
            q = _turned(q, rotary_cos, rotary_sin, lengths[:, None] + _count(q) * masked, rotary_interleaved)
        lengths = lengths + k.shape[1]
        append_to_cache(
            k_cache,
            v_cache,
            k,
            v,
            lengths,
            block_table=table,
            cos=rotary_cos,
            sin=rotary_sin,
            interleaved=rotary_interleaved,
        )
    elif rotary_cos is not None or rotary_sin is not None:
        raise ProblemError("rotary_cos and rotary_sin turn q beside new keys only, k and v: turn it yourself")
    return attention_paged(
        q,
        k_cache,
        v_cache,
        lengths,
        block_table=table,
        cu_seqlens_q=cu_seqlens_q,
        causal=causal,
        window=window_size,
        softcap=_softcap(softcap),
        scale=softmax_scale,
        sinks=_one_of(sinks=sinks, s_aux=s_aux),
        return_lse=return_softmax_lse,
        out=out,
    )


def _lengths(given: Tensor | int | None, cache: Tensor, table: Tensor | None) -> Tensor:
    """Keys of each sequence: all that there is room for, if nothing says so."""
    import torch

    if isinstance(given, torch.Tensor):
        return given
    if given is not None and not isinstance(given, Integral):
        raise ProblemError(f"cache_seqlens is an int, or an int32 tensor (batch,), not {shown(given)}")
    if given is not None and not 0 <= given < MOST_POSITIONS:
        raise ProblemError(f"cache_seqlens is {given}: it counts the keys of a sequence, below {MOST_POSITIONS}")
    batch, most = (len(cache), cache.shape[1]) if table is None else (len(table), table.shape[1] * cache.shape[1])
    return torch.full((batch,), most if given is None else given, dtype=torch.int32, device=cache.device)


def _one_of(**given: Any) -> Any:
    """The option that is given, None if none is. Raises ProblemError for several: they say the same, or exclude it."""
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) > 1:
        raise ProblemError(f"{' and '.join(found)} exclude each other: pass one of them")
    return next(iter(found.values()), None)


def _parts(name: str, packed: Tensor, axis: int, form: str) -> tuple[Tensor, ...]:
    """The tensors packed along an axis of a ``form``, in place. Raises ProblemError for another shape."""
    _needed(**{name: packed})
    sizes = form.strip("()").split(", ")
    if packed.dim() != len(sizes) or packed.shape[axis] != int(sizes[axis]):
        raise ProblemError(f"{name} has shape {tuple(packed.shape)}; it must be {form}")
    return packed.unbind(axis)


def _count(x: Tensor) -> Tensor:
    """0, 1, … for each position of (batch, positions, …)."""
    import torch

    return torch.arange(x.shape[1], dtype=torch.int32, device=x.device)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of (batch, n, heads, head_dim) at positions (batch, n), in float32; later dimensions stay.

    Positions beyond the tables take their last row, as in :func:`warploom.append_to_cache`.
    """
    import torch

    rows = positions.long().clamp(0, len(cos) - 1)
    c, s = (table[rows].float()[:, :, None] for table in (cos, sin))
    half = c.shape[-1]
    turning, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    parts = a * c - b * s, b * c + a * s
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


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


def _needed(**given: Any) -> None:
    """Raises ProblemError for the first that is no array."""
    for name, array in given.items():
        if not hasattr(array, "shape"):
            raise ProblemError(f"{name}: {type(array).__name__} is not an array: pass a torch tensor")


def _softcap(value: Any) -> Any:
    """FlashAttention's 0 as None; a tensor that requires a gradient is not read, and is refused where it is taken."""
    return value if getattr(value, "requires_grad", False) else value or None


def _padded(*tensors: Tensor) -> list[Tensor]:
    """With zeros up to the next head_dim that kernels take, a multiple of 8."""
    missing = -tensors[0].shape[-1] % 8
    if not missing:
        return list(tensors)
    from torch.nn.functional import pad

    return [pad(x, (0, missing)) for x in tensors]


def _scale(q: Tensor, softmax_scale: float | None) -> float | None:
    """The scale, by the head_dim before it is padded."""
    head_dim = q.shape[-1]
    return head_dim**-0.5 if softmax_scale is None and head_dim % 8 else softmax_scale


def _returned(found: Any, q: Tensor, return_attn_probs: bool, return_lse: bool) -> Any:
    """The results in the form that was asked for, without padding."""
    out, *lse = found if isinstance(found, tuple) else (found,)
    head_dim = q.shape[-1]
    out = out[..., :head_dim] if head_dim % 8 else out
    if return_attn_probs:
        return out, lse[0], q.new_empty(0)
    return (out, lse[0]) if return_lse else out


def _deterministic(name: str) -> Callable[..., Any]:
    """``attention`` or ``attention_varlen``, whose gradients have equal bits from run to run."""
    from warploom.operators.names import operator_of

    return partial(operator_of(name), deterministic=True)
