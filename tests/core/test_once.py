"""Results that are computed once, however many threads ask first."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes import holds_in_forked_child
from warploom.core.once import once


def test_equal_calls_of_several_threads_are_computed_once():
    calls = []

    @once(maxsize=8)
    def slow(x, *, y=0):
        calls.append((x, y))
        time.sleep(0.05)
        return object()

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: slow(i % 2, y=1), range(8)))
    assert sorted(calls) == [(0, 1), (1, 1)]
    assert len(set(found)) == 2
    assert slow(0, y=1) is found[0]


def test_different_calls_do_not_wait_for_each_other():
    both = threading.Barrier(2, timeout=10)

    @once(maxsize=8)
    def meet(x):
        both.wait()
        return x

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(meet, (1, 2))) == [1, 2]


def test_calls_may_be_nested():
    @once(maxsize=8)
    def factorial(n):
        return n * factorial(n - 1) if n else 1

    assert factorial(5) == 120


def test_an_error_is_that_threads_own():
    attempts = []

    @once(maxsize=8)
    def second_time(_x):
        attempts.append(1)
        if len(attempts) == 1:
            raise ValueError
        return "made"

    with pytest.raises(ValueError):
        second_time(1)
    assert second_time(1) == "made"


def test_only_the_last_results_are_kept():
    calls = []

    @once(maxsize=2)
    def noted(x):
        calls.append(x)
        return x

    for x in (1, 2, 3, 1):
        noted(x)
    assert calls == [1, 2, 3, 1]
    noted.cache_clear()
    noted(1)
    assert calls == [1, 2, 3, 1, 1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_threads_it_does_not_have():
    busy, leave = threading.Event(), threading.Event()
    parent = os.getpid()

    @once(maxsize=2)
    def work(x):
        if os.getpid() == parent:
            busy.set()
            leave.wait(30)
        return x

    thread = threading.Thread(target=work, args=(1,))
    thread.start()
    busy.wait(10)
    free = holds_in_forked_child(lambda: work(1) == 1, seconds=10)
    leave.set()
    thread.join()
    assert free
