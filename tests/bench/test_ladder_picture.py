"""``benchmarks/ladder_picture.py``: every rung's figure stands in the picture, which the figures alone determine."""

import json

import pytest
from tests.project import ROOT, load

pytest.importorskip("matplotlib")
RESULTS = ROOT / "benchmarks" / "results" / "h200"


@pytest.mark.parametrize(
    ("file", "size", "says"),
    [
        ("attention-d128-bf16.json", None, ["torch flash", "seq 16384", "head_dim 128, bf16, NVIDIA H200"]),
        ("attention-d128-bf16.json", 512, ["seq 512"]),
        ("gemm-f16.json", 8192, ["cublas", "n 8192", "f16, sums in f16, NVIDIA H200"]),
    ],
)
def test_rungs_become_bars_with_their_figures_and_peers(file, size, says, tmp_path):
    result = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    for name in ("a.svg", "b.svg"):
        load("ladder_picture").draw_ladder(result, tmp_path / name, size)
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for row in result["rows"]:
        cells = [c for c in (row["gpu"] or {"cells": []})["cells"] if size in (c.get("seq"), c.get("n"), None)]
        assert all(f">{cell['tflops']['median']:.0f}<" in text for cell in cells[-1:])
        assert not cells or row["name"].partition(": ")[2] in text
    assert all(word in text for word in says)
    assert (tmp_path / "b.svg").read_text(encoding="utf-8") == text
