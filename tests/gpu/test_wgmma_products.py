"""Random products by kernels fed by the TMA on the GPU, every element against float64; reductions of their rows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import warploom
from tests.gpu.test_matmul_random import EPILOGUES, GUARD, Family, case, compile_all, error, guarded
from warploom.core.dtypes import bf16, f16, f32
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.ladder import HOPPER_LADDER
from warploom.kernels.gemm.problem import AnyGemmConfig

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="these run on sm_90a"
    ),
]

LAST = HOPPER_LADDER.rungs[-1].config
WARPS = HopperGemmConfig(block_stride=8, persistent=True, mma_sync=True)
TOGETHER = HopperGemmConfig(block_stride=8, in_flight=True, persistent=True)
CONFIGS: tuple[AnyGemmConfig, ...] = (
    *(rung.config for rung in HOPPER_LADDER.rungs if rung.config.accumulate is f32),  # 08 stands below, with f32 sums
    replace(TOGETHER, tile_m=256, tile_n=192, stages=3),
    replace(TOGETHER, tile_m=192, tile_n=192, consumers=3),
    replace(TOGETHER, tile_n=64, stages=6, split_k=3),
    replace(LAST, tile_n=192, stages=4),
    replace(LAST, tile_m=64, tile_n=64, stages=8),
    replace(TOGETHER, tile_n=160, stages=5),
    replace(TOGETHER, cluster=2),
    replace(LAST, cluster=2),
    replace(LAST, tile_m=64, tile_n=256, stages=5, split_k=2),
    WARPS,
    replace(WARPS, tile_m=256, tile_n=128),
    replace(WARPS, tile_n=128, stages=6, pingpong=True),
    replace(WARPS, tile_m=64, split_k=2),
    replace(WARPS, tile_m=64, tile_n=64, stages=8, persistent=False),
    replace(WARPS, tile_m=64, tile_n=128, consumers=1, cluster=2),
)
PROBLEMS = 40


def family(number: int) -> Family:
    """Every configuration twice: types, layouts and what is combined change from one to the next."""
    draw = random.Random(number)
    config = CONFIGS[number % len(CONFIGS)]
    dtype = (f16, bf16)[number // len(CONFIGS) % 2]
    return Family(
        dtype, f32, draw.choice([None, f32]), draw.random() < 0.5, draw.random() < 0.5, 8, False,
        draw.choice(sorted(EPILOGUES)), draw.random() < 0.5, draw.choice([1.0, -0.5]), True,
        replace(config, dtype=dtype),
    )  # fmt: skip


@pytest.mark.parametrize("number", range(2 * len(CONFIGS)))
def test_random_products(number: int) -> None:
    kind, draw = family(number), random.Random(number)
    torch.manual_seed(number)
    cases = [case(kind, draw) for _ in range(PROBLEMS)]
    compile_all(cases)
    taken = 0
    for problem in cases:
        batch = torch.broadcast_shapes(problem.a.shape[:-2], problem.b.shape[:-2])
        shape = (*batch, problem.a.shape[-2], problem.b.shape[-1])
        whole, out = guarded(shape, kind.out or kind.dtype, kind.unit)
        found = warploom.matmul(problem.a, problem.b, out=out, **problem.options)
        worst = error(problem, found, kind)
        assert worst <= 1.0, (kind, problem.a.shape, problem.a.stride(), problem.b.shape, problem.b.stride(), worst)
        assert bool((whole[..., shape[-1] :] == GUARD).all()), "something beyond the result was written"
        taken += "config" in problem.options
    assert taken >= PROBLEMS // 4


@pytest.mark.parametrize("n", [13, 30, 77])
@pytest.mark.parametrize("config", [TOGETHER, LAST, WARPS], ids=str)
def test_results_whose_lines_the_tma_does_not_reach(config: HopperGemmConfig, n: int) -> None:
    torch.manual_seed(n)
    a, b = (torch.randn(rows, 200, device="cuda", dtype=torch.float16) for rows in (300, n))
    found = warploom.matmul(a, b.T, config=config)
    exact = a.double() @ b.double().T
    assert bool(((found.double() - exact).abs() <= 2.0**-10 * exact.abs() + 1e-3).all())


@pytest.mark.parametrize("config", [TOGETHER, LAST], ids=str)
def test_batches_that_lie_between_the_rows(config: HopperGemmConfig) -> None:
    a, b = (torch.randn(300, 5, 136, device="cuda", dtype=torch.float16).transpose(0, 1) for _ in range(2))
    whole = torch.full((300, 5, 304), GUARD, device="cuda", dtype=torch.float16)
    out = whole.transpose(0, 1)[:, :, :296]
    warploom.matmul(a, b.mT[:, :, :296], out=out, config=config)
    exact = a.double() @ b.double().mT[:, :, :296]
    assert bool(((out.double() - exact).abs() <= 2.0**-10 * exact.abs() + 1e-3).all())
    assert bool((whole[:, :, 296:] == GUARD).all())


@pytest.mark.parametrize("config", [TOGETHER, LAST], ids=str)
def test_equal_calls_give_equal_bits(config: HopperGemmConfig) -> None:
    a, b = (torch.randn(2048, 2048, device="cuda", dtype=torch.float16) for _ in range(2))
    first = warploom.matmul(a, b, config=config)
    assert all(torch.equal(first, warploom.matmul(a, b, config=config)) for _ in range(50))


@pytest.mark.parametrize("splits", [1, 2, 3])
@pytest.mark.parametrize("turns", [True, False])
def test_stages_are_read_before_they_are_filled_again(turns: bool, splits: int) -> None:
    """While f32 results leave from the registers, the other consumer's fragments wait: the TMA must wait for them."""
    config = replace(WARPS, tile_n=128, stages=6, pingpong=turns, split_k=splits)
    torch.manual_seed(splits)
    a, b = (torch.randn(rows, 8192, device="cuda", dtype=torch.float16) for rows in (256, 10240))
    exact, near = a.double() @ b.double().T, 8192 * 2.0**-22 * (a.abs().double() @ b.abs().double().T)
    for _ in range(5):
        found = torch.full((256, 10240), float("nan"), device="cuda")
        warploom.matmul(a, b.T, out=found, out_dtype="f32", config=config)
        assert bool(((found.double() - exact).abs() <= near).all())


@pytest.mark.parametrize("op", ["max", "sum", "logsumexp"])
@pytest.mark.parametrize("sizes", [(512, 4096, 256), (1000, 776, 72), (70, 20000, 128), (4096, 333, 1024)])
@pytest.mark.parametrize("config", [TOGETHER, LAST, replace(LAST, tile_m=64, tile_n=256, stages=5)], ids=str)
def test_reductions_of_rows(config: HopperGemmConfig, op: str, sizes: tuple[int, int, int]) -> None:
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
