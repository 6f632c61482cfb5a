"""flash-linear-attention: chunked and recurrent linear attention in Triton."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from .trial import Result, case

_FLA = ("fla-core==0.6.0", "einops", "triton==3.8.0")


def _inputs(tokens: int, keys: int = 32, values: int = 64, heads: int = 2) -> tuple[torch.Tensor, ...]:
    q, k, v = (torch.randn(1, tokens, heads, dim) / 4 for dim in (keys, keys, values))
    return q, k, v


def _recurrent(q: Any, k: Any, v: Any, decay: Any = None, beta: Any = None, scale: float | None = None) -> Any:
    """Linear attention step by step, in double precision: with decays, and by the delta rule with ``beta``."""
    q, k, v = (x.double() for x in (q, k, v))
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3], dtype=torch.double)
    rows: list[Any] = []
    for t in range(q.shape[1]):
        if decay is not None:
            of = decay[:, t].double().exp()
            state = state * (of[..., None, None] if of.dim() == 2 else of[..., None])
        new = v[:, t]
        if beta is not None:
            new = beta[:, t, :, None].double() * (new - torch.einsum("bhk,bhkv->bhv", k[:, t], state))
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], new)
        rows.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(rows, 1) * (q.shape[-1] ** -0.5 if scale is None else scale)


@case(_FLA, "100 tokens × 2 heads × 32/64 f32")
def fla_fused_recurrent_linear() -> Iterator[Result]:
    from fla.ops.linear_attn import fused_recurrent_linear_attn  # pyright: ignore

    q, k, v = _inputs(50)
    yield fused_recurrent_linear_attn(q, k, v, normalize=False)[0], _recurrent(q, k, v), 1e-4


@case(_FLA, "150 tokens × 2 heads × 32/64 f32")
def fla_chunk_simple_gla() -> Iterator[Result]:
    from fla.ops.simple_gla import chunk_simple_gla  # pyright: ignore

    q, k, v = _inputs(150)
    g = functional.logsigmoid(torch.randn(1, 150, 2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = chunk_simple_gla(*leaves, g)[0]
    wanted = _recurrent(q, k, v, decay=g)
    yield out, wanted, 1e-2
    weights = torch.randn(out.shape)
    (out * weights).sum().backward()
    ours = [x.grad for x in leaves]
    for x in leaves:
        x.grad = None
    (wanted * weights.double()).sum().backward()
    for mine, x in zip(ours, leaves, strict=True):
        yield mine, x.grad, 2e-2


@case(_FLA, "100 tokens × 2 heads × 32/64 f32")
def fla_chunk_gla() -> Iterator[Result]:
    from fla.ops.gla import chunk_gla  # pyright: ignore

    q, k, v = _inputs(100)
    g = functional.logsigmoid(torch.randn(1, 100, 2, 32)) / 4
    yield chunk_gla(q, k, v, g)[0], _recurrent(q, k, v, decay=g), 1e-2


@case(_FLA, "100 tokens × 2 heads × 32/64 f32")
def fla_chunk_delta_rule() -> Iterator[Result]:
    from fla.ops.delta_rule import chunk_delta_rule  # pyright: ignore

    q, k, v = (x.bfloat16() for x in _inputs(100))
    k = functional.normalize(k.float(), dim=-1).bfloat16()
    beta = torch.rand(1, 100, 2).bfloat16()
    yield chunk_delta_rule(q, k, v, beta)[0], _recurrent(q, k, v, beta=beta), 5e-2


@case(_FLA, "100 tokens × 2 heads × 32/64 f32")
def fla_fused_recurrent_gated_delta_rule() -> Iterator[Result]:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule  # pyright: ignore

    q, k, v = _inputs(40)
    k = functional.normalize(k, dim=-1)
    g, beta = functional.logsigmoid(torch.randn(1, 40, 2)), torch.rand(1, 40, 2)
    yield fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta)[0], _recurrent(q, k, v, g, beta), 1e-3


@case(_FLA, "90 tokens × 70 channels f32")
def fla_cumsum() -> Iterator[Result]:
    from fla.ops.utils.cumsum import chunk_global_cumsum, chunk_local_cumsum  # pyright: ignore

    x = torch.randn(1, 90, 3)
    yield chunk_global_cumsum(x), x.double().cumsum(1), 1e-5
    chunks = torch.cat([part.double().cumsum(1) for part in x.split(32, 1)], 1)
    yield chunk_local_cumsum(x, 32), chunks, 1e-5


@case(_FLA, "7 × 200 f32, with gradients")
def fla_layer_norm() -> Iterator[Result]:
    from fla.modules.layernorm import rms_norm  # pyright: ignore

    x, w = torch.randn(7, 200, requires_grad=True), torch.randn(200, requires_grad=True)
    out = rms_norm(x, w, None, eps=1e-6)
    wanted = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6) * w.double()
    yield out, wanted, 1e-5
    weights = torch.randn(7, 200)
    (out * weights).sum().backward()
    ours = [x.grad, w.grad]
    x.grad = w.grad = None
    (wanted * weights.double()).sum().backward()
    yield ours[0], x.grad, 1e-5
    yield ours[1], w.grad, 1e-5
