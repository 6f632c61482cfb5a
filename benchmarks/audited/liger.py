"""Liger-Kernel: training kernels in Triton, by its autograd functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch.nn import functional

from .trial import Result, case

_LIGER = ("liger-kernel==0.8.5",)


def _gradients(ours: Any, reference: Any, *inputs: torch.Tensor, tolerance: float = 1e-5) -> Iterator[Result]:
    """Results and gradients of two functions of the same tensors, the second in double precision."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in inputs]
    others = [x.double().requires_grad_() if x.is_floating_point() else x for x in inputs]
    got, wanted = ours(*leaves), reference(*others)
    got, wanted = ((x if isinstance(x, tuple) else (x,)) for x in (got, wanted))
    for x, y in zip(got, wanted, strict=True):
        yield x, y, tolerance
    weights = [torch.randn(x.shape) for x in got]
    torch.stack([(x * w).sum() for x, w in zip(got, weights, strict=True)]).sum().backward()
    torch.stack([(x * w.double()).sum() for x, w in zip(wanted, weights, strict=True)]).sum().backward()
    for leaf, other in zip(leaves, others, strict=True):
        if leaf.grad is not None and other.grad is not None:
            yield leaf.grad, other.grad, tolerance


def _liger(module: str, function: str, *options: Any) -> Callable[..., Any]:
    """An autograd function of the package, called with tensors and these options."""

    def call(*tensors: torch.Tensor) -> Any:
        return getattr(import_module(f"liger_kernel.ops.{module}"), function).apply(*tensors, *options)

    return call


def _norm(x: Any) -> Any:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _probabilities(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).softmax(-1)


@case(_LIGER, "5 × 1000 f32")
def liger_rms_norm() -> Iterator[Result]:
    ours = _liger("rms_norm", "LigerRMSNormFunction", 1e-6, 0.0, "llama", False)
    yield from _gradients(ours, lambda x, w: _norm(x) * w, torch.randn(5, 1000), torch.randn(1000))


@case(_LIGER, "4099 × 37 f32, several rows a CTA")
def liger_rms_norm_block() -> Iterator[Result]:
    ours = _liger("rms_norm", "LigerRMSNormFunction", 1e-6, 0.0, "gemma", False, False)
    yield from _gradients(ours, lambda x, w: _norm(x) * w, torch.randn(4099, 37), torch.randn(37))


@case(_LIGER, "7 × 501 f32")
def liger_fused_add_rms_norm() -> Iterator[Result]:
    ours = _liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", 1e-6)
    reference = lambda x, r, w: (_norm(x + r) * w, x + r)  # noqa: E731
    yield from _gradients(ours, reference, torch.randn(7, 501), torch.randn(7, 501), torch.randn(501))


@case(_LIGER, "7 × 501 f32")
def liger_layer_norm() -> Iterator[Result]:
    ours = _liger("layer_norm", "LigerLayerNormFunction", 1e-5)
    reference = lambda x, w, b: functional.layer_norm(x, (501,), w, b)  # noqa: E731
    yield from _gradients(ours, reference, torch.randn(7, 501), torch.randn(501), torch.randn(501))


@case(_LIGER, "2 × 6 channels × 77, 3 groups, f32")
def liger_group_norm() -> Iterator[Result]:
    ours = _liger("group_norm", "LigerGroupNormFunction", 6, 3, 1e-5)
    reference = lambda x, w, b: functional.group_norm(x, 3, w, b)  # noqa: E731
    yield from _gradients(ours, reference, torch.randn(2, 6, 77), torch.randn(6), torch.randn(6), tolerance=1e-4)


@case(_LIGER, "5 × 333 f32")
def liger_poly_norm() -> Iterator[Result]:
    ours = _liger("poly_norm", "LigerPolyNormFunction")

    def reference(x: Any, w: Any, b: Any) -> Any:
        return w[0] * _norm(x**3) + w[1] * _norm(x**2) + w[2] * _norm(x) + b

    yield from _gradients(ours, reference, torch.randn(5, 333), torch.randn(3), torch.randn(()), tolerance=1e-4)


@case(_LIGER, "6 × 257 f32", gpu=True)
def liger_dyt() -> Iterator[Result]:
    ours = _liger("dyt", "LigerDyTFunction")
    inputs = torch.randn(6, 257), torch.randn(1), torch.randn(257), torch.randn(257)
    yield from _gradients(ours, lambda x, a, g, b: g * torch.tanh(a * x) + b, *inputs)


