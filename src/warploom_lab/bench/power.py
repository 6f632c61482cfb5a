"""What a kernel draws while nothing else runs: watts, the clock under that load, TFLOP per joule.

A chip at its power limit lowers its clock until it fits, so its speed is what it gets done per joule times that limit:
TFLOP/s = TFLOP/J · W. TFLOP/s alone do not tell such a kernel from one that waits; watts and clock beside them do.

The energy is the driver's counter, read at two of its ticks with the kernel running all the while in between
(NVML, ``nvmlDeviceGetTotalEnergyConsumption``); where a GPU has none, the driver's power readings of the window's
second half, since they are averages over up to a second (NVML, ``nvmlDeviceGetPowerUsage``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from warploom.measure.timing import Candidate, Clock

WINDOW_SECONDS = 0.6
"""Long beside the counter's ticks of about 0.1 s, and cheap enough for every cell of a table."""
SETTLE_SECONDS = 0.3
"""Before the window: clocks take some tenths of a second to come down to what the power limit allows."""
CHUNK_SECONDS = 0.01
_LONGEST = 4.0
"""Give up waiting for the counter's next tick after so many windows."""


class Meter(Protocol):
    """What is read of a GPU; :class:`~warploom.measure.monitor.GpuMonitor` is one."""

    def sm_clock(self) -> float | None:
        """The multiprocessors' clock in MHz, or None."""
        ...

    def joules(self) -> float | None:
        """Energy since some moment, in J, or None."""
        ...

    def watts(self) -> float | None:
        """The driver's averaged power in W, or None."""
        ...


@dataclass(frozen=True)
class Power:
    """A kernel under sustained load: mean watts, median clock in MHz (None: unreadable), seconds of one call."""

    watts: float
    sm_mhz: float | None
    seconds_per_call: float

    @property
    def joules_per_call(self) -> float:
        """Energy of one call in J, the whole board's."""
        return self.watts * self.seconds_per_call

    def per_joule(self, work: float) -> float:
        """``work`` of one call per joule: FLOP → FLOP/J."""
        return work / self.joules_per_call

    def json(self, flops: float) -> dict[str, float | None]:
        """``watts``, ``sm_mhz``, and of ``flops`` a call ``tflops`` under this load and ``tflop_per_joule``."""
        return {
            "watts": round(self.watts, 1),
            "sm_mhz": None if self.sm_mhz is None else round(self.sm_mhz),
            "tflops": float(f"{flops / self.seconds_per_call / 1e12:.4g}"),
            "tflop_per_joule": float(f"{self.per_joule(flops) / 1e12:.4g}"),
        }


def power_of(
    candidate: Candidate,
    sets: int,
    clock: Clock,
    meter: Meter,
    *,
    window: float = WINDOW_SECONDS,
    settle: float = SETTLE_SECONDS,
    now: Callable[[], float] = time.perf_counter,
) -> Power | None:
    """Run ``candidate`` without a pause for ``settle`` + ``window`` seconds; None where no power can be read.

    Calls rotate through input sets 0 … ``sets`` - 1 of random data: zeros switch fewer transistors and draw less.
    """
    load = _Load(candidate, sets, clock)
    start = now()
    while now() - start < settle:
        load.chunk()
    load.forget()
    counted = meter.joules() is not None
    readings = _until_ticks(load, meter, window, now) if counted else _averaged(load, meter, window, now)
    if readings is None:
        return None
    watts, clocks = readings
    return Power(watts, float(np.median(clocks)) if clocks else None, load.seconds / load.calls)


class _Load:
    """Keeps the GPU busy: one chunk of calls runs while the next is queued."""

    def __init__(self, candidate: Candidate, sets: int, clock: Clock) -> None:
        self._candidate, self._sets, self._clock = candidate, sets, clock
        self._position = 0
        self._flying: tuple[Any, Any] | None = None
        self._count = 1
        self.seconds, self.calls = 0.0, 0
        took = self._time(1)
        took = self._time(3) / 3  # the first call may load code
        self._count = max(1, round(CHUNK_SECONDS / max(took, 1e-9)))

    def _queue(self, count: int) -> tuple[Any, Any]:
        start = self._clock.mark()
        for _ in range(count):
            self._candidate.run(self._position % self._sets)
            self._position += 1
        return start, self._clock.mark()

    def _time(self, count: int) -> float:
        return self._clock.seconds(*self._queue(count))

    def chunk(self) -> None:
        """Queue a chunk, then wait for the one before."""
        before, self._flying = self._flying, self._queue(self._count)
        if before is not None:
            self.seconds += self._clock.seconds(*before)
            self.calls += self._count

    def forget(self) -> None:
        """Count seconds and calls from here on."""
        self.seconds, self.calls = 0.0, 0


def _until_ticks(
    load: _Load, meter: Meter, window: float, now: Callable[[], float]
) -> tuple[float, list[float]] | None:
    """(mean watts, clocks) between two ticks of the energy counter at least ``window`` seconds apart."""
    clocks: list[float] = []
    begun = now()
    last, first = meter.joules(), None
    while now() - begun < _LONGEST * window:
        load.chunk()
        joules, moment = meter.joules(), now()
        if joules is None:
            return None
        if joules == last:
            continue
        last = joules
        if first is None:
            first = joules, moment
            load.forget()
        elif moment - first[1] >= window:
            return (joules - first[0]) / (moment - first[1]), clocks
        if (mhz := meter.sm_clock()) is not None:
            clocks.append(mhz)
    return None


def _averaged(load: _Load, meter: Meter, window: float, now: Callable[[], float]) -> tuple[float, list[float]] | None:
    """(median of the power readings, clocks) of the second half of the window."""
    watts: list[float] = []
    clocks: list[float] = []
    begun = now()
    while (passed := now() - begun) < window:
        load.chunk()
        if passed < window / 2:
            continue
        if (found := meter.watts()) is not None:
            watts.append(found)
        if (mhz := meter.sm_clock()) is not None:
            clocks.append(mhz)
    return (float(np.median(watts)), clocks) if watts else None
