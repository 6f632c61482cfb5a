"""An operation without kernels: times are given by a formula, so every search has a known answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.clock import SimulatedClock
from warploom.core.targets import Target, target
from warploom.cuda.cubin import Resources
from warploom.cuda.store import CompiledKernel
from warploom.kernels.classes import size_class
from warploom.kernels.settings import Configuration, flag
from warploom.kernels.source import KernelSource
from warploom.tune.build import Built
from warploom.tune.operation import combinations
from warploom.tune.tuner import TuningGpu

GPU = "NVIDIA Test 9000"


@dataclass(frozen=True)
class FakeProblem:
    """``n`` rows."""

    n: int

    @property
    def size_class(self) -> str:
        return size_class("fake", {}, {"n": (self.n, 0, 20)})


@dataclass(frozen=True)
class FakeConfig(Configuration):
    word = "fake"
    always = ("tile",)

    tile: int = flag(64, "", (16, 32, 64, 128))
    warps: int = flag(4, "", (2, 4, 8))
    stages: int = flag(1, "", (1, 2))
    hint: bool = flag(False, "")
    order: bool = flag(False, "")
    size: int = flag(1, "", (1, 2))

    def check(self, target: Target | None = None) -> list[str]:
        return []


Predicate = Callable[[FakeConfig], bool]


def never(config: FakeConfig) -> bool:
    return False


def compiled(code: str, *, spills: int = 0, threads: int = 128) -> Built:
    """A kernel of 64 registers whose machine code is a text."""
    needs = Resources(64, 0, 0, 1, (), spills, 0)
    return Built(CompiledKernel("fake", "sm_90a", code.encode(), "", needs, False, 0.0), threads, 1024)


def config_of(source: KernelSource) -> Any:
    """The configuration that a source is traced for."""
    return dict(source.arguments)["config"]


@dataclass
class FakeOperation:
    """Times by ``cost``; ``wrong``, ``spilling``, ``broken`` and ``crashing`` configurations are to be left out."""

    clock: SimulatedClock = field(default_factory=SimulatedClock)
    wrong: Predicate = never
    spilling: Predicate = never
    broken: Predicate = never
    crashing: Predicate = never
    fixed: frozenset[str] = frozenset({"size"})
    kinds: tuple[type[Any], ...] = (FakeConfig,)
    ran: list[FakeConfig] = field(default_factory=list)
    compiled: list[FakeConfig] = field(default_factory=list)
    checked: list[FakeConfig] = field(default_factory=list)
    lost: bool = False
    first_run: Callable[[FakeConfig], None] = lambda config: None

    def choose(self, problem: FakeProblem, target: Target) -> tuple[FakeConfig, str]:
        return FakeConfig(), "untuned"

    def space(self, problem: FakeProblem, target: Target) -> Iterator[FakeConfig]:
        return combinations(FakeConfig(), dict.fromkeys(("tile", "warps", "stages")))

    def violations(self, config: FakeConfig, problem: FakeProblem, target: Target) -> list[str]:
        return ["more warps than rows"] if config.tile < 8 * config.warps else []

    def source(self, problem: FakeProblem, config: FakeConfig) -> KernelSource:
        return KernelSource.of("fake:fake", "fake", config=config)

    def workload(self, problem: FakeProblem, device: int) -> FakeWorkload:
        return FakeWorkload(self, problem.n)

    def cost(self, n: int, config: FakeConfig) -> float:
        """Seconds: tile 128 with 8 warps is best for long problems, 32 with 4 for short ones; stages and hint help."""
        best = (128, 8) if n >= 1024 else (32, 4)
        seconds = 1e-4 * n / 1024 * (1 + abs(config.tile - best[0]) / 256 + abs(config.warps - best[1]) / 32)
        return (
            seconds * (0.9 if config.stages == 2 else 1) * (0.97 if config.hint else 1) * (1.02 if config.order else 1)
        )

    def build(self, sources: Sequence[KernelSource], arch: str, progress: Any) -> list[Built | str]:
        results: list[Built | str] = []
        for config in map(config_of, sources):
            self.compiled.append(config)
            progress(len(results) + 1, len(sources))
            code = str(replace(config, order=False) if config.tile == 16 else config)
            built = compiled(code, spills=4096 if self.spilling(config) else 0, threads=32 * config.warps)
            results.append("does not compile: a test" if self.broken(config) else built)
        return results


@dataclass
class FakeWorkload:
    of: FakeOperation
    n: int
    sets: int = 2

    def prepare(self, config: FakeConfig) -> Callable[[int], object]:
        def run(index: int) -> None:
            assert index < self.sets
            self.of.ran.append(config)
            self.of.clock.spend(self.of.cost(self.n, config))

        return run

    def fault(self, config: FakeConfig) -> str | None:
        self.of.checked.append(config)
        self.of.first_run(config)
        if self.of.crashing(config):
            raise RuntimeError("the CUDA driver refused a call: a test")
        return "computes wrong results" if self.of.wrong(config) else None

    def answers(self) -> bool:
        return not self.of.lost


def fake_gpu(clock: SimulatedClock) -> TuningGpu:
    return TuningGpu(0, GPU, target("sm_90a"), clock)
