"""What PyTorch allocates for a call and its backward pass: results and gradients, and nothing as large as one."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

import warploom
from warploom import flash_attn
from warploom.transformers import attention_forward

torch = pytest.importorskip("torch")
profile = pytest.importorskip("torch.profiler").profile


STARTS = torch.tensor([0, 16, 32], dtype=torch.int32)
TARGET = torch.arange(32)
SEQUENCE, HEADS, ROWS = (1, 32, 2, 32), (1, 2, 32, 32), (32, 2, 32)
_Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]
CASES: dict[str, _Case] = {
    "attention": (lambda q, k, v: warploom.attention(q, k, v), (SEQUENCE,) * 3),
    "with sinks": (lambda q, k, v, s: warploom.attention(q, k, v, sinks=s, causal=True), (*(SEQUENCE,) * 3, (2,))),
    "with log-sum-exps": (lambda q, k, v: warploom.attention(q, k, v, return_lse=True), (SEQUENCE,) * 3),
    "heads first": (lambda q, k, v: warploom.attention(q, k, v, layout="bhsd"), (HEADS,) * 3),
    "heads first, lying otherwise": (
        lambda *qkv: warploom.attention(*[x.transpose(1, 2) for x in qkv], layout="bhsd").transpose(1, 2),
        (SEQUENCE,) * 3,
    ),
    "packed": (lambda q, k, v: warploom.attention_varlen(q, k, v, STARTS), (ROWS,) * 3),
    "flash_attn": (lambda q, k, v: flash_attn.flash_attn_func(q, k, v), (SEQUENCE,) * 3),
    "packed flash_attn": (
        lambda q, k, v: flash_attn.flash_attn_varlen_func(q, k, v, STARTS, STARTS, 32, 32),
        (ROWS,) * 3,
    ),
    "product": (lambda a, b: warploom.matmul(a, b), ((32, 64), (64, 96))),
    "linear": (lambda x, w: warploom.matmul(x, w.T), ((2, 16, 64), (96, 64))),
    "linear, turned": (lambda x, w: warploom.matmul(x.mT, w.T), ((64, 32), (96, 64))),
    "batch": (lambda a, b: warploom.matmul(a, b.mT), ((2, 16, 64), (2, 96, 64))),
    "log-sum-exps": (lambda x, w: warploom.matmul_reduce(x, w.T, "logsumexp"), ((32, 64), (96, 64))),
    "loss": (lambda x, w: warploom.linear_cross_entropy(x, w, TARGET, reduction="mean"), ((32, 64), (96, 64))),
}
SMALL = 2048
"""Bytes: less than any of the arrays but those of one number for each row."""


def allocations(run: Callable[[], object]) -> list[int]:
    """Bytes of what PyTorch has allocated meanwhile, whether they were given back or not."""
    with profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    return [max(0, e.nbytes()) for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_all_that_is_allocated(name: str) -> None:
    call, shapes = CASES[name]
    leaves = [torch.randn(shape).half().requires_grad_() for shape in shapes]
    found: Any = call(*leaves)
    outs = found if isinstance(found, tuple) else (found,)
    given = [torch.randn_like(out) for out in outs]
    torch.autograd.backward(outs, given)
    kept = [*outs, *[x.grad for x in leaves]]
    for x in leaves:
        x.grad = None

    def again() -> None:
        found = call(*leaves)
        torch.autograd.backward(found if isinstance(found, tuple) else (found,), given)

    assert sum(allocations(again)) <= sum(x.nbytes for x in kept) + SMALL
    for x, before in zip(leaves, kept[len(outs) :], strict=True):
        assert torch.equal(x.grad, before)


def _watched() -> AbstractContextManager[Any]:
    """A dispatch mode, which sees operators: selective checkpointing is one."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    return Watch()


@pytest.mark.parametrize("mode", [nullcontext, _watched], ids=["eager", "watched"])
@pytest.mark.parametrize("name", CASES)
def test_only_what_autograd_saves_is_kept(name: str, mode: Callable[[], AbstractContextManager[Any]]) -> None:
    """Checkpoints, and hooks that take saved tensors elsewhere, would else free nothing."""
    call, shapes = CASES[name]
    given = [torch.randn(shape).half().requires_grad_() * 1 for shape in shapes]
    there = [weakref.ref(x) for x in given]
    elsewhere = torch.autograd.graph.saved_tensors_hooks(lambda x: x.tolist(), torch.tensor)
    with mode(), elsewhere:
        found = call(*given)
    del given
    assert found is not None
    assert [x() for x in there] == [None] * len(there)


def test_padded_batches_of_transformers_are_moved_without_an_index_for_each_element() -> None:
    q, k, v = (torch.randn(2, 2, 64, 32).half() for _ in range(3))
    mask = torch.ones(2, 64, dtype=torch.int64)
    mask[0, :9] = 0
    model: Any = SimpleNamespace(is_causal=True)
    found = allocations(lambda: attention_forward(model, q, k, v, mask))
    assert max(found) <= 2 * q.nbytes  # PyTorch moves halves in f32 on the CPU; an index is 4 times as large
