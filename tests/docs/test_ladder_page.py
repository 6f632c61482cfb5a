"""docs/ladder-attention.md is what its generator writes from the committed evidence, and says what that says."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest

from tests.project import ROOT, load

TEXT = (ROOT / "docs" / "ladder-attention.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    assert load("ladder_page").main(["--check"]) == 0


def test_nothing_is_left_open() -> None:
    assert not re.search(r"@[A-Z]+@", TEXT)
    assert not re.search(r"different: *\|", TEXT), "every difference has a reason"


def test_every_rung_is_there() -> None:
    rows = json.loads((ROOT / "benchmarks/results/h200/attention-d128-bf16.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        name = row["name"][0].upper() + row["name"][1:]
        assert f"### {name}\n" in TEXT


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


def test_every_count_that_differs_from_ncus_has_a_reason() -> None:
    assert "not explained" not in TEXT


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [((40, 8), (40, 5), True), ((40, 30), (40, 5), False), ((5, 40), (40, 5), False), ((0, 0), (0, 0), True),
     ((64, 0), (130, 0), True)],
)  # fmt: skip
def test_when_a_change_is_reproduced(ours: tuple[int, int], theirs: tuple[int, int], same: bool) -> None:
    assert load("ladder_seeds").same_change(ours, theirs) is same


def test_static_evidence_is_of_this_generator() -> None:
    """One kernel compiled anew has the committed figures (where the same NVRTC is installed)."""
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("needs cuda.core")
    static = load("ladder_static")
    evidence = json.loads(static.EVIDENCE.read_text(encoding="utf-8"))
    if ".".join(map(str, static.nvrtc_version())) != evidence["nvrtc"]:
        pytest.skip("another NVRTC")
    (subject,) = [s for s in static.subjects() if s.name == "4 sm_80 -O3"]
    found = json.loads(json.dumps(static.figures(subject)))
    assert found == evidence["kernels"][subject.name]
