"""FlashAttention's functions by their names, order and defaults, on warploom's kernels.

``from warploom.flash_attn import flash_attn_func`` stands where ``from flash_attn import flash_attn_func`` stood. The
positional order is that of FlashAttention-2; what FlashAttention-3 and -4 add or call otherwise is taken by name.
Options that only steer their schedule (``num_splits``, ``pack_gqa``, ``sm_margin``, …) are taken and not used, and
:func:`get_scheduler_metadata` gives nothing to them; what warploom does not compute is refused by name.

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

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from warploom.core.errors import ProblemError, shown
from warploom.interop.refusals import refuse_watched
from warploom.interop.tracing import is_tracing
from warploom.kernels.attention.problem import MOST_POSITIONS
from warploom.ops.attention import attention
from warploom.ops.attention_paged import append_to_cache, attention_paged, checked_attention_paged
from warploom.ops.attention_varlen import attention_varlen
from warploom.ops.declare import known_signature, refuse_unknown, whole

if TYPE_CHECKING:
    from torch import Tensor

    from warploom.kernels.attention.scores import Window

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

_FP8 = "pass q, k and v as float16 or bfloat16; an fp8 cache is read by warploom.attention_paged(k_scale=, v_scale=)"
_NOT_COMPUTED = {
    "qv": "concatenate it to q, and v to k, along the head_dim",
    "q_descale": _FP8,
    "k_descale": _FP8,
    "v_descale": _FP8,
    "attention_chunk": "pass each chunk as a sequence of flash_attn_varlen_func, or window_size",
    "gather_kv_indices": "gather the keys before",
    "score_mod": "softcap and window_size are computed",
    "score_mod_bwd": "softcap and window_size are computed",
    "mask_mod": "causal and window_size are computed",
    "aux_tensors": "leave it out",
    "aux_scalars": "leave it out",
    "block_sparse_tensors": "causal and window_size are computed",
    "block_sparse_tensors_bwd": "causal and window_size are computed",
    "seqlen_k_per_split": "warploom.attention_paged(fixed_split=) divides keys so",
}
"""Options of FlashAttention-3 and -4 that change the result, and what to do instead."""
_CACHES_BEGIN = (
    "cache_leftpad, cu_seqlens_k_new, and k beside cu_seqlens_q are not supported: begin caches at 0, append first"
)


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
    _refuse("flash_attn_func", dropout_p, softmax_scale, alibi_slopes, others)
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
    return _returned(found, q, v, return_attn_probs, return_lse)


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
    v are pages (pages, page_size, kv_heads, head_dim), and all queries count: there is no ``seqused_q``. Where a
    gradient is wanted, the pages that the table names are copied side by side first. Log-sum-exps are float32 (heads,
    total_q).
    """
    _needed(q=q, k=k, v=v)
    _refuse("flash_attn_varlen_func", dropout_p, softmax_scale, alibi_slopes, others)
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
        _optional(block_table=table, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k)
        if seqused_q is not None:
            raise ProblemError("seqused_q beside pages is not supported: pass the queries that count and their starts")
        lengths = cu_seqlens_k.diff() if seqused_k is None and cu_seqlens_k is not None else seqused_k
        if lengths is None:
            raise ProblemError("pages of no lengths: pass seqused_k, int32 (batch,), or cu_seqlens_k")
        _of_keys(k=k, v=v)
        _refuse_lengths("seqused_k" if cu_seqlens_k is None else "cu_seqlens_k", lengths, 0, k, table)
        if not _differentiated(q, k, v, options["sinks"]):
            found = attention_paged(q, k, v, lengths, block_table=table, cu_seqlens_q=cu_seqlens_q, **options)
            return _returned(found, q, v, return_attn_probs, return_lse)
        k, v, cu_seqlens_k, seqused_k = _gathered(k, v, lengths, table)
    options |= {"seqused_q": seqused_q, "seqused_k": seqused_k}
    found = call(*_padded(q, k, v), cu_seqlens_q, cu_seqlens_k, **options)
    return _returned(found, q, v, return_attn_probs, return_lse)


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
    rotary_seqlens: Tensor | None = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    **others: Any,
) -> Any:
    """Attention of q (batch, q_len, heads, head_dim) on the first ``cache_seqlens`` keys and values of a cache.

    k_cache and v_cache are (batch, capacity, kv_heads, head_dim), or with ``block_table`` (or ``page_table``), int32
    (batch, pages of a sequence), pages (pages, page_size, kv_heads, head_dim); ``cache_batch_idx`` says which of their
    rows is whose. k and v (batch, new, kv_heads, head_dim) are written behind the first ``cache_seqlens`` before, by
    :func:`warploom.append_to_cache`. ``rotary_cos`` and ``rotary_sin`` (positions, rotary_dim / 2) turn k, and q: at
    its own positions if the mask is causal or a window, all at the first otherwise. Positions begin at
    ``cache_seqlens``, or at ``rotary_seqlens``, int32 (batch,). With ``cu_seqlens_q`` q is (queries, heads, head_dim).

    Nothing waits for the GPU, and new keys that a cache on it has no room for are left out. Returns the result, and
    with ``return_softmax_lse`` log-sum-exps, float32 (batch, heads, q_len). There are no gradients. Raises
    ProblemError, before anything is written, for what no cache has room for by a length that the CPU knows (an int, or
    a tensor there), for ``cache_leftpad``, and for new keys of uneven lengths.
    """
    _needed(q=q, k_cache=k_cache, v_cache=v_cache)
    _refuse("flash_attn_with_kvcache", 0.0, softmax_scale, alibi_slopes, others)
    _optional(k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin, rotary_seqlens=rotary_seqlens)
    _optional(cache_batch_idx=cache_batch_idx, block_table=block_table, page_table=page_table)
    if cache_leftpad is not None or cu_seqlens_k_new is not None or (k is not None and cu_seqlens_q is not None):
        raise ProblemError(_CACHES_BEGIN)
    _of_keys(k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    rows = None if cache_batch_idx is None else cache_batch_idx[:, None]  # each is a page
    table = _one_of(block_table=block_table, page_table=page_table, cache_batch_idx=rows)
    new = _new_keys(k, v, cache_seqlens, rotary_cos, rotary_sin)
    _refuse_lengths("cache_seqlens", cache_seqlens, new, k_cache, table)
    lengths = _lengths(cache_seqlens, k_cache, table)
    if rotary_seqlens is not None:
        _refuse_positions(rotary_seqlens)
    options: dict[str, Any] = {
        "block_table": table,
        "cu_seqlens_q": cu_seqlens_q,
        "causal": causal,
        "window": window_size,
        "softcap": _softcap(softcap),
        "scale": softmax_scale,
        "sinks": _one_of(sinks=sinks, s_aux=s_aux),
        "return_lse": return_softmax_lse,
        "out": out,
    }
    if k is None or v is None:
        return attention_paged(q, k_cache, v_cache, lengths, **options)
    counted = lengths + new
    attend = checked_attention_paged(q, k_cache, v_cache, counted, **options)  # before anything is written
    turning: dict[str, Any] = {"cos": rotary_cos, "sin": rotary_sin, "interleaved": rotary_interleaved}
    if rotary_cos is not None and rotary_sin is not None:
        apart = None if rotary_seqlens is cache_seqlens else rotary_seqlens
        q, k, turning = _rotated(q, k, turning, lengths, apart, masked=causal or _is_window(window_size))
        attend = None
    append_to_cache(k_cache, v_cache, k, v, counted, block_table=table, **turning)
    return attention_paged(q, k_cache, v_cache, counted, **options) if attend is None else attend()


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: Any = None
) -> tuple[Tensor, Tensor]:
    """The results of attention on all keys, put together of those on parts of the keys.

    out_partial (parts, …, head_dim) and lse_partial (parts, …), in FlashAttention-3 (parts, batch, q_len, heads), have
    one result and its log-sum-exps for each part; a part without a key has -inf, and what its result holds does not
    count. Returns the result, written to ``out`` if there is one, of ``out_dtype`` or else the type of out_partial, and
    its log-sum-exps, float32. PyTorch computes them, in float32.
    """
    import torch

    _needed(out_partial=out_partial, lse_partial=lse_partial)
    _optional(out=out)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise ProblemError(f"out_dtype is a torch.dtype, not {shown(out_dtype)}")
    if not (out_partial.is_floating_point() and lse_partial.is_floating_point()):
        raise ProblemError(f"out_partial is {out_partial.dtype} and lse_partial {lse_partial.dtype}: both are floats")
    if out_partial.dim() < 2 or out_partial.shape[:-1] != lse_partial.shape:
        raise ProblemError(
            f"out_partial has shape {tuple(out_partial.shape)} and lse_partial {tuple(lse_partial.shape)}: they are "
            "(parts, …, head_dim) and (parts, …)"
        )
    logs = lse_partial.float()
    lse = logs.logsumexp(0)
    weights = torch.where(logs == -torch.inf, 0.0, (logs - lse).exp())[..., None]
    found = torch.where(weights == 0.0, 0.0, weights * out_partial).sum(0)
    if out is None:
        return found.to(out_partial.dtype if out_dtype is None else out_dtype), lse
    if out.shape != found.shape or (out_dtype is not None and out.dtype != out_dtype):
        raise ProblemError(
            f"out is {out.dtype} of shape {tuple(out.shape)}; it must be {out_dtype or out.dtype} of "
            f"{tuple(found.shape)}"
        )
    return out.copy_(found), lse


