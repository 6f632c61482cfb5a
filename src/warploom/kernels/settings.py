"""Flags of a configuration: set by text (``--set FLAG=VALUE`` on the command line), and what each may be."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, Protocol, Self, TypeVar

from warploom.core.dtypes import DType, dtype_of
from warploom.core.errors import ConfigError, ProblemError, shown
from warploom.core.targets import Target

Config = TypeVar("Config")

MOST_OPT_LEVEL = 3


def flag(default: Any, doc: str, choices: tuple[Any, ...] = (False, True)) -> Any:
    """A field of a configuration: what it means, and what a search may set it to."""
    return field(default=default, metadata={"doc": doc, "choices": choices})


class Configuration(ABC):
    """A frozen dataclass of flags: printed as ``name(flag=value, …)``, and read from that; ``word`` is the name.

    Flags that are not printed have their defaults.
    """

    word: ClassVar[str]
    always: ClassVar[tuple[str, ...]] = ("dtype",)
    """Flags that are printed even where they have their defaults."""
    also: ClassVar[Mapping[str, str]] = {}
    """Further names of flags."""

    def __str__(self) -> str:
        shown: list[str] = []
        for f in fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if f.name in self.always or value != f.default:
                shown.append(f"{f.name}={type_name(value)}")
        return f"{self.word}({', '.join(shown)})"

    @classmethod
    def reads(cls, text: str) -> bool:
        """Whether a text is in the notation, by how it begins."""
        return text.partition("(")[0].strip() == cls.word

    @classmethod
    def parse(cls, text: str) -> Self:
        """The configuration that :meth:`__str__` printed. Raises ConfigError for flags it does not have."""
        return cls().with_settings(cls.settings_of(text))

    @classmethod
    def settings_of(cls, text: str) -> dict[str, str]:
        """The flags that a text in the notation sets. Raises ConfigError for another text."""
        match = re.fullmatch(rf"\s*{cls.word}\s*\((.*)\)\s*", text)
        settings = [part.partition("=") for part in (match[1] if match else "=").split(",") if part.strip()]
        if match is None or not all(equals for _, equals, _ in settings):
            raise ConfigError(f"{text!r} is no configuration; write {cls()}")
        return {name.strip(): value.strip() for name, _, value in settings}

    def with_settings(self, settings: Mapping[str, str]) -> Self:
        """This configuration with flags overridden by text, as ``--set FLAG=VALUE`` gives it.

        Raises ConfigError for unknown names and values.
        """
        known: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        changes: dict[str, Any] = {}
        for word, text in settings.items():
            name = self.also.get(word, word)
            if name not in known:
                raise ConfigError(f"{word!r} is no flag of {self.word}; known: {', '.join((*known, *self.also))}")
            changes[name] = flag_value(word, text, known[name])
        return replace(self, **changes)  # type: ignore[type-var]

    @abstractmethod
    def check(self, target: Target | None = None) -> list[str]:
        """The violated constraints (of ``target``, if given); empty if the configuration is valid."""

    def require(self, target: Target | None = None) -> None:
        """Raise ConfigError with the constraints that :meth:`check` found violated."""
        refuse(f"{self} is not valid", self.check(target))


Read = TypeVar("Read", bound=Configuration)
GROUP = "warploom.configurations"
"""The group of entry points by which packages add configurations: sequences of classes, by an operation's name."""


def all_kinds(kinds: Sequence[type[Any] | str]) -> Iterator[type[Any]]:
    """The classes of configurations, in order; a text among ``kinds`` stands for those added to the operation it names.

    Their packages are imported when the iteration comes to them.
    """
    for kind in kinds:
        if isinstance(kind, str):
            yield from _added(kind)
        else:
            yield kind


@lru_cache
def _added(operation: str) -> tuple[type[Any], ...]:
    """The classes of configurations that installed packages add to an operation."""
    from importlib.metadata import entry_points  # imports forty modules, which most calls do without

    return tuple(kind for entry in entry_points(group=GROUP, name=operation) for kind in entry.load())


def read(value: Any, kinds: Sequence[type[Read] | str], **types: DType) -> Read | None:
    """Read a caller's ``config``: None, a configuration of one of these kinds, or the text of one.

    ``kinds`` are as :func:`all_kinds` takes them; those of other packages stand last, and are imported for a value that
    is none of the others. ``types`` are flags that hold where a text leaves them out. Raises ConfigError for others.
    """
    if value is None:
        return None
    for kind in all_kinds(kinds):
        if type(value) is kind:
            return value  # type: ignore[return-value]
        if isinstance(value, str) and kind.reads(value):
            found, given = kind.parse(value), kind.settings_of(value) if types else {}
            left_out = {f.name for f in fields(found)} - given.keys()
            return replace(found, **{name: x for name, x in types.items() if name in left_out})
    words = [f"{kind.word}(…)" for kind in kinds if not isinstance(kind, str)]
    raise ConfigError(
        f"config cannot be {shown(value)}: leave it out for the default, or write {' or '.join(words)} with flags, "
        "as a plan's config is printed"
    )


