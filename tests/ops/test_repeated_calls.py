"""What a repeated call on a GPU prepares: nothing, also where some array must be copied first.

A gradient of PyTorch is often one number shown everywhere: that of ``loss.mean()``, of ``out.sum()``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import warploom
from tests.ops.emulated_gpu import EmulatedGpu
from warploom.core import above
from warploom.core.dtypes import bf16, f16
from warploom.core.errors import ProblemError
from warploom.interop.refusals import DerivativeError
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.ops import attention as attention_ops
from warploom.ops import calls, steps
from warploom.ops import loss as loss_ops
from warploom.ops import matmul as matmul_ops
from warploom.ops import reduce as reduce_ops

SMALL = MatmulSm80(32, 32, 32, 16, 16, stages=2, dtype=bf16)
Array = np.ndarray[Any, Any]


def numbers(*shape: int, seed: int = 0) -> Array:
    """Normal numbers in bf16."""
    return np.random.default_rng(seed).standard_normal(shape).astype(bf16.numpy)


def spread(value: Any, *shape: int) -> Array:
    """One number shown everywhere: strides of 0."""
    return np.broadcast_to(np.asarray(value), shape)


def apart(array: Array) -> Array:
    """The same array, no two elements of which follow each other in memory."""
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
    wide[..., ::2] = array
    return wide[..., ::2]


def product(seed: int) -> tuple[Array, Array]:
    """Of a gradient that is one number."""
    w = numbers(24, 16, seed=seed)
    one = np.asarray(seed + 1, bf16.numpy)
    expected = (seed + 1) * np.tile(w.astype(np.float64).sum(0), (8, 1))
    return warploom.matmul(spread(one, 8, 24), w, config=SMALL), expected


def product_with_extra(seed: int) -> tuple[Array, Array]:
    """An extra matrix whose rows no kernel reads."""
    x, w, extra = numbers(8, 16, seed=seed), numbers(16, 24), numbers(8, 24, seed=seed + 9)
    found = warploom.matmul(x, w, extras=(apart(extra),), epilogue=_add, config=SMALL)
    return found, x.astype(np.float64) @ w.astype(np.float64) + extra.astype(np.float64)


def _add(x: Any, y: Any) -> Any:
    return x + y


def reduction(seed: int) -> tuple[Array, Array]:
    """Of rows that no kernel reads."""
    x, w = numbers(8, 16, seed=seed), numbers(16, 24)
    product = x.astype(np.float64) @ w.astype(np.float64)
    return warploom.matmul_reduce(apart(x), w, config=SMALL), product.max(1)


def losses(seed: int) -> tuple[Array, Array]:
    """Of targets and rows that no kernel reads."""
    x, w, target = numbers(8, 16, seed=seed), numbers(24, 16), np.arange(8)
    logits = x.astype(np.float64) @ w.astype(np.float64).T
    found = warploom.linear_cross_entropy(apart(x), w, apart(target), config=SMALL)
    return found, np.logaddexp.reduce(logits, 1) - logits[np.arange(8), target]


def gradients_of_mean(seed: int) -> tuple[Array, Array]:
    """Of the losses' mean: the gradient by the losses is one number."""
    x, w, target = numbers(8, 16, seed=seed), numbers(24, 16), np.arange(8)
    logits = x.astype(np.float64) @ w.astype(np.float64).T
    lse = np.logaddexp.reduce(logits, 1)
    by_loss = spread(np.float32(1 / 8), 8)
    dx = loss_ops.row_gradients(x, w, lse.astype(np.float32), target, by_loss, config=SMALL)[0]
    return dx, (np.exp(logits - lse[:, None]) - np.eye(8, 24)) @ w.astype(np.float64) / 8


def attention(seed: int) -> tuple[Array, Array]:
    """Of queries that are not aligned."""
    wide = numbers(1, 16, 1, 17, seed=seed)
    q, k = wide[..., 1:], numbers(1, 16, 1, 16)
    values = numbers(1, 1, 1, 16, seed=seed)
    return warploom.attention(q, k, np.repeat(values, 16, 1)), spread(values.astype(np.float64), 1, 16, 1, 16)


