"""Two thousand random matrix products on the GPU, every element against float64 within what its types allow."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest

import warploom
from warploom.core.dtypes import DType, bf16, f16, f32
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.ladder import BEST16, BEST32, LADDER, summed_in
from warploom.kernels.gemm.problem import AnyGemmConfig
from warploom.kernels.gemm.reference import F16_TINY, UNIT_ROUNDOFF, accumulation_bound
from warploom.lang.functions import relu, silu

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

FAMILIES = 40
PROBLEMS_PER_FAMILY = 50
DEVICE = "cuda"
F32_OPERATIONS = 2.0**-20
"""Relative error that a handful of f32 operations and approximate exponentials may make."""
GUARD = 77.0
"""What lies around a result that is written into a larger array."""


def _gate(x: Any, gate: Any) -> Any:
    return silu(x) * gate


@dataclass(frozen=True)
class Combined:
    """An epilogue: as it is traced, in float64, and how much it enlarges an error of its first argument."""

    traced: Callable[..., Any] | None = None
    exact: Callable[..., Any] = lambda x: x
    slope: Callable[..., Any] = lambda: 1.0
    extras: int = 0


EPILOGUES = {
    "none": Combined(),
    "relu": Combined(relu, lambda x: x.relu()),
    "silu·gate": Combined(_gate, lambda x, g: x * torch.sigmoid(x) * g, lambda g: 1.1 * g.abs(), 1),
    "sum": Combined(lambda x, y, z: x + y - z, lambda x, y, z: x + y - z, lambda y, z: 1.0, 2),
}


@dataclass(frozen=True)
class Family:
    """What makes a kernel of its own; extents, batches and strides then vary freely.

    ``unit``: extents are odd multiples of it, so that lines of every problem are aligned alike (free: any).
    """

    dtype: DType
    accumulate: DType
    out: DType | None
    a_rows: bool
    b_rows: bool
    unit: int
    free: bool
    epilogue: str
    bias: bool
    alpha: float
    guarded: bool
    config: AnyGemmConfig | None

    @classmethod
    def of(cls, number: int) -> Family:
        draw = random.Random(number)
        dtype = draw.choice([f16, f16, bf16])
        accumulate = draw.choice([f32, f32, f16]) if dtype is f16 else f32
        configs = [r.config for r in LADDER.rungs if isinstance(r.config, GemmConfig)]
        chosen = draw.choice([None, None, None, *configs, replace(BEST32, tile_m=64, warp_m=32, tile_n=64, warp_n=32)])
        free = number % 8 == 7
        return cls(
            dtype, accumulate, draw.choice([None, None, f32, f16, bf16]), draw.random() < 0.6, draw.random() < 0.5,
            1 if free else draw.choice([1, 2, 4, 8, 8, 8]), free, draw.choice(list(EPILOGUES)), draw.random() < 0.4,
            draw.choice([1.0, 1.0, -0.5]), draw.random() < 0.4,
            None if chosen is None or free else replace(summed_in(chosen, accumulate), dtype=dtype),
        )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One product and its options."""

    a: Any
    b: Any
    options: dict[str, Any]


