"""The cost model against what was measured: the configurations it takes are (nearly) the fastest."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import warploom
from tests.project import ROOT
from warploom.core.dtypes import bf16, f16, f32
from warploom.core.targets import target
from warploom.kernels.matmul.choice import KINDS, Production, candidates_sm80, choose, choose_for_rows, fitting
from warploom.kernels.matmul.cost import seconds
from warploom.kernels.matmul.problem import MatmulProblem, contiguous_problem
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.kernels.settings import read

BENCHMARKS = ROOT / "benchmarks"
SM90 = target("sm_90a")
ALWAYS_SO = {"ldmatrix", "swizzle", "pipelined", "strided", "wide_b", "in_flight", "persistent"}
"""What earlier kernels had as flags, and today's do always."""


def written(text: str) -> Production | None:
    """A configuration as it was written when it was measured; None for kernels that are gone."""
    if "(" in text:
        config = read(text, KINDS)
        return config if isinstance(config, MatmulSm80 | MatmulSm90) else None
    first, *words = text.split(",")
    if first == "mma+tma" or "cluster" in text:
        return None
    settings: dict[str, str] = {}
    for word in (*([] if first == "wgmma" else [first]), *words):
        name, _, value = word.partition("=")
        if name not in ALWAYS_SO:
            settings[name.lower() if name == "CONSUMERS" else name] = value or "true"
    return (MatmulSm90() if first == "wgmma" else MatmulSm80()).with_settings(settings)


def measured() -> Iterator[tuple[MatmulProblem, dict[Production, float]]]:
    """(problem, {configuration: TFLOP/s}) of every product measured on the H200."""
    with (BENCHMARKS / "gemm_shapes.csv").open() as file:
        sizes = {r["name"]: (int(r["m"]), int(r["n"]), int(r["k"])) for r in csv.DictReader(file)}
    for row in json.loads((BENCHMARKS / "results" / "h200" / "gemm.json").read_text())["shapes"]:
        problem = contiguous_problem(*sizes[row["name"]], f16, f32, b_rows=row["weights"] == "k×n")
        rates = {written(text): rate for text, rate in row["rates"].items() if text != "cublas"}
        yield problem, {config: rate for config, rate in rates.items() if config is not None}


@pytest.mark.parametrize("kind", [MatmulSm80, MatmulSm90])
def test_the_model_takes_what_was_fastest(kind: type[Production]) -> None:
    shares: list[float] = []
    for problem, everything in measured():
        rates = {c: rate for c, rate in everything.items() if isinstance(c, kind)}
        if len(rates) > 1:
            taken = min(rates, key=lambda c: seconds(problem, c, SM90))
            shares.append(rates[taken] / max(rates.values()))
    assert len(shares) > 10
    assert math.exp(sum(map(math.log, shares)) / len(shares)) > 0.985
    assert min(shares) > 0.9


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
def test_uneven_counts_of_tiles_are_shared_where_that_was_faster(sizes: tuple[int, int, int], schedule: str) -> None:
    """As measured on the H200 (benchmarks/gemm_waves_h200.py), of mma.sync alone."""
    problem = contiguous_problem(*sizes, f16, b_rows=False)
    general, _ = fitting(problem, candidates_sm80(problem), SM90)
    taken = min(general, key=lambda c: seconds(problem, c, SM90))
    assert ("stream_k" if taken.stream_k else "split_k" if taken.split_k > 1 else "whole") == schedule


@pytest.mark.parametrize(
    ("sizes", "tile_n"),
    [((8192, 4096, 4096), 128), ((2048, 4096, 4096), 128), ((8192, 6144, 4096), 160), ((8192, 5120, 8192), 160)],
)
def test_at_the_power_limit_an_epilogue_that_is_hidden_beats_fewer_loads(
    sizes: tuple[int, int, int], tile_n: int
) -> None:
    """As measured on the H200 (benchmarks/compare_trees.py)."""
    config = choose(contiguous_problem(*sizes, f16, b_rows=False), SM90)[0]
    assert isinstance(config, MatmulSm90)
    assert (config.tile_m, config.tile_n, config.pingpong) == (128, tile_n, True)


