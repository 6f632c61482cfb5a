"""What several tests of calls share."""

from __future__ import annotations

import pytest

from tests.ops.emulated_gpu import DeviceCopy, EmulatedGpu
from warploom.core.targets import target
from warploom.ops import (
    attention,
    attention_backward,
    attention_varlen,
    backends,
    loss,
    matmul,
    places,
    reduce,
    steps,
    tuned,
)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> EmulatedGpu:
    """The only GPU of this machine, without tuned configurations and prepared calls."""
    made = EmulatedGpu()
    monkeypatch.setattr(DeviceCopy, "gpu", made, raising=False)
    monkeypatch.setattr("warploom.cuda.buffers.DeviceCopy", DeviceCopy)
    monkeypatch.setattr(places, "gpu_present", lambda: True)
    monkeypatch.setattr(places, "gpu_target", lambda _: target("sm_80"))
    monkeypatch.setattr(places, "multiprocessors", lambda _: 2)
    monkeypatch.setattr(tuned, "gpu_name", lambda _: "the emulator")
    monkeypatch.setattr(backends.GpuCall, "prepare", made.prepare)
    monkeypatch.setattr(steps, "zero_words", made.zero)
    for room in (matmul, attention, attention_backward, attention_varlen):
        monkeypatch.setattr(room, "_prepared", {})
    for room in (reduce, loss):
        monkeypatch.setattr(room, "_ready", {})
    return made
