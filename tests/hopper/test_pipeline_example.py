"""examples/wgmma_pipeline.py: right and clean under every order; each of its variants with a defect is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.project import ROOT, load
from warploom.checking.kernel_file import check_kernel, kernels_of


def script() -> Any:
    return load("sanitize_unseen")


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_the_example_is_right_and_clean(seed: int | None) -> None:
    (kernel,) = kernels_of(str(ROOT / "examples" / "wgmma_pipeline.py"))
    checked = check_kernel(kernel, seed)
    assert checked.emulation.findings == ()
    assert checked.ok


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("as it is", None),
        ("stage given back before the product has read it", "race"),
        ("no proxy fence before the TMA store", "proxy"),
        ("no barrier before the TMA store", "race"),
        ("no fence after the mbarriers' initialisation", "mbarrier"),
    ],
)
def test_every_defect_is_found(name: str, kind: str | None, tmp_path: Path) -> None:
    unseen = script()
    findings = unseen.on_emulator(unseen.variant(name, tmp_path))
    assert [f["kind"] for f in findings][:1] == ([] if kind is None else [kind])
    assert name in unseen.VARIANTS
