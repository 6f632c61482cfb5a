"""The cost model against what was measured: the configurations it takes are (nearly) the fastest."""

import csv
import json
import math
from pathlib import Path

import pytest

from warploom.core.dtypes import f16, f32
from warploom.core.targets import target
from warploom.kernels.gemm.choice import choose, choose_for_rows, expected_seconds, fitting, parse_config
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.problem import contiguous_problem

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GOAL = target("sm_90a")


def measured():
    """(problem, {configuration: TFLOP/s}) of every product measured on the H200."""
    with (BENCHMARKS / "gemm_shapes.csv").open() as file:
        sizes = {r["name"]: (int(r["m"]), int(r["n"]), int(r["k"])) for r in csv.DictReader(file)}
    for row in json.loads((BENCHMARKS / "results" / "h200" / "gemm.json").read_text())["shapes"]:
        problem = contiguous_problem(*sizes[row["name"]], f16, f32, b_rows=row["weights"] == "k×n")
        yield problem, {parse_config(c): rate for c, rate in row["rates"].items() if c != "cublas"}


@pytest.mark.parametrize("kind", [GemmConfig, HopperGemmConfig])
def test_the_model_takes_what_was_fastest(kind):
    shares = []
    for problem, everything in measured():
        rates = {c: rate for c, rate in everything.items() if isinstance(c, kind)}
        if len(rates) > 1:
            taken = min(rates, key=lambda c: expected_seconds(problem, c, GOAL))
            shares.append(rates[taken] / max(rates.values()))
    if kind is GemmConfig:
        assert len(shares) >= 120
    assert math.exp(sum(map(math.log, shares or [1.0])) / max(1, len(shares))) > 0.985
    assert min(shares, default=1.0) > 0.9


@pytest.mark.parametrize(
    ("sizes", "schedule"),
    [
        ((1536, 5632, 4096), "whole"),  # two waves
        ((1664, 2816, 4096), "stream_k"),  # 1.08 waves
        ((3200, 5632, 4096), "stream_k"),  # 4.17 waves
        ((256, 10240, 5120), "stream_k"),  # 0.61 waves
        ((256, 5120, 8192), "split_k"),  # three parts of 40 tiles make 0.91 waves
        ((2048, 8192, 28672), "whole"),  # 3.88 waves, and operands that no L2 holds
        ((16, 32, 65536), "split_k"),  # one tile
        ((8192, 8192, 8192), "whole"),
    ],
)
def test_uneven_counts_of_tiles_are_shared_where_that_was_faster(sizes, schedule):
    """As measured on the H200 (benchmarks/gemm_waves_h200.py), of mma.sync alone."""
    m, n, k = sizes
    problem = contiguous_problem(m, n, k, f16, b_rows=False)
    general = [c for c in fitting(problem, GOAL)[0] if isinstance(c, GemmConfig)]
    taken = min(general, key=lambda c: expected_seconds(problem, c, GOAL))
    assert ("stream_k" if taken.stream_k else "split_k" if taken.split_k > 1 else "whole") == schedule


def test_large_products_go_to_wgmma_and_few_rows_to_mma_sync():
    for m, kind in ((16, GemmConfig), (256, HopperGemmConfig), (8192, HopperGemmConfig)):
        assert isinstance(choose(contiguous_problem(m, 4096, 4096, f16), GOAL)[0], kind)
    assert isinstance(choose(contiguous_problem(8192, 4096, 4096, f16), target("sm_80"))[0], GemmConfig)
    assert isinstance(choose(contiguous_problem(4096, 4096, 4096, f16, f16), GOAL)[0], GemmConfig)


def test_reductions_of_rows_take_wgmma_where_rows_fill_its_tiles():
    for (m, n, k), goal, kind in (
        ((8192, 131072, 4096), GOAL, HopperGemmConfig),
        ((16384, 16384, 128), GOAL, HopperGemmConfig),
        ((64, 1000, 128), GOAL, HopperGemmConfig),
        ((16, 16384, 128), GOAL, GemmConfig),
        ((4096, 4096, 4096), target("sm_80"), GemmConfig),
    ):
        config, _ = choose_for_rows(contiguous_problem(m, n, k, f16, out_dtype=f32, b_rows=False), goal)
        assert isinstance(config, kind)
        assert config.split_k == 1
    config, why = choose_for_rows(contiguous_problem(4096, 4095, 4096, f16, out_dtype=f32), GOAL)
    assert isinstance(config, GemmConfig)
    assert "mma.sync, as B's lines do not start" in why


def test_the_plan_says_why_the_tma_was_not_used():
    config, why = choose(contiguous_problem(4096, 4095, 4096, f16), GOAL)
    assert isinstance(config, GemmConfig)
    assert "mma.sync, as B's lines do not start at multiples of 16 bytes, which the TMA needs" in why
    config, why = choose(contiguous_problem(4096, 4096, 4096, f16), GOAL)
    assert "TMA" not in why


@pytest.mark.parametrize(("b_rows", "batch"), [(True, 1), (False, 1), (True, 3)])
@pytest.mark.parametrize("sizes", [(1, 4096, 4096), (100, 100, 100), (33, 1001, 77), (8192, 8192, 8192), (64, 1, 64)])
def test_a_contiguous_problem_is_the_one_that_arrays_make(sizes, b_rows, batch):
    import numpy as np

    from warploom.ops.matmul import plan_matmul

    m, n, k = sizes
    lead = (batch,) if batch > 1 else ()
    a = np.empty((*lead, m, k), np.float16)
    b = np.empty((*lead, k, n) if b_rows else (*lead, n, k), np.float16)
    made = plan_matmul(a, b if b_rows else np.swapaxes(b, -1, -2))
    assert made.problem == contiguous_problem(m, n, k, f16, b_rows=b_rows, batch=batch)
