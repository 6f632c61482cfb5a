"""Warpgroups that meet: every barrier is needed, and none is given twice."""

# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.tile.support import clean, escapes
from warploom.core.errors import TraceError
from warploom.ir.program import Program
from warploom.lang import Global, Kernel, f32, kernel
from warploom.tile.roles import Meeting, Turns


@kernel(threads=256)
def reversed_by_two(k: Kernel, x: Global[f32], y: Global[f32]) -> None:
    """256 elements, the last first."""
    tile, both = k.shared(f32, 256), Meeting(k, 2)
    tile.store(x.load(k.thread), 0, k.thread)
    both.sync()
    y.store(tile.load(0, 255 - k.thread), k.thread)


def check_reversed(program: Program, seed: int | None) -> bool:
    x = np.arange(256, dtype=np.float32)
    y = np.full_like(x, np.nan)
    return clean(program, 1, [x, y], seed) and np.array_equal(y, x[::-1])


def test_a_meeting_is_needed() -> None:
    assert escapes(reversed_by_two.trace(), check_reversed) == Counter()


def test_a_barrier_is_given_once() -> None:
    @kernel(threads=32)
    def greedy(k: Kernel) -> None:
        with pytest.raises(TraceError, match="how many there are to be, not 0"):
            k.named_barriers(0)
        first, second = k.named_barriers(3), k.named_barriers()
        assert {0, *range(first, first + 3), second} == {*range(5)}
        k.named_barriers(12)

    with pytest.raises(TraceError, match=r"^test_roles\.py:\d+: .*15 named barriers, not 16"):
        greedy.trace()


def test_a_barrier_written_by_hand_is_nobody_elses() -> None:
    @kernel(threads=128)
    def both(k: Kernel, *, number: int) -> None:
        k.bar_arrive(2, 128)
        first, pair = k.named_barriers(), k.named_barriers(2)
        assert {first, pair, pair + 1, 1 + pair} == {1, 3, 4}
        for barrier in (2, first, pair + 1, 1 + pair, pair + k.warp, number):
            k.bar_sync(barrier, 128)

    both.trace(number=5)
    for number in (1, 3, 4):
        with pytest.raises(TraceError, match=rf"^test_roles\.py:\d+: barrier {number} "):
            both.trace(number=number)


def test_turns_that_are_off_take_no_barriers() -> None:
    @kernel(threads=256)
    def alone(k: Kernel) -> None:
        for _ in range(20):
            Turns(k, k.warp // 4, 1)
            Turns(k, k.warp // 4, 2, on=False)
        Turns(k, k.warp // 4, 2)
        assert k.named_barriers() == 3

    alone.trace()
