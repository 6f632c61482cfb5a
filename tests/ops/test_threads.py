"""Public functions called from many threads at once: each gets what it would get alone, and kernels are traced once."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import warploom
from tests.processes import holds_in_forked_child
from warploom.kernels.attention.device.forward_sm80 import attention_sm80
from warploom.kernels.source import traced

pytestmark = [
    pytest.mark.usefixtures("emulated"),
    pytest.mark.filterwarnings("error"),
    pytest.mark.filterwarnings("ignore::warploom.core.errors.EmulationWarning"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:os.fork.. was called:RuntimeWarning"),  # JAX's, where a test has imported it
]


def half(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float16)


@pytest.fixture(autouse=True)
def impatient_threads():
    """Threads that take turns every few instructions, not every 5 ms."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def together(calls):
    """What the calls give that are started at the same time, a thread each."""
    start = threading.Barrier(len(calls), timeout=60)

    def run(call):
        start.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))


def test_every_thread_gets_its_own_result():
    x, a, b = half(1, 40, 2, 64), half(40, 48), half(48, 56)
    calls = [
        lambda: warploom.attention(x, x, x),
        lambda: warploom.attention(x, x, x, causal=True, return_lse=True),
        lambda: warploom.matmul(a, b),
        lambda: warploom.matmul(a, b, epilogue=lambda s: s * 2.0),
        lambda: warploom.matmul_reduce(a, b, "logsumexp"),
        lambda: warploom.plan(x, x, x, causal=True).program.digest,
        lambda: warploom.plan_matmul(a, b, accumulate="f16").cuda,
    ]
    traced.cache_clear()
    found = together(calls * 2)
    for call, first, second in zip(calls, found[: len(calls)], found[len(calls) :], strict=True):
        expected = call()
        for got in (first, second):
            parts = zip(got, expected, strict=True) if isinstance(expected, tuple) else [(got, expected)]
            assert all(np.array_equal(a, b) for a, b in parts)


def test_equal_first_calls_trace_one_kernel(monkeypatch):
    asked = []
    trace = attention_sm80.trace

    def counted(*name, **options):
        asked.append(options)
        return trace(*name, **options)

    monkeypatch.setattr(attention_sm80, "trace", counted)
    traced.cache_clear()
    x = half(1, 24, 1, 64)
    programs = together([lambda: warploom.plan(x, x, x).program] * 8)
    assert len(asked) == 1
    assert len({id(program) for program in programs}) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_goes_on():
    x = half(1, 24, 1, 64)
    expected = warploom.attention(x, x, x)

    def goes_on() -> bool:
        same = np.array_equal(warploom.attention(x, x, x), expected)
        return same and warploom.plan_matmul(half(8, 16), half(16, 8)).program.threads > 0

    assert holds_in_forked_child(goes_on)
