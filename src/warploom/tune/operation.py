"""What the tuner needs to know of an operation: attention and matmul are the same to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, TypeVar

from warploom.core.targets import Target
from warploom.kernels.source import KernelSource
from warploom.measure.workload import OnGpu
from warploom.ops.tuned import TunableProblem

Problem = TypeVar("Problem", bound=TunableProblem)
Config = TypeVar("Config")


@dataclass(frozen=True)
class TunableOperation(Generic[Problem, Config]):
    """An operation whose configurations are flags with choices (:func:`warploom.kernels.settings.flag`)."""

    fixed: frozenset[str]
    """Flags that no search changes."""
    choose: Callable[[Problem, Target], tuple[Config, str]]
    """The configuration that runs untuned, and why. Raises ProblemError where nothing does."""
    space: Callable[[Problem, Target], Iterator[Config]]
    """Where to begin; flags that these have in common are tried one at a time on what won."""
    violations: Callable[[Config, Problem, Target], list[str]]
    """Those of a configuration for the problem: it is not compiled if there are some."""
    source: Callable[[Problem, Config], KernelSource]
    """The kernel that is compiled for the problem: of several, the one that does the work."""
    kinds: tuple[type[Any] | str, ...]
    """The configurations, as :func:`warploom.kernels.settings.read` takes them."""
    workload: Callable[[Problem, int], OnGpu]
    """The problem on a GPU. Raises UnsupportedDeviceError without PyTorch or a GPU."""


def choices(config: Any) -> dict[str, tuple[Any, ...]]:
    """Return the possible values of each flag of a configuration."""
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
