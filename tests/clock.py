"""Time that a test owns."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from warploom.measure.timing import Candidate


class SimulatedClock:
    """Time passes only in calls: the sum of what they cost. ``drift`` makes every call dearer than the one before."""

    def __init__(self, drift: float = 0.0) -> None:
        self.now, self.drift, self.calls = 0.0, drift, 0
        self.ran: list[tuple[str, int]] = []

    def spend(self, seconds: float) -> None:
        self.calls += 1
        self.now += seconds * (1 + self.drift * self.calls)

    def mark(self) -> float:
        return self.now

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def candidate(self, name: str, cost: float | Iterable[float]) -> Candidate:
        """Costs so much each time, or the next of several; notes (name, input set)."""
        costs = itertools.repeat(cost) if isinstance(cost, int | float) else iter(cost)

        def run(index: int) -> None:
            self.ran.append((name, index))
            self.spend(next(costs))

        return Candidate(name, run)
