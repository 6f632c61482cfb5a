"""What several tests of calls share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ops.emulated_gpu import DeviceCopy, EmulatedGpu, queue_on, repeated
from warploom.core.targets import target
from warploom.ops import backends, calls, launch, steps, tuned, warmup
from warploom.ops.attention import attention_backward_call, attention_call
from warploom.ops.attention_paged import append_call, attention_paged_call
from warploom.ops.attention_varlen import attention_varlen_backward_call, attention_varlen_call
from warploom.ops.loss import loss_call, loss_with_gradients_call, row_gradients_call, scale_gradients_call
from warploom.ops.matmul import matmul_call
from warploom.ops.reduce import matmul_reduce_call

CALLS = (
    append_call,
    attention_call,
    attention_backward_call,
    attention_paged_call,
    attention_varlen_call,
    attention_varlen_backward_call,
    loss_call,
    loss_with_gradients_call,
    scale_gradients_call,
    row_gradients_call,
    matmul_call,
    matmul_reduce_call,
)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run on the emulator, on any machine."""
    for module in (backends, launch):
        monkeypatch.setattr(module, "gpu_present", lambda: False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGpu]:
    """The only GPU of this machine, without tuned configurations and prepared calls."""
    made = EmulatedGpu()
    monkeypatch.setattr(DeviceCopy, "gpu", made, raising=False)
    monkeypatch.setattr("warploom.cuda.buffers.DeviceCopy", DeviceCopy)
    monkeypatch.setattr(backends, "gpu_present", lambda: True)
    monkeypatch.setattr(backends, "gpu_target", lambda _: target("sm_80"))
    monkeypatch.setattr(backends, "multiprocessors", lambda _: 2)
    monkeypatch.setattr(tuned, "gpu_name", lambda _: "the emulator")
    monkeypatch.setattr(backends.GpuCall, "prepare", made.prepare)
    monkeypatch.setattr(steps, "zeroing", made.zeroing)
    monkeypatch.setattr(steps, "repeated", repeated)
    monkeypatch.setattr(steps, "queue_on", queue_on)
    for module in (steps, warmup):
        monkeypatch.setattr(module, "compile_together", lambda *_: None)
    monkeypatch.setattr(steps, "current_stream", lambda *_: 0)
    monkeypatch.setattr(calls, "stream_reader", lambda *_: lambda: 0)
    for call in CALLS:
        call.cache.clear()
    yield made
    for call in CALLS:
        call.cache.clear()
