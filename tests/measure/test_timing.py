"""The timing method, on a clock that the test owns."""

import itertools
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.clock import SimulatedClock
from tests.project import load
from warploom.measure import timing
from warploom.measure.timing import Candidate, Measured, Spread, graphed, input_sets, measure, paired_ratio


def test_the_gpu_rests_before_each_sample(monkeypatch):
    gpu, rests = SimulatedClock(), []
    monkeypatch.setattr(timing.time, "sleep", rests.append)
    measure([gpu.candidate("a", 0.02), gpu.candidate("b", 0.01)], 2, gpu, rounds=3, pause_seconds=0.5)
    assert rests == [0.5] * 6
    measure([gpu.candidate("a", 0.02)], 2, gpu, rounds=3)
    assert len(rests) == 6


def test_rounds_are_interleaved_inputs_rotate_and_small_calls_are_timed_many_together():
    gpu = SimulatedClock()
    found = measure([gpu.candidate("a", 0.02), gpu.candidate("b", 0.02)], 4, gpu, rounds=6, warm_up_seconds=0.02)
    assert found["a"].seconds.median == pytest.approx(0.02)
    timed = gpu.ran[-12:]
    for first, second in zip(timed[::2], timed[1::2], strict=True):
        assert {first[0], second[0]} == {"a", "b"}, "every round times each once"
    assert {index for _, index in timed} == {0, 1, 2, 3}
    assert len({tuple(name for name, _ in timed[i : i + 2]) for i in range(0, 12, 2)}) == 2, "the order changes"
    fast = measure([gpu.candidate("fast", 0.001)], 3, gpu, rounds=7)["fast"]
    assert fast.seconds.median == pytest.approx(0.001)
    assert len(fast.samples) == 7
    assert gpu.calls > 7 * 10


def test_the_first_slow_calls_do_not_count():
    gpu = SimulatedClock()
    cold = gpu.candidate("cold", itertools.chain([5.0], itertools.repeat(0.01)))
    assert measure([cold], 2, gpu, rounds=5)["cold"].seconds.high == pytest.approx(0.01)


def test_calls_warm_the_gpu_up_for_as_long_as_they_are_to():
    gpu = SimulatedClock()
    measure([gpu.candidate("a", 0.001)], 2, gpu, rounds=1, sample_seconds=0.001, warm_up_seconds=0.25)
    assert 0.25 <= gpu.now - 0.001 <= 1.0


def test_the_clocks_that_a_monitor_could_read_are_those_of_their_own_candidate():
    gpu, told = SimulatedClock(), itertools.cycle([1500.0, None])
    monitor: Any = SimpleNamespace(sm_clock=lambda: next(told))
    found = measure([gpu.candidate("a", 0.02)], 2, gpu, rounds=4, monitor=monitor)["a"]
    assert found.clock_mhz is not None
    assert (found.clock_mhz.median, found.clock_mhz.count) == (1500.0, 2)
    silent: Any = SimpleNamespace(sm_clock=lambda: None)
    assert measure([gpu.candidate("a", 0.02)], 2, gpu, rounds=2, monitor=silent)["a"].clock_mhz is None


def test_two_of_one_name_are_refused():
    gpu = SimulatedClock()
    with pytest.raises(ValueError, match="different names"):
        measure([gpu.candidate("a", 0.1), gpu.candidate("a", 0.1)], 2, gpu)


def test_spreads():
    spread = Spread.of([float(x) for x in range(1, 12)])
    assert (spread.low, spread.median, spread.high, spread.count) == (2.0, 6.0, 10.0, 11)
    rate = spread.rate(60.0)
    assert (rate.low, rate.median, rate.high) == (6.0, 10.0, 30.0)
    assert Spread.of([1 / 3]).json() == {"median": 0.3333, "low": 0.3333, "high": 0.3333}
    with pytest.raises(ValueError, match="at least one"):
        Spread.of([])


def test_ratios_are_taken_within_rounds():
    drifting = (1.0, 2.0, 4.0)
    ours = Measured(Spread.of(drifting), None, drifting)
    baseline = Measured(Spread.of(drifting), None, tuple(1.25 * x for x in drifting))
    assert paired_ratio(ours, baseline) == pytest.approx(1.25)


def test_input_sets_cover_the_l2_and_are_at_least_two():
    l2 = 50 << 20
    assert input_sets(192 << 20, l2) == 2
    assert input_sets(1 << 20, l2) == 64
    for size in (3 << 20, 10 << 20, 40 << 20):
        assert input_sets(size, l2) * size >= 3 * l2


def test_host_cost_counts_calls_and_synchronises_before_the_queue_is_full():
    events = []
    calls = {name: lambda name=name: events.append(name) for name in "ab"}
    found = load("host_cost").microseconds(calls, lambda: events.append("wait"), 300)
    for name in calls:
        assert found[name].count == 300
        assert events.count(name) == 300 + 64
    assert max(len(list(group)) for key, group in itertools.groupby(events, "wait".__eq__) if not key) <= 128


def test_a_host_that_is_slow_for_a_while_is_slow_for_all_calls(monkeypatch):
    """A call whose own time was that while had its median doubled beside others of the same cost."""
    host_cost, now, done, names = load("host_cost"), [0], [0], "abcd"
    monkeypatch.setattr(host_cost.time, "perf_counter_ns", lambda: now[0])

    def call():
        done[0] += 1
        now[0] += 20_000 if 1000 < done[0] < 2200 else 10_000  # of some four thousand

    found = host_cost.microseconds(dict.fromkeys(names, call), lambda: None, 1024)
    assert {spread.median for spread in found.values()} == {10.0}
    assert {spread.high for spread in found.values()} == {20.0}


def test_a_graph_holds_what_its_calls_read():
    """A baseline's workspace was freed behind the capture, and the replay read it."""

    class Workspace:
        def read(self, index):
            pass

    def captured():
        workspace = Workspace()
        call = Candidate("call", lambda index: workspace.read(index))
        return graphed(call, 2, SimpleNamespace(cuda=cuda)), weakref.ref(workspace)

    cuda = SimpleNamespace(synchronize=lambda: None, CUDAGraph=SimpleNamespace, graph=lambda _: nullcontext())
    replayed, workspace = captured()
    assert workspace() is not None
    del replayed
    assert workspace() is None


@pytest.mark.gpu
def test_events_and_graphs_on_a_gpu():
    torch = pytest.importorskip("torch")
    from warploom.measure.timing import EventClock

    x = [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    tiny = [torch.randn(64, device="cuda") for _ in range(4)]
    clock = EventClock(torch.cuda.current_stream().cuda_stream)
    product = measure([Candidate("matmul", lambda i: x[i] @ x[i])], 2, clock, rounds=5)["matmul"].seconds.median
    assert 2 * 4096**3 / 2000e12 < product < 0.01
    plain = Candidate("plain", lambda i: tiny[i].mul_(1.0))
    replayed = graphed(Candidate("graph", plain.run), 4, torch)
    found = measure([plain, replayed], 4, clock, rounds=5)
    assert found["graph"].seconds.median / 4 < found["plain"].seconds.median
