"""Hardware counters of launches, read by Nsight Compute (``ncu``) from a process that runs each once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar, Protocol

import numpy as np

from warploom.checking.kernel_file import configuration_of, example_of, one_kernel, traced_kernel
from warploom.core.dtypes import bf16
from warploom.core.errors import ConfigError, UnsupportedDeviceError
from warploom.cuda.device import require_driver, target_of
from warploom.ir.program import Program
from warploom.kernels.attention.problem import AttentionConfig
from warploom.lang import KernelFunction
from warploom.ops.attention import attention, plan
from warploom.ops.launch import copied_launch
from warploom.ops.matmul import matmul, plan_matmul
from warploom_lab.bench.attention import settled as attention_rung
from warploom_lab.bench.counters import METRICS, OPCODES, Profile, choose_metrics, parse_profiles
from warploom_lab.bench.gemm import ACCUMULATORS
from warploom_lab.bench.gemm import settled as gemm_rungs
from warploom_lab.bench.ncu import available_metrics, find_ncu, record
from warploom_lab.bench.samples import locate, parse_source_page
from warploom_lab.inspect import SassReport, inspect_program
from warploom_lab.kernels.attention.ladder import FULL_LADDER as ATTENTION
from warploom_lab.kernels.matmul.ladder import LADDER as GEMM


class Watched(Protocol):
    """A launch that can be described as JSON: a dataclass of plain values."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def config(self) -> Any:
        """What runs. Raises ConfigError for a rung or a flag that does not exist."""
        ...

    @property
    def program(self) -> Program | None:
        """The Program that runs; None for another's kernel, of which ncu's listing is all there is."""
        ...

    def run(self) -> None:
        """Launch it once, in the process that ncu watches."""
        ...


@dataclass(frozen=True)
class AttentionLaunch:
    """One launch to profile: a rung on random inputs (full, head_dim 128, bf16); ``settings`` are FLAG=VALUE."""

    rung: str
    seq: int
    batch: int = 1
    heads: int = 1
    settings: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(batch, seq, heads, head_dim) of q, k and v."""
        return self.batch, self.seq, self.heads, self.config.head_dim

    @property
    def config(self) -> AttentionConfig:
        """The rung's configuration with the settings. Raises ConfigError for a rung or a flag that does not exist."""
        return attention_rung(ATTENTION.rung(self.rung), 128, bf16, _flags(self.settings)).config

    @property
    def program(self) -> Program:
        """The Program that runs."""
        q = np.empty(self.shape, self.config.dtype.numpy)  # never touched: planning reads shapes and strides
        return plan(q, q, q, config=self.config).program

    def run(self) -> None:
        """Launch it once on random NumPy arrays."""
        attention(*_inputs(self.config.dtype.numpy, *3 * [self.shape]), config=self.config)


def _flags(settings: Iterable[str]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in settings)


@lru_cache(maxsize=1)  # a long problem fills a gigabyte
def _inputs(kind: Any, *shapes: tuple[int, ...]) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(shape, np.float32).astype(kind) for shape in shapes]


