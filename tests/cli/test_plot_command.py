"""``warploom plot`` and ``--plot``."""

import json

import pytest


def test_plot_of_a_file(invoke, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "a.svg"
    done = invoke("plot", "benchmarks/results/h200/attention-d128-bf16.json", "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "TFLOP/s drawn to" in done.stderr
    assert "NVIDIA H200" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"kernels": {}})])
def test_other_files_are_refused(invoke, tmp_path, text):
    file = tmp_path / "a.json"
    file.write_text(text, encoding="utf-8")
    done = invoke("plot", str(file), "--out", str(tmp_path / "a.svg"))
    assert done.exit_code == 2
    assert "error: " in done.stderr
    assert "a.json" in done.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"rungs": []}, "warploom ladder reduce's"),
        ({"rows": 5}, "has no rows"),
        ({"rows": [{"x": 1}]}, "are no rungs of a ladder"),
        ({"rows": [5]}, "are no rungs of a ladder"),
    ],
)
def test_results_that_are_no_ladder_with_a_picture(invoke, tmp_path, content, says):
    file = tmp_path / "a.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    done = invoke("plot", str(file), "--out", str(tmp_path / "a.svg"))
    assert done.exit_code == 2
    assert says in done.stderr
    assert "warploom ladder attention (or gemm) --json" in done.stderr


@pytest.mark.usefixtures("no_compiler")
def test_a_ladder_draws_itself(invoke, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "a.svg"
    options = ("--rung", "1,2", "--seq", "64", "--on", "cpu", "--set", "tile_n=16")
    done = invoke("ladder", "attention", *options, "--plot", str(out))
    assert done.exit_code == 0, done.output
    assert "2  swizzle" in out.read_text(encoding="utf-8")


def test_a_ladder_refuses_another_ending_before_it_runs(invoke, tmp_path):
    done = invoke("ladder", "attention", "--plot", str(tmp_path / "a.gif"))
    assert done.exit_code == 2
    assert ".svg, .png, .pdf" in done.stderr
    assert "rungs" not in done.stderr
