"""Bugs of other projects are found at a line that is to blame; their repaired kernels are clean and right."""

from __future__ import annotations

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")

from tests.real_bugs.base import Miniature
from tests.real_bugs.miniatures import MINIATURES


@pytest.mark.parametrize("miniature", MINIATURES, ids=lambda m: m.thread)
def test_a_bug_is_found_where_it_is_and_its_repair_is_clean(miniature: Miniature) -> None:
    for seed in miniature.seeds:
        findings, _ = miniature.check(repaired=False, seed=seed)
        found = bool(findings) and miniature.blames(findings[0])
        assert found != bool(miniature.missed), findings
    for seed in (None, 3):
        findings, right = miniature.check(repaired=True, seed=seed)
        assert right
        assert findings == ()


def test_most_are_found() -> None:
    assert len(MINIATURES) >= 24
    assert sum(not m.missed for m in MINIATURES) >= 0.9 * len(MINIATURES)
