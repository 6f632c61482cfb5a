"""``warploom plot`` and ``--plot``."""

import json

import pytest

from tests.project import ROOT

LADDER = ROOT / "benchmarks/results/h200/attention-d128-bf16.json"


def test_timed_rows_become_bars_with_their_figures_and_baselines(invoke, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "deep" / "a.svg"
    done = invoke("plot", str(LADDER), "--out", str(out))
    assert done.exit_code == 0, done.output
    assert "TFLOP/s drawn to" in done.stderr
    text = out.read_text(encoding="utf-8")
    for row in json.loads(LADDER.read_text(encoding="utf-8"))["rows"]:
        assert row["name"].partition(": ")[2] in text
        assert f">{row['gpu']['tflops']['median']:.0f}<" in text
    for said in ("torch flash", "seq 16384", "head_dim 128, bf16, NVIDIA H200"):
        assert said in text


WANTED = "warploom ladder attention (or gemm) --json"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", ["is no JSON"]),
        ("[]", ["has no rows", WANTED]),
        ('{"kernels": {}}', ["has no rows", WANTED]),
        ('{"rungs": []}', ["warploom ladder reduce's", WANTED]),
        ('{"rows": 5}', ["has no rows", WANTED]),
        ('{"rows": [{"x": 1}]}', ["are no rungs of a ladder", WANTED]),
        ('{"rows": [5]}', ["are no rungs of a ladder", WANTED]),
    ],
)
def test_files_that_are_no_ladder_with_a_picture(invoke, tmp_path, text, says):
    file = tmp_path / "a.json"
    file.write_text(text, encoding="utf-8")
    done = invoke("plot", str(file), "--out", str(tmp_path / "a.svg"))
    assert done.exit_code == 2
    for part in ("error: ", "a.json", *says):
        assert part in done.stderr


@pytest.mark.usefixtures("no_compiler")
def test_a_ladder_draws_itself(invoke, tmp_path):
    pytest.importorskip("matplotlib")
    out = tmp_path / "a.svg"
    options = ("--rung", "1,2", "--seq", "64", "--on", "cpu", "--set", "tile_n=16")
    done = invoke("ladder", "attention", *options, "--plot", str(out))
    assert done.exit_code == 0, done.output
    assert "2  swizzle" in out.read_text(encoding="utf-8")
