"""The space of a search, from the fields of a configuration: each flag says in its metadata what it may be."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import Field, dataclass, fields, replace
from typing import Any, Generic, TypeVar

Config = TypeVar("Config")


def _choices(config: Any) -> dict[str, tuple[Any, ...]]:
    """What each flag may be; fields without ``choices`` in their metadata are not searched."""
    declared: tuple[Field[Any], ...] = fields(config)
    return {f.name: tuple(f.metadata["choices"]) for f in declared if "choices" in f.metadata}


@dataclass(frozen=True)
class Space(Generic[Config]):
    """Configurations around ``base``: flags searched ``together`` (every combination), and those never touched.

    All other flags are tried one at a time on what won among the combinations (:meth:`variants`): most of them gain
    little, and little depends on the tile.
    """

    base: Config
    together: tuple[str, ...]
    pinned: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        unknown = {*self.together, *self.pinned} - set(_choices(self.base))
        if unknown:
            raise ValueError(f"{type(self.base).__name__} has no choices for {', '.join(sorted(unknown))}")

    def combinations(self) -> Iterator[Config]:
        """Every combination of the flags searched together, in the order of their choices."""
        choices = _choices(self.base)
        for values in itertools.product(*(choices[name] for name in self.together)):
            yield _replaced(self.base, dict(zip(self.together, values, strict=True)))

    def variants(self, config: Config) -> Iterator[Config]:
        """``config`` with one other flag changed, all choices of each."""
        for name, values in _choices(config).items():
            if name in self.pinned or name in self.together:
                continue
            for value in values:
                if value != getattr(config, name):
                    yield _replaced(config, {name: value})


def _replaced(config: Any, changes: dict[str, Any]) -> Any:
    return replace(config, **changes)


def distinct(configs: Iterable[Config]) -> list[Config]:
    """Each configuration once, in order of first appearance."""
    return list(dict.fromkeys(configs))
