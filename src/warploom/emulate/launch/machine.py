"""The emulator: run a Program for every CTA of a grid, with every check on.

A Program is made ready to run, with its steps and what every launch asks of it, and kept for its next run: to make the
steps takes as long as a small grid takes to run, and the same kernel may run in several orders.
"""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from threading import RLock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.core.arguments import grid_of
from warploom.core.errors import EmulationError, ProblemError, shown
from warploom.emulate.barriers.barriers import Barriers, ClusterBarriers, Wait
from warploom.emulate.barriers.mbarriers import Mbarriers
from warploom.emulate.control.context import Decision
from warploom.emulate.control.execute import Executor
from warploom.emulate.control.frames import Frame
from warploom.emulate.control.tasks import Task
from warploom.emulate.control.undefined import WideAddresses
from warploom.emulate.findings.findings import Finding, Findings, causes
from warploom.emulate.findings.report import Reporter
from warploom.emulate.findings.traffic import Traffic, TrafficCounter
from warploom.emulate.launch.arguments import BoundArguments, bind, granules, written_parameters
from warploom.emulate.launch.recording import Recording, asked_for
from warploom.emulate.memory.buffers import GlobalBuffer
from warploom.emulate.memory.global_memory import GlobalMemory
from warploom.emulate.memory.memory import LocalMemory
from warploom.emulate.memory.shared_memory import SharedMemory
from warploom.emulate.order.clocks import MOST_CLOCKED, MOST_STAMPS, Clocks
from warploom.emulate.order.launches import EarlierLaunches, QueuedLaunch, StreamOrder
from warploom.emulate.order.ordering import Ordering, Published
from warploom.emulate.order.places import Places
from warploom.emulate.order.planes import planes_of
from warploom.emulate.transactions.boxes import wrong_boxes
from warploom.emulate.transactions.bulk import BulkCopies
from warploom.emulate.transactions.transaction import CopyQueue
from warploom.emulate.transactions.warpgroups import WARPS, RegisterPools, Warpgroups, has_wgmma
from warploom.ir.program import Program
from warploom.ir.statements import Const, Op, Roles, SourceLine, blocks, walk
from warploom.isa.conversion import FULL_MASK
from warploom.isa.effects import Access, Barrier, Effect, Fence, GlobalWait, MbarrierWait, RegisterBudget, WarpSync

Array = NDArray[Any]


_MOST_OPS = 100_000
"""Of all Programs that are kept."""


class PreparedProgram(Executor):
    """One launch at a time runs on it. ``large``: with an array that cannot be addressed in 32 bits."""

    def __init__(self, program: Program, checks: bool, large: bool) -> None:
        effects = program.effects
        super().__init__(program, checks, checks and any(_orders(e) for _, e in effects), large)
        self.program, self.ops = program, sum(1 for _ in program.ops())
        self.written = written_parameters(program)
        self.shared_granule, self.global_granule = granules(program)
        self.apart = any(_tells_lanes(op, e) for op, e in effects)
        self.distributed = any(isinstance(e, Access) and e.remote for _, e in effects)
        self.waits_for_ctas = any(isinstance(e, GlobalWait) for _, e in effects)
        self.talks = any(_tells_ctas(e) for _, e in effects)
        self.planes = planes_of(program)
        named = [*program.shared, *program.parameters]
        self.compiled = any(x.name in _OF_TRITON for x in named)
        self.multiplies_by_warpgroups = has_wgmma(program)


_kept: dict[tuple[int, bool, bool], PreparedProgram] = {}
"""By the Program's identity: equal ones may have other lines. Whoever runs one has taken it out."""
_of_kept = RLock()


