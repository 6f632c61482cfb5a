# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Random programs that only synchronise: which accesses are ordered, by the definition.

The reference keeps, for every thread, the set of all accesses that happen before its next instruction. A program is a
sequence of steps in one order that fits all of its barriers; each warp does its own of them.
"""

from __future__ import annotations

import random
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from warploom.emulate import emulate
from warploom.ir.program import Program
from warploom.lang import Global, GlobalPointer, Kernel, Traced, kernel, u32

CELLS = 64
Part = Literal["all", "low", "high", "first"]
PARTS: dict[Part, range] = {"all": range(32), "low": range(16), "high": range(16, 32), "first": range(1)}


@dataclass(frozen=True)
class Step:
    """What some warps do: ``kind`` with the lanes ``part`` of ``warps``; ``others`` wait at a hand-over."""

    kind: str
    warps: tuple[int, ...]
    part: Part = "all"
    others: tuple[int, ...] = ()
    number: int = 0


COPIED = -1
"""In place of the value of a copy, which no store counts as equal to."""


@dataclass
class Access:
    """What a thread did to a cell when it knew of the accesses ``before``; ``value`` is None for a read."""

    number: int
    thread: int
    value: int | None
    before: frozenset[int]


@dataclass
class Threads:
    """The reference: what every thread knows, and what was done to every cell."""

    warps: int
    known: list[set[int]] = field(default_factory=list[set[int]])
    done: list[list[Access]] = field(default_factory=lambda: [[] for _ in range(CELLS)])
    flying: dict[int, list[list[tuple[int, int]]]] = field(default_factory=dict[int, list[list[tuple[int, int]]]])
    next: int = 0
    kinds: set[str] = field(default_factory=set[str])
    races: list[tuple[int, Access, Access]] = field(default_factory=list[tuple[int, Access, Access]])

    def __post_init__(self) -> None:
        self.known = [set[int]() for _ in range(32 * self.warps)]

    def access(self, thread: int, cell: int, value: int | None = None) -> int:
        """A read, or a write of a value: a race with every earlier one that is not known, where either writes.

        Stores of equal values are no race.
        """
        if any(cell == at for groups in self.flying.values() for group in groups for at, _ in group):
            self.kinds.add("in_flight")
        self.next += 1
        new = Access(self.next, thread, value, frozenset(self.known[thread]))
        for old in self.done[cell]:
            if old.thread != thread and old.number not in new.before and (old.value != value or value == COPIED):
                self.races.append((cell, old, new))
        self.done[cell].append(new)
        return self.next

    def do(self, step: Step) -> None:
        """One step, by its definition."""
        threads = [32 * warp + lane for warp in step.warps for lane in PARTS[step.part]]
        if step.kind in ("store", "load"):
            for thread in threads:
                value = _value(step) if step.kind == "store" else None
                self.known[thread].add(self.access(thread, _cell(step, thread), value))
        elif step.kind == "copy":
            for thread in threads:  # lands when it is waited for
                number = self.access(thread, _cell(step, thread), COPIED)
                self.flying.setdefault(thread, []).append([(_cell(step, thread), number)])
        elif step.kind == "wait":
            for thread in threads:
                while len(groups := self.flying.get(thread, [])) > step.number:
                    self.known[thread].update(number for _, number in groups.pop(0))
        else:
            tell = [32 * w for w in step.warps] if step.kind == "mbarrier" else threads
            listen = [32 * w + lane for w in step.others for lane in PARTS[step.part]] if step.others else threads
            learnt = set[int]().union(*(self.known[t] for t in tell))
            if step.kind == "bar" and step.others:  # who waits tells as well
                learnt |= set[int]().union(*(self.known[t] for t in listen))
            for thread in listen:
                self.known[thread] |= learnt

    def end(self) -> bool:
        """What is still under way at the end, and races. Returns whether one may be found that need not be."""
        if any(self.flying.values()):
            self.kinds.add("leak")
        certain = [not self._replaced(*race) for race in self.races]
        self.kinds |= {"race"} if any(certain) else set()
        return bool(certain) and not any(certain)

    def _replaced(self, cell: int, one: Access, other: Access) -> bool:
        """Whether one of two writes was followed by a store of the other's value: every order leaves that one."""
        return any(
            first.number in late.before and late.value == second.value != COPIED
            for late in self.done[cell]
            for first, second in ((one, other), (other, one))
            if None not in (late.value, first.value, second.value)
        )


