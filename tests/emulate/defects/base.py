"""How a defect is planted: a kernel with a switch, what must be said of it, and the public report it stems from."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from warploom.core.errors import WarploomError
from warploom.emulate import Emulation, Finding
from warploom.emulate.launch.machine import emulate_launches
from warploom.emulate.order.launches import QueuedLaunch
from warploom.ir.program import Program

Array = np.ndarray[Any, Any]
NONE = ""
"""The switch of the correct twin."""


@dataclass(frozen=True)
class Launch:
    """A kernel to run. ``right`` gives what arrays must hold at the end, by the number of the argument.

    ``earlier`` launches go before it; the other fields are those of :class:`QueuedLaunch`.
    """

    program: Program
    grid: int | tuple[int, ...]
    arguments: Sequence[Any]
    right: Mapping[int, Any] = field(default_factory=dict[int, Any])
    earlier: Sequence[QueuedLaunch] = ()
    stream: str | int = 0
    programmatic: bool = False
    after: Sequence[int] = ()

    def run(self, seed: int | None = None) -> list[Emulation]:
        """Run it, after the earlier ones."""
        last = QueuedLaunch(self.program, self.grid, self.arguments, self.stream, self.programmatic, self.after)
        return emulate_launches([*self.earlier, last], seed=seed)


@dataclass(frozen=True)
class Defect:
    """One planted defect. ``kinds`` may name it ("refused": before it runs), at a line like ``at`` (empty: any)."""

    group: str
    name: str
    setting: Mapping[str, Any]
    kinds: frozenset[str]
    at: str
    report: str
    build: Callable[..., Launch]

    def __str__(self) -> str:
        setting = ", ".join(f"{k}={v}" for k, v in self.setting.items())
        return f"{self.group}: {self.build.__name__}: {self.name}" + (f" ({setting})" if setting else "")


@dataclass(frozen=True)
class Verdict:
    """What was said of a launch: kinds and source lines, first things first. Nothing: it passed."""

    kinds: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    wrong: tuple[int, ...] = ()


corpus: list[Defect] = []
GROUPS = ("ctas", "named", "mbarriers", "copies", "tma", "products", "warps", "clusters", "grids", "values", "launches")


def every_defect() -> list[Defect]:
    """All defects of all groups."""
    for name in GROUPS:
        import_module(f"{__package__}.{name}")
    return corpus


def every_twin() -> list[Defect]:
    """One defect of each kernel and setting."""
    return list({(d.build, str(d.setting)): d for d in every_defect()}.values())


def planted(
    group: str, report: str, defects: Mapping[str, tuple[str, ...]], settings: Sequence[Mapping[str, Any]] = ({},)
) -> Callable[[Callable[..., Launch]], Callable[..., Launch]]:
    """Each of ``defects`` (kinds by "|", a regular expression for the line, maybe a report of its own) per setting."""

    def register(build: Callable[..., Launch]) -> Callable[..., Launch]:
        for setting in settings:
            for name, (kinds, at, *own) in defects.items():
                source = own[0] if own else report
                corpus.append(Defect(group, name, setting, frozenset(kinds.split("|")), at, source, build))
        return build

    return register


def judge(build: Callable[..., Launch], switch: str, setting: Mapping[str, Any], seed: int | None = None) -> Verdict:
    """Trace and run a kernel with a defect, or (``NONE``) its twin."""
    try:
        launch = build(switch, **setting)
        runs = launch.run(seed)
    except WarploomError as refusal:
        said = str(refusal)
        where = re.findall(r"(\w+\.py):(\d+)", said)
        return Verdict(("refused",), tuple(_text(build, file, int(line)) for file, line in where), (said,))
    wrong = [i for i, right in launch.right.items() if not np.array_equal(launch.arguments[i], right)]
    found = [finding for run in runs for finding in run.findings]
    return Verdict(tuple(f.kind for f in found), _lines(found), tuple(map(str, found)), tuple(wrong))


def _lines(found: Sequence[Finding]) -> tuple[str, ...]:
    """The source text of both lines of each finding."""
    both = [(f.where, f.other or f.where) for f in found]
    return tuple(linecache.getline(a.file, a.line) + linecache.getline(b.file, b.line) for a, b in both)


def _text(build: Callable[..., Launch], file: str, line: int) -> str:
    path = build.__code__.co_filename
    return linecache.getline(path, line) if path.endswith(file) else ""


def is_found(defect: Defect, verdict: Verdict) -> bool:
    """Whether what comes first names the defect by a kind that fits."""
    return bool(verdict.kinds) and verdict.kinds[0] in defect.kinds


def is_at_its_line(defect: Defect, verdict: Verdict) -> bool:
    """Whether what comes first names a line that is concerned."""
    return not defect.at or (bool(verdict.lines) and re.search(defect.at, verdict.lines[0]) is not None)


def numbers(count: int) -> Array:
    """0, 1, 2 …"""
    return np.arange(count, dtype=np.uint32)


def zeros(count: int) -> Array:
    """An output."""
    return np.zeros(count, np.uint32)
