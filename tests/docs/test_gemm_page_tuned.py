"""The page's tables of a search, of the seed's kernels, and what it says of evidence that is out of date."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.project import load
from warploom.bench.gemm import GemmFamily
from warploom.bench.ladder import config_json
from warploom.kernels.matmul.ladder import FULL_LADDER, LADDER


def spread(median: float) -> dict[str, float]:
    return {"median": median, "low": median - 2, "high": median + 3}


def cell(n: int, data: str, load_name: str, median: float, **more: Any) -> dict[str, Any]:
    peers = {"cublas": {"tflops": spread(2 * median)}}
    ratio = {"cublas": 0.5}
    return {"n": n, "data": data, "load": load_name, "tflops": spread(median), "ratio": ratio, "peers": peers, **more}


def test_loads_and_data_stand_side_by_side_with_the_tile_that_won() -> None:
    module: Any = load("gemm_page_tuned")
    own = config_json(LADDER.rung("03").config)
    cells = [
        cell(n, data, load_name, 400.0 + number, config=own | {"tile_m": 256, "tile_k": 32})
        for n in (4096, 8192)
        for number, (data, load_name) in enumerate(module.CONDITIONS)
    ]
    search = {"4096": {"timed": 60, "dropped": {"spills 300 bytes": 20}, "finalists": {}}}
    first = cell(4096, "uniform", "sustained", 400.0)
    by_tma = {"rung": "h5", "config": config_json(FULL_LADDER.rung("h5").config), "gpu": {"cells": [first]}}
    tuned = {"rows": [{"rung": "03", "config": own, "gpu": {"cells": cells}, "search": search}, by_tma]}
    evidence = SimpleNamespace(tuned=tuned)
    text = module.tuned_tables(evidence)
    assert text.index("N = 4096:") < text.index("N = 8192:")
    assert (
        "| 03 | 256×128×32 64×64 s3 | 400 (398–403) · 50% | 401 (399–404) · 50% | 402 (400–405) · 50% "
        "| 403 (401–406) · 50% |" in text
    )
    assert "| h5 | its own | 400 (398–403) · 50% | – | – | – |" in text
    assert "| 00 cuBLAS |  | 800 (798–803) | 802 (800–805) |" in text
    assert "03 60 of 80." in module.search_summary(evidence)


def test_the_seeds_kernels_stand_beside_ours() -> None:
    module: Any = load("gemm_page_tuned")
    loads = {name: {"seed": 430.0, "ours": 450.0, "ratio": {"median": 1.046}} for name in module.LOADS}
    row = {"rung": "03", "n": 4096, "seed_tile": "256x128x64_64x64_S3", "kind": "tuned", "tile": "t", "loads": loads}
    text = module.beside_kernels(SimpleNamespace(kernels_of_seed={"rows": [row]}))
    assert text.splitlines()[-1] == "| 03 | 4096 | 256x128x64_64x64_S3 | tuned | t |" + " 430 → 450 · 1.05× |" * 3


def test_rungs_that_were_timed_as_another_program_are_named() -> None:
    module: Any = load("gemm_page")
    now = GemmFamily().emulator_case(LADDER.rung("02").config, 0).program.digest
    rows: dict[str, dict[str, Any]] = {"02": {"digest": now}, "03": {"digest": now}, "best16": {}}
    evidence = SimpleNamespace(rows=lambda kind: rows)
    assert module.outdated(evidence, "f16") == "; of an earlier Program, or without its digest: 03, best16"
    assert module.outdated(SimpleNamespace(rows=lambda kind: {"02": {"digest": now}}), "f16") == ""
