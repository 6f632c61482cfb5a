"""``benchmarks/first_call_h200.py``: whose cache a process finds, what counts as missed, and a child that fails."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.project import load


@pytest.fixture
def script() -> Any:
    return load("first_call_h200")


def test_fresh_processes_have_a_cache_of_their_own_and_later_ones_find_one_of_their_cell_and_tree(
    script, monkeypatch, tmp_path
):
    seen: list[Any] = []

    def run(samples, _at_once):
        seen.extend(samples)
        seconds = [(2.0 if sample.sources == tmp_path else 1.0) + i for i, sample in enumerate(samples)]
        return [
            {"seconds": s, "import_s": 0.01, "microseconds": {"median": 9.0}, "error": 0.5, "poisoned": True}
            for s in seconds
        ]

    monkeypatch.setattr(script, "run", run)
    own, beside = script.measure(["matmul", "matmul_reduce"], fresh=2, later=3, beside=tmp_path)
    fresh, later = seen[:8], seen[8:]
    assert [sample.sources == tmp_path for sample in seen] == [False, True] * 10, "trees take turns"
    assert len({sample.cache for sample in fresh}) == 8
    assert len({sample.cache for sample in later}) == 4
    for one in later:
        assert any((one.cell, one.sources, one.cache) == (x.cell, x.sources, x.cache) for x in fresh)
    assert own[0]["fresh_s"] == {"median": 5.0, "low": 1.0, "high": 5.0, "samples": [1.0, 5.0]}
    assert beside[1]["later_s"] == {"median": 17.0, "low": 13.0, "high": 21.0, "samples": [13.0, 17.0, 21.0]}


def cell(script, *, fresh=1.0, later=0.02, error=0.5, poisoned=True):
    return {
        "call": "x",
        "fresh_s": script.spread([fresh]),
        "later_s": script.spread([later]),
        "error": {"value": error, "bound": 1.0},
        "poisoned": poisoned,
    }


def test_what_is_missed_is_told(script):
    most = {"fresh": 1.5, "later": 0.05}
    assert script.missed([cell(script)], most) == []
    changed: dict[str, Any]
    for changed in (
        {"fresh": 1.6},
        {"later": 0.06},
        {"error": 1.1},
        {"error": math.nan},
        {"poisoned": False},
        {"later": math.inf},
    ):
        assert len(script.missed([cell(script, **changed)], most)) == 1, changed


def test_a_process_that_fails_is_no_sample(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "__file__", str(tmp_path / "child.py"))
    (tmp_path / "child.py").write_text(
        "import sys\nprint('ready', flush=True)\nassert sys.stdin.readline() == 'go\\n'\n"
        "assert sys.argv[-1] != 'broken', 'no luck'\n"
        'print(\'{"seconds": 0.5, "again": 0.1, "error": 0.2, "poisoned": true}\')\n'
    )
    good, broken = script.run([script.Sample(name, tmp_path) for name in ("good", "broken")])
    assert (good["seconds"], broken["error"]) == (0.5, math.inf)
    assert "no luck" in capsys.readouterr().out
