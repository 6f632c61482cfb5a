"""docs/evidence/ladder-reduce.md is what its script writes from the committed evidence, and reaches what is asked."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "evidence" / "ladder-reduce.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results" / "h200"


@pytest.fixture(scope="module")
def page() -> Any:
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("reduce_page")
    finally:
        sys.path.remove(folder)


def test_the_page_is_up_to_date(page) -> None:
    assert page.main(["--check"]) == 0


def test_nothing_is_left_open() -> None:
    assert not re.search(r"@[A-Z0-9]+@", TEXT)


def test_the_evidence_holds_what_the_page_says(page) -> None:
    found = page.Evidence()
    assert found.faster("4", "1") >= 11.5
    assert found.faster("5", "2") > found.faster("4", "2") > 1
    for row in found.rows.values():
        counted = row["counters"]["launch"]
        assert counted["bank_conflicts"].get("all shared", 0.0) == row["bank_conflicts"], "the emulator counts as ncu"
        classes = counted["wavefronts"]
        assert classes.get("ld.shared", 0.0) + classes.get("st.shared", 0.0) == row["wavefronts"]
    limits = [row["grid"]["energy_per_operation_j"] for row in found.rows.values()]
    assert all(joules > 0 for joules in limits)


def test_the_papers_own_baseline_has_a_table_of_its_own(page) -> None:
    times = {"median": 3e-6, "low": 2e-6, "high": 4e-6}
    row = {"launch": {"paper_protocol_s": times, "graph_s": times}, "loop": {"cycles_per_operation": times},
           "grid": {"operations_per_s": {name: x * 1e15 for name, x in times.items()}, "speed_up": times,
                    "energy_per_operation_j": 6e-8}}  # fmt: skip
    *_, line = page.textbook({"1w": row, "wmma": row}).splitlines()
    assert line.startswith("| wmma | 3.00 (2.00–4.00) | 3.000 (2.000–4.000) |")
    assert line.endswith("| 60.0 |")


def test_no_product_is_written_and_pytorch_is_slower() -> None:
    peers = json.loads((RESULTS / "matmul-reduce.json").read_text(encoding="utf-8"))["result"]
    rows = [*peers["against_torch"], peers["loss_against_torch"]]
    assert max(row["warploom_extra_bytes"] for row in rows) <= 64 * 2**20
    assert peers["search_ten_millions"]["extra_bytes"] <= 64 * 2**20
    least = json.loads((ROOT / "benchmarks" / "targets.json").read_text(encoding="utf-8"))["reduce"]["over_pytorch"]
    for row in peers["against_torch"]:
        assert row["error"] <= 1
        assert min(row["over"]["torch"], row["over"]["torch.compile"]) >= least[str(row["k"])]


def test_every_traced_fragment_holds() -> None:
    traced = json.loads((RESULTS / "discovery.json").read_text(encoding="utf-8"))["fragments"]
    assert {row["verdict"] for row in traced} <= {"agrees", "new"}
    assert all(row["linear"] for row in traced)
