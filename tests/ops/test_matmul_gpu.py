"""``matmul`` on a GPU: two thousand random products, each element against float64 within what the types allow."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import warploom
from warploom.core.dtypes import dtype_of
from warploom.kernels.gemm.ladder import LADDER
from warploom.kernels.gemm.reference import UNIT_ROUNDOFF, accumulation_bound
from warploom.lang.functions import relu

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

PROBLEMS = 2000


def error(a: Any, b: Any, c: Any, accumulate: str, bias: Any = None, function: Any = None) -> float:
    """The largest error over what is allowed at its element; at most 1 is right, NaN is infinite."""
    product, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    if bias is not None:
        product, magnitude = product + bias.double(), magnitude + bias.double().abs()
    if function is not None:
        product = function(product)
    gamma = accumulation_bound(a.shape[-1], dtype_of(accumulate)) + 2.0**-23
    u = UNIT_ROUNDOFF[dtype_of(c.dtype).name]
    allowed = u * (1 + gamma) * product.abs() + gamma * (1 + u) * magnitude + 2.0**-24 * (a.shape[-1] / 16 + 1)
    off = (c.double() - product).abs()
    return float(torch.where(off.isnan(), torch.inf, off / allowed).max())


def problems(count: int) -> list[tuple[Any, Any, dict[str, Any]]]:
    """Extents are odd multiples of 1, 2, 4 or 8, so that few kernels serve them all; A and B in either layout."""
    rng = np.random.default_rng(11)
    found = []
    for _ in range(count):
        unit = int(rng.choice([1, 2, 4, 8, 8, 8]))
        m, n, k = (unit * (2 * int(rng.integers(0, top // (2 * unit) + 1)) + 1) for top in (300, 300, 700))
        dtype = torch.bfloat16 if rng.random() < 0.3 else torch.float16
        f16_sums = dtype is torch.float16 and rng.random() < 0.2
        options: dict[str, Any] = {"accumulate": "f16" if f16_sums else "f32"}
        if rng.random() < 0.3:
            options["out_dtype"] = "f32"
        if rng.random() < 0.3:
            options |= {"bias": torch.randn(n, device="cuda", dtype=dtype), "epilogue": relu}
        lead = () if rng.random() < 0.8 else (int(rng.integers(2, 4)),)
        a = torch.randn(*lead, m, k, device="cuda", dtype=dtype)
        b = torch.randn(*lead, k, n, device="cuda", dtype=dtype)
        if rng.random() < 0.5:
            a = a.mT.contiguous().mT
        if rng.random() < 0.5:
            b = b.mT.contiguous().mT
        found.append((a, b, options))
    return found


def compile_all(plans: list[Any]) -> None:
    from warploom.ops.backends import compiled, gpu_target

    programs = {id(p): p for plan in plans for p in (plan.program, plan.finish) if p is not None}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda p: compiled(p, gpu_target(0).name), programs.values()))


def test_random_products_element_by_element():
    cases = problems(PROBLEMS)
    compile_all([warploom.plan_matmul(a, b, **options) for a, b, options in cases])
    wrong = []
    for a, b, options in cases:
        c = warploom.matmul(a, b, **options)
        function = torch.relu if "epilogue" in options else None
        off = error(a, b, c, options["accumulate"], options.get("bias"), function)
        if not off <= 1.0:
            wrong.append((tuple(a.shape), a.stride(), tuple(b.shape), b.stride(), options["accumulate"], off))
    assert wrong == []


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
    stream = torch.cuda.Stream()
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
