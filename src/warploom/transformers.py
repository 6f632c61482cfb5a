"""Transformers' models on warploom's kernels: ``register()``, then ``attn_implementation="warploom"``.

Models say what they need by parameter names (scaling, sliding_window, softcap, is_causal); all of it is computed by the
kernels. What they do not compute is refused by its name, or runs on Transformers' own ``sdpa``.

Source: Transformers, "Attention Interface", and ``integrations/flash_attention.py`` of 5.23, whose meaning of every
option this keeps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warploom.core.errors import ProblemError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

NAME = "warploom"
"""What ``attn_implementation`` is called."""


def register() -> None:
    """Let Transformers' models choose ``attn_implementation="warploom"``, in this process."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import flash_attention_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, flash_attention_mask)


def attention_forward(
    module: Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    is_causal: bool | None = None, s_aux: Tensor | None = None, **others: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention as a model of Transformers asks for it.

    query (batch, heads, q_len, head_dim), key and value (batch, kv_heads, kv_len, head_dim); ``sliding_window`` counts
    the query's own key. Returns (batch, q_len, heads, head_dim), and None for the probabilities, which nobody has.

    A mask of four dimensions runs on ``sdpa``. Raises ProblemError for dropout and for padded batches.
    """
    if dropout:
        raise ProblemError(f"attention dropout is {dropout}, and warploom has no dropout: set attention_dropout to 0")
    if s_aux is not None:
        raise ProblemError("s_aux (attention sinks) is not supported: load the model with attn_implementation='eager'")
    if attention_mask is not None and attention_mask.dim() == 4:
        return _by_sdpa(module, query, key, value, attention_mask, scaling, softcap, is_causal, others)
    if attention_mask is not None or others.get("cu_seq_lens_q") is not None or _is_packed(query, others):
        raise ProblemError(
            "padded and packed batches are not supported: pass sequences of one length, or load the model with "
            "attn_implementation='sdpa'"
        )
    from warploom.ops.attention import attention

    length, kv_length = query.shape[2], key.shape[2]
    causal = (module.is_causal if is_causal is None else is_causal) and length > 1
    sides = None
    if sliding_window is not None and kv_length > sliding_window:
        sides = sliding_window - 1, sliding_window - 1
    # heads beside each other, so that the result is what the next layer reads, and nothing is copied
    q, k, v = (x.transpose(1, 2) for x in (query, key, _as_wide(value, query)))
    out = attention(q, k, v, causal=bool(causal), scale=scaling, window=sides, softcap=softcap)
    return out[..., : value.shape[3]], None


def _as_wide(value: Tensor, query: Tensor) -> Tensor:
    """``value`` with zeros up to the head_dim of the query."""
    from torch.nn.functional import pad

    missing = query.shape[3] - value.shape[3]
    return pad(value, (0, missing)) if missing else value


def _is_packed(query: Tensor, others: dict[str, Any]) -> bool:
    """Whether the positions of the only row of a batch say that it holds several sequences."""
    positions: Tensor | None = others.get("position_ids")
    if positions is None or query.shape[0] != 1 or positions.dim() != 2 or positions.shape[-1] < 2:
        return False
    return bool((positions.diff() != 1).any())


def _by_sdpa(
    module: Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None,
    softcap: float | None, is_causal: bool | None, others: dict[str, Any],
) -> tuple[Tensor, None]:  # fmt: skip
    """Transformers' own, which knows such masks; it raises ValueError for a soft cap."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    options = {**others, "scaling": scaling, "softcap": softcap, "is_causal": is_causal}
    return sdpa_attention_forward(module, query, key, value, mask, **options)
