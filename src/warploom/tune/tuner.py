"""The search: prune before compiling, prune the cubins, check results, then time in rounds and keep the better half.

Every candidate that is timed has computed a small problem right first. Rounds are interleaved
(:mod:`warploom.measure.timing`). What won is kept for calls (``ops.tuned``).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from warploom.core.errors import ConfigError, UnsupportedDeviceError, WarploomError
from warploom.core.targets import Target
from warploom.kernels.settings import read
from warploom.kernels.source import KernelSource
from warploom.measure.pytorch import torch_module
from warploom.measure.timing import Candidate, Clock, EventClock, Measured, measure, paired_ratio
from warploom.measure.workload import OnGpu
from warploom.ops import tuned
from warploom.ops.backends import gpu_name, gpu_target
from warploom.tune.build import Built, Progress, build_all
from warploom.tune.operation import TunableOperation, neighbours

Report = Callable[[str, float], None]


@dataclass(frozen=True)
class Effort:
    """The duration of a measurement. A round times every candidate once; a sample is ``sample_seconds`` of calls."""

    sample_seconds: float = 0.003
    warm_up_seconds: float = 0.003
    rounds: int = 3
    final_rounds: int = 15
    finalists: int = 4
    most_behind: float = 1.25
    """Candidates slower than the best by this factor do not see a second set of rounds."""
    worth: float = 1.003
    """What one more flag must gain to be kept."""
    passes: int = 2
    hung_after_seconds: float = 60.0
    """How long the first run of a kernel on a small problem may take, loading included."""


class GpuLostError(WarploomError, RuntimeError):
    """A candidate has made the GPU unusable for this process."""


HUNG = 75
"""The exit code after a hanging kernel."""


def leave_hung(config: str) -> None:
    """End the process: a kernel that hangs cannot be stopped in any other way."""
    sys.stderr.write(f"error: {config} hangs, which is a defect of the kernel: please report it\n")
    sys.stderr.flush()
    os._exit(HUNG)


@dataclass(frozen=True)
class TuningGpu:
    """Where candidates run: the index and name of the GPU, its target, and a clock on its stream."""

    index: int
    name: str
    target: Target
    clock: Clock


def gpu_for_tuning(index: int = 0) -> TuningGpu:
    """GPU ``index`` with a clock on PyTorch's current stream there, made current.

    Raises UnsupportedDeviceError without a driver, such a GPU, or PyTorch (which holds the inputs).
    """
    from warploom.cuda.device import require_driver

    require_driver()
    torch = torch_module()
    if index >= torch.cuda.device_count():
        raise UnsupportedDeviceError(f"there is no GPU {index}: PyTorch sees {torch.cuda.device_count()}")
    torch.cuda.set_device(index)
    torch.cuda.init()
    clock = EventClock(int(torch.cuda.current_stream(index).cuda_stream))
    return TuningGpu(index, gpu_name(index), gpu_target(index), clock)


@dataclass(frozen=True)
class Outcome:
    """The outcome of tuning one problem.

    ``known``: it had been tuned before; ``dropped`` counts reasons not to time; ``not_kept`` is why what won could not
    be kept (a full disk), ``""`` where it was.
    """

    size_class: str
    found: tuned.Tuned | None
    known: bool = False
    dropped: Counter[str] = field(default_factory=Counter[str])
    complete: bool = True
    not_kept: str = ""


class BuildAll(Protocol):
    """:func:`warploom.tune.build.build_all`, or what stands for it in a test."""

    def __call__(self, sources: Sequence[KernelSource], arch: str, progress: Progress) -> list[Built | str]: ...


@dataclass
class Tuner:
    """Tunes problems of one operation on one GPU. ``budget`` seconds are for all problems together.

    Raises OSError where nothing could be kept. If that happens later (a full disk), the search ends all the same, and
    its outcome says what was not kept.
    """

    operation: TunableOperation[Any, Any]
    gpu: TuningGpu
    budget: float | None = None
    effort: Effort = field(default_factory=Effort)
    report: Report = lambda text, fraction: None
    build: BuildAll = build_all
    now: Callable[[], float] = time.monotonic
    hung: Callable[[str], None] = leave_hung
    built: dict[KernelSource, Built | str] = field(default_factory=dict[KernelSource, "Built | str"])
    won: list[Any] = field(default_factory=list[Any])

    def __post_init__(self) -> None:
        tuned.require_writable()
        self._deadline = None if self.budget is None else self.now() + self.budget

    def tune_all(self, problems: Sequence[Any], *, again: bool = False) -> list[Outcome]:
        """Every problem in order; those that the budget does not reach have no configuration."""
        outcomes: list[Outcome] = []
        for number, problem in enumerate(problems):
            told, base = problem.size_class, number / len(problems)
            outcomes.append(
                self.tune(
                    problem,
                    again=again,
                    report=lambda text, fraction, told=told, base=base: self.report(
                        f"{told}: {text}", base + fraction / len(problems)
                    ),
                )
            )
        return outcomes

    def tune(self, problem: Any, *, again: bool = False, report: Report | None = None) -> Outcome:
        """The configuration for a problem: what is known of its class unless ``again``, else by a search."""
        known = None if again else tuned.find(self.gpu.name, problem.size_class)
        if known is not None:
            self._remember(known.config)
            return Outcome(problem.size_class, known, known=True)
        if self.is_over():
            return Outcome(problem.size_class, None, complete=False)
        outcome = _Search(self, problem, report or self.report).run()
        if outcome.found is not None:
            self._remember(outcome.found.config)
        return outcome

    def _remember(self, notation: str) -> None:
        try:
            self.won.append(read(notation, self.operation.kinds))
        except ConfigError:
            return

    def is_over(self) -> bool:
        """Whether the budget is spent."""
        return self._deadline is not None and self.now() >= self._deadline


class _Search:
    """One problem's search."""

    def __init__(self, tuner: Tuner, problem: Any, report: Report) -> None:
        self.tuner, self.problem, self.report = tuner, problem, report
        self.operation, self.gpu, self.effort = tuner.operation, tuner.gpu, tuner.effort
        self.default = self.operation.choose(problem, self.gpu.target)[0]
        self.dropped: Counter[str] = Counter()
        self.timed: set[str] = set()
        self.codes: set[bytes] = set()
        self.workload: OnGpu | None = None

    def run(self) -> Outcome:
        """Search, keep what won, and say what was left out."""
        # What won for other problems comes first: it carries their small flags over.
        entries = self._ready([self.default, *self.tuner.won, *self.operation.space(self.problem, self.gpu.target)])
        if not entries:
            return Outcome(self.problem.size_class, None, dropped=self.dropped)
        entries, complete = self._halve(entries)
        for _ in range(self.effort.passes):
            if self.tuner.is_over():
                complete = False
                break
            better = self._one_flag_better(entries[0])
            if better is None:
                break
            entries.insert(0, better)
        found, not_kept = self._decide(entries), ""
        try:
            tuned.keep(found)
        except OSError as error:
            not_kept = f"{error.filename or tuned.folder()}: {error.strerror}"
        return Outcome(self.problem.size_class, found, False, self.dropped, complete, not_kept)

    # -- candidates
    def _ready(self, configs: Iterable[Any]) -> list[tuple[Any, Candidate]]:
        """The candidates worth timing: they fit, compile, do not spill, differ from each other, and compute right."""
        fitting = [
            c
            for c in dict.fromkeys(configs)
            if str(c) not in self.timed and self._keep(self.operation.violations(c, self.problem, self.gpu.target))
        ]
        sources = {str(c): self.operation.source(self.problem, c) for c in fitting}
        self._compile(list(dict.fromkeys(sources.values())))
        entries: list[tuple[Any, Candidate]] = []
        for done, config in enumerate(fitting):
            self.report("checking results", 0.4 + 0.1 * done / len(fitting))
            built = self.tuner.built[sources[str(config)]]
            if isinstance(built, str):
                self._keep([built])
                continue
            known = ["the same machine code as another"] if built.kernel.cubin in self.codes else []
            if self._keep(known or built.faults(self.gpu.target)) and (candidate := self._checked(config)) is not None:
                self.codes.add(built.kernel.cubin)
                entries.append((config, candidate))
        return entries

    def _compile(self, sources: Sequence[KernelSource]) -> None:
        missing = [source for source in sources if source not in self.tuner.built]

        def progress(done: int, total: int) -> None:
            self.report(f"compiling {done}/{total}", 0.4 * done / total)

        if missing:
            results = self.tuner.build(missing, self.gpu.target.name, progress)
            self.tuner.built |= dict(zip(missing, results, strict=True))

    def _checked(self, config: Any) -> Candidate | None:
        """The candidate, if its first run on a small problem gives what float64 does."""
        if self.workload is None:
            self.workload = self.operation.workload(self.problem, self.gpu.index)
        guard = threading.Timer(self.effort.hung_after_seconds, self.tuner.hung, (str(config),))
        guard.daemon = True
        guard.start()
        try:
            verdict = self.workload.fault(config)
        except (WarploomError, RuntimeError) as error:
            verdict = f"does not run: {str(error).splitlines()[0]}"
            if not self.workload.answers():
                raise GpuLostError(f"the GPU no longer answers after {config} ({error})") from error
        finally:
            guard.cancel()
        if not self._keep([verdict] if verdict else []):
            return None
        return Candidate(str(config), self.workload.prepare(config))

    def _keep(self, reasons: list[str]) -> bool:
        """Whether there is no reason to drop a candidate; counts the first."""
        if reasons:
            self.dropped[reasons[0]] += 1
        return not reasons

    # -- timing
    def _measure(self, entries: Sequence[tuple[Any, Candidate]], rounds: int) -> dict[str, Measured]:
        assert self.workload is not None
        self.timed |= {candidate.name for _, candidate in entries}
        return measure(
            [candidate for _, candidate in entries],
            self.workload.sets,
            self.gpu.clock,
            rounds=rounds,
            sample_seconds=self.effort.sample_seconds,
            warm_up_seconds=self.effort.warm_up_seconds,
        )

    def _halve(self, entries: list[tuple[Any, Candidate]]) -> tuple[list[tuple[Any, Candidate]], bool]:
        """(finalists, best first; whether the budget sufficed)."""
        effort, turn = self.effort, 0
        while len(entries) > effort.finalists and not self.tuner.is_over():
            self.report(f"timing {len(entries)}", 0.5 + 0.3 * (1 - effort.finalists / len(entries)))
            turn += 1
            found = self._measure(entries, effort.rounds * turn)
            entries = sorted(entries, key=lambda e: found[e[1].name].seconds.median)
            limit = effort.most_behind * found[entries[0][1].name].seconds.median
            best = entries[: max(effort.finalists, len(entries) // 2)]
            entries = [e for e in best if found[e[1].name].seconds.median <= limit]
        return entries, len(entries) <= effort.finalists

    def _one_flag_better(self, best: tuple[Any, Candidate]) -> tuple[Any, Candidate] | None:
        """The best of the configurations that differ from ``best`` in one flag, if that is worth it."""
        entries = self._ready(neighbours(best[0], self.operation.fixed))
        if not entries:
            return None
        self.report(f"timing {len(entries)} variants", 0.85)
        found = self._measure([best, *entries], 2 * self.effort.rounds)
        ahead = {e[1].name: paired_ratio(found[e[1].name], found[best[1].name]) for e in entries}
        first = max(entries, key=lambda e: ahead[e[1].name])
        return first if ahead[first[1].name] >= self.effort.worth else None

    def _decide(self, entries: list[tuple[Any, Candidate]]) -> tuned.Tuned:
        """The last rounds, among the finalists and the default."""
        finalists = entries[: self.effort.finalists + self.effort.passes]
        default = str(self.default)
        if default not in {candidate.name for _, candidate in finalists}:
            candidate = self._checked(self.default)
            finalists += [] if candidate is None else [(self.default, candidate)]
        self.report(f"timing {len(finalists)} finalists", 0.95)
        found = self._measure(finalists, self.effort.final_rounds)
        first = min(found, key=lambda name: found[name].seconds.median)
        ratio = paired_ratio(found[first], found[default]) if default in found else 1.0
        spread, size_class = found[first].seconds, self.problem.size_class
        seconds = spread.median, spread.low, spread.high
        return tuned.Tuned.now(self.gpu.name, size_class, first, seconds, ratio, len(self.timed))