def _cell(step: Step, thread: int) -> int:
    """Lanes of one instruction have cells of their own; the number shifts them against those of other warps."""
    if step.number & 2:
        return (thread * (1 if step.number & 1 else 33) + step.number * 7) % CELLS
    return (thread & 31 ^ step.number >> 2) % 32


def _value(step: Step) -> int:
    """One of two values, so that half of the stores to a cell are equal."""
    return 7 + (step.number >> 4)


def random_steps(rng: random.Random) -> tuple[int, list[Step]]:
    """The number of warps, and the steps."""
    warps = rng.choice((1, 2, 2, 3))
    steps: list[Step] = []
    bars, mbarriers = 1, 0
    for _ in range(rng.randint(3, 12)):
        kind = rng.choices(
            ("store", "load", "copy", "wait", "syncwarp", "cta", "bar", "mbarrier"), (6, 6, 1, 2, 4, 2, 3, 3)
        )[0]
        warp = (rng.randrange(warps),)
        some = tuple(sorted(rng.sample(range(warps), rng.randint(1, warps))))
        if kind in ("store", "load", "copy"):
            part = rng.choice(("all", "all", "low", "high", "first"))
            steps.append(Step(kind, rng.choice((warp, some)), part, (), rng.randrange(32)))
        elif kind == "wait" and any(s.kind == "copy" and warp[0] in s.warps for s in steps):
            steps.append(Step(kind, warp, rng.choice(("all", "all", "low")), (), rng.randrange(2)))
        elif kind == "syncwarp":
            steps.append(Step(kind, warp, rng.choice(("all", "all", "low", "high"))))
        elif kind == "cta":
            steps.append(Step(kind, tuple(range(warps))))
        elif kind == "bar" and bars < 15 and warps > 1:
            others = tuple(w for w in range(warps) if w not in some) if rng.random() < 0.6 else ()
            steps.append(Step(kind, some, "all", others, bars))
            bars += 1
        elif kind == "mbarrier":
            others = tuple(w for w in range(warps) if w not in some) or some
            steps.append(Step(kind, some, rng.choice(("all", "all", "first", "high")), others, mbarriers))
            mbarriers += 1
    return warps, steps


