"""What the tuner needs to know of a kernel family: attention and matmul are the same to it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeVar

from warploom.core.targets import Target
from warploom.ir.program import Program
from warploom.tune.built import Built
from warploom.tune.space import Space
from warploom.winners.classes import ProblemClass

Problem = TypeVar("Problem", contravariant=True)
Config = TypeVar("Config")
Candidate = TypeVar("Candidate", contravariant=True)


class Workload(Protocol[Candidate]):
    """One problem on one GPU: inputs on the device, and candidates that run on them."""

    sets: int
    """Input sets, enough to rotate past the L2."""

    def prepare(self, config: Candidate, built: Built) -> Callable[[int], object]:
        """A function that queues one call on an input set. Raises WarploomError or RuntimeError where it cannot run."""
        ...

    def fault(self, config: Candidate, built: Built) -> str | None:
        """What is wrong with the results on a small problem of the same kernel; None if nothing."""
        ...

    def answers(self) -> bool:
        """Whether the GPU still runs anything in this process: after an illegal access it does not."""
        ...


class Family(Protocol[Problem, Config]):
    """A kernel family. Instances are pickled: programs are built in other processes."""

    @property
    def name(self) -> str:
        """The family's name: ``"attention"``."""
        ...

    def problem_class(self, problem: Problem) -> ProblemClass:
        """Which problems share a winner with this one."""
        ...

    def default(self, problem: Problem, goal: Target) -> Config:
        """The untuned configuration: always timed, and what a winner is compared with."""
        ...

    def spaces(self, problem: Problem, goal: Target) -> Sequence[Space[Any]]:
        """Where to search; one space per generator."""
        ...

    def misfits(self, problem: Problem, config: Config, goal: Target) -> list[str]:
        """Every reason not to compile a configuration for the problem."""
        ...

    def kernel_key(self, problem: Problem, config: Config) -> Hashable:
        """Equal for problems that run the same kernel."""
        ...

    def program(self, problem: Problem, config: Config) -> Program:
        """The traced kernel."""
        ...

    def parse(self, text: str) -> Config:
        """A configuration from ``str(config)``. Raises ConfigError."""
        ...

    def workload(self, problem: Problem, device: int) -> Workload[Config]:
        """The problem on a GPU. Raises UnsupportedDeviceError."""
        ...