def get_scheduler_metadata(*_: Any, **_named: Any) -> None:
    """FlashAttention-3's schedule of a call, made before it: None, since warploom's kernels find theirs on the GPU.

    ``flash_attn_with_kvcache(scheduler_metadata=None)`` takes what this returns.
    """


def _new_keys(k: Tensor | None, v: Tensor | None, lengths: Any, cos: Tensor | None, sin: Tensor | None) -> int:
    """The number of new keys of each sequence. Raises ProblemError for new keys without what belongs to them."""
    if (k is None) != (v is None):
        raise ProblemError("k and v, the new keys and values, come together: pass both or none")
    if k is None and (cos is not None or sin is not None):
        raise ProblemError("rotary_cos and rotary_sin turn q beside new keys only, k and v: turn it yourself")
    new = 0 if k is None else k.shape[1]
    if new and lengths is None:
        raise ProblemError("k and v are written behind the keys that cache_seqlens counts: pass it")
    return new


def _lengths(given: Tensor | int | None, cache: Tensor, table: Tensor | None) -> Tensor:
    """Keys of each sequence: all that there is room for, if nothing says so."""
    import torch

    if isinstance(given, torch.Tensor):
        if given.dtype is not torch.int32 or given.layout is not torch.strided:
            raise ProblemError(f"cache_seqlens is {given.dtype}, {given.layout}: it must be int32 (batch,), strided")
        return given
    if given is not None and not isinstance(given, Integral):
        raise ProblemError(f"cache_seqlens is an int, or an int32 tensor (batch,), not {shown(given)}")
    if given is not None and not 0 <= given < MOST_POSITIONS:
        raise ProblemError(f"cache_seqlens is {given}: it counts the keys of a sequence, below {MOST_POSITIONS}")
    batch, most = (len(cache), cache.shape[1]) if table is None else (len(table), table.shape[1] * cache.shape[1])
    return torch.full((batch,), most if given is None else given, dtype=torch.int32, device=cache.device)


