"""The reduction experiment's figures: counters of an operation, what falls short of a target, the tables."""

from __future__ import annotations

from typing import Any

import pytest

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
    row = {
        "op": "max",
        "m": 1,
        "n": 1,
        "k": 128,
        "error": 0.5,
        "warploom_extra_bytes": 2**26,
        "over": {"torch": 1.5, "torch.compile": 1.4},
    }
    assert benchmark.below_baselines([row]) == []
    worse: dict[str, Any]
    for worse in ({"error": float("nan")}, {"warploom_extra_bytes": 2**26 + 1}, {"over": {"torch": 2.0, "c": 1.2}}):
        assert len(benchmark.below_baselines([row | worse])) == 1


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
