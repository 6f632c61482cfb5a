"""A run as it happened: what warps ran and waited for, what was in flight beside them, and what ended each wait.

Time is counted in steps: one instruction, or arithmetic that follows each other, of all warps that go on
together; a copy that lands by itself takes a step too. It is no time of a GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.tasks import LaneGroup, Task
from warploom.emulate.findings.findings import Finding
from warploom.emulate.findings.recorder import RunListener
from warploom.emulate.findings.report import Reporter
from warploom.emulate.transactions.transaction import Landing, Transaction
from warploom.ir.statements import NOWHERE, Op, SourceLine
from warploom.isa import effects as fx

Array = NDArray[Any]
Place: TypeAlias = tuple[int, int]
"""A CTA by its number in the grid, and a warp of it."""
CTAS = 8
"""CTAs whose run is recorded, the first of the launch."""
RUNS, WAITS = "runs", "waits"
_ENGINES: dict[type[fx.Effect], str] = {
    fx.AsyncCopy: "cp.async",
    fx.CopyArrival: "cp.async",
    fx.AsyncMatrix: "wgmma",
    fx.AsyncStore: "st.async",
}
"""The engine that carries an effect out; the TMA all others."""


@dataclass(eq=False)
class Slice:
    """From a step on until before another, some warps of a CTA run or wait, or what they started is in flight.

    ``kind`` is :data:`RUNS`, :data:`WAITS` or the name of the engine; ``count`` are instructions in flight together.
    """

    kind: str
    begin: int
    end: int
    cta: int
    warps: tuple[int, ...]
    text: str = ""
    where: SourceLine = NOWHERE
    count: int = 1


@dataclass(frozen=True)
class Arrow:
    """An arrow of the timeline: at step ``at`` the slice ``source`` ended the wait ``target``."""

    source: Slice
    target: Slice
    at: int


@dataclass(frozen=True)
class FoundMark:
    """A finding, when it was found and at which warp."""

    at: int
    place: Place
    finding: Finding


@dataclass(frozen=True)
class Recording:
    """The run of the first CTAs of a launch, in ``steps`` steps."""

    slices: tuple[Slice, ...]
    arrows: tuple[Arrow, ...]
    marks: tuple[FoundMark, ...]
    steps: int


_ASKED: ContextVar[bool] = ContextVar("recorded", default=False)


@contextmanager
def recorded(on: bool = True) -> Generator[None, None, None]:
    """Record the runs of the emulator in the block: their :class:`~warploom.emulate.Emulation` has a ``recording``."""
    token = _ASKED.set(on)
    try:
        yield
    finally:
        _ASKED.reset(token)


def asked_for() -> RunListener:
    """A recorder for a launch."""
    return _RunRecorder() if _ASKED.get() else RunListener()


@dataclass(eq=False)
class _RunRecorder(RunListener):
    """``base`` is the step at which lanes went on from the ``first`` step of their block, or nobody runs."""

    base: int = 0
    first: int = 0
    group: LaneGroup | None = None
    running: dict[tuple[int, tuple[int, ...]], Slice] = field(default_factory=dict[Any, Slice])
    here: list[Place] = field(default_factory=list[Place])
    slices: list[Slice] = field(default_factory=list[Slice])
    arrows: dict[tuple[Slice, Slice], int] = field(default_factory=dict[Any, int])
    of_groups: dict[tuple[int, int, int], Slice] = field(default_factory=dict[Any, Slice])
    marks: dict[Any, FoundMark] = field(default_factory=dict[Any, FoundMark])
    waiting: dict[tuple[Place, int], tuple[int, Op]] = field(default_factory=dict[Any, Any])
    woken: dict[Place, tuple[Slice | Place, int]] = field(default_factory=dict[Any, Any])
    flights: dict[Any, Slice] = field(default_factory=dict[Any, Slice])
    over: set[Slice] = field(default_factory=set[Slice])
    landed: Slice | None = None

    @property
    def now(self) -> int:
        """The step that is being taken."""
        return self.base + (0 if self.group is None else self.group.step - self.first)

    def enter(self, report: Reporter) -> None:
        self.end_open()
        self.report = report

    def places(self, rows: Collection[int]) -> list[Place]:
        """The warps of the recorded CTAs among rows of the batch."""
        report = self.report
        slots = [divmod(report.first + row, report.warps_per_cta) for row in rows]
        return [(report.places.linear(slot), warp) for slot, warp in slots if slot < CTAS]

    # -- warps

    def goes_on(self, task: Task, group: LaneGroup) -> None:
        self.here, self.group, self.first = self.places(task.rows_of(group)), group, group.step
        over: dict[tuple[int, int, Op], list[int]] = {}
        for place in self.here:
            begin, op = self.waiting.pop((place, id(group.wait)), (self.base, None))
            if op is not None:
                over.setdefault((place[0], begin, op), []).append(place[1])
        for (cta, begin, op), warps in over.items():
            wait = self.add(WAITS, begin, self.base, cta, warps, op)
            for source, at in (self.woken.pop((cta, warp), (None, 0)) for warp in warps):
                if isinstance(source, Slice):
                    self.arrows.setdefault((source, wait), at)

    def stops(self, group: LaneGroup, done: bool) -> None:
        begin, end = self.base, self.base + (len(group.block.points) if done else group.step) - self.first
        self.base, self.group, wait = end, None, None if done else group.wait
        if wait is not None:
            self.waiting |= {(place, id(wait)): (end - 1, wait.op) for place in self.here}
        by_cta: dict[int, list[int]] = {}
        for cta, warp in self.here:
            by_cta.setdefault(cta, []).append(warp)
        for cta, warps in by_cta.items():
            key, until = (cta, tuple(warps)), end if wait is None else end - 1
            last = self.running.get(key)
            if last is not None and last.begin < last.end == begin:  # an empty one was not kept
                last.end = until
            else:
                last = self.running[key] = self.add(RUNS, begin, until, cta, warps)
            for place, (source, at) in self.woken.items():
                if isinstance(source, tuple) and source[0] == cta and source[1] in warps:
                    self.woken[place] = last, at

    def add(self, kind: str, begin: int, end: int, cta: int, warps: Collection[int], op: Op | None = None) -> Slice:
        """A slice, which is kept unless it is empty."""
        text, where = ("", NOWHERE) if op is None else (_named(op), op.where)
        found = Slice(kind, begin, end, cta, tuple(warps), text, where)
        if end > begin:
            self.slices.append(found)
        return found

    def ends_waits(self, rows: Collection[int], by: int | None = None) -> None:
        for place in self.places(rows):
            own = [x for x in ([] if by is None else self.places([by])) or self.here if x[0] == place[0]]
            source = self.landed if self.group is None else next(iter(own or self.here), None)
            if source is not None:
                self.woken[place] = source, self.now

    # -- what is in flight

    def starts(self, started: Transaction) -> None:
        for key, (cta, warp) in self.groups(started, np.ones(started.rows.size, np.bool_)):
            flight = self.flights.get(key)
            if flight is None:
                self.flights[key] = self.add(_engine(started.op), self.now, self.now + 1, cta, [warp], started.op)
            else:
                flight.warps = tuple(sorted({*flight.warps, warp}))
                flight.text = ", ".join(dict.fromkeys([*flight.text.split(", "), *_named(started.op).split(", ")]))
                flight.count += warp == flight.warps[0]

    def groups(self, of: Transaction, which: Array) -> list[tuple[Any, Place]]:
        """The groups, of a CTA or for ``wgmma`` of a warpgroup, that transactions of some of their rows are in."""
        engine, found = _engine(of.op), list[tuple[Any, Place]]()
        for row, number in zip(of.rows[which].tolist(), of.group[which].max(axis=1).tolist(), strict=True):
            for cta, warp in self.places([row]):
                found.append(((engine, cta, warp // 4 if engine == "wgmma" else 0, number), (cta, warp)))
        return found

    def ends(self, ended: Transaction, done: Array, op: Op | None) -> None:
        waits: dict[Slice, list[int]] = {}
        for key, (_, warp) in self.groups(ended, np.asarray(done.any(axis=1))):
            flight = self.flights[key]
            flight.end = max(flight.end, self.now + 1)
            self.over.add(flight)
            waits.setdefault(flight, []).append(warp)
        for flight, warps in waits.items() if op is not None else ():
            key = self.now, flight.cta, warps[0]
            if key not in self.of_groups:
                self.of_groups[key] = self.add(WAITS, self.now, self.now + 1, flight.cta, warps, op)
            self.arrows.setdefault((flight, self.of_groups[key]), self.now)

    def takes_off(self, landing: Landing) -> None:
        by = landing.by
        for cta, _ in self.places([landing.barrier.cta * self.report.warps_per_cta]):
            warps = [warp for _, warp in self.places([by.row])]
            self.flights[id(landing)] = self.add(_engine(by.op), self.now, self.now + 1, cta, warps, by.op)

    def lands(self, landing: Landing) -> None:
        self.base += 1
        self.landed = self.flights.pop(id(landing), None)
        if self.landed is not None:
            self.landed.end = self.base

    # -- findings and the end

    def finds(self, finding: Finding, row: int) -> None:
        for place in self.places([row]):
            self.marks.setdefault((finding.kind, finding.where, finding.other), FoundMark(self.now, place, finding))

    def end_open(self) -> None:
        """End all waits and transactions that are still open, at the last step of their CTA."""
        for ((cta, warp), _), (begin, op) in self.waiting.items():
            self.add(WAITS, begin, self.base, cta, [warp], op)
        for flight in self.flights.values():
            flight.end = flight.end if flight in self.over else max(self.base, flight.end)
        self.waiting.clear()
        self.flights.clear()

    def finish(self) -> Recording:
        self.end_open()
        arrows = tuple([Arrow(source, target, at) for (source, target), at in self.arrows.items()])
        return Recording(tuple(self.slices), arrows, tuple(self.marks.values()), self.base)


def _engine(op: Op) -> str:
    return next((_ENGINES[type(e)] for e in op.instruction.effects() if type(e) in _ENGINES), "TMA")


def _named(op: Op) -> str:
    """An operation by the tiles and barriers that it works on, or by its name."""
    tiles = dict.fromkeys(tile.name for tile in op.within if tile is not None and tile.name)
    return ", ".join(tiles) or op.instruction.mnemonic
