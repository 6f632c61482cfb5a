"""Random matrix products on the GPU: every element against float64, within what its types allow."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

import warploom
from warploom.core.dtypes import DType, f16
from warploom.kernels.matmul.problem import MatmulConfig
from warploom.kernels.matmul.reference import F16_TINY, UNIT_ROUNDOFF, accumulation_bound
from warploom.lang.functions import relu, silu

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
    config: MatmulConfig | None


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
    if family.out is not None:
        options["out_dtype"] = family.out.name
    if family.bias:
        options["bias"] = fresh(n, dtype=family.dtype)
    combined = EPILOGUES[family.epilogue]
    if combined.traced is not None:
        extras = tuple(fresh(*batch, m, n, dtype=family.dtype) for _ in range(combined.extras))
        options |= {"epilogue": combined.traced, "extras": extras}
    config = family.config
    if config is not None and 0 not in (m, n) and not config.violations(warploom.plan_matmul(a, b, **options).problem):
        options["config"] = config
    return Case(a, b, options)


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
    programs = {call.source: call.source.program for plan in plans for call in plan.calls}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda program: compiled(program, gpu_target(0).name), programs.values()))


def assert_products(family: Family, count: int, seed: int) -> int:
    """Multiply so many random problems of a family; how many took its configuration."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    cases = [case(family, draw) for _ in range(count)]
    compile_all(cases)
    for problem in cases:
        batch = torch.broadcast_shapes(problem.a.shape[:-2], problem.b.shape[:-2])
        shape = (*batch, problem.a.shape[-2], problem.b.shape[-1])
        whole, out = guarded(shape, family.out or family.dtype, family.unit) if family.guarded else (None, None)
        found = warploom.matmul(problem.a, problem.b, out=out, **problem.options)
        assert found.shape == shape
        worst = error(problem, found, family)
        assert worst <= 1.0, (family, problem.a.shape, problem.a.stride(), problem.b.shape, problem.b.stride(), worst)
        if whole is not None:
            assert bool((whole[..., shape[-1] :] == GUARD).all()), "something beyond the result was written"
    return sum("config" in problem.options for problem in cases)
