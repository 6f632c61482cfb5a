"""What pages of evidence may say: emulator and hardware differ only where there is a reason."""

from __future__ import annotations

from typing import Any

import pytest

from tests.project import load


def counted(emulator: int, ncu: float) -> dict[str, float]:
    return {"emulator": emulator, "ncu": ncu}


def test_a_difference_that_nothing_explains_is_no_page() -> None:
    module = load("gemm_page_counters")
    found = {"ldmatrix": counted(8, 8.0), "ld.shared": counted(100, 60.0)}  # of rung 01a ptxas joins loads
    profile: dict[str, Any] = {
        "environment": {"gpu": {"name": "NVIDIA X99 80GB"}},
        "small": {"whole tiles": [256] * 3},
        "rungs": {"01a": {"wavefronts": {"whole tiles": found}}},
    }
    assert "`ld.shared`" in module.both_sides(profile)
    assert module.both_sides(profile).startswith("On the X99, ")
    profile["without the hint"] = {"04": {"whole tiles": {"cp.async": counted(40, 41.0)}}}
    with pytest.raises(ValueError, match="at -O1 both sides differ"):
        module.both_sides(profile)
    found["ldmatrix"] = counted(8, 9.0)
    with pytest.raises(ValueError, match="rung 01a, whole tiles: nothing explains ldmatrix"):
        module.both_sides(profile)
    found.clear()
    assert module.both_sides(profile).endswith("for every rung.")


@pytest.mark.parametrize(
    ("rung", "product", "kind", "explained"),
    [
        ("01a", "whole tiles", "ld.shared", True),
        ("01b", "whole tiles", "ld.shared", False),
        ("01b", "ragged", "ld.shared", True),
        ("03", "ragged", "cp.async", False),
        ("03", "unaligned", "cp.async", True),
        ("04", "whole tiles", "cp.async", True),
        ("04", "ragged", "ldmatrix", False),
        ("02", "ragged", "st.shared", False),
    ],
)
def test_what_may_differ_and_what_not(rung: str, product: str, kind: str, explained: bool) -> None:
    assert (load("gemm_page_counters").reason(rung, product, kind) is not None) is explained