@contextmanager
def prepared(program: Program, checks: bool, large: bool) -> Iterator[PreparedProgram]:
    """The Program made ready, for one caller alone."""
    key = (id(program), checks, large)
    with _of_kept:
        found = _kept.pop(key, None)
    found = found or PreparedProgram(program, checks, large)
    try:
        yield found
    finally:
        found.leave()
        with _of_kept:
            _kept[key] = found
            ops = 0
            for old, one in reversed(list(_kept.items())):
                ops += one.ops
                if ops > _MOST_OPS:
                    del _kept[old]


def _tells_lanes(op: Op, effect: Effect) -> bool:
    """Whether by an instruction some lanes of a warp may learn what its other lanes do not."""
    if isinstance(effect, WarpSync):
        mask = None if effect.mask is None or not effect.orders_memory else op.operands[effect.mask]
        return mask is not None and not (isinstance(mask, Const) and int(mask.value) % 2**32 == FULL_MASK)
    return isinstance(effect, MbarrierWait) or _orders(effect)


def _tells_ctas(effect: Effect) -> bool:
    """Whether CTAs may tell each other by an effect how far they have come."""
    return (
        isinstance(effect, Access) and effect.space == "global" and (effect.mode == "atomic" or effect.order != "weak")
    )


def _orders(effect: Effect) -> bool:
    """Whether an effect can order accesses of different CTAs."""
    return isinstance(effect, Fence | GlobalWait) or (
        isinstance(effect, Access) and effect.order not in ("weak", "relaxed")
    )


_OF_TRITON = "global_smem", "global scratch memory"
"""What Triton calls all shared memory of a kernel, and a parameter that it adds: no code of authors names either."""
_WARPS_PER_BATCH = 512
_BURST = 24  # the most steps a task may take at a stretch under a seed
_UNEVEN = 4  # every so many seeds one group of warps is held back, until the others wait for it or almost so
_HELD_BACK = 0.98
_HOLDS = {1: (0,), 2: (1, 2, 3)}
"""Under seeds with these remainders by _UNEVEN a few CTAs are held until the others have ended: each after so many of
its instructions by which CTAs tell each other how far they have come."""
_MOST_LOOKS = 500  # rounds of loops that look what other threads do, until held CTAs are let go on
_IDLE_PASSES = 1000  # after so many rounds of loops that find nothing new, nothing new will come


@dataclass(frozen=True)
class Emulation:
    """The findings and counters of a run. Its outputs are in the arrays that were passed.

    ``findings`` has one for each cause; what probably follows from it is in its ``follows``. ``executed`` counts the
    warps that came by each instruction, by name, ``counts`` one by one: what counts none was not checked. ``printed``
    is what the kernel printed, CTA by CTA and warp by warp.
    """

    findings: tuple[Finding, ...]
    traffic: Traffic
    executed: Mapping[str, int]
    program: str
    counts: Sequence[tuple[Op, int]]
    printed: str = ""
    decisions: Sequence[Decision] = field(default=(), repr=False)
    """What lanes decided at each condition, loop and masked copy: what they did alike was not exercised."""
    recording: Recording | None = field(default=None, repr=False)
    """What happened when, of a run within :func:`~warploom.emulate.recorded`."""

    def raise_if_found(self) -> Emulation:
        """Raise EmulationError with every finding, if there is an error among them; else return self."""
        if any(finding.grade == "error" for finding in self.findings):
            lines = "\n".join(f"  {f}" for f in self.findings)
            raise EmulationError(f"{self.program}: the emulator found {len(self.findings)}:\n{lines}", self.findings)
        return self


