"""Ladders drawn from rows."""

import json

import pytest

from tests.project import ROOT
from warploom.core.errors import ConfigError, UnsupportedDeviceError
from warploom_lab.bench import plot as plotting
from warploom_lab.bench.plot import plot_ladder, result_title


@pytest.fixture(scope="module")
def result():
    return json.loads((ROOT / "benchmarks/results/h200/attention-d128-bf16.json").read_text(encoding="utf-8"))


@pytest.fixture
def draw(tmp_path):
    """Rows as an SVG, and what it says is drawn."""
    pytest.importorskip("matplotlib")
    out = tmp_path / "deep" / "ladder.svg"

    def drawn(rows, **options):
        what = plot_ladder(rows, out, **options)
        return out.read_text(encoding="utf-8"), what

    return drawn


def static(result):
    return [{**row, "gpu": None} for row in result["rows"]]


def test_products_are_named_by_size_and_accumulators(result, draw):
    cell = {k: v for k, v in result["rows"][0]["gpu"]["cells"][0].items() if k not in ("seq", "batch", "heads")}
    rows = [
        {
            **row,
            "rung": key,
            "name": f"{key}_Name",
            "config": {"dtype": "f16", "accumulate": "f16"},
            "gpu": {"cells": [cell | {"n": n} for n in (1024, 2048)]},
        }
        for key, row in zip(("01a", "02"), result["rows"], strict=False)
    ]
    text, _ = draw(rows, size=2048, title=result_title({"rows": rows}))
    assert "f16, sums in f16; n 2048" in text
    assert "02  Name" in text


def test_another_size_is_drawn_and_an_unknown_one_refused(result, draw):
    text, _ = draw(result["rows"][:3], size=512)
    assert "seq 512" in text
    assert draw(result["rows"][:3], size=512)[0] == text
    with pytest.raises(ConfigError, match="513 was not timed; sizes: 512, 1024"):
        draw(result["rows"], size=513)
    with pytest.raises(ConfigError, match="nothing was timed"):
        draw(static(result), size=512)


def test_without_a_gpu_conflicts_and_registers_are_drawn(result, draw):
    rows = static(result)
    spilling = rows[0]["targets"]["sm_90a"] | {"spill_bytes": 80}
    rows[0] = rows[0] | {"targets": rows[0]["targets"] | {"sm_90a": spilling}}
    text, what = draw(rows)
    assert what == "wavefronts and registers"
    for said in ("conflict-free", "sm_90a", "+80 B"):
        assert said in text


def test_a_legend_says_which_instructions_multiply_where_both_are_drawn(result, draw):
    older, newer = ([r for r in result["rows"] if r["rung"].startswith("h") is newest] for newest in (False, True))
    for rows, shown in ((older[:2], False), (newer[:2], False), ([older[0], newer[0]], True)):
        assert (">wgmma<" in draw(rows, size=512)[0], ">mma.sync<" in draw(rows, size=512)[0]) == (shown, shown)


def test_png_is_a_png(result, tmp_path):
    pytest.importorskip("matplotlib")
    plot_ladder(result["rows"][:2], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


def test_endings_and_rows_are_checked(result, tmp_path):
    with pytest.raises(ConfigError, match=r"ends in \.svg, \.png, \.pdf, not '\.gif'"):
        plot_ladder(result["rows"], tmp_path / "a.gif")
    with pytest.raises(ConfigError, match="no rows"):
        plot_ladder([], tmp_path / "a.svg")


def test_a_missing_matplotlib_is_named(result, tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(plotting.importlib, "import_module", missing)
    with pytest.raises(UnsupportedDeviceError, match=r"matplotlib.*\[plot\]"):
        plot_ladder(result["rows"], tmp_path / "a.svg")
