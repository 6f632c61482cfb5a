"""Attention in float64 by PyTorch's own operations, differentiable, and how near a 16-bit result must be."""

from __future__ import annotations

from typing import Any

import torch


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """Random tensors that require gradients."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)


def attention64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and log-sum-exps of q (batch, q_len, heads, head_dim); masks are aligned with the last query and key."""
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = softcap * torch.tanh(s / softcap) if softcap else s
    apart = torch.arange(s.shape[3]) - (torch.arange(s.shape[2])[:, None] + s.shape[3] - s.shape[2])
    left, right = window[0], 0 if causal else window[1]
    hidden = (apart < -left if left >= 0 else apart != apart) | (apart > right if right >= 0 else apart != apart)
    s = s.masked_fill(hidden, -torch.inf)
    p = torch.softmax(s, -1).nan_to_num(0.0)
    return torch.einsum("bhij,bjhd->bihd", p, v.double()), torch.logsumexp(s, -1)


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Each element within a few roundings of 16 bits of float64's."""
    u = 2**-7 if found.dtype is torch.bfloat16 else 2**-10
    torch.testing.assert_close(found.double(), expected, rtol=u, atol=u * expected.abs().max().item())


def assert_like_float64(found: torch.Tensor, given: tuple[torch.Tensor, ...], *qkv: Any, **options: Any) -> None:
    """``found`` and its gradients by ``given``, from which q, k and v were made, are those of float64."""
    expected, _ = attention64(*qkv, **options)
    assert_near(found.detach(), expected.detach())
    by = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(found.dtype)
    wanted = torch.autograd.grad(expected, given, by.double(), retain_graph=True)
    for x, grad, want in zip(given, torch.autograd.grad(found, given, by), wanted, strict=True):
        assert (grad.shape, grad.dtype) == (x.shape, x.dtype)
        assert_near(grad, want.double())
