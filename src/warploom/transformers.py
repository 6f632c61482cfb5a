"""Transformers' models on warploom's kernels: ``register()``, then ``attn_implementation="warploom"``.

Models say what they need by parameter names (scaling, sliding_window, softcap, is_causal, s_aux), and the kernels
compute it. What they do not compute is refused by its name, or runs on Transformers' own ``sdpa``.

Source: Transformers, "Attention Interface", and ``integrations/flash_attention.py`` of 5.23, whose meaning of every
option this keeps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from warploom.core.errors import ProblemError
from warploom.ops.attention import attention
from warploom.ops.attention_varlen import attention_varlen
from warploom.ops.declare import by_our_names

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

_varlen: Callable[..., Any] = attention_varlen

NAME = "warploom"
"""What ``attn_implementation`` is called."""


def register() -> None:
    """Let Transformers' models choose ``attn_implementation="warploom"``, in this process."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, flash_attention_mask)


def attention_forward(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as a model of Transformers asks for it.

    query (batch, heads, q_len, head_dim), key and value (batch, kv_heads, kv_len, head_dim); ``sliding_window`` counts
    the query's own key. Returns (batch, q_len, heads, head_dim), and None for the probabilities, which nobody has.

    Batches that a mask of two dimensions pads, and sequences packed in one row, are computed as the sequences they are;
    a mask of four dimensions runs on ``sdpa``. Raises ProblemError for dropout and for caches of continuous batching
    without such a mask.
    """
    if dropout:
        raise ProblemError(f"attention dropout is {dropout}, and warploom has no dropout: set attention_dropout to 0")
    if attention_mask is not None and attention_mask.dim() == 4:
        if s_aux is not None:
            raise ProblemError(
                "s_aux, logits of heads, beside a four-dimensional mask: use attn_implementation='eager'"
            )
        return _by_sdpa(module, query, key, value, attention_mask, scaling, softcap, is_causal, others)
    if others.get("cache") is not None:
        raise ProblemError("continuous batching on Transformers' paged cache: use attn_implementation='sdpa' for it")
    length, kv_length = query.shape[2], key.shape[2]
    sides = None
    if sliding_window is not None and kv_length > sliding_window:
        sides = sliding_window - 1, sliding_window - 1
    causal = (module.is_causal if is_causal is None else is_causal) and length > 1
    options = by_our_names(is_causal=bool(causal), scaling=scaling, window=sides, softcap=softcap, s_aux=s_aux)
    # heads beside each other, so that the result is what the next layer reads, and nothing is copied
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    starts = None if attention_mask is not None else _starts(query, others)
    if attention_mask is not None:
        return _padded(q, k, v, attention_mask.bool(), options), None
    return attention(q, k, v, **options) if starts is None else _packed(q, k, v, starts, options), None


def _starts(query: Tensor, others: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Where the sequences of queries and keys begin in the only row of a batch; None if it is one sequence.

    The model says so, or its positions do, which begin anew with each sequence.
    """
    import torch

    given = others.get("cu_seq_lens_q"), others.get("cu_seq_lens_k")
    if given[0] is not None and given[1] is not None:
        return given[0].to(torch.int32), given[1].to(torch.int32)
    positions: Tensor | None = others.get("position_ids")
    if positions is None or query.shape[0] != 1 or positions.dim() != 2 or positions.shape[-1] < 2:
        return None
    begins = (positions[0].diff() != 1).nonzero().flatten() + 1
    if not len(begins):
        return None
    starts = torch.nn.functional.pad(begins, (1, 0)).to(torch.int32)
    starts = torch.cat([starts, starts.new_tensor([positions.shape[1]])])
    return starts, starts


def _packed(q: Tensor, k: Tensor, v: Tensor, starts: tuple[Tensor, Tensor], options: dict[str, Any]) -> Tensor:
    """Sequences one behind the other in the only row of a batch."""
    rows = (x.flatten(0, 1) for x in (q, k, v))
    return _varlen(*rows, *starts, **options)[None]


def _padded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: dict[str, Any]) -> Tensor:
    """Sequences of the lengths that a mask (batch, kv_len) says: those tokens count, and are brought to the front.

    Queries are the last of the tokens. The result is zero where the mask is. Nothing waits for the device.
    """
    import torch

    batch, length = q.shape[:2]
    kv_length = mask.shape[1]  # a cache may have room for more
    kept = {"q": mask[:, -length:] if length > 1 else mask.new_ones(batch, 1), "k": mask}
    order = {name: torch.argsort(~x, dim=1, stable=True)[..., None, None] for name, x in kept.items()}
    starts = {name: _every(x.shape[1], batch, q) for name, x in kept.items()}
    used = {name: x.sum(1, dtype=torch.int32) for name, x in kept.items()}
    rows = (
        x[:, :kv_length].gather(1, order[name].expand(-1, -1, *x.shape[2:])).flatten(0, 1)
        for x, name in ((q, "q"), (k, "k"), (v, "k"))
    )
    out = _varlen(*rows, starts["q"], starts["k"], seqused_q=used["q"], seqused_k=used["k"], **options)
    out = out.view(*q.shape[:3], v.shape[3])
    found = torch.empty_like(out).scatter_(1, order["q"].expand_as(out), out)
    return found.masked_fill_(~kept["q"][..., None, None], 0.0)  # rows of no sequence hold anything


def _every(length: int, batch: int, like: Tensor) -> Tensor:
    """Where sequences begin that have equal room."""
    import torch

    return torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=like.device)


def _by_sdpa(
    module: Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    softcap: float | None,
    is_causal: bool | None,
    others: dict[str, Any],
) -> tuple[Tensor, None]:
    """Transformers' own, which knows such masks; it raises ValueError for a soft cap."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    options = {**others, "scaling": scaling, "softcap": softcap, "is_causal": is_causal}
    return sdpa_attention_forward(module, query, key, value, mask, **options)