def _refuse_lengths(name: str, given: Any, new: int, cache: Tensor, table: Tensor | None) -> None:
    """Raises ProblemError for lengths that the CPU knows and a cache has no room for, with ``new`` keys behind them."""
    import torch

    if isinstance(given, torch.Tensor):
        if given.device.type != "cpu" or given.dim() != 1 or not len(given) or is_tracing():
            return
        if given.dtype not in (torch.int32, torch.int64) or given.layout is not torch.strided:
            return  # the operation refuses it
        least, most = int(given.min()), int(given.max())
    elif isinstance(given, Integral):
        least = most = int(given)
    else:
        return
    entries = 1 if table is None or table.dim() != 2 else table.shape[1]
    room = cache.shape[1] * entries
    if least < 0 or most + new > room:
        count = f"{new} new ones do" if new else "they do"
        why = "is less than no key" if least < 0 else f"keys, and {count} not fit"
        columns = "" if table is None else f", {entries} columns of block_table"
        raise ProblemError(
            f"{name} says {least if least < 0 else most} {why}: a sequence has room for {room} keys{columns}"
        )


def _refuse_positions(given: Tensor) -> None:
    """Raises ProblemError for ``rotary_seqlens`` that are no integers, one for each sequence."""
    import torch

    if given.dtype not in (torch.int32, torch.int64) or given.dim() != 1:
        form = f"{given.dtype} of shape {tuple(given.shape)}"
        raise ProblemError(f"rotary_seqlens is {form}: it has the positions of sequences, int32 (batch,)")