def emulate(
    program: Program,
    grid: int | tuple[int, ...],
    arguments: Sequence[Any] | Mapping[str, Any],
    *,
    seed: int | None = None,
    checks: bool = True,
    stop: bool = False,
    progress: Callable[[float], None] | None = None,
) -> Emulation:
    """Run ``program`` on a grid of CTAs; arrays among ``arguments`` are global memory and are changed in place.

    ``arguments`` follow the parameters, by position or by name: NumPy arrays for pointers (the pointer is the array's
    first element; strides are the kernel's business), numbers for scalars, a :class:`TensorMapArgument` or an
    ``(array, TensorMapSpec)`` pair for tensor maps. Warps run in lock-step, or, with ``seed``,
    in an adversarial order that the seed determines; either way every check sees what is ordered, not what happened to
    come first. ``stop`` raises EmulationError at the first finding. ``checks=False`` computes the outputs alone.
    ``progress`` is called with the fraction done. Raises ProblemError for arguments that do not fit the parameters,
    ConfigError for a grid that no GPU takes.
    """
    if not isinstance(program, Program):
        raise ProblemError(f"emulate runs a Program, not {shown(program)}: of a kernel it is kernel.trace(…)")
    if seed is not None and (not isinstance(seed, int) or seed < 0):
        raise ProblemError(f"seed is a number that determines the order of the warps, 0 or more, not {shown(seed)}")
    launch = QueuedLaunch(program, grid, arguments)
    return emulate_launches([launch], seed=seed, checks=checks, stop=stop, progress=progress)[0]


def emulate_launches(
    launches: Sequence[QueuedLaunch],
    *,
    seed: int | None = None,
    checks: bool = True,
    stop: bool = False,
    progress: Callable[[float], None] | None = None,
) -> list[Emulation]:
    """Run launches one after the other, with options as those of :func:`emulate`, and judge what orders them.

    Global memory and its history go on from one to the next: an access is a race with that of an earlier launch unless
    that one is over when the kernel begins, or ``griddepcontrol.wait`` has waited for it.
    """
    places, bound = [Places.of(of.program, grid_of(of.grid)) for of in launches], bind(launches)
    buffers = [buffer for of in bound for buffer in of.buffers]
    large, streams, found = checks and WideAddresses.needed(buffers), StreamOrder(launches), list[Emulation]()
    try:
        with ExitStack() as stack:
            programs = {id(of.program): of.program for of in launches}
            ready = {key: stack.enter_context(prepared(p, checks, large)) for key, p in programs.items()}
            memory, history = _memory(buffers, list(ready.values())), list[Op | None]([None])
            for number, (launch, of, where) in enumerate(zip(launches, bound, places, strict=True)):
                run = _Launch(ready[id(launch.program)], where, of, Findings(stop, checks), seed)
                tell = None if progress is None else partial(_tell, progress, number / len(launches), 1 / len(launches))
                found.append(run.run(memory, history, streams.begin(), tell))
                streams.end(len(history) - 1, found[-1].executed.get("griddepcontrol.wait", 0) > 0)
    except MemoryError:
        size = sum(buffer.data.nbytes for buffer in buffers)
        raise ProblemError(
            f"{size} bytes of arrays, and what is known of each byte, exceed this machine's memory: emulate less"
        ) from None
    return found


def _memory(buffers: list[GlobalBuffer], ready: list[PreparedProgram]) -> GlobalMemory:
    """The global memory of launches of some programs."""
    written = [of.written for of in ready]
    names = None if None in written else set[str]().union(*(x for x in written if x is not None))
    return GlobalMemory(buffers, names, min(of.global_granule for of in ready), ready[0].checks)


