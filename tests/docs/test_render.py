"""The generator of tables writes what the result files say."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.project import load


@pytest.fixture
def render() -> ModuleType:
    return load("render")


RATE = {"median": 120.0, "low": 119.0, "high": 122.0}
CELL = {"seq": 4096, "tflops": RATE, "ratio": {"torch_flash": 1.2}, "baselines": {"torch_flash": {"tflops": RATE}}}
ROW = {
    "rung": "2",
    "name": "swizzle",
    "config": {},
    "findings": [],
    "error": {"metric": "m", "value": 0.25, "bound": 0.5},
    "wavefronts": {"ldmatrix": {"actual": 16, "ideal": 8}},
    "targets": {"sm_80": {"registers": 226, "spill_bytes": 4}, "sm_90a": {"not_for": "shared memory"}},
    "gpu": {**CELL, "cells": [CELL]},
}
ENVIRONMENT = {"gpu": {"name": "NVIDIA X"}, "nvrtc": [13, 0], "packages": {"torch": "2.9"}, "date": "2031-05-06T00"}
SHOWN = {"gpu": "| 120 (1.20×) |", "static": "| 2.00 | – | 226 (4) | – |", "baselines": "| 120 (119–122) |"}


def test_tables_are_written_and_then_up_to_date(
    render: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.json").write_text(json.dumps({"environment": ENVIRONMENT, "rows": [ROW]}), encoding="utf-8")
    page = tmp_path / "page.md"
    tables = "".join(f"<!-- table: x.json {columns} -->\nformer\n<!-- end table -->\n" for columns in SHOWN)
    page.write_text(f"before\n{tables}after\n", encoding="utf-8")
    listed = {"x.json": {"date": "2031-05-06", "commit": "abc", "kernels": "older"}}
    (tmp_path / "older.json").write_text(json.dumps(listed), encoding="utf-8")
    for module in ("page_parts", "stale"):
        monkeypatch.setattr(load(module), "RESULTS", tmp_path)
    monkeypatch.setattr(render, "PAGES", (page,))
    monkeypatch.setattr(render, "PICTURES", {})  # they need matplotlib
    assert render.main(["--check"]) == 1
    assert "former" in page.read_text(encoding="utf-8")
    assert render.main([]) == 0
    text = page.read_text(encoding="utf-8")
    for shown in (
        *SHOWN.values(),
        "*NVIDIA X, NVRTC 13.0, torch 2.9, measured on an older kernel, 2031-05-06, commit abc*",
    ):
        assert shown in text
    assert "former" not in text
    assert (text[:7], text[-6:]) == ("before\n", "after\n")
    assert render.main(["--check"]) == 0


def test_a_drivers_version_is_not_that_of_cuda(render: ModuleType) -> None:
    assert render.provenance({"driver": "580.65.06", "cuda_driver": "13.0"}) == "without a GPU, driver 580.65.06"
    assert render.provenance({"driver": None, "cuda_driver": [13, 0]}) == "without a GPU, a driver for CUDA 13.0"
    assert render.provenance({}) == "without a GPU"


def test_a_missing_file_is_said_and_unknown_columns_are_refused(render: ModuleType) -> None:
    assert "Not measured yet" in render.table("h200/no-such-file.json gpu")
    assert render.table("h200/no-such-file.json gradients").strip() == "", "a section is left out"
    with pytest.raises(KeyError, match="names no columns"):
        render.table("h200/attention.json pie-chart")


def test_a_training_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [{"attention": kind, "loss": kind, "losses": [2.0, 1.0]} for kind in ("warploom", "torch")]
    load("page_sections").draw_training({"runs": runs}, tmp_path / "curves.svg")
    assert "warploom, loss warploom" in (tmp_path / "curves.svg").read_text(encoding="utf-8")


def test_figures_of_both_loads_and_wrong_baselines_are_told() -> None:
    sections = load("page_sections")
    spread = {"median": 1.5, "low": 1.4, "high": 1.6}
    cells = [
        {
            "head_dim": 64,
            "causal": causal,
            "seq": 512,
            "tflops": {"warploom": RATE},
            "ratio": {"torch_cudnn": spread},
            "error": {"metric": "m", "value": 0.5, "bound": 1.0},
            "baseline_errors": {"torch_cudnn": error},
            "power": {"warploom": {"tflops": ours}, "torch_cudnn": {"tflops": 100.0}},
        }
        for causal, ours, error in ((False, 110.0, 0.5), (True, 99.0, 1.5))
    ]
    text = sections.made("attention-calls", {"cells": cells})
    assert "| 64 | full | in turns | 120 · 1.50× · – |" in text
    assert "| 64 | causal | in turns | 120 · 1.50×† · – |" in text
    assert "|  |  | alone | 99 · 0.99×† · – |" in text
    assert "| in turns | 1.50×, least 1.50×" in text
    assert "| alone | 1.04×, least 0.99× (head_dim 64 causal 512) | – |" in text


@pytest.mark.parametrize(
    ("file", "columns"),
    [
        ("attention-cells", "attention-calls"),
        ("attention-backward-cells", "gradients"),
        ("decode-cells", "decode"),
        ("varlen-cells", "packed"),
        ("prefill-cells", "prefill"),
    ],
)
def test_rows_that_were_timed_rested_too_say_so(file: str, columns: str) -> None:
    sections = load("page_sections")
    result = json.loads((load("stale").RESULTS / "h200" / f"{file}.json").read_text(encoding="utf-8"))
    for cell in result["cells"]:
        cell.pop("rested", None)
    before = sections.made(columns, result)
    for cell in result["cells"]:
        rates = {key: cell[key] for key in ("tflops", "ratio", "part") if key in cell}
        cell["rested"] = {
            **rates,
            "ratio": {"torch_cudnn": {"median": 7.77}, "cudnn": {"median": 7.77}, **rates["ratio"]},
        }
    after = sections.made(columns, result)
    assert "rested" not in before
    assert after.count("| rested |") == after.count("| in turns |") > 0


def test_missed_targets_stand_below_their_table(
    render: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missed = ["a call: 13 µs, at most 12", "another is wrong at d64: 2.0"]
    rung = ROW | {"rung": "02", "gpu": {**CELL, "cells": [{**CELL, "n": 8192, "over_rung_before": 2.25}]}}
    results: dict[str, dict[str, Any]] = {
        "host-cost": {"rows": [{"call": "a call", "microseconds": RATE}], "missed": missed},
        "gemm-f16": {"rows": [rung]},  # as benchmarks/targets.json has it
    }
    for name, result in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"environment": ENVIRONMENT, **result}), encoding="utf-8")
    listed = {f"{name}.json": {"date": "2031-05-06", "commit": "abc", "kernels": "older"} for name in results}
    (tmp_path / "older.json").write_text(json.dumps(listed), encoding="utf-8")
    for module in ("page_parts", "stale"):
        monkeypatch.setattr(load(module), "RESULTS", tmp_path)
    text = render.table("host-cost.json host-cost")
    assert "Targets missed: a call: 13 µs, at most 12*" in text
    assert "another" not in text
    short = "Targets missed: rung 02 at n = 8192: at least 2.5× the rung before, reached 2.25*"
    assert short in render.table("gemm-f16.json gpu")


def test_what_became_of_the_cases_of_other_files_is_counted_and_failures_are_named(render: ModuleType) -> None:
    outcomes = ("passed", "passed", "refused", "failed", "left out")
    cases = [
        {"file": "tests/test_it.py", "test": "test_out", "case": f"case{i}", "outcome": outcome, "said": f"said {i}"}
        for i, outcome in enumerate(outcomes)
    ]
    text = load("page_sections").made("their_files", {"cases": cases})
    assert "| FlashAttention-2 | `test_out` | 2 | 1 | 1 | 1 |" in text
    assert "- `test_out[case3]`: said 3" in text
    assert "said 2" not in text