def _of_keys(**given: Tensor | None) -> None:
    """Raises ProblemError for caches, pages or new keys that are given and have not four dimensions."""
    for name, x in given.items():
        if x is not None and x.dim() != 4:
            raise ProblemError(f"{name} has shape {tuple(x.shape)}; it must be (…, keys, kv_heads, head_dim), of four")


def _differentiated(*tensors: Tensor | None) -> bool:
    """Whether a gradient by one of these may be asked for."""
    from warploom.operators.registration import differentiated

    return differentiated(*tensors)


def _gathered(k: Tensor, v: Tensor, lengths: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values of pages side by side, with a history; where sequences begin, and how many keys of each count."""
    import torch

    if table.dim() != 2 or k.dim() != 4 or v.dim() != 4:
        raise ProblemError(
            f"block_table has shape {tuple(table.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)}: they are (batch, "
            "pages of a sequence) and (pages, page_size, kv_heads, head_dim)"
        )
    if table.dtype is not torch.int32:
        raise ProblemError(f"block_table is {table.dtype}: it names pages, int32 (batch, pages of a sequence)")
    named = table.long().clamp(0, max(0, len(k) - 1))
    room = table.shape[1] * k.shape[1]
    starts = torch.arange(0, len(table) * room + 1, max(1, room), dtype=torch.int32, device=k.device)
    return k[named].flatten(0, 2), v[named].flatten(0, 2), starts, lengths.clamp(0, room)


def _one_of(**given: Any) -> Any:
    """The option that is given, None if none is. Raises ProblemError for several: they say the same, or exclude it."""
    found = None
    for value in given.values():
        if value is not None:
            if found is not None:
                names = " and ".join([name for name, x in given.items() if x is not None])
                raise ProblemError(f"{names} exclude each other: pass one of them")
            found = value
    return found


def _parts(name: str, packed: Tensor, axis: int, form: str) -> tuple[Tensor, ...]:
    """The tensors packed along an axis of a ``form``, in place. Raises ProblemError for another shape."""
    _needed(**{name: packed})
    sizes = form.strip("()").split(", ")
    if packed.dim() != len(sizes) or packed.shape[axis] != int(sizes[axis]):
        raise ProblemError(f"{name} has shape {tuple(packed.shape)}; it must be {form}")
    return packed.unbind(axis)


def _is_window(window_size: Window | None) -> bool:
    return window_size is not None and any(side not in (-1, None) for side in window_size)


def _rotated(
    q: Tensor, k: Tensor, turning: dict[str, Any], lengths: Tensor, apart: Tensor | None, *, masked: bool
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """q at its positions, which begin at ``lengths`` or ``apart`` from those, the new keys, and what turns those yet.

    q is at its own positions if it is ``masked``, all at the first otherwise. Keys that begin ``apart`` are turned
    here, others as they are appended.
    """
    first = (lengths if apart is None else apart)[:, None]
    q = _turned("q", q, first + _count(q) * masked, **turning)
    return (q, k, turning) if apart is None else (q, _turned("k", k, first + _count(k), **turning), {})


def _count(x: Tensor) -> Tensor:
    """0, 1, … for each position of (batch, positions, …)."""
    import torch

    return torch.arange(x.shape[1], dtype=torch.int32, device=x.device)


def _turned(name: str, x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of (batch, n, heads, head_dim) at positions (batch, n), in float32; later dimensions stay.

    Positions beyond the tables take their last row, as in :func:`warploom.append_to_cache`. Raises ProblemError for
    tables that do not fit the tensor called ``name``.
    """
    import torch

    fits = cos.dim() == 2 and cos.shape == sin.shape and len(cos) > 0
    if x.dim() != 4 or not fits or 2 * cos.shape[1] > x.shape[3] or len(positions) != len(x):
        raise ProblemError(
            f"rotary_cos has shape {tuple(cos.shape)}, rotary_sin {tuple(sin.shape)}, {name} {tuple(x.shape)}, and "
            f"there are {len(positions)} lengths: they are (positions, rotary_dim / 2) twice, with rotary_dim up to "
            "head_dim, (batch, tokens, heads, head_dim), and batch"
        )
    rows = positions.long().clamp(0, len(cos) - 1)
    c, s = (table[rows].float()[:, :, None] for table in (cos, sin))
    half = c.shape[-1]
    turning, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    a, b = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    parts = a * c - b * s, b * c + a * s
    turned = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)


