"""The reduction experiment's figures: counters of an operation, what falls short of a target, the tables."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tests.lab.bench.gpu import FakeGpu
from tests.project import load
from warploom_lab.bench.reduce import PAPER, loop_opcodes
from warploom_lab.cli import ladder
from warploom_lab.kernels.reduce.ladder import LADDER


def script() -> Any:
    return load("reduce_h200")


def experiment(speed_up: float) -> dict[str, Any]:
    spread = {"median": 2e-6, "low": 1e-6, "high": 3e-6}
    rows = [
        {
            "rung": rung.key,
            "name": rung.name,
            "right": True,
            "findings": [],
            "shared_bytes": 1024,
            "barriers": 1,
            "shuffles": 0,
            "wavefronts": 144,
            "bank_conflicts": 120,
            "compiled": {"registers": 22},
            "launch": {"launch_s": spread, "graph_s": spread, "paper_protocol_s": spread, "watts": None},
            "loop": {"cycles_per_operation": {"median": 100.0 * (1 + number)}},
            "grid": {
                "operations_per_s": {"median": 1e9},
                "speed_up": {"median": speed_up if number > 1 else 1.0},
                "watts": 250.0,
                "idle_watts": 120.0,
                "energy_per_operation_j": 5e-8,
            },
        }
        for number, rung in enumerate(LADDER.rungs)
    ]
    return {"rungs": rows, "paper": PAPER}


def test_what_falls_short_is_named():
    benchmark = script()
    assert benchmark.below_experiment(experiment(12.0)) == []
    assert "6.00 times the baseline as compiled" in benchmark.below_experiment(experiment(6.0))[0]
    wrong = experiment(12.0)
    wrong["rungs"][2]["right"] = False
    assert "wrong on the emulator" in benchmark.below_experiment(wrong)[0]


def test_reductions_that_fall_short_are_named():
    row = {
        "op": "max",
        "cell": "max at 1×1×128",
        "k": 128,
        "error": {"warploom": 0.5},
        "warploom_extra_bytes": 2**26,
        "over": {"torch": 1.5, "torch.compile": 1.4},
    }
    missed = load("reduce_cells").Reductions().missed
    assert missed([row]) == []
    worse: dict[str, Any]
    for worse in (
        {"error": {"warploom": float("nan")}},
        {"warploom_extra_bytes": 2**26 + 1},
        {"over": {"torch": 2.0, "c": 1.2}},
    ):
        assert len(missed([row | worse])) == 1


def once(gpu: FakeGpu, run: Any) -> Any:
    """The call, computed at its first time alone."""
    result = cache(run)

    def call(given: Any) -> Any:
        gpu.spend(0.02)
        return result(given)

    return call


def test_reductions_are_checked_and_written_as_pages_ask(monkeypatch, tmp_path):
    """The script from end to end on the CPU, small, with its kernels on the emulator."""
    torch = pytest.importorskip("torch")
    script, on_cpu = load("reduce_cells"), torch.randn
    cells = [script.Cell(op, 24, 40, 128) for op in (*script.OPS, script.LOSS, script.SEARCH)]
    monkeypatch.setattr(script.Reductions, "cells", lambda self: cells)
    monkeypatch.setattr(script, "BLOCK", 16)
    monkeypatch.setattr(script, "extra_bytes", lambda call: 2**20)
    monkeypatch.setattr(torch, "randn", lambda *shape, device, dtype: on_cpu(*shape, dtype=dtype))
    monkeypatch.setattr(torch, "compile", lambda function: function)
    gpu = FakeGpu(monkeypatch)
    monkeypatch.setattr(gpu, "poison", lambda result: None)
    made = script.Reductions.trial

    def trial(self, cell):
        found = made(self, cell)
        return replace(found, calls={name: once(gpu, run) for name, run in found.calls.items()})

    monkeypatch.setattr(script.Reductions, "trial", trial)
    code = script.Reductions().main(["--out", str(tmp_path), "--rounds", "1"], lambda: gpu)
    found = json.loads((tmp_path / "matmul-reduce.json").read_text(encoding="utf-8"))
    assert not [text for text in found["missed"] if "wrong" in text]
    assert code == int(bool(found["missed"]))
    result = found["result"]
    assert [row["op"] for row in result["against_torch"]] == list(script.OPS)
    assert set(result["against_torch"][0]["over"]) == {"torch", "torch.compile"}
    assert result["against_torch"][0]["over mma.sync"] > 0
    assert 0 < result["loss_against_torch"]["error"] < 1e-3
    assert result["search_ten_millions"]["vectors"] == 40
    assert result["search_ten_millions"]["s"]["median"] > 0
    assert "max" in load("page_sections").made("reductions", found)


def test_the_tables_of_a_gpu(capsys):
    ladder._report_reduce(experiment(12.0), True)  # pyright: ignore[reportPrivateUsage]
    shown = capsys.readouterr()
    assert "12.00" in shown.out
    assert "6.1 times as fast" in shown.err


@pytest.mark.parametrize(("key", "loads", "shuffles"), [("1", 16, 0), ("4", 0, 4), ("5", 0, 2)])
def test_sass_has_the_reads_and_shuffles_that_the_rung_says(key, loads, shuffles):
    counts = loop_opcodes(LADDER.rung(key).config, "sm_90a")
    if counts is None:
        pytest.skip("NVRTC or nvdisasm is missing")
    assert counts.get("LDS", 0) == loads
    assert counts.get("SHFL", 0) == shuffles
    assert counts["HMMA"] == 2
    assert not {"PRMT", "SEL", "SHF"} & set(counts), "the permutation of Figure 2 only renames registers"