@case(_LIGER, "5 × 700 f32")
def liger_softmax() -> Iterator[Result]:
    yield from _gradients(_liger("softmax", "LigerSoftmaxFunction"), lambda x: x.softmax(-1), torch.randn(5, 700))


@case(_LIGER, "5 × 300 f32")
def liger_sparsemax() -> Iterator[Result]:
    def reference(x: Any) -> Any:
        z = x.sort(-1, descending=True).values
        k = torch.arange(1, x.shape[-1] + 1)
        support = (1 + k * z > z.cumsum(-1)).sum(-1, keepdim=True)
        return (x - (z.cumsum(-1).gather(-1, support - 1) - 1) / support).clamp(min=0)

    yield from _gradients(_liger("sparsemax", "LigerSparsemaxFunction", -1), reference, torch.randn(5, 300))


@case(_LIGER, "5 × 300 f32")
def liger_geglu() -> Iterator[Result]:
    reference = lambda a, b: functional.gelu(a, approximate="tanh") * b  # noqa: E731
    yield from _gradients(_liger("geglu", "LigerGELUMulFunction"), reference, torch.randn(5, 300), torch.randn(5, 300))


@case(_LIGER, "5 × 300 f32")
def liger_swiglu() -> Iterator[Result]:
    ours = _liger("swiglu", "LigerSiLUMulFunction")
    yield from _gradients(ours, lambda a, b: functional.silu(a) * b, torch.randn(5, 300), torch.randn(5, 300))


@case(_LIGER, "5 × 302 f32")
def liger_swiglu_fused() -> Iterator[Result]:
    ours = _liger("swiglu", "LigerFusedGateUpSiLUMulFunction")
    yield from _gradients(ours, lambda y: functional.silu(y[:, :151]) * y[:, 151:], torch.randn(5, 302))


@case(_LIGER, "5 × 300 f32")
def liger_relu_squared() -> Iterator[Result]:
    ours = _liger("relu_squared", "LigerReLUSquaredFunction")
    yield from _gradients(ours, lambda x: x.relu().square(), torch.randn(5, 300))


@case(_LIGER, "9 tokens × 1001 words f32, label smoothing")
def liger_cross_entropy() -> Iterator[Result]:
    target = torch.randint(0, 1001, (9,))
    target[4] = -100
    ours = _liger("cross_entropy", "LigerCrossEntropyFunction", target, None, -100, 0.0, 0.1, "mean", None, False)
    reference = lambda x: functional.cross_entropy(x, target, label_smoothing=0.1)  # noqa: E731
    yield from _gradients(lambda x: ours(x * 1)[0], reference, torch.randn(9, 1001), tolerance=1e-4)


@case(_LIGER, "9 tokens × 1001 words f32")
def liger_kl_div() -> Iterator[Result]:
    wanted = _probabilities(9, 1001)
    ours = _liger("kl_div", "LigerKLDivLossFunction", wanted, "batchmean")
    reference = lambda x: functional.kl_div(x, wanted.double(), reduction="batchmean")  # noqa: E731
    yield from _gradients(ours, reference, _probabilities(9, 1001).log(), tolerance=1e-4)


@case(_LIGER, "9 tokens × 517 words f32")
def liger_jsd() -> Iterator[Result]:
    wanted = _probabilities(9, 517).log()

    def reference(x: Any) -> Any:
        p, q = wanted.double().exp(), x.exp()
        m = ((p + q) / 2).log()
        return (0.5 * (p * (wanted - m)).sum() + 0.5 * (q * (x - m)).sum()) / 9

    ours = _liger("jsd", "LigerJSDFunction", wanted, None, 0.5, -100, "triton")
    yield from _gradients(ours, reference, _probabilities(9, 517).log(), tolerance=1e-4)


@case(_LIGER, "9 tokens × 517 words f32")
def liger_tvd() -> Iterator[Result]:
    other = _probabilities(9, 517)
    ours = _liger("tvd", "LigerTVDLossFunction", other)
    reference = lambda p: 0.5 * (p - other).abs().sum() / 9  # noqa: E731
    yield from _gradients(ours, reference, _probabilities(9, 517), tolerance=1e-4)


