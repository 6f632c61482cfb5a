"""What the tuner needs to know of an operation: attention and matmul are the same to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, Protocol, TypeVar

from warploom.bench.peers import torch_module
from warploom.bench.timing import input_sets
from warploom.core.dtypes import DType
from warploom.core.targets import Target
from warploom.kernels.source import KernelSource
from warploom.ops.tuned import TunableProblem

Problem = TypeVar("Problem", bound=TunableProblem, contravariant=True)
Config = TypeVar("Config")
Candidate = TypeVar("Candidate", contravariant=True)


class Workload(Protocol[Candidate]):
    """One problem on one GPU: inputs on the device, and candidates that run on them."""

    sets: int
    """Input sets, enough to rotate past the L2."""

    def prepare(self, config: Candidate) -> Callable[[int], object]:
        """A function that queues one call on an input set. Raises WarploomError or RuntimeError where it cannot run."""
        ...

    def fault(self, config: Candidate) -> str | None:
        """What is wrong with the results on a small problem of the same kernel; None if nothing."""
        ...

    def answers(self) -> bool:
        """Whether the GPU still runs anything in this process: after an illegal access it does not."""
        ...


class OnGpu:
    """What workloads share: PyTorch on a GPU, a generator of inputs, and ``sets`` of so many bytes past the L2."""

    def __init__(self, device: int, bytes_per_set: int) -> None:
        torch = self._torch = torch_module()
        self._index, self._device = device, torch.device("cuda", device)
        self._generator = torch.Generator(self._device).manual_seed(0)
        self.sets = input_sets(bytes_per_set, int(torch.cuda.get_device_properties(self._device).L2_cache_size))

    def kind(self, dtype: DType) -> Any:
        """PyTorch's type."""
        return {"bf16": self._torch.bfloat16, "f16": self._torch.float16, "f32": self._torch.float32}[dtype.name]

    def answers(self) -> bool:
        """Whether the GPU still runs anything in this process."""
        try:
            self._torch.cuda.synchronize(self._device)
        except RuntimeError:
            return False
        return True


class Operation(Protocol[Problem, Config]):
    """An operation whose configurations are flags with choices (:func:`warploom.kernels.settings.flag`)."""

    @property
    def fixed(self) -> frozenset[str]:
        """Flags that no search changes."""
        ...

    def choose(self, problem: Problem, target: Target) -> tuple[Config, str]:
        """The configuration that runs untuned, and why. Raises ProblemError where nothing does."""
        ...

    def space(self, problem: Problem, target: Target) -> Iterator[Config]:
        """Where to begin; flags that these have in common are tried one at a time on what won."""
        ...

    def misfits(self, problem: Problem, config: Config, target: Target) -> list[str]:
        """Every reason not to compile a configuration for the problem."""
        ...

    def source(self, problem: Problem, config: Config) -> KernelSource:
        """The kernel that is compiled for the problem: of several, the one that does the work."""
        ...

    def parse(self, text: str) -> Config:
        """A configuration from ``str(config)``. Raises ConfigError."""
        ...

    def workload(self, problem: Problem, device: int) -> Workload[Config]:
        """The problem on a GPU. Raises UnsupportedDeviceError without PyTorch or a GPU."""
        ...


def choices(config: Any) -> dict[str, tuple[Any, ...]]:
    """What each flag of a configuration may be."""
    return {f.name: tuple(f.metadata["choices"]) for f in fields(config) if "choices" in f.metadata}


def combinations(base: Any, names: Mapping[str, tuple[Any, ...] | None]) -> Iterator[Any]:
    """``base`` with every combination of values of some flags: those given, or all that the flag may have."""
    known = choices(base)
    for values in itertools.product(*(of or known[name] for name, of in names.items())):
        yield replace(base, **dict(zip(names, values, strict=True)))


def neighbours(config: Any, fixed: frozenset[str]) -> Iterator[Any]:
    """``config`` with one flag changed, all choices of each."""
    for name, values in choices(config).items():
        if name not in fixed:
            yield from (replace(config, **{name: value}) for value in values if value != getattr(config, name))
