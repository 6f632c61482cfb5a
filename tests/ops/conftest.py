"""What several tests of calls share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ops.emulated_gpu import DeviceCopy, EmulatedGpu
from warploom.core.targets import target
from warploom.ops import (
    append_to_cache,
    attention,
    attention_backward,
    attention_paged,
    attention_varlen,
    attention_varlen_backward,
    backends,
    launch,
    loss,
    matmul,
    processors,
    reduce,
    steps,
    tuned,
)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run on the emulator, on any machine."""
    for module in (processors, launch):
        monkeypatch.setattr(module, "gpu_present", lambda: False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGpu]:
    """The only GPU of this machine, without tuned configurations and prepared calls."""
    made = EmulatedGpu()
    monkeypatch.setattr(DeviceCopy, "gpu", made, raising=False)
    monkeypatch.setattr("warploom.cuda.buffers.DeviceCopy", DeviceCopy)
    monkeypatch.setattr(processors, "gpu_present", lambda: True)
    monkeypatch.setattr(processors, "gpu_target", lambda _: target("sm_80"))
    monkeypatch.setattr(processors, "multiprocessors", lambda _: 2)
    monkeypatch.setattr(tuned, "gpu_name", lambda _: "the emulator")
    monkeypatch.setattr(backends.GpuCall, "prepare", made.prepare)
    monkeypatch.setattr(steps, "zero_words", made.zero)
    modules = (
        append_to_cache,
        attention,
        attention_backward,
        attention_paged,
        attention_varlen,
        attention_varlen_backward,
        loss,
        matmul,
        reduce,
    )
    for module in modules:
        module._prepared.clear()
    yield made
    for module in modules:
        module._prepared.clear()
