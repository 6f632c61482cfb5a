"""The search: prune before compiling, prune the cubins, check results, then time in rounds and keep the better half.

Every candidate that is timed has computed a small problem right first. Rounds are interleaved (``bench.timing``), and
each is kept in the store: a search that was killed goes on with the candidates it had left.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

from warploom.bench.timing import Candidate, Clock, Measured, measure, paired_ratio
from warploom.core.errors import ConfigError, WarploomError
from warploom.core.targets import Target
from warploom.tune.build import Progress, build_all
from warploom.tune.built import Built
from warploom.tune.family import Family, Workload
from warploom.tune.space import distinct
from warploom.winners.classes import ProblemClass
from warploom.winners.store import Winner, WinnerStore, package_version

Report = Callable[[str, float], None]


@dataclass(frozen=True)
class Effort:
    """How long to measure. Rounds time every candidate once; a sample is calls of ``sample_seconds`` together."""

    sample_seconds: float = 0.003
    warm_up_seconds: float = 0.003
    rounds: int = 3
    final_rounds: int = 15
    finalists: int = 4
    most_behind: float = 1.25
    """Candidates slower than the best by this factor do not see a second set of rounds."""
    worth: float = 1.003
    """What one more flag must gain to be kept."""
    variant_passes: int = 2
    hung_after_seconds: float = 60.0
    """How long the first run of a kernel on a small problem may take, loading included."""


class GpuLostError(WarploomError, RuntimeError):
    """A candidate has made the GPU unusable for this process."""


def leave_hung(config: str) -> None:
    """End the process: a kernel that hangs cannot be stopped in any other way."""
    sys.stderr.write(f"error: {config} hangs; start the same command again, it goes on without this configuration\n")
    sys.stderr.flush()
    os._exit(HUNG)


HUNG = 75
"""The exit code after a hanging kernel: EX_TEMPFAIL, try again."""


@dataclass(frozen=True)
class Gpu:
    """Where candidates run: the index and name of the GPU, its target, and a clock on its stream."""

    index: int
    name: str
    goal: Target
    clock: Clock


@dataclass(frozen=True)
class Outcome:
    """What came of one problem.

    ``known``: the store had its winner; ``dropped`` counts reasons not to time; ``not_kept`` is why the store could not
    take the winner (a full disk), ``""`` where it did.
    """

    problem: ProblemClass
    winner: Winner | None
    known: bool = False
    dropped: Counter[str] = field(default_factory=Counter[str])
    complete: bool = True
    not_kept: str = ""


class BuildAll(Protocol):
    """:func:`warploom.tune.build.build_all`, or what stands for it in a test."""

    def __call__(
        self, family: Any, problem: Any, configs: Sequence[Any], arch: str, progress: Progress
    ) -> list[Built | str]: ...


@dataclass
class _Entry:
    config: Any
    candidate: Candidate


class Tuner:
    """Tunes problems of one family on one GPU. ``budget`` seconds are for all problems together.

    Raises OSError where the store cannot be written. If it cannot any more later (a full disk), the search ends all the
    same, and its outcome says what was not kept.
    """

    def __init__(
        self,
        family: Family[Any, Any],
        gpu: Gpu,
        store: WinnerStore,
        *,
        budget: float | None = None,
        effort: Effort | None = None,
        report: Report = lambda text, fraction: None,
        build: BuildAll = build_all,
        now: Callable[[], float] = time.monotonic,
        hung: Callable[[str], None] = leave_hung,
    ) -> None:
        store.require_writable()
        self.family, self.gpu, self.store = family, gpu, store
        self.effort = effort or Effort()
        self._report, self._build, self._now, self._hung = report, build, now, hung
        self._deadline = None if budget is None else now() + budget
        self._built: dict[tuple[Hashable, str], Built | str] = {}
        self._verdicts: dict[tuple[Hashable, str], str | None] = {}
        self._won: list[Any] = []

    # -- problems
    def tune_all(self, problems: Sequence[Any], *, again: bool = False) -> list[Outcome]:
        """Every problem in order; those that the budget does not reach have no winner."""
        outcomes: list[Outcome] = []
        for index, problem in enumerate(problems):
            name = str(self.family.problem_class(problem))
            base, share = index / len(problems), 1 / len(problems)
            outcomes.append(self.tune(problem, again=again, report=_scaled(self._report, name, base, share)))
        return outcomes

    def tune(self, problem: Any, *, again: bool = False, report: Report | None = None) -> Outcome:
        """The winner for a problem: from the store unless ``again``, else by a search."""
        report = report or self._report
        wanted = self.family.problem_class(problem)
        known = [w for w in self.store.winners(self.gpu.name, package_version()) if w.problem == wanted]
        if known and not again:
            self._remember(known[0].config)
            return Outcome(wanted, known[0], known=True)
        if self._is_over():
            return Outcome(wanted, None, complete=False)
        return _Search(self, problem, wanted, report).run()

    def _remember(self, notation: str) -> None:
        try:
            self._won.append(self.family.parse(notation))
        except ConfigError:
            return

    def _is_over(self) -> bool:
        return self._deadline is not None and self._now() >= self._deadline


class _Search:
    """One problem's search."""

    def __init__(self, tuner: Tuner, problem: Any, wanted: ProblemClass, report: Report) -> None:
        self.tuner, self.problem, self.wanted, self.report = tuner, problem, wanted, report
        self.family, self.gpu, self.effort = tuner.family, tuner.gpu, tuner.effort
        self.default = self.family.default(problem, self.gpu.goal)
        self.spaces = self.family.spaces(problem, self.gpu.goal)
        self.dropped: Counter[str] = Counter()
        self.timed: set[str] = set()
        self.workload: Workload[Any] | None = None
        self.suspects = tuner.store.suspects(tuner.gpu.name, package_version(), wanted)

    def run(self) -> Outcome:
        """Search, keep the winner, and say what was left out."""
        combined = distinct(c for space in self.spaces for c in space.combinations())
        space_id = _digest(combined)
        left = self._left_by_a_killed_search(space_id)
        # What won for other problems comes first: it carries their small flags over.
        configs = [c for c in distinct([self.default, *self.tuner._won, *combined]) if left is None or str(c) in left]
        entries = self._ready(distinct([self.default, *configs]))
        if not entries:
            return Outcome(self.wanted, None, dropped=self.dropped)
        entries, complete = self._halve(entries, space_id)
        for _ in range(self.effort.variant_passes):
            if self.tuner._is_over():
                complete = False
                break
            better = self._one_flag_better(entries[0])
            if better is None:
                break
            entries.insert(0, better)
        winner = self._decide(entries)
        self.tuner._remember(winner.config)
        not_kept = self._kept(lambda: self.tuner.store.add(winner))
        return Outcome(self.wanted, winner, dropped=self.dropped, complete=complete, not_kept=not_kept)

    @staticmethod
    def _kept(write: Callable[[], None]) -> str:
        """Why the store could not take something: a search of minutes does not end for that."""
        try:
            write()
        except OSError as error:
            return f"{error.filename}: {error.strerror}"
        return ""

    def _left_by_a_killed_search(self, space_id: str) -> set[str] | None:
        rounds = self.tuner.store.rounds(self.gpu.name, package_version(), self.wanted, space_id)
        return set(rounds[-1]["left"]) if rounds else None

    # -- candidates
    def _ready(self, configs: Iterable[Any]) -> list[_Entry]:
        """The candidates worth timing: they fit, compile, do not spill, differ from each other, and compute right."""
        fitting = [c for c in configs if self._keep(self.family.misfits(self.problem, c, self.gpu.goal))]
        self._compile(fitting)
        entries: list[_Entry] = []
        seen: set[bytes] = set()
        for done, config in enumerate(fitting):
            self.report("checking results", 0.4 + 0.1 * done / len(fitting))
            built = self.tuner._built[self._key(config)]
            if isinstance(built, str):
                self._keep([built])
            elif built.kernel.cubin in seen:
                self._keep(["the same machine code as another"])
            elif self._keep(built.faults(self.gpu.goal)) and (entry := self._checked(config, built)) is not None:
                seen.add(built.kernel.cubin)
                entries.append(entry)
        return entries

    def _key(self, config: Any) -> tuple[Hashable, str]:
        return self.family.kernel_key(self.problem, config), self.gpu.goal.name

    def _compile(self, configs: Sequence[Any]) -> None:
        missing = [c for c in configs if self._key(c) not in self.tuner._built]

        def progress(done: int, total: int) -> None:
            self.report(f"compiling {done}/{total}", 0.4 * done / total)

        if missing:
            results = self.tuner._build(self.family, self.problem, missing, self.gpu.goal.name, progress)
            self.tuner._built |= {self._key(c): built for c, built in zip(missing, results, strict=True)}

    def _checked(self, config: Any, built: Built) -> _Entry | None:
        if self.workload is None:
            self.workload = self.family.workload(self.problem, self.gpu.index)
        key = self._key(config)
        if key not in self.tuner._verdicts:
            self.tuner._verdicts[key] = self._first_run(config, built, self.workload)
        if not self._keep([verdict] if (verdict := self.tuner._verdicts[key]) else []):
            return None
        return _Entry(config, Candidate(str(config), self.workload.prepare(config, built)))

    def _first_run(self, config: Any, built: Built, workload: Workload[Any]) -> str | None:
        """What is wrong with a kernel. It may hang or end the process: then the next search goes on without it."""
        if str(config) in self.suspects:
            return "did not come back from its first run"
        self._note("trying", {"config": str(config)})
        guard = threading.Timer(self.effort.hung_after_seconds, self.tuner._hung, (str(config),))
        guard.daemon = True
        guard.start()
        try:
            verdict = workload.fault(config, built)
        except (WarploomError, RuntimeError) as error:
            verdict = f"does not run: {str(error).splitlines()[0]}"
            if not workload.answers():
                raise GpuLostError(
                    f"the GPU no longer answers after {config} ({error}): start the same command again, it goes on "
                    "without this configuration"
                ) from error
        finally:
            guard.cancel()
        self._note("tried", {"config": str(config)})
        return verdict

    def _keep(self, reasons: list[str]) -> bool:
        """Whether there is no reason to drop a candidate; counts the first."""
        if reasons:
            self.dropped[reasons[0]] += 1
        return not reasons

    # -- timing
    def _measure(self, entries: Sequence[_Entry], rounds: int) -> dict[str, Measured]:
        assert self.workload is not None
        self.timed |= {e.candidate.name for e in entries}
        return measure(
            [e.candidate for e in entries], self.workload.sets, self.gpu.clock, rounds=rounds,
            sample_seconds=self.effort.sample_seconds, warm_up_seconds=self.effort.warm_up_seconds,
        )  # fmt: skip

    def _halve(self, entries: list[_Entry], space_id: str) -> tuple[list[_Entry], bool]:
        """(finalists, best first; whether the budget sufficed). The default stays among them."""
        effort, turn = self.effort, 0
        while len(entries) > effort.finalists and not self.tuner._is_over():
            self.report(f"timing {len(entries)}", 0.5 + 0.3 * (1 - effort.finalists / len(entries)))
            found = self._measure(entries, effort.rounds * (turn + 1))
            entries = sorted(entries, key=lambda e: found[e.candidate.name].seconds.median)
            limit = effort.most_behind * found[entries[0].candidate.name].seconds.median
            best = entries[: max(effort.finalists, len(entries) // 2)]
            entries = [e for e in best if found[e.candidate.name].seconds.median <= limit]
            turn += 1
            self._note_round(turn, space_id, found, entries)
        return entries, len(entries) <= effort.finalists

    def _note_round(self, turn: int, space_id: str, found: dict[str, Measured], left: Sequence[_Entry]) -> None:
        medians = {name: float(f"{m.seconds.median:.4g}") for name, m in found.items()}
        values = {"space": space_id, "round": turn, "left": [e.candidate.name for e in left], "seconds": medians}
        self._note("round", values)

    def _note(self, kind: str, values: dict[str, Any]) -> None:
        about = {"gpu": self.gpu.name, "version": package_version(), "problem": self.wanted.json()}
        self._kept(lambda: self.tuner.store.append({"record": kind, **about, **values}))

    def _one_flag_better(self, best: _Entry) -> _Entry | None:
        """The best of the configurations that differ from ``best`` in one flag, if that is worth it."""
        spaces = [s for s in self.spaces if type(s.base) is type(best.config)]
        variants = [v for s in spaces for v in s.variants(best.config) if str(v) not in self.timed]
        entries = [e for e in self._ready(variants) if not self._is_same_code(e, best)]
        if not entries:
            return None
        self.report(f"timing {len(entries)} variants", 0.85)
        found = self._measure([best, *entries], 2 * self.effort.rounds)
        ahead = {e.candidate.name: paired_ratio(found[e.candidate.name], found[best.candidate.name]) for e in entries}
        first = max(entries, key=lambda e: ahead[e.candidate.name])
        return first if ahead[first.candidate.name] >= self.effort.worth else None

    def _is_same_code(self, entry: _Entry, other: _Entry) -> bool:
        one, two = (self.tuner._built[self._key(e.config)] for e in (entry, other))
        return isinstance(one, Built) and isinstance(two, Built) and one.kernel.cubin == two.kernel.cubin

    def _decide(self, entries: list[_Entry]) -> Winner:
        """The last rounds, among the finalists and the default."""
        default = str(self.default)
        finalists = entries[: self.effort.finalists + self.effort.variant_passes]
        if default not in {e.candidate.name for e in finalists}:
            finalists += self._ready([self.default])
        self.report(f"timing {len(finalists)} finalists", 0.95)
        found = self._measure(finalists, self.effort.final_rounds)
        first = min(finalists, key=lambda e: found[e.candidate.name].seconds.median).candidate.name
        ratio = paired_ratio(found[first], found[default]) if default in found else 1.0
        spread = found[first].seconds
        seconds, low, high = (float(f"{x:.5g}") for x in (spread.median, spread.low, spread.high))
        return Winner(
            self.gpu.name, package_version(), self.wanted, first, seconds, low, high, spread.count,
            float(f"{ratio:.4g}"), len(self.timed), datetime.now(UTC).date().isoformat(),
        )  # fmt: skip


def _digest(configs: Iterable[Any]) -> str:
    return hashlib.sha256("\n".join(str(c) for c in configs).encode()).hexdigest()[:16]


def _scaled(report: Report, name: str, base: float, share: float) -> Report:
    return lambda text, fraction: report(f"{name}: {text}", base + share * fraction)