@pytest.mark.parametrize(
    ("problem", "arch", "kind"),
    [
        (contiguous_problem(16, 4096, 4096, f16), "sm_90a", MatmulSm80),
        (contiguous_problem(256, 4096, 4096, f16), "sm_90a", MatmulSm90),
        (contiguous_problem(8192, 4096, 4096, f16), "sm_90a", MatmulSm90),
        (contiguous_problem(8192, 4096, 4096, f16), "sm_80", MatmulSm80),
        (contiguous_problem(4096, 4096, 4096, f16, f16), "sm_90a", MatmulSm80),
    ],
)
def test_large_products_go_to_wgmma_and_few_rows_to_mma_sync(problem: MatmulProblem, arch: str, kind: type) -> None:
    assert isinstance(choose(problem, target(arch))[0], kind)


@pytest.mark.parametrize(
    ("sizes", "arch", "kind"),
    [
        ((8192, 131072, 4096), "sm_90a", MatmulSm90),
        ((16384, 16384, 128), "sm_90a", MatmulSm90),
        ((64, 1000, 128), "sm_90a", MatmulSm90),
        ((16, 16384, 128), "sm_90a", MatmulSm80),
        ((4096, 4096, 4096), "sm_80", MatmulSm80),
    ],
)
def test_reductions_of_rows_take_wgmma_where_rows_fill_its_tiles(
    sizes: tuple[int, int, int], arch: str, kind: type
) -> None:
    config, _ = choose_for_rows(contiguous_problem(*sizes, f16, out_dtype=f32, b_rows=False), target(arch))
    assert isinstance(config, kind)
    assert not config.cut


@pytest.mark.parametrize(
    ("sizes", "exponentials", "pingpong"),
    [
        ((16384, 50304, 768), False, True),
        ((16384, 50304, 768), True, True),
        ((8192, 131072, 4096), False, False),
        ((8192, 131072, 4096), True, True),
        ((256, 1024, 4096), True, False),  # as many tiles as SMs: nothing to take turns with
    ],
)
def test_consumers_take_turns_where_a_reduction_takes_long_beside_its_products(
    sizes: tuple[int, int, int], exponentials: bool, pingpong: bool
) -> None:
    problem = contiguous_problem(*sizes, bf16, out_dtype=f32, b_rows=False)
    config, _ = choose_for_rows(problem, SM90, exponentials=exponentials)
    assert isinstance(config, MatmulSm90)
    assert config.pingpong == pingpong


@pytest.mark.parametrize("choice", [choose, choose_for_rows])
def test_the_plan_says_why_the_tma_was_not_used(choice: Callable[..., Any]) -> None:
    config, why = choice(contiguous_problem(4096, 4095, 4096, f16), SM90)
    assert isinstance(config, MatmulSm80)
    assert "mma.sync, as B's lines do not start at multiples of 16 bytes, which the TMA needs" in why
    assert "TMA" not in choice(contiguous_problem(4096, 4096, 4096, f16), SM90)[1]


@pytest.mark.parametrize(("b_rows", "batch"), [(True, 1), (False, 1), (True, 3)])
@pytest.mark.parametrize("sizes", [(1, 4096, 4096), (100, 100, 100), (33, 1001, 77), (8192, 8192, 8192), (64, 1, 64)])
def test_a_contiguous_problem_is_the_one_that_arrays_make(
    sizes: tuple[int, int, int], b_rows: bool, batch: int
) -> None:
    m, n, k = sizes
    lead = (batch,) if batch > 1 else ()
    a = np.empty((*lead, m, k), np.float16)
    b = np.empty((*lead, k, n) if b_rows else (*lead, n, k), np.float16)
    made = warploom.plan_matmul(a, b if b_rows else np.swapaxes(b, -1, -2))
    assert made.problem == contiguous_problem(m, n, k, f16, b_rows=b_rows, batch=batch)
