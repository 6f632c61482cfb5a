"""Power and energy of a kernel, on a GPU whose clock and counter the test owns."""

from __future__ import annotations

import math

import pytest

from tests.clock import SimulatedClock
from warploom_lab.bench.power import Power, power_of


class FakeGpu(SimulatedClock):
    """Draws so many watts; the energy counter ticks every ``tick`` seconds."""

    def __init__(self, cost: float, watts: float, tick: float | None = 0.1) -> None:
        super().__init__()
        self.kernel, self.true_watts, self.tick = self.candidate("a kernel", cost), watts, tick

    def sm_clock(self) -> float | None:
        return 1500.0 if self.now > 0.3 else 1980.0

    def watts(self) -> float | None:
        return self.true_watts

    def joules(self) -> float | None:
        if self.tick is None:
            return None
        return math.floor(self.now / self.tick) * self.tick * self.true_watts

    def power(self) -> Power | None:
        return power_of(self.kernel, 3, self, self, now=self.mark)


def test_energy_is_taken_between_ticks_of_the_counter() -> None:
    gpu = FakeGpu(cost=0.0007, watts=650.0)
    power = gpu.power()
    assert power is not None
    assert power.watts == pytest.approx(650.0, rel=0.02)
    assert power.seconds_per_call == pytest.approx(0.0007)
    assert power.sm_mhz == 1500.0, "clocks count once they have settled"
    assert {index for _, index in gpu.ran} == {0, 1, 2}
    assert 0.9 < gpu.now < 1.4, "settling, a window, and the wait for two ticks"


def test_power_readings_where_there_is_no_counter() -> None:
    power = FakeGpu(cost=0.002, watts=300.0, tick=None).power()
    assert power is not None
    assert power.watts == pytest.approx(300.0)


def test_nothing_readable_is_none() -> None:
    class Blind(FakeGpu):
        def watts(self) -> float | None:
            return None

    assert Blind(0.002, 300.0, None).power() is None
    stuck = FakeGpu(0.002, 300.0, tick=1e9)
    assert stuck.power() is None, "a counter that never ticks is no reading"
    assert stuck.now < 4.0


def test_work_per_joule() -> None:
    power = Power(watts=700.0, sm_mhz=1485.4, seconds_per_call=0.002)
    assert power.joules_per_call == pytest.approx(1.4)
    assert power.per_joule(1.4e12) == pytest.approx(1e12)
    assert power.json(1.4e12) == {"watts": 700.0, "sm_mhz": 1485, "tflops": 700.0, "tflop_per_joule": 1.0}
