"""Ladders: the same kernel in named steps, each with the one change that makes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from warploom.core.errors import ConfigError

Config = TypeVar("Config")


@dataclass(frozen=True)
class Rung(Generic[Config]):
    """One step of a ladder: its key ("8"), the seeds' name for it, what it changes, and its configuration."""

    key: str
    name: str
    changes: str
    config: Config


def steps(config: Any, changed: Iterable[tuple[str, str, str, Mapping[str, Any]]]) -> Iterator[Rung[Any]]:
    """The rungs of a configuration whose flags change step by step: (key, name, what changes, flags)."""
    for key, name, changes, flags in changed:
        config = replace(config, **flags)
        yield Rung(key, name, changes, config)


@dataclass(frozen=True)
class Ladder(Generic[Config]):
    """The rungs of one kernel family, from the base up."""

    family: str
    rungs: tuple[Rung[Config], ...]

    def rung(self, key: str) -> Rung[Config]:
        """The rung of a key or name. Raises ConfigError that lists the rungs there are."""
        for rung in self.rungs:
            if key in (rung.key, rung.name):
                return rung
        known = ", ".join(f"{r.key} ({r.name})" for r in self.rungs)
        raise ConfigError(f"{self.family} has no rung {key!r}; its rungs: {known}")