class Writer:
    """Writes steps in the language; a method for each kind."""

    def __init__(self, k: Kernel, data: GlobalPointer, mbarriers: list[Step]) -> None:
        self.k, self.data = k, data
        self.tile = k.shared(u32, CELLS, name="tile")
        self.total = k.register(u32, 0)
        with k.when(k.thread < 32):
            for i in range(0, CELLS, 32):
                self.tile.store(k.value(7, u32), 0, k.thread + i)
        if mbarriers:
            self.bars = k.mbarriers(len(mbarriers), "bars")
            with k.when(k.thread == 0):
                for i, step in enumerate(mbarriers):
                    self.bars.init(len(step.warps), i)
                k.mbarrier_fence()
        k.syncthreads()

    def write(self, step: Step, warp: int) -> None:
        """What a warp does in a step."""
        if step.kind == "mbarrier" and warp in step.warps:
            self.bars.arrive(step.number, when=self.k.lane == 0)
        if step.kind != "mbarrier" or warp in step.others:
            with self.lanes(step.part):
                getattr(self, step.kind)(step, warp)

    def lanes(self, part: Part) -> AbstractContextManager[None]:
        """A branch of some lanes."""
        lanes, k = PARTS[part], self.k
        if part == "all":
            return nullcontext()
        return k.when(k.lane < lanes.stop if lanes.start == 0 else k.lane >= lanes.start)

    def cell(self, step: Step) -> Traced:
        """As ``_cell``."""
        k = self.k
        if step.number & 2:
            return (k.thread * (1 if step.number & 1 else 33) + step.number * 7) % CELLS
        return ((k.thread & 31) ^ (step.number >> 2)) % 32

    def store(self, step: Step, warp: int) -> None:
        """A store to shared memory."""
        self.tile.store(self.k.value(_value(step), u32), 0, self.cell(step))

    def load(self, step: Step, warp: int) -> None:
        """A load of shared memory."""
        self.total += self.tile.load(0, self.cell(step))

    def copy(self, step: Step, warp: int) -> None:
        """An asynchronous copy, a group of its own."""
        self.k.cp_async(self.tile.address(0, self.cell(step)), self.data + self.k.thread, 4)
        self.k.commit_group()

    def wait(self, step: Step, warp: int) -> None:
        """For all copies but the newest."""
        self.k.wait_group(step.number)

    def syncwarp(self, step: Step, warp: int) -> None:
        """Of some lanes."""
        self.k.syncwarp(sum(1 << lane for lane in PARTS[step.part]))

    def cta(self, step: Step, warp: int) -> None:
        """All warps meet; in roles that is the barrier of all threads."""
        self.k.bar_sync(0, 32 * len(step.warps))

    def bar(self, step: Step, warp: int) -> None:
        """Some warps arrive for others, or meet."""
        count = 32 * (len(step.warps) + len(step.others))
        if step.others and warp in step.warps:
            self.k.bar_arrive(step.number, count)
        else:
            self.k.bar_sync(step.number, count)

    def mbarrier(self, step: Step, warp: int) -> None:
        """For the leaders of all warps that arrive."""
        self.bars.wait(0, step.number)


def program_of(warps: int, steps: list[Step]) -> Program:
    """The same steps in the language, each warp's in its own role."""
    mbarriers = [step for step in steps if step.kind == "mbarrier"]

    def body(k: Kernel, data: Global[u32]) -> None:
        writer = Writer(k, data, mbarriers)
        for warp in range(warps):
            with k.warps(warp, warp + 1):
                for step in steps:
                    if warp in step.warps or warp in step.others:
                        writer.write(step, warp)
        data.store(writer.total, k.thread)

    return kernel(threads=32 * warps, requires="sm_90a" if mbarriers else "sm_80")(body).trace()


def verdict(number: int) -> frozenset[str]:
    """What the reference says of random program ``number``."""
    return _drawn(random.Random(number))[2][0]


def _drawn(rng: random.Random) -> tuple[int, list[Step], list[frozenset[str]]]:
    """The number of warps, the steps, and the verdicts that are right."""
    warps, steps = random_steps(rng)
    threads = Threads(warps)
    for step in steps:
        threads.do(step)
    either = threads.end()
    kinds = frozenset(threads.kinds)
    return warps, steps, [kinds, kinds | {"race"}] if either else [kinds]


def difference(number: int) -> str:
    """What the emulator says of random program ``number`` and the reference does not, or the other way round."""
    rng = random.Random(number)
    warps, steps, wanted = _drawn(rng)
    data = np.zeros(32 * warps, np.uint32)
    run = emulate(program_of(warps, steps), 1, [data], seed=rng.choice((None, None, number)))
    found = {finding.kind for cause in run.findings for finding in (cause, *cause.follows)}
    same = _one_name(found) in [_one_name(kinds) for kinds in wanted]
    return "" if same else f"order {number}: {sorted(found)}, the reference says {sorted(wanted[0])}"


def _one_name(kinds: AbstractSet[str]) -> AbstractSet[str]:
    """What is not ordered with a copy races, or meets it in flight and reads poison: that depends on the run."""
    if "in_flight" in kinds:
        return {"race"} | set(kinds) - {"in_flight", "uninitialised"}
    return kinds
