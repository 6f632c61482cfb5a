"""Where a call runs: on the GPU of its arrays, on a GPU with copies of CPU arrays, or on the emulator."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.core.targets import Target, target
from warploom.interop.arrays import Device
from warploom.ops.backends import gpu_present, gpu_target, multiprocessors

EMULATED_TARGET = "sm_80"
"""The architecture a plan is made for where there is no GPU; a ``wgmma`` configuration asked for is emulated too."""
EMULATED_MULTIPROCESSORS = 2
"""CTAs of an emulated persistent kernel, at most: each then has several tiles."""
EMULATOR = "the emulator"


@dataclass(frozen=True)
class Place:
    """A GPU by its number, or the emulator (None); the architecture to make kernels for, and how many SMs it has."""

    gpu: int | None
    goal: Target
    multiprocessors: int

    @classmethod
    def of(cls, device: Device, *, requires: str | None = None) -> Place:
        """Where arrays on a device are worked on; ``requires``: the architecture that a given configuration needs."""
        if device[0] != "cuda" and not gpu_present():
            return cls(None, target(requires or EMULATED_TARGET), EMULATED_MULTIPROCESSORS)
        number = device[1] if device[0] == "cuda" else 0
        return cls(number, gpu_target(number), multiprocessors(number))

    def __str__(self) -> str:
        return EMULATOR if self.gpu is None else f"GPU {self.gpu}"