def attention_gradients(seed: int) -> tuple[Array, Array]:
    """Of the result's sum: every column of dv is how much its key was seen."""
    q, k, v = numbers(1, 16, 1, 16, seed=seed), numbers(1, 16, 1, 16), numbers(1, 16, 1, 16, seed=2)
    q64, k64, v64 = (x[0, :, 0].astype(np.float64) for x in (q, k, v))
    scores = q64 @ k64.T / 4
    lse = np.logaddexp.reduce(scores, 1)
    p = np.exp(scores - lse[:, None])
    out = (p @ v64)[None, :, None].astype(bf16.numpy)
    dout = spread(np.asarray(1, bf16.numpy), 1, 16, 1, 16)
    dv = warploom.attention_backward(dout, q, k, v, out, lse[None, None].astype(np.float32))[2]
    return dv, np.tile(p.sum(0)[:, None], (1, 16))[None, :, None]


CALLS = (product, product_with_extra, reduction, losses, gradients_of_mean, attention, attention_gradients)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_arrays_that_are_copied_first_are_planned_once(
    call: Callable[[int], tuple[Array, Array]], gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.hold(monkeypatch)
    prepared = list[int]()
    for trial in range(3):
        found, expected = call(trial)
        np.testing.assert_allclose(found.astype(np.float64), expected, rtol=0.03, atol=0.03)
        prepared.append(len(gpu.prepared))
    assert prepared == prepared[:1] * 3


X, Y = numbers(1, 16, 1, 16), numbers(1, 16, 1, 16, seed=1)
LOOKED_UP: dict[str, tuple[ModuleType, Callable[[], Any]]] = {
    "attention": (attention_ops, lambda: warploom.attention(X, X, Y)),
    "with log-sum-exps": (attention_ops, lambda: warploom.attention(X, X, Y, return_lse=True)[1]),
    "matmul": (matmul_ops, lambda: warploom.matmul(X[0, :, 0], Y[0, :, 0], config=SMALL)),
    "matmul_reduce": (reduce_ops, lambda: warploom.matmul_reduce(X[0, :, 0], Y[0, :, 0], "sum", config=SMALL)),
}
SETTLED = "problem_of", "_plan", "check_epilogue", "multiplication", "reduce_plan"
"""What only a first call needs: to form the problem, and to plan."""


@pytest.mark.parametrize("name", LOOKED_UP)
def test_a_repeated_call_looks_up_what_the_first_settled(
    name: str, gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, call = LOOKED_UP[name]
    gpu.hold(monkeypatch)
    first = call()
    for settled in SETTLED:
        monkeypatch.setattr(module, settled, lambda *_: pytest.fail("settled at the first call"), raising=False)
    np.testing.assert_array_equal(call(), first)


def _attention(*tensors: Any) -> Any:
    return warploom.attention(*tensors)


def _attention_with_sinks(*tensors: Any) -> Any:
    return warploom.attention(*tensors[:3], sinks=tensors[3], return_lse=True)[0]


def _attention_by_itself(x: Any) -> Any:
    return warploom.attention(x, x, x)


def _product(a: Any, b: Any) -> Any:
    return warploom.matmul(a, b, config=replace(SMALL, dtype=f16))


def _product_into(a: Any, b: Any, out: Any) -> Any:
    return warploom.matmul(a, b, out=out, config=replace(SMALL, dtype=f16))


LIKE: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "attention": (_attention, ((1, 16, 2, 16),) * 3),
    "of one tensor": (_attention_by_itself, ((1, 16, 2, 16),)),
    "with sinks": (_attention_with_sinks, (*((1, 16, 2, 16),) * 3, (2,))),
    "matmul": (_product, ((16, 16), (16, 16))),
    "matmul into out": (_product_into, ((16, 16), (16, 16), (16, 16))),
}


@pytest.fixture(params=LIKE)
def like(request: pytest.FixtureRequest, gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> Any:
    """(a call, its tensors, the tensors that were read): torch's on the CPU, which claim to be on a GPU."""
    torch = pytest.importorskip("torch")
    gpu.hold(monkeypatch)
    read = list[Any]()
    reader = calls.describe_all
    monkeypatch.setattr(
        calls, "describe_all", lambda given, *public: read.extend(given.values()) or reader(given, *public)
    )
    call, shapes = LIKE[request.param]
    tensors = [torch.randn(shape, dtype=torch.float32 if len(shape) == 1 else torch.float16) for shape in shapes]
    for _ in range(2):
        call(*tensors)
    read.clear()
    return call, tensors, read


def test_tensors_like_earlier_ones_are_not_read(like: Any, gpu: EmulatedGpu) -> None:
    call, (first, *others), read = like
    expected = call(first, *others).clone()
    again = first + 1
    gpu.keep(again)
    assert not expected.equal(call(again, *others))
    assert call(first, *others).equal(expected)
    assert not read or call is _product_into  # what shares memory with out is looked at


def test_tensors_unlike_earlier_ones_are_read(like: Any) -> None:
    """Whatever reading a tensor would have told, one comparison tells."""
    import torch

    call, (first, *others), read = like
    turned = first.transpose(-3 % first.dim(), -2).contiguous().transpose(-3 % first.dim(), -2)
    shifted = torch.empty(first.numel() + 1, dtype=first.dtype)[1:].view(first.shape).copy_(first)
    negated = torch._neg_view(-first)  # pyright: ignore[reportPrivateImportUsage]
    for unlike in (turned, negated, shifted):
        read.clear()
        assert call(unlike, *others).equal(call(first, *others))
        assert any(x is unlike for x in read)
    read.clear()
    with pytest.raises(ProblemError, match="convert"):
        call(first.double(), *others)
    with pytest.raises(ProblemError), torch.autograd.forward_ad.dual_level():
        call(torch.autograd.forward_ad.make_dual(first, first), *others)
    assert len(read) >= 2
    first.untyped_storage().resize_(0)
    with pytest.raises(ProblemError, match="no memory"):
        call(first, *others)


def test_memory_that_out_shares_is_found_at_new_addresses(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    gpu.hold(monkeypatch)
    a, b, out = (torch.randn(16, 16).half() for _ in range(3))
    for _ in range(3):
        _product_into(a, b, out)
    with pytest.raises(ProblemError, match="out shares memory with a"):
        _product_into(a, b, a)
    (both := torch.empty(24, 16).half())[:16].copy_(a)
    with pytest.raises(ProblemError, match="out shares memory with a"):
        _product_into(both[:16], b, both[8:])


def test_a_gradient_is_wanted_of_tensors_known_without_one(like: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def operator(*_: Any, **__: Any) -> Any:
        raise DerivativeError("requires a gradient")

    call, (first, *others), read = like
    wanted = torch.nn.Parameter(first.clone())
    with torch.no_grad():
        found = [call(wanted, *others).clone() for _ in range(4)]
    assert all(x.equal(found[0]) for x in found)
    read.clear()
    monkeypatch.setattr(above, "operator_of", lambda _: operator)
    with pytest.raises(DerivativeError, match="requires a gradient"):
        call(wanted, *others)


def test_a_stream_keeps_one_memory_for_all_launches_that_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_lasting", {})

    def lasting(words: int, stream: int = 5) -> int:
        return steps.Prepared((), (), words, 0).room("numpy", stream)(True)[0]

    assert lasting(0) == 0
    first = lasting(100)
    assert first == lasting(60) == lasting(128)
    assert first not in (lasting(100, stream=6), steps.Prepared((), (), 100, 0).room("numpy", 5)(False)[0])
    larger = lasting(1000)
    assert larger == lasting(100) != first


def test_only_launches_of_one_stream_with_little_memory_are_joined(monkeypatch: pytest.MonkeyPatch, gpu: Any) -> None:
    asked = list[bool]()
    monkeypatch.setattr(steps, "repeated", lambda *_, joined: asked.append(joined))
    plan = warploom.plan_matmul(numbers(16, 64), numbers(64, 16), config=replace(SMALL, split_k=2))
    for most in (steps._LASTING_WORDS, 1):
        monkeypatch.setattr(steps, "_LASTING_WORDS", most)
        prepared = plan.steps.prepare(("a", "b", "out"), 0)
        for stream in (0, 2, 5):  # 2 is another stream in each thread
            prepared.queueable((stream, 64, 128, 192), lambda _: (0, None))
    assert asked == [True, False, True, False, False, False]


@pytest.mark.gpu
def test_tensors_of_a_gpu_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """With weights as layers have them, at new addresses, on another stream, and without a gradient."""
    torch = pytest.importorskip("torch")
    x, q = torch.randn(64, 64, device="cuda").half(), torch.randn(3, 1, 64, 2, 64, device="cuda").half()
    bias = torch.nn.Parameter(torch.randn(64, device="cuda").half())

    def both(x: Any, q: Any) -> tuple[Any, Any]:
        with torch.no_grad():
            return warploom.matmul(x, x.mT, bias=bias), warploom.attention(*q, causal=True)

    both(x, q)
    expected = both(x, q)
    monkeypatch.setattr(calls, "describe_all", lambda *_: pytest.fail("read again"))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = both(x.clone(), q.clone())
    stream.synchronize()
    assert all(map(torch.equal, found, expected))
