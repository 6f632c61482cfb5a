"""The cost model against what was measured: the configurations it takes are (nearly) the fastest."""

import csv
import json
import math
from pathlib import Path

import pytest

from warploom.core.dtypes import f16, f32
from warploom.core.targets import target
from warploom.kernels.gemm.choice import MACHINES, choose, seconds
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.problem import contiguous_problem

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
GOAL = target("sm_90a")


def measured():
    """(problem, {configuration: TFLOP/s}) of every product measured on the H200."""
    with (BENCHMARKS / "gemm_shapes.csv").open() as file:
        sizes = {r["name"]: (int(r["m"]), int(r["n"]), int(r["k"])) for r in csv.DictReader(file)}
    for row in json.loads((BENCHMARKS / "results" / "h200" / "gemm.json").read_text())["shapes"]:
        problem = contiguous_problem(*sizes[row["name"]], f16, f32, b_rows=row["weights"] == "k×n")
        yield problem, {GemmConfig.parse(c): rate for c, rate in row["rates"].items() if c != "cublas"}


def test_the_model_takes_what_was_fastest():
    shares = []
    for problem, rates in measured():
        taken = min(rates, key=lambda c: seconds(problem, c, MACHINES["sm_90a"], GOAL.shared_per_sm))
        shares.append(rates[taken] / max(rates.values()))
    assert len(shares) >= 120
    assert math.exp(sum(map(math.log, shares)) / len(shares)) > 0.985
    assert min(shares) > 0.9


def test_the_choice_is_mostly_among_what_was_measured():
    known = [choose(problem, GOAL)[0] in rates for problem, rates in measured()]
    assert sum(known) >= 0.9 * len(known)


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
