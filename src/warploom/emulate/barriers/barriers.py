"""Named barriers of a CTA and the barrier of a cluster: who has arrived, who waits, and what they learn of each other.

Sources: PTX ISA, ``bar``, ``barrier.cluster``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Execution, Frame
from warploom.emulate.findings.report import Reporter
from warploom.emulate.order.clocks import Clocks
from warploom.emulate.order.planes import CONTROL, joined
from warploom.ir.statements import Op, SourceLine
from warploom.isa.effects import Barrier, ClusterBarrier

Array = NDArray[Any]

NAMED_BARRIERS = 16
"""A CTA has barriers 0 … 15 (PTX ISA, ``bar``)."""


@dataclass(eq=False)
class Wait:
    """Why a task cannot go on: the rows that are still held back at ``op``.

    ``since``: how many findings there were when it began. ``then`` runs once it is over, on the frame that goes on,
    which may have only some of the rows that began to wait.
    """

    op: Op
    rows: set[int]
    since: int | None = None
    then: Callable[[Frame], None] | None = None

    @property
    def ready(self) -> bool:
        """Whether nothing holds the task back any more."""
        return not self.rows


@dataclass(eq=False)
class Phase:
    """One use of a barrier: when each warp (or queue of transactions), by the clocks' columns, came last, what these
    and those before them have made known, and who waits until all have come.
    """

    came: dict[int, int] = field(default_factory=dict[int, int])
    known: Array | None = None
    waits: list[tuple[Wait, int]] = field(default_factory=list[tuple[Wait, int]])
    over: bool = False

    def arrive(self, column: int, stamp: int, known: Array) -> None:
        """A warp or a queue comes."""
        self.came[column] = stamp
        self.known = known if self.known is None else joined(self.known, known)

    def unordered(self, clocks: Clocks, row: int) -> list[int]:
        """The stamps of arrivals that a warp does not know of."""
        passed = clocks.passed(row) if self.came else np.zeros(0)
        return [stamp for column, stamp in self.came.items() if passed[column] < stamp]

    def wait(self, wait: Wait, row: int) -> None:
        """A warp waits until all have come."""
        wait.rows.add(row)
        self.waits.append((wait, row))

    def complete(self, clocks: Clocks) -> None:
        """All have come: who waits learns what is known, and goes on."""
        self.over = True
        self.tell(clocks, [row for _, row in self.waits])
        for wait, row in self.waits:
            wait.rows.discard(row)

    def tell(self, clocks: Clocks, rows: list[int]) -> None:
        """Warps learn what all that came have made known."""
        if rows:
            assert self.known is not None
            clocks.meet(np.array(rows), self.known)


@dataclass(eq=False, kw_only=True)
class NamedPhase(Phase):
    """One use of a named barrier: ``count`` warps have come, some perhaps more than once."""

    expected: int
    op: Op
    everyone: bool
    count: int = 0
    votes: Array = field(default_factory=lambda: np.zeros(2, np.uint32))  # threads whose predicate holds, and all


class Barriers:
    """All barriers of a batch, by (CTA of the batch, number)."""

    def __init__(self, clocks: Clocks, reporter: Reporter, threads: int) -> None:
        self.clocks = clocks
        self.report = reporter
        self.threads = threads
        self.open: dict[tuple[int, int], NamedPhase] = {}
        self.gone: Counter[int] = Counter()  # CTA → warps that have ended
        self.past: dict[tuple[int, int], NamedPhase] = {}  # the last use of each that is over
        self.votes: dict[int, Array] = {}  # row → those of the last barrier that it has waited for
        # Barriers that warps have met at from different lines: how many findings there were then, and the lines.
        self.mixed: dict[tuple[int, int], tuple[int, list[SourceLine]]] = {}

    def exited(self, rows: Array) -> None:
        """Count warps that have ended out of barriers of the whole CTA (CUDA, compute capability 7)."""
        ctas = (rows // self.clocks.warps_per_cta).tolist()
        self.gone.update(ctas)
        for key in [k for k in self.open if k[0] in set(ctas)]:
            self._complete_if_all_came(key)

    def arrive(self, call: Execution[Barrier]) -> Wait | None:
        """All warps of the frame arrive. Returns what they wait for, or None if they may go on.

        Where the barrier puts predicates of its threads together, warps that have waited for it get the result.
        """
        frame, op, number, holds = call.frame, call.op, call.given["barrier"], call.given.get("holds")
        threads, waits = call.effect.threads, call.effect.waits
        self.clocks.stamp(op)
        whole = frame.whole_ctas and waits and threads in (None, self.threads) and not self.open and holds is None
        if whole and number.size == 1 and 0 <= int(number.flat[0]) < NAMED_BARRIERS:
            if self.past:
                for row in frame.rows.tolist():
                    self._follows((row // self.clocks.warps_per_cta, int(number.flat[0])), row, op)
            self.clocks.sync_ctas(frame.rows)
            if self.past:  # whoever comes later knows of all that was
                ctas = set((frame.rows // self.clocks.warps_per_cta).tolist())
                self.past = {key: phase for key, phase in self.past.items() if key[0] not in ctas}
            return None
        expected = self.threads if threads is None else threads
        if expected % 32 or not 0 < expected <= self.threads:
            message = f"{op.instruction.mnemonic} for {expected} threads: use a multiple of 32 up to {self.threads}"
            self.report.add("barrier", op.where, message, int(frame.rows[0]), 0)
            return None
        wait = Wait(op, set(), then=None if holds is None else partial(self._voted, op))
        numbers, came = frame.full(number)[:, 0], frame.acting()
        for i, (row, which) in enumerate(zip(frame.rows.tolist(), numbers.tolist(), strict=True)):
            if not 0 <= which < NAMED_BARRIERS:
                self.report.add("barrier", op.where, f"there is no barrier {which}: use 0 to 15", row, 0)
                continue
            key = (row // self.clocks.warps_per_cta, which)
            phase = self.open.setdefault(key, NamedPhase(expected=expected, op=op, everyone=threads is None))
            if holds is not None:
                phase.votes += np.array([(frame.full(holds)[i] & came[i]).sum(), came[i].sum()], np.uint32)
            self._arrive(row, key, expected, wait if waits else None, op)
        return None if wait.ready and holds is None else wait

    def _voted(self, op: Op, frame: Frame) -> None:
        """Warps that have waited get what the predicates of all threads say together."""
        votes = np.stack([self.votes.get(row, np.zeros(2, np.uint32)) for row in frame.rows.tolist()])
        frame.write(op.results[0], op.instruction.meaning(votes[:, :1], votes[:, 1:])[0])

    def _arrive(self, row: int, key: tuple[int, int], expected: int, wait: Wait | None, op: Op) -> None:
        phase = self.open[key]
        if phase.expected != expected:
            message = (
                f"barrier {key[1]} is used for {expected} threads here and for {phase.expected} there at once: "
                "give all its uses one thread count"
            )
            self.report.add("barrier", op.where, message, row, 0, other=phase.op.where)
        self._follows(key, row, op)
        phase.count += 1
        phase.arrive(int(self.clocks.columns[row]), self.clocks.now, self.clocks.release(row, None))
        if wait is not None:
            phase.wait(wait, row)
        self._complete_if_all_came(key)

    def _follows(self, key: tuple[int, int], row: int, op: Op) -> None:
        """An arrival that may come before the barrier's last use is over counts for that one in another order."""
        earlier = self.past.get(key)
        unknown = [] if earlier is None else earlier.unordered(self.clocks, row)
        if earlier is None or not unknown:
            return
        message = (
            f"{op.instruction.mnemonic} at barrier {key[1]} is not ordered after its last use: in another order it "
            "counts for that one. Take another barrier, or let all meet before it is used again"
        )
        lines = [self.report.line_of(stamp) for stamp in unknown]
        other = next((line for line in lines if line != op.where), earlier.op.where)
        self.report.add("barrier", op.where, message, row, 0, other=other)

    def _complete_if_all_came(self, key: tuple[int, int]) -> None:
        phase = self.open[key]
        ended = self.gone[key[0]] if phase.everyone else 0
        if 32 * (phase.count + ended) < phase.expected:
            return
        del self.open[key]
        self.past[key] = phase
        if phase.everyone and key not in self.mixed:
            lines = list(dict.fromkeys(self.report.line_of(stamp) for stamp in phase.came.values()))
            if len(lines) > 1:
                self.mixed[key] = len(self.report.findings), lines
        self.report.recorder.ends_waits([row for _, row in phase.waits])
        phase.complete(self.clocks)
        self.votes.update((row, phase.votes) for _, row in phase.waits)

    def describe(self, key: tuple[int, int], waits: Mapping[int, SourceLine]) -> str:
        """Arrived and expected threads of an open phase, and where others are; rows wait at the lines of ``waits``."""
        phase, warps = self.open[key], self.clocks.warps_per_cta
        everyone = range(key[0] * warps, (key[0] + 1) * warps)
        came = {row for row in everyone if self.clocks.columns[row] in phase.came}
        parts = [f"{warps_text(came, warps)} came"]
        elsewhere = dict[SourceLine | None, set[int]]()
        for row in everyone:
            if row not in came:
                elsewhere.setdefault(waits.get(row), set()).add(row)
        parts += [f"{warps_text(rows, warps)} {whereabouts(rows, waits)}" for rows in [*elsewhere.values()][:4]]
        text = f"barrier {key[1]} has {32 * phase.count} of {phase.expected} threads: {', '.join(parts)}"
        if key in self.mixed:
            text += f"; before, it was met from {' and '.join(map(str, self.mixed[key][1]))} at once"
        return text

    def since(self, row: int) -> int | None:
        """The number of findings when the barrier at which a warp waits was first met from different lines."""
        keys = (key for key, use in self.open.items() if key in self.mixed and row in (r for _, r in use.waits))
        return next((self.mixed[key][0] for key in keys), None)

    def at_exit(self) -> None:
        """Arrivals nobody waited for are a mistake in the count of threads or in the order."""
        for (cta, number), phase in self.open.items():
            if phase.waits:
                continue
            message = (
                f"the kernel ends while barrier {number} has {32 * phase.count} of {phase.expected} threads: "
                "match every bar.arrive by a bar.sync of the other warps"
            )
            self.report.add("barrier", phase.op.where, message, cta * self.clocks.warps_per_cta, 0)