@dataclass(frozen=True)
class GemmLaunch:
    """One launch to profile: a rung on random row-major matrices of its own types; ``settings`` are FLAG=VALUE.

    ``accumulate``: "f16" or "f32" instead of the rung's own.
    """

    rung: str
    m: int
    n: int
    k: int
    accumulate: str | None = None
    settings: tuple[str, ...] = ()

    @property
    def config(self) -> Any:
        """The rung's configuration with the settings. Raises ConfigError for a rung or a flag that does not exist."""
        kind = None if self.accumulate is None else ACCUMULATORS[self.accumulate]
        return gemm_rungs([GEMM.rung(self.rung)], kind, _flags(self.settings))[0].config

    @property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The shapes of A and B."""
        return (self.m, self.k), (self.k, self.n)

    @property
    def program(self) -> Program:
        """The Program that runs; of a split K the first of two."""
        config = self.config
        a, b = (np.empty(shape, config.dtype.numpy) for shape in self.shapes)
        return plan_matmul(a, b, config=config, accumulate=config.accumulate).program  # reads shapes and strides alone

    def run(self) -> None:
        """Launch it once on random NumPy arrays."""
        config = self.config
        matmul(*_inputs(config.dtype.numpy, *self.shapes), config=config, accumulate=config.accumulate)


@dataclass(frozen=True)
class KernelLaunch:
    """The example of a kernel in a file, for a profiler to watch; ``settings`` are NAME=VALUE."""

    file: str
    settings: tuple[str, ...] = ()

    @property
    def config(self) -> tuple[KernelFunction, dict[str, Any]]:
        """The kernel and its configuration. Raises ProblemError or ConfigError for what does not exist."""
        function = one_kernel(self.file)
        return function, configuration_of(function, _flags(self.settings))

    @property
    def program(self) -> Program:
        """The Program that runs."""
        return traced_kernel(*self.config)

    def run(self) -> None:
        """Launch the example once."""
        function, configuration = self.config
        program = self.program
        launch = example_of(function, program, 0, configuration)
        copied = copied_launch(program, launch.grid, launch.arguments)
        copied.queue(0)
        copied.download()


def profile_launches(
    launches: Sequence[Watched],
    *,
    tables: Sequence[str] = tuple(METRICS),
    samples: bool = True,
    seconds: float = 120.0,
    kernels: str = "",
    module: str = "",
) -> list[Profile]:
    """Counters and samples of each launch, from one process that ncu watches; clocks as they are.

    The launches are of one class, which the process imports from ``module`` (by default its own). It launches each once
    and nothing else (or nothing whose name ``kernels``, a regular expression, matches). Of :data:`METRICS` ``tables``
    are read: a launch is replayed until all of them are, so few take less time.

    Raises UnsupportedDeviceError where ncu is missing, refuses or takes longer than ``seconds``, ConfigError for a rung
    or flag that does not exist.
    """
    ncu = find_ncu()
    for one in launches:
        one.config  # noqa: B018  # a mistake is told before anything runs
    known = choose_metrics(available_metrics(ncu))
    chosen = {name: known[name] for name in tables if name in known}
    wanted = [
        *(m for table in chosen.values() for m in table.values()),
        *([OPCODES] if "instructions" in tables else []),
    ]
    kind = type(launches[0])
    driver = [
        sys.executable,
        "-m",
        __name__,
        f"{module or kind.__module__}:{kind.__qualname__}",
        json.dumps([asdict(one) for one in launches]),
    ]
    raw, source = record(ncu, wanted, driver, samples=samples, seconds=seconds, kernels=kernels)
    profiles = parse_profiles(raw, chosen)
    if len(profiles) != len(launches):
        raise UnsupportedDeviceError(f"ncu saw {len(profiles)} kernels where {len(launches)} were launched")
    return with_samples(profiles, source, launches)


def with_samples(profiles: Sequence[Profile], source: str, launches: Sequence[Watched]) -> list[Profile]:
    """The profiles with the samples of ncu's source page; as they are where ncu took none."""
    try:
        kernels = parse_source_page(source)
    except ConfigError:
        return list(profiles)
    if len(kernels) != len(profiles):
        return list(profiles)
    joined = zip(profiles, kernels, launches, strict=True)
    return [replace(profile, samples=locate(sampled, _report(one))) for profile, sampled, one in joined]


def _report(one: Watched) -> SassReport | None:
    """What a launch compiles to, with lines and encodings; None where that is not known or nvdisasm is missing."""
    try:
        program = one.program
        return None if program is None else inspect_program(program, target_of(0).name, with_source=True)
    except UnsupportedDeviceError:
        return None


def main(name: str, described: str) -> None:
    """``python -m warploom_lab.bench.profile MODULE:CLASS JSON``: launch each once; the process that ncu watches."""
    module, _, kind = name.partition(":")
    make = getattr(import_module(module), kind)
    require_driver()
    for one in json.loads(described):
        make(**{key: tuple(value) if isinstance(value, list) else value for key, value in one.items()}).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
