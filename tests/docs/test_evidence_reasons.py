"""What pages of evidence conclude: what may differ between emulator and hardware, what a seed's figure shows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.project import load


def counted(emulator: int, ncu: float) -> dict[str, float]:
    return {"emulator": emulator, "ncu": ncu}


def test_a_difference_that_nothing_explains_is_no_page() -> None:
    module = load("gemm_page_counters")
    found = {"ldmatrix": counted(8, 8.0), "ld.shared": counted(100, 60.0)}  # of rung 01a ptxas joins loads
    profile = {"small": {"whole tiles": [256] * 3}, "rungs": {"01a": {"wavefronts": {"whole tiles": found}}}}
    evidence = SimpleNamespace(profile=profile)
    assert "`ld.shared`" in module.both_sides(evidence)
    profile["without the hint"] = {"04": {"whole tiles": {"cp.async": counted(40, 41.0)}}}
    with pytest.raises(ValueError, match="at -O1 both sides differ"):
        module.both_sides(evidence)
    found["ldmatrix"] = counted(8, 9.0)
    with pytest.raises(ValueError, match="rung 01a, whole tiles: nothing explains ldmatrix"):
        module.both_sides(evidence)
    found.clear()
    assert module.both_sides(evidence).endswith("for every rung.")


@pytest.mark.parametrize(
    ("rung", "product", "kind", "explained"),
    [("01a", "whole tiles", "ld.shared", True), ("01b", "whole tiles", "ld.shared", False),
     ("01b", "ragged", "ld.shared", True), ("03", "ragged", "cp.async", False), ("03", "unaligned", "cp.async", True),
     ("04", "whole tiles", "cp.async", True), ("04", "ragged", "ldmatrix", False),
     ("02", "ragged", "st.shared", False)],
)  # fmt: skip
def test_what_may_differ_and_what_not(rung: str, product: str, kind: str, explained: bool) -> None:
    assert (load("gemm_page_counters").reason(rung, product, kind) is not None) is explained


def test_fragment_intensity_is_counted_as_the_seed_counts_it() -> None:
    """Against a count of each load: two rows and eight columns of fragments."""
    intensity = load("ladder_counters").intensity
    along, anew = sum(2 + 8 for _ in range(16)), sum(1 + 8 for _ in range(16) for _ in range(2))
    assert intensity(2, 8, k_slices=True) == 16 * 2 * 8 / along == 1.6
    assert intensity(2, 8, k_slices=False) == 16 * 2 * 8 / anew


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [((40, 8), (40, 5), True), ((40, 30), (40, 5), False), ((5, 40), (40, 5), False), ((0, 0), (0, 0), True),
     ((64, 0), (130, 0), True)],
)  # fmt: skip
def test_when_a_change_is_reproduced(ours: tuple[int, int], theirs: tuple[int, int], same: bool) -> None:
    assert load("ladder_seeds").same_change(ours, theirs) is same


def test_how_far_two_types_are_apart() -> None:
    bf16 = {key: {"loop_instructions": n} for key, n in (("1", 100), ("2", 200), ("h9", 1))}
    f16 = {key: {"loop_instructions": n} for key, n in (("1", 98), ("2", 210))}
    assert load("ladder_seeds").types_apart(f16, bf16) == "−2.0% to +5.0%"


def test_counters_say_what_moved_from_rung_to_rung() -> None:
    def rung(cycles: float, tensor: float, alu: float) -> dict[str, Any]:
        counted = {"time": {"cycles": cycles}, "instructions": {"all": 100}, "pipes, %": {"tensor": tensor, "alu": alu}}
        return {"counters": counted}

    counters = load("ladder_counters").Counters({"rungs": {"h7": rung(10, 80.0, 5.0), "h8": rung(9, 88.0, 5.5)}})
    assert counters.change("h7", "h8") == "cycles −10.0%, instructions +0.0%, tensor 80.0 → 88.0 %"
    assert counters.change("h6", "h7") == ""
