"""One mbarrier: its phase, who has come by, and what that has made known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from warploom.emulate.barriers.barriers import Wait, warps_text, whereabouts
from warploom.emulate.control.frames import Lanes
from warploom.emulate.order.known import Known
from warploom.ir.statements import Op, SourceLine


@dataclass(frozen=True, slots=True)
class Remote:
    """An arrival from another CTA: who, when, and at what."""

    bar: Mbarrier
    row: int
    lanes: Lanes
    stamp: int
    op: Op


@dataclass(eq=False)
class Told:
    """What arrivals and copies have made known at an mbarrier: since its first phase, and in completed phases."""

    now: Known | None = None
    done: Known | None = None

    def learn(self, known: Known) -> None:
        """One more of them."""
        if self.now is None:
            self.now = known.copy()
        else:
            self.now.join(known)

    def complete(self) -> None:
        """The phase completes. Later ones add to what is known: a later phase implies the earlier ones."""
        self.done = None if self.now is None else self.now.copy()


@dataclass(eq=False)
class Counted:
    """What counted for a phase: rows of arrivals, queues of copies, and when their control came by (stamps)."""

    arrivals: dict[int, int] = field(default_factory=dict[int, int])
    copies: dict[int, int] = field(default_factory=dict[int, int])


@dataclass(eq=False)
class PhaseEvents:
    """When whose control came by an mbarrier: in the current phase, the ``last`` one and the one ``before`` that.

    ``waits``: rows that saw the end of the last one, and when.
    """

    now: Counted = field(default_factory=Counted)
    last: Counted = field(default_factory=Counted)
    before: Counted = field(default_factory=Counted)
    waits: dict[int, int] = field(default_factory=dict[int, int])

    def complete(self) -> None:
        """The phase is over; those who wait for it do so from now on."""
        self.now, self.last, self.before, self.waits = Counted(), self.now, self.last, {}


@dataclass(eq=False)
class Mbarrier:
    """One mbarrier. ``phase`` counts completed phases, ``observed`` those that somebody has waited for."""

    cta: int
    address: int
    count: int
    op: Op
    row: int
    lane: int
    stamp: int
    pending: int
    fenced: int = 0  # when its initialisation was made visible to the async proxy
    tx: int = 0
    expected: int = 0  # bytes, of the current phase
    phase: int = 0
    observed: int = 0
    told: Told = field(default_factory=lambda: Told())
    far: Told = field(
        default_factory=lambda: Told()
    )  # by other CTAs at the scope of the cluster, for waits at that scope
    events: PhaseEvents = field(default_factory=lambda: PhaseEvents())
    waiters: list[Waiter] = field(default_factory=list["Waiter"])
    arrival: Op | None = None
    copy: Op | None = None
    copied_phase: int = -1

    @property
    def idle(self) -> bool:
        """Nothing has happened in the current phase."""
        return self.pending == self.count and self.tx == 0

    def expect(self, size: int) -> None:
        """The current phase takes ``size`` more bytes of copies."""
        self.tx += size
        self.expected += size

    def complete(self) -> None:
        """The next phase begins."""
        self.phase += 1
        self.pending, self.expected = self.count, 0
        self.told.complete()
        self.far.complete()
        self.events.complete()

    def describe(self, warps: int, waits: Mapping[int, SourceLine]) -> str:
        """Its phase, what is missing, and who waits; ``warps``: of a CTA, ``waits``: the lines at which rows wait."""
        text = f"is in phase {self.phase} (parity {self.phase & 1})"
        if self.pending:
            text += f", {self.pending} of {self.count} arrivals missing ({self._who_came(warps, waits)})"
        if self.tx:
            of = f"{self.tx} of" if self.tx > 0 else f"{-self.tx} more than"
            text += f", {of} {self.expected} expected bytes {'missing' if self.tx > 0 else 'have come'}"
            text += "" if self.copy is None else f" (the last came from {self.copy.where.stack})"
        for parity in (0, 1):
            rows = {w.row for w in self.waiters if w.parity == parity}
            text += f", waited for by {warps_text(rows, warps)} (parity {parity})" if rows else ""
        return text

    def _who_came(self, warps: int, waits: Mapping[int, SourceLine]) -> str:
        """Who has arrived in the current phase; whoever did in the last one and not in this, with where it is now."""
        if self.arrival is None:
            return "nothing has arrived yet"
        now, last = set(self.events.now.arrivals), set(self.events.last.arrivals)
        parts = [f"{warps_text(now, warps)} came at {self.arrival.where.stack}"] if now else []
        for row in sorted(last - now)[:4]:
            parts.append(f"{warps_text({row}, warps)} came for the phase before and {whereabouts(row, waits)}")
        return ", ".join(parts)


@dataclass(eq=False)
class Waiter:
    """Lanes of a warp that wait for the phase of a parity to complete."""

    wait: Wait
    left: list[Waiter]  # the waiters of the same warp's execution that are not done
    row: int
    lanes: Lanes
    parity: int
    far: bool
