"""Timing on a GPU: events on the launch stream, warm-up, candidates interleaved, inputs rotated past the L2.

Clocks fall under load and differ from minute to minute, so candidates are never timed one after the other: every round
times each of them once, in an order that changes from round to round. Medians with the 10th and 90th percentile.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from warploom.measure.monitor import GpuMonitor

L2_MARGIN = 3
"""The inputs of one rotation cover the L2 this many times."""
_MOST_SETS = 64


@dataclass(frozen=True)
class Candidate:
    """Something to time: ``run(i)`` queues one call on input set ``i`` on the current stream and returns at once."""

    name: str
    run: Callable[[int], object]


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of ``count`` samples."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        """The spread of at least one sample. Raises ValueError without any."""
        if not samples:
            raise ValueError("a spread needs at least one sample")
        low, median, high = (float(x) for x in np.percentile(np.asarray(samples, np.float64), (10, 50, 90)))
        return cls(median, low, high, len(samples))

    def rate(self, work: float) -> Spread:
        """``work`` per second, from seconds: the slowest time becomes the lowest rate."""
        return Spread(work / self.median, work / self.high, work / self.low, self.count)

    def json(self, digits: int = 4) -> dict[str, float]:
        """``median``, ``low`` and ``high``, to ``digits`` significant digits."""
        return {name: float(f"{getattr(self, name):.{digits}g}") for name in ("median", "low", "high")}


@dataclass(frozen=True)
class Measured:
    """Seconds per call, and the multiprocessors' clock in MHz while it ran (None where NVML does not answer).

    ``samples`` are the seconds of every round, in order: rounds of two candidates belong together.
    """

    seconds: Spread
    clock_mhz: Spread | None
    samples: tuple[float, ...]


class Clock(Protocol):
    """Marks points of a stream and tells the time between two of them."""

    def mark(self) -> Any:
        """A mark after everything queued so far."""
        ...

    def seconds(self, start: Any, end: Any) -> float:
        """Waits for ``end``; the seconds between the two marks."""
        ...


class EventClock:
    """CUDA events on the stream with handle ``stream`` (that of the launches)."""

    def __init__(self, stream: int) -> None:
        from warploom.cuda.device import cuda_core

        core = cuda_core()
        if not stream:
            core.Device().set_current()  # events of the default stream are those of the thread's current context
        self._stream = core.Stream.from_handle(stream) if stream else core.LEGACY_DEFAULT_STREAM
        self._options = core.EventOptions(timing_enabled=True)

    def mark(self) -> Any:
        """An event at the end of what is queued now."""
        return self._stream.record(options=self._options)

    def seconds(self, start: Any, end: Any) -> float:
        """The time between two events; waits for the second."""
        end.sync()
        return float(end - start) / 1000


def input_sets(bytes_per_set: int, l2_bytes: int) -> int:
    """Return the number of input sets (at least two) such that no call finds its inputs in the L2."""
    return max(2, min(_MOST_SETS, -(-L2_MARGIN * l2_bytes // max(1, bytes_per_set))))


def measure(
    candidates: Sequence[Candidate],
    sets: int,
    clock: Clock,
    *,
    rounds: int = 15,
    sample_seconds: float = 0.01,
    warm_up_seconds: float = 0.05,
    pause_seconds: float = 0.0,
    monitor: GpuMonitor | None = None,
    progress: Callable[[float], None] | None = None,
    seed: int = 0,
) -> dict[str, Measured]:
    """Time every candidate ``rounds`` times, interleaved; each sample is calls of about ``sample_seconds`` together.

    Before each sample the GPU rests for ``pause_seconds``. Without a rest, kernels that use all of a GPU meet its power
    limit: the clock falls for all alike, by as much as the hottest of them ask, and figures depend on the company.

    Calls rotate through input sets 0 … ``sets`` - 1. Names must differ. Raises ValueError for two of one name.
    """
    names = [c.name for c in candidates]
    if len(set(names)) != len(names):
        raise ValueError(f"candidates need different names, not {names}")
    calls = {c.name: _warm_up(c, sets, clock, warm_up_seconds, sample_seconds) for c in candidates}
    samples: dict[str, list[float]] = {name: [] for name in names}
    clocks: dict[str, list[float]] = {name: [] for name in names}
    order, shuffle, position = list(candidates), random.Random(seed), 0
    for done in range(rounds):
        shuffle.shuffle(order)
        for candidate in order:
            if pause_seconds:
                time.sleep(pause_seconds)
            count = calls[candidate.name]
            start = clock.mark()
            for _ in range(count):
                candidate.run(position % sets)
                position += 1
            end = clock.mark()
            if monitor is not None and (mhz := monitor.sm_clock()) is not None:
                clocks[candidate.name].append(mhz)  # read while the queued calls run
            samples[candidate.name].append(clock.seconds(start, end) / count)
        if progress is not None:
            progress((done + 1) / rounds)
    return {
        name: Measured(
            Spread.of(samples[name]), Spread.of(clocks[name]) if clocks[name] else None, tuple(samples[name])
        )
        for name in names
    }


def _warm_up(candidate: Candidate, sets: int, clock: Clock, warm_up_seconds: float, sample_seconds: float) -> int:
    """Run until ``warm_up_seconds`` have passed on the GPU; how many calls make up a sample."""
    candidate.run(0)
    spent, calls, batch = 0.0, 0, 1
    while True:
        start = clock.mark()
        for i in range(batch):
            candidate.run((calls + i) % sets)
        took = max(clock.seconds(start, clock.mark()), 1e-9)
        spent, calls = spent + took, calls + batch
        if spent >= warm_up_seconds:
            return max(1, round(sample_seconds / (took / batch)))
        batch = min(2 * batch, max(1, round(2 * warm_up_seconds / (took / batch))))


def graphed(candidate: Candidate, sets: int, torch: Any) -> Candidate:
    """The candidate as replays of a CUDA graph of one call per input set: no launch gaps between tiny kernels.

    A replay is ``sets`` calls, so its time has to be divided by ``sets``. What the candidate holds lives as long as the
    graph, which reads it.
    """
    candidate.run(0)  # loading and autotuning must not be captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(sets):
            candidate.run(i)

    def replay(_: int, _held: Candidate = candidate) -> None:
        graph.replay()

    return Candidate(candidate.name, replay)


def paired_ratio(ours: Measured, baseline: Measured) -> float:
    """Return the speed-up over ``baseline``: the median over the rounds of time(baseline) / time(ours)."""
    return float(np.median(np.asarray(baseline.samples) / np.asarray(ours.samples)))


def paired_spread(ours: Measured, baseline: Measured) -> Spread:
    """The spread over the rounds of what :func:`paired_ratio` is the median of."""
    return Spread.of([float(x) for x in np.asarray(baseline.samples) / np.asarray(ours.samples)])
