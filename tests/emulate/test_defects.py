"""Every planted defect is found, by one finding that names its line; every twin is clean and right."""

from __future__ import annotations

import pytest

from tests.emulate.defects.base import NONE, Defect, Verdict, every_defect, every_twin, is_at_its_line, is_found, judge


@pytest.mark.parametrize("defect", every_defect(), ids=str)
def test_defect_is_found_at_its_line(defect: Defect) -> None:
    verdict = judge(defect.build, defect.name, defect.setting)
    assert is_found(defect, verdict), verdict
    assert is_at_its_line(defect, verdict), verdict
    assert len(verdict.kinds) <= 2, verdict  # two at most; the table has how often it is one


@pytest.mark.parametrize("twin", every_twin(), ids=lambda d: f"{d.group} {d.build.__name__} {d.setting}")
def test_twin_is_clean_and_right_in_every_order(twin: Defect) -> None:
    for seed in (None, 0, 3):
        verdict = judge(twin.build, NONE, twin.setting, seed)
        assert verdict == Verdict(), seed
