"""``benchmarks/ladders.py``: what it refuses, and a measurement that is written and held against targets."""

import json

import pytest
from typer.testing import CliRunner

from tests.project import load
from warploom.cuda.device import has_gpu


@pytest.fixture
def ladders():
    """Run the script with some arguments."""
    return lambda *arguments: CliRunner().invoke(load("ladders").app, list(arguments))


@pytest.mark.skipif(has_gpu(), reason="for machines without a GPU")
@pytest.mark.parametrize("words", [["attention"], ["gemm"], ["gemm", "--tuned", "--rung", "03"]])
def test_a_gpu_is_needed(ladders, words):
    result = ladders(*words)
    assert result.exit_code == 2
    assert "GPU" in result.stderr


@pytest.mark.parametrize("option", ["--data", "--load"])
def test_what_products_are_timed_on_and_how_has_names(ladders, option):
    result = ladders("gemm", option, "zeros")
    assert result.exit_code == 2
    assert f"{option} takes" in result.stderr
    assert "'zeros'" in result.stderr


@pytest.mark.parametrize("family", ["attention", "gemm"])
def test_a_broken_targets_file_is_named(ladders, tmp_path, family):
    file = tmp_path / "targets.json"
    file.write_text("{")
    result = ladders(family, "--targets", str(file))
    assert result.exit_code == 2
    assert "targets.json" in result.stderr


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "rung", "baseline", "size", "where"),
    [
        ("attention", "2", "torch_flash", ["--gpu-seq", "512"], {"seq": 512}),
        ("gemm", "02", "cublas", ["--gpu-n", "1024"], {"n": 1024}),
    ],
)
def test_it_writes_evidence_and_a_missed_target_is_exit_code_1(ladders, tmp_path, family, rung, baseline, size, where):
    pytest.importorskip("torch")
    targets, out = tmp_path / "targets.json", tmp_path / "result.json"
    for at_least, code in ((0.01, 0), (100.0, 1)):
        figure = {"rung": rung, "baseline": baseline, "where": where, "at_least": at_least}
        targets.write_text(json.dumps({family: [figure]}))
        result = ladders(family, "--rung", rung, *size, "--out", str(out), "--targets", str(targets))
        assert result.exit_code == code, result.output
    assert "target missed" in result.stderr
    assert json.loads(out.read_text())["rows"][0]["gpu"]["baselines"][baseline]