def _rotated(x: Any, cos: Any, sin: Any) -> Any:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


@case(_LIGER, "2 × 6 and 2 heads × 7 tokens × 64 f32")
def liger_rope() -> Iterator[Result]:
    angles = torch.randn(1, 7, 32).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    ours = _liger("rope", "LigerRopeFunction", cos, sin)
    reference = lambda q, k: (_rotated(q, cos[:, None], sin[:, None]), _rotated(k, cos[:, None], sin[:, None]))  # noqa: E731
    yield from _gradients(ours, reference, torch.randn(2, 6, 7, 64), torch.randn(2, 2, 7, 64))


@case(_LIGER, "2 × 5 tokens × 6 and 2 heads × 64 f32")
def liger_llama4_rope() -> Iterator[Result]:
    turns = torch.polar(torch.ones(5, 32), torch.randn(5, 32))

    def turned(x: Any) -> Any:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], 32, 2))
        return torch.view_as_real(pairs * turns[None, :, None]).flatten(-2)

    ours = _liger("llama4_rope", "LigerLlama4RopeFunction", turns)
    reference = lambda q, k: (turned(q), turned(k))  # noqa: E731
    yield from _gradients(ours, reference, torch.randn(2, 5, 6, 64), torch.randn(2, 5, 2, 64))


@case(_LIGER, "4 blocks × 3 × 5 tokens × 96 f32")
def liger_attention_residual() -> Iterator[Result]:
    def reference(v: Any, query: Any, w: Any) -> Any:
        scores = (_norm(v) * w * query).sum(-1)
        return (scores.softmax(0)[..., None] * v).sum(0)

    ours = _liger("attn_res", "LigerAttnResFunction", 1e-6)
    yield from _gradients(ours, reference, torch.randn(4, 3, 5, 96), torch.randn(96), torch.randn(96), tolerance=1e-4)


@case(_LIGER, "40 of 70 rows × 50 f32, rows taken several times")
def liger_embedding() -> Iterator[Result]:
    indices = torch.randint(0, 70, (40,))
    ours = lambda table: _liger("experimental.embedding", "LigerEmbeddingFunction")(table, indices)  # noqa: E731
    yield from _gradients(ours, lambda table: table[indices], torch.randn(70, 50))


@case(_LIGER, "11 tokens × 64 × 301 words f32")
def liger_linear_cross_entropy() -> Iterator[Result]:
    target = torch.randint(0, 301, (11,))

    def ours(x: Any, w: Any) -> Any:
        return _liger("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")(x, w, target)[0]

    reference = lambda x, w: functional.cross_entropy(x @ w.T, target)  # noqa: E731
    yield from _gradients(ours, reference, torch.randn(11, 64), torch.randn(301, 64), tolerance=1e-4)


@case(_LIGER, "13 tokens, 2 of 4 experts, 48 × 40 f32")
def liger_moe() -> Iterator[Result]:
    indices = torch.stack([torch.randperm(4)[:2] for _ in range(13)]).int()

    def reference(x: Any, up: Any, down: Any, weights: Any) -> Any:
        rows = []
        for i in range(13):
            of = [int(e) for e in indices[i]]
            gates = [up[e] @ x[i] for e in of]
            outs = [down[e] @ (functional.silu(g[:40]) * g[40:]) for e, g in zip(of, gates, strict=True)]
            rows.append(sum(weights[i, j] * out for j, out in enumerate(outs)))
        return torch.stack(rows)

    def ours(x: Any, up: Any, down: Any, weights: Any) -> Any:
        return _liger("fused_moe", "LigerFusedMoEFunction")(x, up, down, indices, weights)

    inputs = torch.randn(13, 48), torch.randn(4, 80, 48), torch.randn(4, 48, 40), torch.rand(13, 2)
    yield from _gradients(ours, reference, *inputs, tolerance=1e-2)


@case(_LIGER, "2 × 9 tokens × 701 words f32")
def liger_grpo_loss() -> Iterator[Result]:
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax  # pyright: ignore

    logits, ids = torch.randn(2, 10, 701), torch.randint(0, 701, (2, 9))
    wanted = (logits[:, :-1].double() / 0.9).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    yield fused_selective_log_softmax(logits, ids), wanted, 1e-5
