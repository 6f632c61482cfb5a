"""docs/evidence/from-mma-to-wgmma.md and its pictures are what their generator writes from the committed evidence."""

from __future__ import annotations

import json
import re

from tests.project import ROOT, load

TEXT = (ROOT / "docs" / "evidence" / "from-mma-to-wgmma.md").read_text(encoding="utf-8")


def test_page_and_pictures_are_up_to_date() -> None:
    assert load("wgmma_page").main(["--check"]) == 0


def test_nothing_is_left_open() -> None:
    assert not re.search(r"@[A-Z]+@", TEXT)
    assert (ROOT / "examples" / "wgmma_pipeline.py").read_text(encoding="utf-8") in TEXT


def test_no_mutant_survives_without_a_reason() -> None:
    found = json.loads((ROOT / "benchmarks/results/static/hopper-mutants.json").read_text(encoding="utf-8"))
    for name, row in found["configs"].items():
        assert f"| {name} |" in TEXT
        assert row["survivors"] == []


def test_cells_without_a_measurement_are_shown_as_such() -> None:
    page = load("wgmma_page")
    load_ = {"watts": 699.6, "sm_mhz": 1485, "tflops": 650.0, "tflop_per_joule": 0.93}
    speed, ratio = ({"median": m, "low": m - 1, "high": m + 1} for m in (650.0, 2.0))
    cell = {"head_dim": 128, "causal": False, "seq": 4096, "tflops": {"warploom": speed}, "power": {"warploom": load_},
            "ratio": {"torch_cudnn": ratio}}  # fmt: skip
    whole = page.cells({"cells": [cell]})
    assert "| 128 | full | 4096 | 650 (649–651) | 2.00 (1.00–3.00) | 700 W, 1485 MHz | 0.93 / – |" in whole
    assert "| – | – / – |" in page.cells({"cells": [cell | {"power": {}}]})
    assert "650 instead of 650 TFLOP/s" in page.zeros({"cells": [cell | {"zeros": load_}]})
    assert "TFLOP/s" not in page.zeros({"cells": [cell]})
    assert page.unseen({}) == "*Not measured yet.*"
