"""A GPU for workloads: PyTorch on the CPU, and launches on the emulator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

from warploom.ops.backends import run_on_emulator


class CpuTorch:
    """PyTorch whose GPU is the CPU: enough for a workload's inputs."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.cuda = SimpleNamespace(
            get_device_properties=lambda device: SimpleNamespace(L2_cache_size=20000), synchronize=lambda device: None
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def device(self, *_: Any) -> Any:
        return self._torch.device("cpu")

    def Generator(self, _: Any) -> Any:  # noqa: N802 - PyTorch's name
        return self._torch.Generator()


class EmulatedAttention:
    """A ``GpuCall``; ``broken`` launches write nothing."""

    made: ClassVar[list[EmulatedAttention]] = []
    broken: ClassVar[bool] = False

    def __init__(self, call: Any) -> None:
        self.call, self.launches = call, []
        EmulatedAttention.made.append(self)

    @classmethod
    def of(cls, call: Any, device: int) -> EmulatedAttention:
        return cls(call)

    def launch(self, views: Any, kind: str) -> None:
        assert kind == "torch"
        self.launches.append([view.pointer for view in views])
        if not self.broken:
            run_on_emulator(self.call.source.program, self.call.grid, views, self.call.scalars, self.call.maps)