def _refuse(name: str, dropout_p: Any, softmax_scale: Any, alibi_slopes: Any, others: dict[str, Any]) -> None:
    """Raises ProblemError for what is not computed, TypeError for what is no option of FlashAttention."""
    order = (
        "The positional order here is FlashAttention-2's, where dropout_p comes before softmax_scale, and not "
        "FlashAttention-3's: pass options by name"
    )
    if dropout_p.__class__ is not float and not isinstance(dropout_p, Real):
        raise ProblemError(f"dropout_p is a number, not {shown(dropout_p)}. {order}")
    if dropout_p:
        raise ProblemError(f"dropout_p is {dropout_p}, and warploom has no dropout. {order}")
    if isinstance(softmax_scale, bool):
        raise ProblemError(f"softmax_scale is a number, not {softmax_scale}. {order}")
    if alibi_slopes is not None:
        raise ProblemError("alibi_slopes: warploom has no ALiBi; leave it out")
    for option, value in others.items():
        if option in _NOT_COMPUTED:
            if value is not None and not (isinstance(value, int) and value == 0):
                instead = _NOT_COMPUTED[option]
                raise ProblemError(f"{option}: warploom does not compute this option of FlashAttention; {instead}")
        elif option not in _HINTS:
            refuse_unknown(name, (option,), known_signature(globals()[name]).parameters)


def _needed(**given: Any) -> None:
    """Raises ProblemError for the first that is no tensor of PyTorch, or one number."""
    import torch

    for name, array in given.items():
        if not isinstance(array, torch.Tensor):
            raise ProblemError(
                f"{name}: {type(array).__name__} is not a torch tensor, and FlashAttention's functions take no other "
                "array: pass one. Those of warploom, such as warploom.attention, take arrays of other frameworks"
            )
        if not array.ndim:
            raise ProblemError(f"{name} is a single number: it has at least one dimension")


def _optional(**given: Any) -> None:
    """Raises ProblemError for the first that is neither None nor a tensor of PyTorch."""
    for name, array in given.items():
        if array is not None:
            _needed(**{name: array})


def _softcap(value: Any) -> Any:
    """FlashAttention's 0 as None. Raises ProblemError for a number that JAX or torch.func traces, before it is read."""
    if value is not None and value.__class__ is not float and not isinstance(value, Real):
        import torch

        if not torch.compiler.is_compiling():
            refuse_watched("softcap", value)
    return value or None


def _padded(*tensors: Tensor) -> Sequence[Tensor]:
    """With zeros up to the next head_dim that kernels take, a multiple of 8: of each tensor its own."""
    for x in tensors:
        if x.shape[-1] % 8:
            break
    else:
        return tensors
    from torch.nn.functional import pad

    return [pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x for x in tensors]


def _scale(q: Tensor, softmax_scale: float | None) -> float | None:
    """The scale, by the head_dim before it is padded."""
    head_dim = q.shape[-1]
    return head_dim**-0.5 if softmax_scale is None and head_dim % 8 else softmax_scale


def _returned(found: Any, q: Tensor, v: Tensor, return_attn_probs: bool, return_lse: bool) -> Any:
    """The results in the form that was asked for, without padding."""
    several, value_dim = return_attn_probs or return_lse, v.shape[-1]
    out = found[0] if several else found
    out = out[..., :value_dim] if value_dim % 8 else out
    if return_attn_probs:
        return out, found[1], q.new_empty(0)
    return (out, found[1]) if several else out


def _deterministic(name: str) -> Callable[..., Any]:
    """``attention`` or ``attention_varlen``, whose gradients have equal bits from run to run."""
    from warploom.operators import operator_of

    return partial(operator_of(name), deterministic=True)
