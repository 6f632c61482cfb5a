"""Generated pages are what their scripts write from the committed evidence; what was not measured is shown as such."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project import load


@pytest.mark.parametrize(
    "script", ["gemm_page", "ladder_page", "ptx_forms", "ptx_mutants_page", "reduce_page", "render", "wgmma_page"]
)
def test_the_page_is_up_to_date(script: str) -> None:
    assert load(script).main(["--check"]) == 0, f"run python benchmarks/{script}.py"


def test_a_template_takes_what_was_measured(tmp_path: Path) -> None:
    template = tmp_path / "page.md"
    template.write_text("a @ONE@\n<!-- if TWO -->\n@TWO@\n<!-- end if -->\nb\n", encoding="utf-8")
    filled = load("page_parts").filled
    assert filled(template, {"ONE": "1"}) == "a 1\nb\n"
    assert filled(template, {"ONE": "1", "TWO": "2"}, ["TWO"]) == "a 1\n2\nb\n"
    with pytest.raises(KeyError, match="THREE"):
        filled(template, {"ONE": "1", "THREE": "3"})
    with pytest.raises(KeyError, match="TWO"):
        filled(template, {"ONE": "1"}, ["TWO"])


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


def test_the_papers_own_baseline_has_a_table_of_its_own() -> None:
    times = {"median": 3e-6, "low": 2e-6, "high": 4e-6}
    row = {"launch": {"paper_protocol_s": times, "graph_s": times}, "loop": {"cycles_per_operation": times},
           "grid": {"operations_per_s": {name: x * 1e15 for name, x in times.items()}, "speed_up": times,
                    "energy_per_operation_j": 6e-8}}  # fmt: skip
    *_, line = load("reduce_page").textbook({"1w": row, "wmma": row}).splitlines()
    assert line.startswith("| wmma | 3.00 (2.00–4.00) | 3.000 (2.000–4.000) |")
    assert line.endswith("| 60.0 |")