class AnyConfiguration(Protocol):
    """A configuration of a kernel, or of the kernels of an operation."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    requires: ClassVar[str]
    """The oldest architecture that they run on."""

    @property
    def dtype(self) -> DType:
        """The element type of the operands."""
        ...

    def check(self, target: Target | None = None) -> list[str]:
        """The violated constraints; empty if the configuration is valid."""
        ...

    def with_settings(self, settings: Mapping[str, str]) -> Self:
        """This configuration with flags overridden by text."""
        ...


def violations_of(config: Any, problem: Any, target: Target | None) -> list[str]:
    """The constraints that a configuration violates for a problem on a target, if given; empty if it takes it.

    A problem's constraints divide by flags: they are asked of a valid configuration alone.
    """
    return config.check() or [*config.check(target), *config.violations(problem)]


def fitting(problem: Any, configs: Iterable[Config], target: Target) -> tuple[list[Config], list[str]]:
    """The configurations that take a problem on a target, and the first violated constraint of each other."""
    every = [(config, violations_of(config, problem, target)) for config in configs]
    return [c for c, found in every if not found], list(dict.fromkeys(found[0] for _, found in every if found))


def first_fitting(configs: Iterable[Config], violations: Callable[[Config], list[str]], none: str) -> Config:
    """The first of ``configs`` without ``violations``. Raises ProblemError that says ``none`` takes it, and why."""
    reasons: dict[str, None] = {}
    for config in configs:
        found = violations(config)
        if not found:
            return config
        reasons[found[0]] = None
    raise ProblemError(f"{none}: {'; '.join(reasons)}")


def violated(constraints: Sequence[tuple[bool, str]]) -> list[str]:
    """The messages of the constraints, pairs (whether it holds, message), that do not hold."""
    return [problem for holds, problem in constraints if not holds]


def shared_excess(needed: int, target: Target | None) -> list[str]:
    """Why so many bytes of shared memory per CTA do not fit a target; empty if they do, or without one."""
    if target is None or needed <= target.shared_per_block:
        return []
    return [f"needs {needed} bytes of shared memory, {target.name} has {target.shared_per_block} per CTA"]


def refuse(what: str, problems: list[str]) -> None:
    """Raise ConfigError that says ``what`` and lists every problem; nothing if there is none."""
    if problems:
        raise ConfigError(f"{what}: " + "; ".join(problems))


def flag_value(name: str, text: str, current: Any) -> Any:
    """``text`` as the type of the flag it sets, whose value now is ``current``. Raises ConfigError for another."""
    if isinstance(current, bool):
        if text.lower() in ("true", "1", "yes", "on"):
            return True
        if text.lower() in ("false", "0", "no", "off"):
            return False
        raise ConfigError(f"{name} is true or false, not {text!r}")
    if isinstance(current, DType):
        return element_type(name, text)
    if isinstance(current, str):
        return text
    kind = float if isinstance(current, float) else int
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{name} is {'a number' if kind is float else 'an integer'}, not {text!r}") from None


def element_type(name: str, text: str) -> DType:
    """The type that ``text`` names. Raises ConfigError for none."""
    try:
        return dtype_of(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from None


def type_name(dtype: Any) -> str:
    """The name of a type; of anything else that stands in its place its text, for messages."""
    return dtype.name if isinstance(dtype, DType) else str(dtype)


@lru_cache(maxsize=64)
def _limits(kind: type) -> tuple[tuple[str, type, int, int | None], ...]:
    """(name, type, least, most) of each flag of a class of configurations."""
    found: list[tuple[str, type, int, int | None]] = []
    for f in fields(kind):
        of: type = next((of for of in _KINDS if isinstance(f.default, of)), int)
        optimisation = f.name == "opt_level"
        least = 0 if of is not int or optimisation or 0 in f.metadata["choices"] else 1
        found.append((f.name, of, least, MOST_OPT_LEVEL if optimisation else None))
    return tuple(found)


_KINDS = {
    bool: "True or False",
    DType: "a type of warploom.core.dtypes (f16, bf16 …)",
    int: "a Python int",
}


def broken_flags(config: Any) -> list[str]:
    """The flags that are wrong by themselves, by type or smaller than any choice of theirs; empty if none is.

    Checks of how flags fit together may divide by them, so they come after this one.
    """
    found: list[str] = []
    for name, kind, least, most in _limits(type(config)):
        value: Any = getattr(config, name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            found.append(f"{name} is {_KINDS[kind]}, not {shown(value)}")
        elif kind is int and most is not None and not least <= value <= most:
            found.append(f"{name} is ptxas's, {least} to {most}, not {shown(value)}")
        elif kind is int and value < least:
            found.append(f"{name} is at least {least}, not {shown(value)}")
    return found
