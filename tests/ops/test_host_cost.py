"""What a repeated call costs the host, in calls of functions: launches, tensor maps and a GPU's memory are played.

``benchmarks/host_cost.py`` measures the time on a GPU, of the same calls.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest

import warploom
from tests.ops.conftest import CALLS
from tests.ops.emulated_gpu import queue_on
from tests.project import load
from warploom.core.targets import target
from warploom.interop import arrays
from warploom.interop.arrays import ArrayView, Form, torch_type
from warploom.ops import backends, calls, steps, tuned
from warploom.ops.backends import GpuCall

torch = pytest.importorskip("torch")

MOST = {
    "attention": 27,
    "attention_varlen": 28,
    "attention_paged": 29,
    "matmul": 27,
    "matmul, bias and gelu": 32,
    "matmul split K": 26,
    "matmul_reduce": 26,
    "linear_cross_entropy": 27,
    "flash_attn_func": 43,
    "flash_attn_varlen_func": 57,
    "flash_attn_with_kvcache, append": 260,  # on the CPU the sum of the lengths lies elsewhere each time
    "torch.ops.warploom.attention": 43,
    "torch.ops.warploom.matmul": 42,
    "attention, recorded": 38,
    "attention_varlen, recorded": 39,
    "matmul, recorded": 36,
    "linear_cross_entropy, recorded": 41,
    "attention, backward": 88,
    "attention_varlen, backward": 84,
    "matmul, backward": 80,
    "linear_cross_entropy, forward and backward": 100,
}
"""Calls of functions, of Python and of C; each is about a tenth more than were counted."""


class SilentLaunch:
    """A kernel that does nothing."""

    def pack(self, arguments: Sequence[Any]) -> Any:
        """The arguments."""
        return arguments

    def queueable(self, _stream: int, packed: Any) -> tuple[Callable[[], tuple[int]], Any]:
        """What queues nothing."""
        return partial(tuple, (0,)), packed


def _prepare(
    source: Any, _grid: Any, _scalars: Mapping[str, int], device: int, mapped: Sequence[Any] = (), **_: Any
) -> GpuCall:
    return GpuCall(SilentLaunch(), (), device, tuple(mapped))  # pyright: ignore[reportArgumentType]


def _repeated(
    on: Callable[[int, int], Sequence[Any]], stream: int, room: Callable[[bool], tuple[int, Any]], **_: bool
) -> tuple[Callable[[], tuple[int]], Any]:
    """A graph of launches that does nothing."""
    return partial(tuple, (0,)), on(stream, room(True)[0])


@pytest.fixture
def silent_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 that tensors of the CPU claim to be on, and that computes nothing."""
    reader = arrays._read_torch

    def read(tensor: Any) -> ArrayView:
        return reader(tensor)._replace(device=("cuda", 0))

    def makers(_kind: str, forms: Iterable[Form], _device: Any, _: Any = None) -> Callable[[], list[Any]]:
        kept = [torch.empty(shape, dtype=torch_type(dtype)) for shape, dtype in forms]
        return lambda: [x.detach() for x in kept]  # at the same addresses, as an allocator gives them in a loop

    monkeypatch.setitem(arrays._readers, torch.Tensor, read)
    for module in (calls, steps):
        monkeypatch.setattr(module, "makers", makers)
    monkeypatch.setattr(calls, "stream_reader", lambda *_: int)
    monkeypatch.setattr(steps, "current_stream", lambda *_: 0)
    monkeypatch.setattr(steps, "queue_on", queue_on)
    monkeypatch.setattr(steps, "compile_together", lambda *_: None)
    monkeypatch.setattr(steps, "zeroing", lambda *_: (partial(tuple, (0,)), None))
    monkeypatch.setattr(steps, "repeated", _repeated)
    monkeypatch.setattr(
        steps, "empty", lambda _kind, shape, dtype, _device: torch.empty(shape, dtype=torch_type(dtype))
    )
    monkeypatch.setattr(steps, "_lasting", {})
    monkeypatch.setattr(backends.GpuCall, "prepare", _prepare)
    monkeypatch.setattr("warploom.cuda.tensor_maps.encode", lambda *_: 0)
    monkeypatch.setattr(backends, "gpu_target", lambda _: target("sm_90a"))
    monkeypatch.setattr(backends, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(tuned, "gpu_name", lambda _: "NVIDIA H200")
    for call in CALLS:
        call.cache.clear()
    yield
    for call in CALLS:
        call.cache.clear()


def test_launches_are_one_for_the_driver_unless_the_first_begins_early_and_works_long(silent_gpu: None) -> None:
    def joined(batch: int, length: int) -> bool:
        pages = torch.empty(batch * length // 64, 64, 2, 128, dtype=torch.bfloat16)
        q, lengths = torch.empty(batch, 1, 8, 128, dtype=torch.bfloat16), torch.zeros(batch, dtype=torch.int32)
        table = torch.zeros(batch, length // 64, dtype=torch.int32)
        steps = warploom.plan_attention_paged(q, pages, pages, lengths, block_table=table).steps
        assert len(steps.calls) == 2
        names = [x for call in steps.calls for x in call.arrays if x not in steps.workspace]
        return steps.prepare(names, 0).joined

    assert [joined(2, 256), joined(16, 4096)] == [True, False]
    heads = torch.empty(1, 256, 4, 128, dtype=torch.bfloat16)
    plan = warploom.plan(heads, heads, heads)
    assert not plan.steps.prepare(("q", "k", "v", "out"), 0).joined


def counted(call: Callable[[], object]) -> int:
    """The functions that a call calls."""
    found = [0]

    def count(_frame: Any, event: str, _argument: Any) -> None:
        found[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found[0]


def test_a_repeated_call_calls_few_functions(silent_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("host_cost")
    monkeypatch.setattr(script, "sdpa", lambda _: torch.nn.functional.scaled_dot_product_attention)
    timed = {**script.plain_calls(torch), **script.gradient_calls(torch)}
    found = dict[str, int]()
    for name in MOST:
        for _ in range(64):  # until the addresses that the CPU's allocator gives in turn have all come
            timed[name]()
        found[name] = min(counted(timed[name]) for _ in range(16))
    assert {name: count for name, count in found.items() if count > MOST[name]} == {}, found
