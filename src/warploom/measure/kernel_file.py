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
from warploom.lang.kernel import configuration_text
from warploom.measure.timing import Candidate, Clock, EventClock, Measured, input_sets, measure, paired_ratio
from warploom.ops import tuned
from warploom.ops.backends import gpu_name
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
        name = configuration_text(self.configuration)
        return f"{name}: {micro['median']:.4g} µs {spread}, {self.gigabytes:.4g} GB/s of its arrays"

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

    Without values the kernel's own are tried (``@kernel(tune=…)``), and the fastest is kept for launches. Raises
    UnsupportedDeviceError without a GPU, ConfigError for parameters that the kernel does not have, OSError where
    nothing can be kept.
    """
    candidates = combinations(function, values) if values else function.choices()
    if candidates == [{}]:
        raise ConfigError(
            f"name what to try, as in --try tile=64,128, or declare it: @kernel(…, tune={{'tile': (64, 128)}}) of "
            f"{function.name}"
        )
    require_driver()
    if not values:
        tuned.require_writable()
    ready: list[PreparedConfiguration] = []
    dropped: dict[str, str] = {}
    for configuration in candidates:
        try:
            ready.append(prepare(function, configuration))
        except WarploomError as error:
            dropped[configuration_text(configuration)] = str(error)
    timed = sorted(_timed(ready, rounds, clock), key=lambda t: t.measured.seconds.median)
    if timed and not values:
        _keep(function, timed)
    return Search(tuple(timed), dropped)


def _keep(function: KernelFunction, timed: Sequence[Timed]) -> None:
    """Keep the first of ``timed`` for launches on GPU 0."""
    first, spread = timed[0], timed[0].measured.seconds
    default = [one for one in timed if all(function.settings[name] == x for name, x in one.configuration.items())]
    speedup = paired_ratio(first.measured, default[0].measured) if default else 1.0
    seconds, size_class = (spread.median, spread.low, spread.high), tuned.kernel_class(function.trace())
    config = configuration_text(first.configuration)
    tuned.keep(tuned.Tuned.now(gpu_name(0), size_class, config, seconds, speedup, len(timed)))


def combinations(function: KernelFunction, values: Mapping[str, Sequence[str]]) -> list[dict[str, Any]]:
    """Every configuration of the values, given as text. Raises ConfigError for an unknown parameter."""
    return [
        configuration_of(function, dict(zip(values, chosen, strict=True)))
        for chosen in itertools.product(*values.values())
    ]


def _timed(ready: Sequence[PreparedConfiguration], rounds: int, clock: Clock | None) -> list[Timed]:
    if not ready:
        return []

    def candidate(one: PreparedConfiguration) -> Candidate:
        launches = one.launches
        return Candidate(configuration_text(one.configuration), lambda i: launches[i % len(launches)].queue(0))

    sets = max(len(one.launches) for one in ready)
    found = measure([candidate(one) for one in ready], sets, clock or EventClock(0), rounds=rounds)
    return [Timed(x.configuration, x.results, found[configuration_text(x.configuration)], x.bytes) for x in ready]
