"""``matmul`` on a GPU: every rung, split K, streams, host arrays; each element against float64 within what types allow.

Random problems: ``tests/gpu/test_matmul_random.py``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import warploom
from warploom.core.dtypes import dtype_of
from warploom.measure.matmul import torch_error
from warploom_lab.kernels.matmul.ladder import LADDER

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")


def error(a: Any, b: Any, c: Any, accumulate: str) -> float:
    """The largest error over what is allowed at its element; at most 1 is right, NaN is infinite."""
    return torch_error(c, a, b, dtype_of(accumulate)).value


@pytest.mark.parametrize("rung", LADDER.rungs, ids=lambda r: r.key)
def test_each_rung(rung):
    a, b = (torch.randn(776, 776, device="cuda", dtype=torch.float16) for _ in range(2))
    kind = rung.config.accumulate.name
    assert error(a, b, warploom.matmul(a, b, config=rung.config, accumulate=kind), kind) <= 1.0


def test_split_k_repeats_its_bits():
    a, b = torch.randn(16, 16384, device="cuda").half(), torch.randn(16384, 64, device="cuda").half()
    assert warploom.plan_matmul(a, b).config.split_k > 1
    results = [warploom.matmul(a, b) for _ in range(5)]
    assert error(a, b, results[0], "f32") <= 1.0
    assert all(torch.equal(r, results[0]) for r in results)


def test_the_callers_stream_is_used():
    a, b = (torch.randn(256, 256, device="cuda", dtype=torch.float16) for _ in range(2))
    warploom.matmul(a, b)  # compiles: a first call may take longer than the stream is kept busy
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        c = warploom.matmul(a, b)
    assert not stream.query()
    stream.synchronize()
    assert error(a, b, c, "f32") <= 1.0


def test_host_arrays_run_on_the_gpu():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 33, 2000)).astype(np.float16), rng.standard_normal((2000, 40)).astype(np.float16)
    c = warploom.matmul(a, b.copy(order="F"))
    assert isinstance(c, np.ndarray)
    assert np.abs(c - a.astype(np.float64) @ b.astype(np.float64)).max() < 0.2
