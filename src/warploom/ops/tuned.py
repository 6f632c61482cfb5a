"""Tuned configurations: what a search found fastest on a GPU for a class of problems, one small file for each.

They lie in ``$WARPLOOM_CACHE/tuned`` and count for the sources that they were found with. A file appears by an atomic
rename; whatever is wrong with one costs the tuned configuration, never a result.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from warploom.core.errors import ConfigError, warn_caller
from warploom.core.files import make_private_folder, open_private, parse_json, put_file, require_private_folder
from warploom.core.settings import cache_folder
from warploom.core.targets import Target
from warploom.kernels.settings import Read, read, violations_of
from warploom.ops.backends import gpu_name, sources_digest

if TYPE_CHECKING:
    from warploom.ir.program import Program


class TunableProblem(Protocol):
    """A problem of any operation."""

    @property
    def size_class(self) -> str:
        """Which problems share a tuned configuration."""
        ...


@dataclass(frozen=True)
class Tuned:
    """The fastest configuration found for a class of problems on one GPU, in its notation.

    Seconds per call are the median, the 10th and the 90th percentile; ``speedup`` is over the default, the median of
    the rounds' ratios; ``timed`` configurations were timed. ``sources`` tells with which kernels.
    """

    gpu: str
    size_class: str
    config: str
    seconds: float
    low: float
    high: float
    speedup: float
    timed: int
    date: str
    sources: str

    @classmethod
    def now(cls, gpu: str, size_class: str, config: str, seconds: Sequence[float], speedup: float, timed: int) -> Tuned:
        """One of today and of these sources; ``seconds`` are the median, the 10th and the 90th percentile."""
        median, low, high, ratio = (float(f"{x:.5g}") for x in (*seconds, speedup))
        today = datetime.now(UTC).date().isoformat()
        return cls(gpu, size_class, config, median, low, high, ratio, timed, today, current_sources())

    @property
    def current(self) -> bool:
        """Whether it was found with these sources."""
        return self.sources == current_sources()

    def __str__(self) -> str:
        spread = f"{self.seconds * 1e3:.4g} ms ({self.low * 1e3:.4g}–{self.high * 1e3:.4g})"
        return f"{spread}, {self.speedup:.3f} × the default"


def current_sources() -> str:
    """The digest that tuned configurations are bound to; empty where the sources cannot be read."""
    return (sources_digest() or "")[:16]


def folder() -> Path:
    """Where they lie."""
    return cache_folder() / "tuned"


def _file(gpu: str, size_class: str) -> Path:
    name = hashlib.sha256("\0".join((gpu, size_class)).encode()).hexdigest()
    return folder() / f"{name[:32]}.json"


def require_writable() -> None:
    """Raise OSError where nothing could be kept: better before a search than after it."""
    make_private_folder(folder())
    with tempfile.TemporaryFile(dir=folder()):
        pass


def keep(found: Tuned) -> None:
    """Keep a configuration, in place of the one before. Raises OSError where the folder cannot be written."""
    make_private_folder(folder())
    put_file(_file(found.gpu, found.size_class), json.dumps(asdict(found)).encode())
    _find.cache_clear()
    _configuration.cache_clear()


def kept() -> list[Tuned]:
    """Every tuned configuration there is, in the order of GPUs and classes."""
    try:
        require_private_folder(folder())
        found = [_read(path) for path in folder().glob("[!.]*.json")]
    except OSError:
        return []
    return sorted((x for x in found if x is not None), key=lambda x: (x.gpu, x.size_class))


def find(gpu: str, size_class: str) -> Tuned | None:
    """The configuration for a class of problems on a GPU by its name, if one was found with these sources."""
    try:
        require_private_folder(folder())
        found = _read(_file(gpu, size_class))
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn(folder(), error.strerror or str(error))
        return None
    known = found is not None and (found.gpu, found.size_class) == (gpu, size_class)
    return found if known and found is not None and found.current else None


@lru_cache(maxsize=1024)
def _find(_folder: Path, gpu: str, size_class: str, kinds: tuple[type[Read] | str, ...]) -> tuple[Any, str] | None:
    """(configuration, why it runs), read and parsed once in a process."""
    found = find(gpu, size_class)
    try:
        return None if found is None else (read(found.config, kinds), f"tuned on {gpu} for {size_class}: {found}")
    except ConfigError:
        return None


def tuned(
    problem: TunableProblem, target: Target, device: int | None, kinds: tuple[type[Read] | str, ...]
) -> tuple[Read, str] | None:
    """The configuration found for such problems on GPU ``device``, and why it runs; None without one that fits."""
    if device is None:
        return None
    found: tuple[Any, str] | None = _find(folder(), gpu_name(device), problem.size_class, kinds)
    if found is None or violations_of(found[0], problem, target):
        return None
    return found


def kernel_class(program: Program) -> str:
    """The class of all launches of a kernel of the user's: its name, and its Program with the defaults."""
    return f"{program.name} {program.digest[:16]}"


def configuration_found(program: Program, device: int) -> str:
    """The text of the configuration that was found for :func:`kernel_class` on GPU ``device``, "" without one."""
    return _configuration(folder(), gpu_name(device), kernel_class(program))


@lru_cache(maxsize=1024)
def _configuration(_folder: Path, gpu: str, size_class: str) -> str:
    found = find(gpu, size_class)
    return "" if found is None else found.config


def _read(path: Path) -> Tuned | None:
    """A file's content; None after a warning where it is none of ours. Raises OSError where there is no such file."""
    try:
        with open(path, "rb", opener=open_private) as file:
            values: Any = parse_json(file.read())
        kinds = {f.name: {"str": str, "float": float, "int": int}[str(f.type)] for f in fields(Tuned)}
        return Tuned(**{name: kind(values[name]) for name, kind in kinds.items()})
    except FileNotFoundError:
        raise
    except OSError as error:
        _warn(path, error.strerror or str(error))
    except (ValueError, KeyError, TypeError):
        _warn(path, "it is damaged")
    return None


def _warn(path: Path, why: str) -> None:
    warn_caller(
        f"{path} holds no tuned configuration that can be used: {why}. Remove it, and tune again what is missing "
        "(warploom tune show lists what is there).",
        RuntimeWarning,
    )
