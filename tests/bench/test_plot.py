"""Ladders drawn from rows."""

import json
from pathlib import Path

import pytest

from warploom.bench import plot as plotting
from warploom.bench.plot import plot_ladder, result_title
from warploom.core.errors import ConfigError, UnsupportedDeviceError

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "attention-d128-bf16.json"


@pytest.fixture(scope="module")
def result():
    return json.loads(RESULT.read_text(encoding="utf-8"))


def static(result):
    return [{**row, "gpu": None} for row in result["rows"]]


def test_timed_rows_become_bars_with_their_figures_and_peers(result, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "deep" / "ladder.svg"
    assert plot_ladder(result["rows"], out, title=result_title(result)) == "TFLOP/s"
    text = out.read_text(encoding="utf-8")
    for row in result["rows"]:
        assert row["name"].partition(": ")[2] in text
        assert f">{row['gpu']['tflops']['median']:.0f}<" in text
    assert "torch flash" in text
    assert "seq 16384" in text
    assert "head_dim 128, bf16, NVIDIA H200" in text


def test_products_are_named_by_size_and_accumulators(result, tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        {**row, "rung": key, "name": f"{key}_Name", "config": {"dtype": "f16", "accumulate": "f16"},
         "gpu": {"cells": [{**row["gpu"]["cells"][0], "n": n} for n in (1024, 2048)]}}
        for key, row in zip(("01a", "02"), result["rows"], strict=False)
    ]  # fmt: skip
    for row in rows:
        for cell in row["gpu"]["cells"]:
            for other in ("seq", "batch", "heads"):
                cell.pop(other, None)
    plot_ladder(rows, tmp_path / "a.svg", size=2048, title=result_title({"rows": rows}))
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "f16, sums in f16; n 2048" in text
    assert "02  Name" in text


def test_the_same_rows_give_the_same_file(result, tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        plot_ladder(result["rows"][:4], tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_another_size_is_drawn_and_an_unknown_one_refused(result, tmp_path):
    pytest.importorskip("matplotlib")
    plot_ladder(result["rows"][:3], tmp_path / "a.svg", size=512)
    assert "seq 512" in (tmp_path / "a.svg").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="513 was not timed; sizes: 512, 1024"):
        plot_ladder(result["rows"], tmp_path / "a.svg", size=513)
    with pytest.raises(ConfigError, match="nothing was timed"):
        plot_ladder(static(result), tmp_path / "a.svg", size=512)


def test_without_a_gpu_conflicts_and_registers_are_drawn(result, tmp_path):
    pytest.importorskip("matplotlib")
    out, rows = tmp_path / "static.svg", static(result)
    spilling = rows[0]["targets"]["sm_90a"] | {"spill_bytes": 80}
    rows[0] = rows[0] | {"targets": rows[0]["targets"] | {"sm_90a": spilling}}
    assert plot_ladder(rows, out) == "wavefronts and registers"
    text = out.read_text(encoding="utf-8")
    assert "conflict-free" in text
    assert "sm_90a" in text
    assert "+80 B" in text


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
    with pytest.raises(UnsupportedDeviceError, match="pip install matplotlib"):
        plot_ladder(result["rows"], tmp_path / "a.svg")
