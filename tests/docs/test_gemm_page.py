"""docs/evidence/ladder-gemm.md is what its script writes from the committed evidence, and that is of this generator."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re

import pytest

from tests.project import ROOT, load
from warploom.kernels.gemm.ladder import LADDER

TEXT = (ROOT / "docs" / "evidence" / "ladder-gemm.md").read_text(encoding="utf-8")


def test_the_page_is_up_to_date() -> None:
    assert load("gemm_page").main(["--check"]) == 0


def test_nothing_is_left_open() -> None:
    assert not re.search(r"@[A-Z0-9]+@", TEXT)


@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_every_rung_and_size_is_there(kind: str) -> None:
    rows = json.loads((ROOT / f"benchmarks/results/h200/gemm-{kind}.json").read_text(encoding="utf-8"))["rows"]
    for row in rows:
        assert [cell["n"] for cell in row["gpu"]["cells"]] == [1024, 2048, 4096, 8192, 16384]
        assert f"| {row['rung']} |" in TEXT
    for rung in LADDER.rungs:
        assert f"### {rung.name}\n" in TEXT


def test_timed_rungs_are_the_ladders() -> None:
    """Evidence of a configuration that a rung no longer has is out of date."""
    configs = {rung.key: rung.config for rung in LADDER.rungs}
    for kind in ("f16", "f32"):
        rows = json.loads((ROOT / f"benchmarks/results/h200/gemm-{kind}.json").read_text(encoding="utf-8"))["rows"]
        for row in rows:
            if row["rung"] in configs:
                config = configs[row["rung"]]
                flags = ("tile_m", "tile_n", "tile_k", "warp_m", "warp_n", "stages", "block_stride")
                assert [row["config"][name] for name in flags] == [getattr(config, name) for name in flags]


def test_static_evidence_is_of_this_generator() -> None:
    """One kernel compiled anew has the committed figures (where the same NVRTC is installed)."""
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("needs cuda.core")
    static = load("gemm_static")
    evidence = json.loads(static.EVIDENCE.read_text(encoding="utf-8"))
    if ".".join(map(str, load("ladder_static").nvrtc_version())) != evidence["nvrtc"]:
        pytest.skip("another NVRTC")
    (subject,) = [s for s in static.subjects() if s.name == "02 f16 sm_80"]
    assert json.loads(json.dumps(subject.figures())) == evidence["kernels"][subject.name]