def kind(dtype: DType) -> Any:
    return {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[dtype.name]


def fresh(*shape: int, dtype: DType) -> Any:
    return torch.randn(shape, device=DEVICE, dtype=torch.float32).to(kind(dtype))


def matrix(family: Family, batch: tuple[int, ...], rows: int, cols: int, row_major: bool, pad: int) -> Any:
    """Row- or column-major, its lines ``pad`` elements apart."""
    if row_major:
        return fresh(*batch, rows, cols + pad, dtype=family.dtype)[..., :cols]
    return fresh(*batch, cols, rows + pad, dtype=family.dtype)[..., :rows].mT


def case(family: Family, draw: random.Random) -> Case:
    unit = family.unit

    def extent(most: int) -> int:
        if family.free and draw.random() < 0.3:
            return draw.choice([0, 1, 2, 7, 16, 63, 64, 65, 128])
        return draw.randint(1, most) if family.free else unit * (2 * draw.randint(0, most // (2 * unit)) + 1)

    m, n, k = extent(400), extent(400), extent(700)
    if draw.random() < 0.1:  # a long sum of few elements
        m, n, k = min(m, 5 * unit), min(n, 7 * unit), extent(6000)
    batch = draw.choice([(), (), (), (draw.randint(2, 4),), (2, draw.randint(1, 3))])
    shared = draw.choice([batch, (), (1,) * len(batch)])
    pad = 2 * unit * draw.randint(0, 3)
    a = matrix(family, batch, m, k, family.a_rows, pad)
    b = matrix(family, shared, k, n, family.b_rows, pad)
    options: dict[str, Any] = {"accumulate": family.accumulate.name, "alpha": family.alpha}
    if family.config is not None and not _misfits(family, a, b):
        options["config"] = family.config
    if family.out is not None:
        options["out_dtype"] = family.out.name
    if family.bias:
        options["bias"] = fresh(n, dtype=family.dtype)
    combined = EPILOGUES[family.epilogue]
    if combined.traced is not None:
        extras = tuple(fresh(*batch, m, n, dtype=family.dtype) for _ in range(combined.extras))
        options |= {"epilogue": combined.traced, "extras": extras}
    return Case(a, b, options)


def _misfits(family: Family, a: Any, b: Any) -> list[str]:
    assert family.config is not None
    problem = warploom.plan_matmul(a, b, accumulate=family.accumulate).problem
    a_k, b_k = problem.a.k_contiguous, problem.b.k_contiguous
    return family.config.check(a_k_contiguous=a_k, b_k_contiguous=b_k) + problem.misfits(family.config)


def guarded(shape: tuple[int, ...], dtype: DType, unit: int) -> tuple[Any, Any]:
    """(array full of GUARD, the part of it that receives a result and is full of NaN)."""
    whole = torch.full((*shape[:-1], shape[-1] + 2 * unit), GUARD, device=DEVICE, dtype=kind(dtype))
    inner = whole[..., : shape[-1]]
    inner.fill_(math.nan)
    return whole, inner


def error(problem: Case, out: Any, family: Family) -> float:
    """The largest error over what is allowed at its element; at most 1 is right, NaN is infinite."""
    combined, alpha = EPILOGUES[family.epilogue], family.alpha
    a, b, extras = problem.a.double(), problem.b.double(), [x.double() for x in problem.options.get("extras", ())]
    bias = problem.options["bias"].double() if family.bias else torch.zeros((), dtype=torch.float64, device=DEVICE)
    depth = a.shape[-1]
    magnitude = abs(alpha) * (a.abs() @ b.abs())
    steps = math.ceil(depth / 16) if family.accumulate is f16 else 0
    of_sum = accumulation_bound(depth, family.accumulate) * magnitude + abs(alpha) * steps * F16_TINY
    combining = F32_OPERATIONS * (magnitude + bias.abs())
    exact = combined.exact(alpha * (a @ b) + bias, *extras)
    before = combined.slope(*extras) * (of_sum + combining)
    before = before + F32_OPERATIONS * (exact.abs() + sum((x.abs() for x in extras), torch.zeros_like(exact)))
    out_dtype = family.out or family.dtype
    allowed = before + UNIT_ROUNDOFF[out_dtype.name] * (exact.abs() + before) + F16_TINY
    off = (out.double() - exact).abs()
    return float(torch.where(off.isnan(), torch.inf, off / allowed).max()) if out.numel() else 0.0


def compile_all(cases: list[Case]) -> None:
    """Trace in this thread, compile on all cores."""
    from warploom.ops.backends import compiled, gpu_target

    plans = [warploom.plan_matmul(c.a, c.b, **c.options) for c in cases if 0 not in (*c.a.shape[:-1], c.b.shape[-1])]
    programs = {id(p): p for plan in plans for p in (plan.program, plan.finish) if p is not None}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda p: compiled(p, gpu_target(0).name), programs.values()))


@pytest.mark.parametrize("number", range(FAMILIES))
def test_random_products(number):
    family, draw = Family.of(number), random.Random(1000 + number)
    torch.manual_seed(number)
    cases = [case(family, draw) for _ in range(PROBLEMS_PER_FAMILY)]
    compile_all(cases)
    for problem in cases:
        batch = torch.broadcast_shapes(problem.a.shape[:-2], problem.b.shape[:-2])
        shape = (*batch, problem.a.shape[-2], problem.b.shape[-1])
        whole, out = None, None
        if family.guarded:
            whole, out = guarded(shape, family.out or family.dtype, family.unit)
        found = warploom.matmul(problem.a, problem.b, out=out, **problem.options)
        assert found.shape == shape
        worst = error(problem, found, family)
        assert worst <= 1.0, (family, problem.a.shape, problem.a.stride(), problem.b.shape, problem.b.stride(), worst)
        if whole is not None:
            assert bool((whole[..., shape[-1] :] == GUARD).all()), "something beyond the result was written"


def test_the_families_cover_what_there_is():
    """Both layouts of A and B, every type of result, every epilogue and rung, every alignment, extents of any kind."""
    found = [Family.of(number) for number in range(FAMILIES)]
    assert {(f.a_rows, f.b_rows) for f in found} == {(x, y) for x in (True, False) for y in (True, False)}
    assert {f.out for f in found} == {None, f16, bf16, f32}
    assert {f.epilogue for f in found} == set(EPILOGUES)
    assert {f.unit for f in found} == {1, 2, 4, 8}
    assert {(f.dtype, f.accumulate) for f in found} == {(f16, f32), (f16, f16), (bf16, f32)}
    assert sum(f.free for f in found) >= 5
    assert len({f.config for f in found}) >= 8
    assert BEST16 != BEST32