class _Launch:
    """A launch: its tasks, their schedule, and what has been found."""

    def __init__(
        self, executor: PreparedProgram, places: Places, bound: BoundArguments, findings: Findings, seed: int | None
    ) -> None:
        self.executor, self.program, self.places, self.findings = executor, executor.program, places, findings
        self.rng = None if seed is None else random.Random(seed)
        self.warps, self.values, self.maps = self.program.warps, bound.values, bound.maps
        self.recorder = asked_for()
        self.published = Published()
        self.tasks: list[Task] = []
        self.idle = 0  # rounds in which loops looked in vain for what other threads do
        # How often a copy lands before some warp goes on; without a seed, none does while any warp can.
        self.haste = 0.0 if self.rng is None else self.rng.choice((0.02, 0.2, 0.6))
        # The group of four warps that is held back under this seed: all others meet it late, a whole loop step or more.
        uneven = seed is not None and seed % _UNEVEN == _UNEVEN - 1
        self.slow = seed // _UNEVEN % -(-self.warps // WARPS) if uneven and seed is not None else None
        self.held: dict[int, int] = {}  # CTAs of the batch, and after how many such instructions each is held
        self.looks = 0
        alone = seed is not None and executor.talks and places.together == 1
        holds = _HOLDS.get(seed % _UNEVEN, ()) if alone and seed is not None else ()
        first = seed // _UNEVEN % len(holds) if seed is not None and holds else 0
        self.holds = holds[first:] + holds[:first]

    def run(
        self,
        memory: GlobalMemory,
        history: list[Op | None],
        earlier: EarlierLaunches,
        progress: Callable[[float], None] | None,
    ) -> Emulation:
        """Run all batches, on a memory and a history of stamps that ``earlier`` launches may have left."""
        self.history, self.earlier, self.names = history, earlier, earlier.names
        self.executor.begin(memory, TrafficCounter(), self.values, self.rng)
        total, together = self.places.ctas, self.places.together
        if self.maps and self.executor.checks:
            maps = {
                p.value: (p.name, self.maps[int(self.values[p.value].item())].spec)
                for p in self.program.parameters
                if p.kind == "tensor_map"
            }
            for op, message in wrong_boxes(self.program, maps):
                self.findings.add(Finding("layout", f"{op.instruction.mnemonic} {message}", op.where))
        per_batch = max(1, _WARPS_PER_BATCH // (self.warps * together)) * together
        with np.errstate(all="ignore"):
            for first in range(0, total, per_batch):
                ctas = min(per_batch, total - first)
                if progress is not None:
                    self.executor.progress = partial(_tell, progress, first / total, ctas / total)
                if not self._run_batch(first, ctas):
                    break
        counts = [(op, count[0]) for op, count in self.executor.counts]
        executed = Counter[str]()
        for op, count in counts:
            executed[op.instruction.mnemonic] += count
        traffic = self.executor.counter.traffic
        printed = "".join(text for _, text in sorted(self.executor.printed, key=itemgetter(0)))
        decisions = tuple([replace(decision) for decision in self.executor.decisions])
        return Emulation(
            causes(self.findings.all),
            traffic,
            executed,
            self.program.name,
            counts,
            printed,
            decisions,
            self.recorder.finish(),
        )

    def _run_batch(self, first: int, ctas: int) -> bool:
        """Run CTAs together; whether all came to their end."""
        run, program, rows = self.executor, self.program, ctas * self.warps
        home = self.places.domain if run.distributed else self.warps
        most = MOST_STAMPS if run.checks and program.shared_bytes > 0 else MOST_CLOCKED
        clocks = run.clocks = Clocks(
            rows,
            self.places,
            first * self.warps,
            self.history,
            self.names,
            across=run.across,
            planes=run.planes,
            home=home,
            most=most,
            earlier=self.earlier,
        )
        report = run.report = Reporter(
            self.findings, clocks, partial(_loops_of, self.tasks), compiled=run.compiled, recorder=self.recorder
        )
        self.recorder.enter(report)
        memory = run.memory
        memory.enter(clocks, report)
        shared = run.shared = SharedMemory(
            ctas, program.shared_bytes, run.shared_granule, clocks, report, run.checks, run.apart
        )
        run.local = LocalMemory(rows, program.local_bytes, report)
        run.ordering = Ordering(clocks, self.published)
        run.barriers = Barriers(clocks, report, program.threads)
        run.clusters = ClusterBarriers(rows, clocks, report)
        run.mbarriers = Mbarriers(clocks, report, program, shared, run.ordering)
        run.copies = CopyQueue(rows, shared, memory, report)
        ordering, copies = weakref.proxy(run.ordering), weakref.proxy(run.copies)  # they know the reporter
        report.published = lambda agent, stamp: ordering.published_by(agent, stamp)
        report.waits = lambda row, begun: copies.how_to_wait(row, begun)
        run.bulk = BulkCopies(shared, memory, run.mbarriers, report, run.counter, self.maps, run.copies)
        run.warpgroups = Warpgroups(shared, report, run.counter, run.watched)
        run.registers = RegisterPools(program, rows, report)
        run.forget()
        if self.rng is not None and self.holds:
            held = self.rng.sample(range(ctas), min(len(self.holds), ctas - 1))
            self.held, self.looks = dict(zip(held, self.holds, strict=False)), 0
        self.tasks[:] = self._divide(np.arange(rows).reshape(ctas, self.warps))
        for cta, count in self.held.items():
            self._go_until(cta, count)
        if not self._schedule():
            return False
        if run.checks:
            at_exit = (run.copies, run.barriers, run.bulk, run.mbarriers, run.warpgroups, run.clusters, shared.afar)
            for part in at_exit:
                part.at_exit()
        return True

    def _divide(self, everyone: Array) -> list[Task]:
        """The first tasks: all warps together. Under a seed every few warps of the CTAs for themselves.

        Where CTAs wait for each other they are apart from the beginning.
        """
        apart, step = 1, self.warps
        if self.executor.waits_for_ctas or self.rng is not None:
            apart = self.places.ctas if self.executor.waits_for_ctas else self.places.together
            step = WARPS if self.executor.multiplies_by_warpgroups else 1
        parts = [everyone[cta] for cta in self.held]
        everyone = np.delete(everyone, list(self.held), axis=0)
        parts += [
            everyone[cta::apart, warp : warp + step] for cta in range(apart) for warp in range(0, self.warps, step)
        ]
        frames = [Frame(part.ravel(), self.warps, self.executor.constants) for part in parts if part.size]
        return [Task(self.executor, self.executor.graph, frame, self.executor.exited) for frame in frames]

    def _schedule(self) -> bool:
        """Run tasks until all have ended; those that wait are passed over. Returns whether they have."""
        looked = True  # loops that look again and again do so after each copy that lands
        while self.tasks:
            busy = [t for t in self.tasks if t.busy]
            resting = [t for t in self.tasks if t.resting]
            if not busy and (looked or not resting) and self.executor.bulk.land(self.rng):
                self.idle, looked = 0, False
                continue
            ready, looked = busy or resting, not busy
            stuck = not ready or self.idle > _IDLE_PASSES
            if not busy and self._split(stuck):
                continue
            if stuck:
                self._report_deadlock([wait for task in self.tasks for wait in task.waits()])
                return False
            if self.rng is None:
                for task in ready:
                    self._advance(task, None)
            elif self.executor.bulk.loads and self.rng.random() < self.haste:
                self.executor.bulk.land(self.rng)
            else:
                self._advance(self._next(ready, self.rng), self.rng.choice((1, 1, 2, _BURST)))
        return True

    def _not_held(self, ready: list[Task]) -> list[Task]:
        """The tasks that are not held, also in loops that do more than look; without any, those held the earliest."""
        after = {task: self.held.get(int(task.rows[0]) // self.warps, -1) for task in self.tasks}
        going = [t for t, held in after.items() if held < 0 and (t.busy or not all(g.idle for g in t.resting))]
        self.looks += not any(task.busy for task in going)
        if self.looks > _MOST_LOOKS:
            self.held = {}
        first = min(after[task] for task in ready)
        return going or [task for task in ready if after[task] == first]

    def _go_until(self, cta: int, count: int) -> None:
        """A CTA of the batch goes on alone until it has told others so often how far it has come, or must wait."""
        while count > 0:
            task = next((t for t in self.tasks if t.busy and t.rows[0] // self.warps == cta), None)
            if task is None:
                return
            before = len(self.history)
            self._advance(task, 1)
            ops = [op for op in self.history[before:] if op is not None]
            count -= sum(any(_tells_ctas(e) for e in op.instruction.effects()) for op in ops)

    def _next(self, ready: list[Task], rng: random.Random) -> Task:
        """Which task goes on under a seed."""
        if self.held:
            ready = self._not_held(ready)
        if self.slow is not None:
            ahead = [t for t in ready if t.rows[0] % self.warps // WARPS != self.slow]
            if ahead and rng.random() < _HELD_BACK:
                return rng.choice(ahead)
        return rng.choice(ready)

    def _split(self, last: bool) -> bool:
        """Let go ahead, in some task, what waits for nothing; whether there is anything."""
        for task in self.tasks:
            parts = task.split(last)
            if parts:
                self._replace(task, parts)
                self.idle = 0
                return True
        return False

    def _advance(self, task: Task, steps: int | None) -> None:
        before, self.idle = self.idle, 0
        parts = task.run(steps)
        if parts or not task.groups:
            self._replace(task, parts)
        elif task.busy:
            self.idle = before
        elif task.resting and all(group.idle for group in task.resting):
            self.idle = before + 1

    def _replace(self, task: Task, parts: list[Task]) -> None:
        number = self.tasks.index(task)
        self.tasks[number : number + 1] = parts

    def _report_deadlock(self, waits: list[Wait]) -> None:
        """One finding for each line that is waited at, with the state of every barrier."""
        waiting = {row: wait for wait in waits for row in wait.rows}
        self.executor.warpgroups.check_together(set(waiting))
        lines = {row: wait.op.where for row, wait in waiting.items()}
        barriers = self.executor.barriers
        for row in sorted(waiting, key=lambda row: (-self.executor.mbarriers.progress(row), row)):
            named = [barriers.describe(key, lines) for key in barriers.open if key[0] == row // self.warps]
            parts = (*named, self.executor.mbarriers.describe(row, lines), self.executor.clusters.describe(row))
            parts = (*parts, self.executor.warpgroups.describe(row), self.executor.registers.describe(row))
            state = "; ".join(p for p in parts if p) or "nothing will complete"
            wait = waiting[row]
            message = f"{wait.op.instruction.mnemonic} waits for ever ({state}): {_cure(wait.op, self.program)}"
            since = self.executor.barriers.since(row)
            since = wait.since if since is None else since
            self.executor.report.add("deadlock", wait.op.where, message, row, 0, since=since)


def _tell(progress: Callable[[float], None], done: float, share: float, fraction: float) -> None:
    """A batch, which is a ``share`` of the launch and follows on what is ``done``, has come so far."""
    progress(min(1.0, done + share * fraction))


def _loops_of(tasks: list[Task], row: int, lane: int) -> tuple[tuple[SourceLine, int], ...]:
    return next((task.loops(row, lane) for task in tasks if row in task.rows), ())


def _cure(op: Op, program: Program) -> str:
    """The advice on what would end a wait."""
    effects = op.instruction.effects()
    roles = (role for s in walk(program.body) if isinstance(s, Roles) for role in blocks(s))
    if any(isinstance(x, Barrier) and x.threads is None for x in effects) and any(op in walk(role) for role in roles):
        return (
            "it counts all threads of the CTA, those of the other roles too; the warps of one role meet by "
            "k.bar_sync(k.named_barriers(), threads)"
        )
    found = (_CURES[type(effect)] for effect in effects if type(effect) in _CURES)
    return next(found, "every thread it counts must arrive, in every branch and as often")


_CURES: dict[type[Effect], str] = {
    MbarrierWait: "all its arrivals (of an empty stage a release by each reader) and exactly the expected bytes must "
    "come, as often as it is waited for; who waits for empty stages begins with phase=1",
    RegisterBudget: "other warpgroups must give registers back first, and enough of them",
    GlobalWait: "who raises the counter must come so far, and must not be behind this CTA in the grid",
}
