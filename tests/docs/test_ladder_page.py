"""The figures on docs/evidence/ladder-attention.md follow from the evidence."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.project import ROOT, load


def test_register_needs_come_from_the_layouts() -> None:
    table = load("ladder_seeds").register_need()
    assert "| K | 128 | 128 | reproduced |" in table
    assert "| all | 404 | 404 | reproduced |" in table


def test_fragment_intensity_is_counted_as_the_seed_counts_it() -> None:
    """Against a count of each load: two rows and eight columns of fragments."""
    intensity = load("ladder_counters").intensity
    along = sum(2 + 8 for _ in range(16)), 16 * 2 * 8
    anew = sum(1 + 8 for _ in range(16) for _ in range(2)), 16 * 2 * 8
    assert intensity(2, 8, k_slices=True) == along[1] / along[0] == 1.6
    assert intensity(2, 8, k_slices=False) == anew[1] / anew[0]
    assert round(intensity(2, 8, k_slices=False), 2) == 0.89


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [((40, 8), (40, 5), True), ((40, 30), (40, 5), False), ((5, 40), (40, 5), False), ((0, 0), (0, 0), True),
     ((64, 0), (130, 0), True)],
)  # fmt: skip
def test_when_a_change_is_reproduced(ours: tuple[int, int], theirs: tuple[int, int], same: bool) -> None:
    assert load("ladder_seeds").same_change(ours, theirs) is same


def test_shares_of_flash_are_the_seeds_beside_both_types() -> None:
    def rows(share: float) -> dict[str, Any]:
        cells = [{"seq": seq, "ratio": {"torch_flash": ratio}} for seq, ratio in ((512, 9.0), (4096, share))]
        return {"1": {"gpu": {"cells": cells}}, "2": {"gpu": {"cells": [{"seq": 4096, "ratio": {"torch_flash": 0.9}}]}}}

    lines = load("ladder_seeds").shares_table(rows(0.2), rows(0.25)).splitlines()
    assert lines[2:] == ["| 1 | 0.16 | 0.20 | 0.25 | – | – |", "| 2 | 0.73 | 0.90 | 0.90 | 4.59× | 4.50× |"]


def test_types_agree_where_all_but_the_code_is_the_same() -> None:
    agree = load("ladder_seeds").types_agree
    assert agree({"1": {"code": "a", "n": 1}}, {"1": {"code": "b", "n": 1}, "h9": {}}) == "1 of 1"
    assert agree({"1": {"code": "a", "n": 1}}, {"1": {"code": "a", "n": 2}}) == "0 of 1"


def test_the_search_behind_rung_7_says_where_the_rungs_are() -> None:
    rate = {"median": 310.0, "low": 300.0, "high": 320.0}
    row = {"tflops": rate, "registers": 200, "spill_bytes": 0}
    found = {
        "seq": 4096, "rungs": {"6": "six", "7": "seven"}, "glance": {"best": 3.0, "seven": 2.0, "six": 1.0},
        "finalists": [{"config": name, "place": n + 1, **row} for n, name in enumerate(("best", "seven", "six"))],
        "environment": json.loads((ROOT / "benchmarks/results/h200/ablations.json").read_text("utf-8"))["environment"],
    }  # fmt: skip
    text = load("ladder_page").search_text(found)
    assert text.startswith("Of 3 configurations `best` is the fastest here, 310 (300–320) TFLOP/s at length 4096")
    assert "rung 7 is number 2 with 310 (300–320) and rung 6 is number 3" in text
