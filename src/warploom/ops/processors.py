"""Where a call runs: on the GPU of its arrays, on a GPU with copies of CPU arrays, or on the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from warploom.core.targets import Target, target
from warploom.interop.arrays import Device
from warploom.kernels.settings import refuse, violations_of
from warploom.ops.backends import gpu_present, gpu_target, multiprocessors

Config = TypeVar("Config")

EMULATED_TARGET = "sm_80"
"""The architecture a plan is made for where there is no GPU; a ``wgmma`` configuration asked for is emulated too."""
EMULATED_MULTIPROCESSORS = 2
"""CTAs of an emulated persistent kernel, at most: each then has several tiles."""


@dataclass(frozen=True)
class Processor:
    """A GPU by its number, or the emulator (None); the architecture to make kernels for, and how many SMs it has."""

    gpu: int | None
    target: Target
    multiprocessors: int

    @classmethod
    def of(cls, device: Device, *, requires: str | None = None) -> Processor:
        """Where arrays on a device are worked on; ``requires``: the architecture that a given configuration needs."""
        if device[0] != "cuda" and not gpu_present():
            return cls(None, target(requires or EMULATED_TARGET), EMULATED_MULTIPROCESSORS)
        number = device[1] if device[0] == "cuda" else 0
        return cls(number, gpu_target(number), multiprocessors(number))

    def __str__(self) -> str:
        return "the emulator" if self.gpu is None else f"GPU {self.gpu}"


def decided(
    problem: Any,
    device: Device,
    config: Any,
    choose: Callable[[Processor], tuple[Config, str]],
    violations: Callable[[Any, Any, Target], list[str]] = violations_of,
) -> tuple[Config, str, Processor]:
    """The configuration asked for, or else the one to ``choose``; why that; and where it runs.

    Raises ConfigError for one asked for that does not fit, by its ``violations`` for the problem on a target.
    """
    on = Processor.of(device, requires=None if config is None else config.requires)
    if config is None:
        return *choose(on), on
    refuse(f"{config} does not fit", violations(config, problem, on.target))
    return config, "asked for by the caller", on
