"""Check and time a user's own kernel on the GPU, launched as its example says, or search its configurations."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.checking.kernel_file import ExampleResult, configuration_of, example_of, results_of, traced_kernel
from warploom.core.errors import ConfigError, ProblemError, WarploomError
from warploom.cuda.device import require_driver
from warploom.ir.program import Program
from warploom.lang import KernelFunction
from warploom.measure.timing import Candidate, Clock, EventClock, Measured, input_sets, measure
from warploom.ops.launch import CopiedLaunch, copied_launch

_L2_BYTES = 50 << 20
"""What the copies of the arguments that are timed in turn must exceed: the L2 of an H100 or H200."""
_MOST_SETS = 8


@dataclass(frozen=True)
class Timed:
    """A configuration of a kernel that was right, and how long its example takes; ``bytes`` of its arrays."""

    configuration: Mapping[str, Any]
    results: tuple[ExampleResult, ...]
    measured: Measured
    bytes: int

    @property
    def gigabytes(self) -> float:
        """The arrays' bytes, each once, in GB/s."""
        return self.bytes / self.measured.seconds.median / 1e9

    def text(self) -> str:
        """In one line: microseconds with the 10th and 90th percentile, and the rate."""
        micro = {name: value * 1e6 for name, value in self.measured.seconds.json().items()}
        spread = f"({micro['low']:.4g} to {micro['high']:.4g})"
        return (
            f"{shown(self.configuration)}: {micro['median']:.4g} µs {spread}, {self.gigabytes:.4g} GB/s of its arrays"
        )

    def json(self) -> dict[str, Any]:
        """The configuration, microseconds, GB/s, and the checked results."""
        return {
            "configuration": {name: str(value) for name, value in self.configuration.items()},
            "microseconds": {name: value * 1e6 for name, value in self.measured.seconds.json().items()},
            "array_gigabytes_per_second": self.gigabytes,
            "results": [{"name": r.name, "error": r.error, "tolerance": r.tolerance} for r in self.results],
        }


@dataclass(frozen=True)
class Search:
    """Configurations that were timed, the fastest first, and why others were not."""

    timed: tuple[Timed, ...]
    dropped: Mapping[str, str]


@dataclass(frozen=True)
class PreparedConfiguration:
    """One configuration on the GPU: checked, with arguments enough that no launch finds its own in the L2."""

    configuration: Mapping[str, Any]
    results: tuple[ExampleResult, ...]
    launches: tuple[CopiedLaunch, ...]
    bytes: int


def prepare(function: KernelFunction, configuration: Mapping[str, Any]) -> PreparedConfiguration:
    """Run the example once on the GPU and compare what it expects.

    Raises ProblemError where it expects nothing or a result is wrong, and what tracing and launching raise.
    """
    program = traced_kernel(function, configuration)
    launch = example_of(function, program, 0, configuration)
    if not launch.expect:
        raise ProblemError(f"the example of {function.name} expects nothing: give expect to Launch, to check results")
    first = copied_launch(program, launch.grid, launch.arguments)
    first.queue(0)
    first.download()
    results = results_of(program, launch)
    if wrong := [r.name for r in results if not r.ok]:
        raise ProblemError(f"{function.name} is wrong on the GPU ({', '.join(wrong)}): run warploom check first")
    arrays = [x[0] if isinstance(x, tuple) else x for x in launch.arguments]
    size = sum(int(x.nbytes) for x in arrays if isinstance(x, np.ndarray))
    sets = min(_MOST_SETS, input_sets(size, _L2_BYTES))
    more = [_again(function, program, configuration, seed) for seed in range(1, sets)]
    return PreparedConfiguration(configuration, results, (first, *more), size)


def _again(function: KernelFunction, program: Program, configuration: Mapping[str, Any], seed: int) -> CopiedLaunch:
    launch = example_of(function, program, seed, configuration)
    return copied_launch(program, launch.grid, launch.arguments)


def bench_kernel(
    function: KernelFunction, configuration: Mapping[str, Any], rounds: int, clock: Clock | None = None
) -> Timed:
    """Check and time one configuration. Raises UnsupportedDeviceError without a GPU, and as :func:`prepare` does."""
    require_driver()
    return _timed([prepare(function, configuration)], rounds, clock)[0]


def tune_kernel(
    function: KernelFunction, values: Mapping[str, Sequence[str]], rounds: int, clock: Clock | None = None
) -> Search:
    """Check every combination of the values of trace-time parameters, and time those that are right, interleaved.

    Raises UnsupportedDeviceError without a GPU, ConfigError for parameters that the kernel does not have.
    """
    candidates = combinations(function, values)
    require_driver()
    ready: list[PreparedConfiguration] = []
    dropped: dict[str, str] = {}
    for configuration in candidates:
        try:
            ready.append(prepare(function, configuration))
        except WarploomError as error:
            dropped[shown(configuration)] = str(error)
    timed = _timed(ready, rounds, clock)
    return Search(tuple(sorted(timed, key=lambda t: t.measured.seconds.median)), dropped)


def combinations(function: KernelFunction, values: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Every configuration of the values, given as text. Raises ConfigError for an unknown parameter, or for none."""
    if not values:
        raise ConfigError("name what to try, as in --try tile=64,128 --try stages=2,3")
    return [
        configuration_of(function, dict(zip(values, chosen, strict=True)))
        for chosen in itertools.product(*values.values())
    ]


def shown(configuration: Mapping[str, Any]) -> str:
    """``tile=64, stages=2``, or "as it is" for none."""
    return ", ".join(f"{name}={value}" for name, value in configuration.items()) or "as it is"


def _timed(ready: Sequence[PreparedConfiguration], rounds: int, clock: Clock | None) -> list[Timed]:
    if not ready:
        return []

    def candidate(one: PreparedConfiguration) -> Candidate:
        launches = one.launches
        return Candidate(shown(one.configuration), lambda i: launches[i % len(launches)].queue(0))

    sets = max(len(one.launches) for one in ready)
    found = measure([candidate(one) for one in ready], sets, clock or EventClock(0), rounds=rounds)
    return [Timed(x.configuration, x.results, found[shown(x.configuration)], x.bytes) for x in ready]
