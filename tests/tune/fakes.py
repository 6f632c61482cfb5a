"""A kernel family without kernels: times are given by a formula, so every search has a known answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from warploom.core.errors import ConfigError
from warploom.core.targets import target
from warploom.cuda.cubin import Resources
from warploom.cuda.store import CompiledKernel
from warploom.tune.built import Built
from warploom.tune.space import Space
from warploom.tune.tuner import Gpu
from warploom.winners.classes import ProblemClass, bucket


def flag(default: Any, *choices: Any) -> Any:
    return field(default=default, metadata={"doc": "", "choices": choices})


@dataclass(frozen=True)
class FakeConfig:
    tile: int = flag(64, 16, 32, 64, 128)
    warps: int = flag(4, 2, 4, 8)
    stages: int = flag(1, 1, 2)
    hint: bool = flag(False, False, True)
    order: bool = flag(False, False, True)
    size: int = flag(1, 1)
    note: str = ""

    def __str__(self) -> str:
        return f"tile={self.tile} warps={self.warps} stages={self.stages} hint={self.hint:d} order={self.order:d}"

    @classmethod
    def parse(cls, text: str) -> FakeConfig:
        try:
            values = {name: int(value) for name, value in (word.split("=") for word in text.split())}
            return cls(values["tile"], values["warps"], values["stages"], bool(values["hint"]), bool(values["order"]))
        except (ValueError, KeyError) as error:
            raise ConfigError(text) from error


Predicate = Callable[[FakeConfig], bool]


def never(config: FakeConfig) -> bool:
    return False


class SimulatedClock:
    """Time passes only in calls: the sum of what they cost. ``drift`` makes every call dearer than the one before."""

    def __init__(self, drift: float = 0.0) -> None:
        self.now, self.drift, self.calls = 0.0, drift, 0

    def spend(self, seconds: float) -> None:
        self.calls += 1
        self.now += seconds * (1 + self.drift * self.calls)

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, end: float) -> float:
        return end - start


@dataclass
class FakeFamily:
    """Times by ``cost``; ``wrong``, ``spilling``, ``broken`` and ``crashing`` configurations are to be left out."""

    clock: SimulatedClock
    wrong: Predicate = never
    spilling: Predicate = never
    broken: Predicate = never
    crashing: Predicate = never
    name: str = "fake"
    ran: list[FakeConfig] = field(default_factory=list)
    compiled: list[FakeConfig] = field(default_factory=list)
    checked: list[FakeConfig] = field(default_factory=list)
    lost: bool = False
    first_run: Callable[[FakeConfig], None] = lambda config: None
    after_calls: Callable[[int], None] = lambda calls: None

    def problem_class(self, problem: int) -> ProblemClass:
        return ProblemClass(self.name, "bf16", (("kind", "plain"),), (("n", bucket(problem, 0, 20)),))

    def default(self, problem: int, goal: Any) -> FakeConfig:
        return FakeConfig()

    def spaces(self, problem: int, goal: Any) -> tuple[Space[FakeConfig], ...]:
        return (Space(FakeConfig(), ("tile", "warps", "stages"), frozenset({"size"})),)

    def misfits(self, problem: int, config: FakeConfig, goal: Any) -> list[str]:
        return ["more warps than rows"] if config.tile < 8 * config.warps else []

    def kernel_key(self, problem: int, config: FakeConfig) -> FakeConfig:
        return config

    def program(self, problem: int, config: FakeConfig) -> Any:
        raise AssertionError("the fake build does not trace")

    def parse(self, text: str) -> FakeConfig:
        return FakeConfig.parse(text)

    def workload(self, problem: int, device: int) -> FakeWorkload:
        return FakeWorkload(self, problem)

    def cost(self, problem: int, config: FakeConfig) -> float:
        """Seconds: tile 128 with 8 warps is best for long problems, 32 with 4 for short ones; stages and hint help."""
        best = (128, 8) if problem >= 1024 else (32, 4)
        seconds = 1e-4 * problem / 1024 * (1 + abs(config.tile - best[0]) / 256 + abs(config.warps - best[1]) / 32)
        return (
            seconds * (0.9 if config.stages == 2 else 1) * (0.97 if config.hint else 1) * (1.02 if config.order else 1)
        )

    def build(self, family: Any, problem: int, configs: Any, arch: str, progress: Any) -> list[Built | str]:
        self.compiled += configs
        results: list[Built | str] = []
        for config in configs:
            progress(len(results) + 1, len(configs))
            results.append("does not compile: a test" if self.broken(config) else self._built(config, arch))
        return results

    def _built(self, config: FakeConfig, arch: str) -> Built:
        spills = 4096 if self.spilling(config) else 0
        code = str(replace(config, order=False) if config.tile == 16 else config).encode()
        needs = Resources(64, 0, 0, 1, (), spills, 0)
        return Built(CompiledKernel("fake", arch, code, "", needs, False, 0.0), 32 * config.warps, 1024, ())


@dataclass
class FakeWorkload:
    family: FakeFamily
    problem: int
    sets: int = 2

    def prepare(self, config: FakeConfig, built: Built) -> Callable[[int], object]:
        def run(index: int) -> None:
            assert index < self.sets
            self.family.ran.append(config)
            self.family.clock.spend(self.family.cost(self.problem, config))
            self.family.after_calls(len(self.family.ran))

        return run

    def fault(self, config: FakeConfig, built: Built) -> str | None:
        self.family.checked.append(config)
        self.family.first_run(config)
        if self.family.crashing(config):
            raise RuntimeError("the CUDA driver refused a call: a test")
        return "computes wrong results" if self.family.wrong(config) else None

    def answers(self) -> bool:
        return not self.family.lost


def fake_gpu(clock: SimulatedClock) -> Gpu:
    return Gpu(0, "NVIDIA Test 9000", target("sm_90a"), clock)
