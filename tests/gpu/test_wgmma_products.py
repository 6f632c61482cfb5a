"""Random products by ``wgmma`` on the GPU, every element against float64; reductions of their rows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="these run on sm_90a"
    ),
]

import warploom  # noqa: E402 (after the skip)
from tests.gpu.products import EPILOGUES, GUARD, Family, assert_products  # noqa: E402
from warploom.core.dtypes import bf16, f16, f32  # noqa: E402
from warploom.kernels.matmul.sm90 import MatmulSm90  # noqa: E402
from warploom_lab.kernels.matmul.ladder import HOPPER_LADDER  # noqa: E402

TOGETHER, TURNS = MatmulSm90(), MatmulSm90(tile_n=128, stages=6, pingpong=True)
CONFIGS: tuple[Any, ...] = (
    *(rung.config for rung in HOPPER_LADDER.rungs),
    replace(TOGETHER, tile_m=256, tile_n=192, stages=3),
    replace(TOGETHER, tile_m=192, tile_n=192, consumers=3),
    replace(TOGETHER, tile_n=64, stages=6, split_k=3),
    replace(TURNS, tile_n=192, stages=4),
    replace(TURNS, tile_m=64, tile_n=64, stages=8),
    replace(TOGETHER, tile_n=160, stages=5),
    replace(TURNS, tile_m=64, tile_n=256, stages=5, split_k=2),
)
PROBLEMS = 40


def family(number: int) -> Family:
    """Every configuration twice: types, layouts and what is combined change from one to the next."""
    draw = random.Random(number)
    config = CONFIGS[number % len(CONFIGS)]
    dtype = (f16, bf16)[number // len(CONFIGS) % 2]
    return Family(
        dtype,
        f32,
        draw.choice([None, f32]),
        draw.random() < 0.5,
        draw.random() < 0.5,
        8,
        False,
        draw.choice(sorted(EPILOGUES)),
        draw.random() < 0.5,
        draw.choice([1.0, -0.5]),
        True,
        replace(config, dtype=dtype),
    )


@pytest.mark.parametrize("number", range(2 * len(CONFIGS)))
def test_random_products(number: int) -> None:
    assert assert_products(family(number), PROBLEMS, number) >= PROBLEMS // 4


@pytest.mark.parametrize("n", [13, 30, 77])
@pytest.mark.parametrize("config", [TOGETHER, TURNS], ids=str)
def test_results_whose_lines_the_tma_does_not_reach(config: MatmulSm90, n: int) -> None:
    torch.manual_seed(n)
    a, b = (torch.randn(rows, 200, device="cuda", dtype=torch.float16) for rows in (300, n))
    found = warploom.matmul(a, b.T, config=config)
    exact = a.double() @ b.double().T
    assert bool(((found.double() - exact).abs() <= 2.0**-10 * exact.abs() + 1e-3).all())


@pytest.mark.parametrize("config", [TOGETHER, TURNS], ids=str)
def test_batches_that_lie_between_the_rows(config: MatmulSm90) -> None:
    a, b = (torch.randn(300, 5, 136, device="cuda", dtype=torch.float16).transpose(0, 1) for _ in range(2))
    whole = torch.full((300, 5, 304), GUARD, device="cuda", dtype=torch.float16)
    out = whole.transpose(0, 1)[:, :, :296]
    warploom.matmul(a, b.mT[:, :, :296], out=out, config=config)
    exact = a.double() @ b.double().mT[:, :, :296]
    assert bool(((out.double() - exact).abs() <= 2.0**-10 * exact.abs() + 1e-3).all())
    assert bool((whole[:, :, 296:] == GUARD).all())


@pytest.mark.parametrize("config", [TOGETHER, TURNS], ids=str)
def test_equal_calls_give_equal_bits(config: MatmulSm90) -> None:
    a, b = (torch.randn(2048, 2048, device="cuda", dtype=torch.float16) for _ in range(2))
    first = warploom.matmul(a, b, config=config)
    assert all(torch.equal(first, warploom.matmul(a, b, config=config)) for _ in range(50))


@pytest.mark.parametrize("op", ["max", "sum", "logsumexp"])
@pytest.mark.parametrize("sizes", [(512, 4096, 256), (1000, 776, 72), (70, 20000, 128), (4096, 333, 1024)])
@pytest.mark.parametrize("config", [TOGETHER, TURNS, replace(TURNS, tile_m=64, tile_n=256, stages=5)], ids=str)
def test_reductions_of_rows(config: MatmulSm90, op: str, sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    torch.manual_seed(m)
    a = torch.randn(m, k, device="cuda", dtype=torch.float16)
    b = torch.randn(n, k, device="cuda", dtype=torch.float16).T
    bias = torch.randn(n, device="cuda", dtype=torch.float16)
    product = a.double() @ b.double() * 0.5 + bias.double()
    size = a.abs().double() @ b.abs().double() + bias.abs().double()
    bound = k * 2.0**-21 * (size.sum(-1) if op == "sum" else size.amax(-1)) + 1e-4
    expected = {"max": product.amax(-1), "sum": product.sum(-1), "logsumexp": product.logsumexp(-1)}[op]
    found = warploom.matmul_reduce(a, b, op, scale=0.5, bias=bias, config=config)  # type: ignore[arg-type]
    assert bool(((found.double() - expected).abs() <= bound).all())
    assert torch.equal(found, warploom.matmul_reduce(a, b, op, scale=0.5, bias=bias, config=config))  # type: ignore[arg-type]