class ClusterBarriers:
    """The barriers of the clusters of a batch: the current phase of each, and those that rows have yet to wait for.

    A cluster's barrier has two halves. Threads that have exited count as arrived, and release nothing.
    """

    def __init__(self, rows: int, clocks: Clocks, reporter: Reporter) -> None:
        self.clocks, self.report = clocks, reporter
        self.domain = clocks.domain
        self.gone = np.zeros(rows, np.bool_)
        self.current = [Phase() for _ in range(rows // self.domain)]
        self.arrived: dict[int, tuple[Phase, Op]] = {}

    def meet(self, call: Execution[ClusterBarrier]) -> Wait | None:
        """All warps of the frame execute one of the halves. Returns what they wait for."""
        if call.effect.waits:
            return self._wait(call.frame, call.op)
        return self._arrive(call.frame, call.op, call.effect.relaxed)

    def _arrive(self, frame: Frame, op: Op, relaxed: bool) -> None:
        """All warps of the frame arrive."""
        self.clocks.stamp(op)
        self.clocks.absorb(frame.rows)
        for row in frame.rows.tolist():
            if row in self.arrived:
                message = f"a warp executes {op.instruction.mnemonic} again before it has waited for the first "
                message += "arrival: arrive once for each wait"
                self.report.add("barrier", op.where, message, row, 0, other=self.arrived[row][1].where)
                continue
            known = self.clocks.release(row, None)
            # A relaxed arrival tells how far control has come, and which mbarriers' initialisation was published.
            if relaxed:
                known[:CONTROL], known[CONTROL + 1 :] = 0, 0
            phase = self.current[row // self.domain]
            phase.arrive(int(self.clocks.columns[row]), self.clocks.now, known)
            self.arrived[row] = phase, op
        self._complete(frame.rows)

    def _wait(self, frame: Frame, op: Op) -> Wait | None:
        """The wait of the frame's warps for their cluster's barrier; None where it is over already."""
        wait = Wait(op, set())
        for row in frame.rows.tolist():
            if row not in self.arrived:
                message = f"a warp executes {op.instruction.mnemonic} without having arrived (barrier.cluster.arrive): "
                self.report.add("barrier", op.where, message + "every thread arrives before it waits", row, 0)
                continue
            phase, _ = self.arrived.pop(row)
            if phase.over:
                phase.tell(self.clocks, [row])
            else:
                phase.wait(wait, row)
        return None if wait.ready else wait

    def exited(self, rows: Array) -> None:
        """Count warps that have ended as arrived, so that nobody waits for them."""
        self.gone[rows] = True
        self._complete(rows)

    def _missing(self, number: int) -> list[int]:
        """The warps of a cluster that have yet to come."""
        rows, came = range(number * self.domain, (number + 1) * self.domain), self.current[number].came
        return [row for row in rows if not self.gone[row] and self.clocks.columns[row] not in came]

    def _complete(self, rows: Array) -> None:
        for number in np.unique(rows // self.domain).tolist():
            if self.current[number].came and not self._missing(number):
                self.report.recorder.ends_waits([row for _, row in self.current[number].waits])
                self.current[number].complete(self.clocks)
                self.current[number] = Phase()

    def describe(self, row: int) -> str:
        """Name the warps that are missing at the barrier of a warp's cluster; '' where nobody waits."""
        number = row // self.domain
        if not self.current[number].waits:
            return ""
        missing = self._missing(number)
        named = ", ".join(f"warp {r % self.clocks.warps_per_cta} of {self.report.cta(r)}" for r in missing[:4])
        return f"the cluster's barrier misses {named}" + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")

    def at_exit(self) -> None:
        """Arrivals that nobody waited for."""
        for row in sorted(self.arrived)[:1]:
            message = "the kernel ends between barrier.cluster.arrive and its barrier.cluster.wait: wait for it"
            self.report.add("barrier", self.arrived[row][1].where, message, row, 0)


def warps_text(rows: set[int], of_cta: int) -> str:
    """Warps by their numbers within their CTA."""
    numbers = sorted({row % of_cta for row in rows})
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"warps {numbers[0]} to {numbers[-1]}"
    return f"warp{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def whereabouts(rows: set[int], waits: Mapping[int, SourceLine]) -> str:
    """Where warps are while others wait for them for ever; rows wait at the lines of ``waits``, these at one."""
    row, one = min(rows), len(rows) == 1
    if row in waits:
        return f"wait{'s' * one} at {waits[row]}"
    return f"{'has' if one else 'have'} ended"
