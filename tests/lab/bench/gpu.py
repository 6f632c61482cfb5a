"""A GPU for scripts of cells whose time a test owns."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest

from tests.clock import SimulatedClock
from warploom.measure.timing import Candidate


class FakeGpu(SimulatedClock):
    """Calls take the seconds that they say; without a pause of 20 ms before it a call takes twice as long."""

    arch, monitor = "sm_90a", None

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.clock, self.monitor, self.pauses, self.rested = self, self, list[float](), False
        monkeypatch.setattr("warploom.measure.timing.time.sleep", self.sleep)

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.rested = seconds >= 0.020

    def working(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def sets(self, bytes_per_set: int) -> int:
        return 3

    def graphed(self, candidate: Candidate, calls: int) -> Candidate:
        def replay(_: int) -> None:
            for i in range(calls):
                candidate.run(i)

        self.rested = False
        replay(0)
        return Candidate(candidate.name, replay)

    def poison(self, result: Any) -> None:
        result[...] = np.nan

    def release(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def sm_clock(self) -> float:
        return 1980.0 if self.rested else 1500.0

    def power_limit(self) -> float:
        return 700.0

    def power(self, candidate: Candidate, flops: float) -> dict[str, float]:
        return {"watts": 600.0, "flops": flops}
