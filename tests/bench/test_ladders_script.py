"""``benchmarks/ladders.py``: what it refuses, and a measurement that is written and held against targets."""

import json
from types import SimpleNamespace

import pytest
from tests.project import load
from typer.testing import CliRunner

from warploom.bench.ladder import LadderResult
from warploom.bench.power import Power
from warploom.bench.timing import Candidate
from warploom.cuda.device import has_gpu
from warploom.kernels.ladder import Rung


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


def test_rungs_and_peers_run_for_power_at_the_last_size(monkeypatch):
    script, prepared = load("ladders"), []

    def prepare(rung):
        prepared.append(rung.key)
        return Candidate(f"rung {rung.key}", lambda i: i)

    case = SimpleNamespace(label={"seq": 512}, flops=7 * 10**14, work=SimpleNamespace(sets=1, stream=0),
                           candidate=prepare, peers=[Candidate("peer", lambda i: i)])  # fmt: skip
    device = SimpleNamespace(pci_bus_id="")
    monkeypatch.setattr(script, "cuda_core", lambda: SimpleNamespace(Device=lambda index: device))
    monkeypatch.setattr(script, "EventClock", lambda stream: None)
    watts = {"rung 1": Power(700.0, 1500.0, 1.0), "peer": None}
    monkeypatch.setattr(script, "power_of", lambda candidate, *_: watts[candidate.name])
    cells = [{"seq": seq, "peers": {"peer": {"tflops": 1.0}}} for seq in (256, 512)]
    rows = [{"rung": key, "name": key, "gpu": {**of[-1], "cells": of}} for key, of in (("1", cells), ("2", cells[:1]))]
    rungs = [Rung(row["rung"], row["name"], "", None) for row in rows]
    script.add_power(script.Run(SimpleNamespace(gpu_case=lambda *_: case), rungs, [256, 512]), LadderResult({}, rows))
    assert prepared == ["1"], "the other does not fit the last size"
    for cell in (rows[0]["gpu"], rows[0]["gpu"]["cells"][1]):
        assert cell["power"]["tflop_per_joule"] == 1.0
        assert cell["peers"] == {"peer": {"tflops": 1.0, "power": None}}
    assert "power" not in rows[1]["gpu"] | rows[0]["gpu"]["cells"][0]
    header, body = load("page_tables").power_cells(rows)
    assert header[2] == "TFLOP/s, seq 512"
    assert body == [["1", "1", "700", "700", "1500", "1.000"]]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "rung", "peer", "size", "where"),
    [
        ("attention", "2", "torch_flash", ["--gpu-seq", "512"], {"seq": 512}),
        ("gemm", "02", "cublas", ["--gpu-n", "1024"], {"n": 1024}),
    ],
)
def test_it_writes_evidence_and_a_missed_target_is_exit_code_1(ladders, tmp_path, family, rung, peer, size, where):
    pytest.importorskip("torch")
    targets, out = tmp_path / "targets.json", tmp_path / "result.json"
    for at_least, code in ((0.01, 0), (100.0, 1)):
        figure = {"rung": rung, "peer": peer, "where": where, "at_least": at_least}
        targets.write_text(json.dumps({family: [figure]}))
        result = ladders(family, "--rung", rung, *size, "--out", str(out), "--targets", str(targets))
        assert result.exit_code == code, result.output
    assert "target missed" in result.stderr
    assert json.loads(out.read_text())["rows"][0]["gpu"]["peers"][peer]
