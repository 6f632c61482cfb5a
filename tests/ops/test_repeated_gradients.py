"""Backward passes again and again on a GPU: on other data at other addresses, and without reading a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import warploom
from tests.ops.emulated_gpu import EmulatedGpu
from warploom.core.dtypes import f16
from warploom.core.errors import ProblemError
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.lang.functions import silu
from warploom.ops import calls

torch = pytest.importorskip("torch")

SMALL = MatmulSm80(32, 32, 32, 16, 16, stages=2, dtype=f16)
STARTS = torch.tensor([0, 5, 16], dtype=torch.int32)
TARGET = torch.tensor([3, 0, -100, 7, 11, 2, 2, 23])


def _plain_attention(q: Any, k: Any, v: Any, sinks: Any = None, starts: tuple[int, ...] = (0, 16)) -> Any:
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    i = torch.arange(scores.shape[-1])
    sequence = torch.bucketize(i, torch.tensor(starts[1:]), right=True)
    scores = scores.masked_fill((i[:, None] < i) | (sequence[:, None] != sequence), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    return torch.einsum("bhij,bjhd->bihd", torch.softmax(scores, -1)[..., : k.shape[1]], v)


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "attention": (
        lambda q, k, v: warploom.attention(q, k, v, causal=True),
        _plain_attention,
        ((1, 16, 2, 16),) * 3,
    ),
    "with sinks": (
        lambda q, k, v, sinks: warploom.attention(q, k, v, causal=True, sinks=sinks),
        _plain_attention,
        (*((1, 16, 2, 16),) * 3, (2,)),
    ),
    "packed": (
        lambda q, k, v: warploom.attention_varlen(q, k, v, STARTS, causal=True),
        lambda *given: _plain_attention(*[x[None] for x in given], starts=(0, 5, 16))[0],
        ((16, 2, 16),) * 3,
    ),
    "matmul": (lambda a, b: warploom.matmul(a, b, config=SMALL), torch.matmul, ((8, 16), (16, 24))),
    "matmul of w.T": (lambda a, w: warploom.matmul(a, w.T, alpha=0.5), lambda a, w: 0.5 * a @ w.T, ((8, 16), (24, 16))),
    "batches": (lambda a, b: warploom.matmul(a, b, config=SMALL), torch.matmul, ((2, 8, 16), (2, 16, 24))),
    "by itself": (lambda a: warploom.matmul(a, a, config=SMALL), lambda a: a @ a, ((16, 16),)),
    "epilogue": (
        lambda a, b, gate: warploom.matmul(a, b, epilogue=_gated, extras=(gate,), config=SMALL),
        lambda a, b, gate: torch.nn.functional.silu(a @ b) * gate,
        ((8, 16), (16, 24), (8, 24)),
    ),
    "linear": (
        lambda x, w, bias: warploom.matmul(x, w.T, bias=bias, epilogue=silu, config=SMALL),
        lambda x, w, bias: torch.nn.functional.silu(x @ w.T + bias),
        ((8, 16), (24, 16), (24,)),
    ),
    "loss": (
        lambda x, w: warploom.linear_cross_entropy(x, w, TARGET, config=SMALL),
        lambda x, w: torch.nn.functional.cross_entropy(x @ w.T, TARGET, reduction="none"),
        ((8, 16), (24, 16)),
    ),
    "mean loss": (
        lambda x, w: warploom.linear_cross_entropy(x, w, TARGET, reduction="mean"),
        lambda x, w: torch.nn.functional.cross_entropy(x @ w.T, TARGET),
        ((8, 16), (24, 16)),
    ),
}


def _gated(x: Any, gate: Any) -> Any:
    return silu(x) * gate


@pytest.mark.parametrize("name", CALLS)
def test_a_repeated_backward_pass_is_right_and_reads_nothing(
    name: str, gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.hold(monkeypatch)
    call, plain, shapes = CALLS[name]
    read, reader = list[str](), calls.describe_all
    monkeypatch.setattr(calls, "describe_all", lambda given, *said: read.extend(given) or reader(given, *said))
    for x in (STARTS, TARGET):
        gpu.keep(x)
    kept = list[Any]()  # at other addresses in each round
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        given = [torch.randn(shape, generator=generator) for shape in shapes]
        kind = torch.bfloat16 if name == "mean loss" else torch.float16
        tensors = [x if name == "with sinks" and x.dim() == 1 else x.to(kind) for x in given]
        for x in tensors:
            gpu.keep(x)
        tensors = [x.requires_grad_() for x in tensors]
        exact = [x.detach().double().requires_grad_() for x in tensors]
        read.clear()
        out, expected = call(*tensors), plain(*exact)
        by_out = torch.randn(out.shape, generator=generator).to(out.dtype)
        gpu.keep(by_out)
        kept += [*tensors, out, by_out]
        found = torch.autograd.grad(out, tensors, by_out)
        wanted = torch.autograd.grad(expected, exact, by_out.double())
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=0.02, atol=0.02)
    assert read == []


def test_another_kind_of_gradient_is_read(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number shown everywhere after full gradients, and one that lies transposed."""
    gpu.hold(monkeypatch)
    a, b = (torch.randn(16, 16).half() for _ in range(2))
    gradients = [torch.randn(16, 16).half() for _ in range(5)] + [torch.randn(16, 16).half().T]
    for x in (a, b, *gradients):
        gpu.keep(x)
    a.requires_grad_()
    for gradient in [*gradients, torch.ones(()).half().expand(16, 16), gradients[0]]:
        (found,) = torch.autograd.grad(warploom.matmul(a, b, config=SMALL), a, gradient)
        torch.testing.assert_close(found.float(), gradient.float() @ b.float().T, rtol=0.02, atol=0.02)


def test_a_gradient_with_a_tangent_is_refused_again_and_again(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.hold(monkeypatch)
    a, b, gradient = (torch.randn(16, 16).half() for _ in range(3))
    for x in (a, b, gradient):
        gpu.keep(x)
    product = warploom.matmul(a.requires_grad_(), b, config=SMALL)
    for _ in range(4):
        torch.autograd.grad(product, a, gradient, retain_graph=True)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ProblemError, match="tangent"):
        torch.autograd.grad(product, a, torch.autograd.forward_ad.make_dual(gradient, gradient))


def test_an_epilogue_that_changed_since_the_forward_pass_has_no_backward_pass() -> None:
    a, b = torch.randn(16, 16).half().requires_grad_(), torch.randn(16, 16).half()
    factor = 2.0

    def scaled(x: Any) -> Any:
        return x * factor

    product = warploom.matmul(a, b, epilogue=scaled, config=replace(SMALL))
    factor = 3.0
    with pytest.raises(ProblemError, match="changed"):
        torch.autograd.grad(product.sum(), a)
    factor = 2.0
    (found,) = torch.autograd.grad(warploom.matmul(a, b, epilogue=scaled).sum(), a)
    torch.testing.assert_close(found.float(), (2.0 * b.float().sum(1)).expand(16, 16), rtol=0.01, atol=0.01)
