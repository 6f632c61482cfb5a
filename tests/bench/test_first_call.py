"""``benchmarks/first_call_h200.py``: whose cache a process finds, what counts as missed, and a child that fails."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.project import load


@pytest.fixture
def script() -> Any:
    return load("first_call_h200")


def told(seconds, error=0.5, poisoned=True):
    return {"seconds": seconds, "import_s": 0.01, "microseconds": {"median": 9.0}, "error": error, "poisoned": poisoned}


def test_later_processes_find_the_cache_of_a_fresh_one_of_their_cell(script, monkeypatch):
    seen: list[Any] = []

    def run(samples, _at_once):
        seen.extend(samples)
        return [told(1.0 + i if i < 4 else i - 2.0) for i in range(len(samples))]

    monkeypatch.setattr(script, "run", run)
    (cells,) = script.measure(["matmul", "matmul_reduce"], fresh=2, later=3)
    first, then = seen[:4], seen[4:]
    assert len({sample.cache for sample in first}) == 4, "each with a cache of its own"
    for name in ("matmul", "matmul_reduce"):
        (cache,) = {sample.cache for sample in then if sample.cell == name}
        assert cache in {sample.cache for sample in first if sample.cell == name}
    assert cells[0]["fresh_s"] == {"median": 3.0, "low": 1.0, "high": 3.0, "samples": [1.0, 3.0]}
    assert cells[1]["later_s"]["samples"] == [3.0, 5.0, 7.0]
    assert cells[1]["later_s"]["median"] == 5.0


def test_two_trees_take_turns_each_with_caches_of_its_own(script, monkeypatch, tmp_path):
    seen: list[Any] = []

    def run(samples, _at_once):
        seen.extend(samples)
        return [told(2.0 if sample.sources == tmp_path else 1.0) for sample in samples]

    monkeypatch.setattr(script, "run", run)
    own, beside = script.measure(["matmul"], fresh=1, later=2, beside=tmp_path)
    assert [sample.sources == tmp_path for sample in seen] == [False, True] * 3
    assert len({(sample.sources, sample.cache) for sample in seen}) == 2
    assert (own[0]["later_s"]["samples"], beside[0]["later_s"]["samples"]) == ([1.0, 1.0], [2.0, 2.0])


def cell(script, *, fresh=1.0, later=0.02, error=0.5, poisoned=True):
    return {"call": "x", "fresh_s": script.spread([fresh]), "later_s": script.spread([later]),
            "error": {"value": error, "bound": 1.0}, "poisoned": poisoned}  # fmt: skip


def test_what_is_missed_is_told(script):
    most = {"fresh": 1.5, "later": 0.05}
    assert script.missed([cell(script)], most) == []
    changed: dict[str, Any]
    for changed in ({"fresh": 1.6}, {"later": 0.06}, {"error": 1.1}, {"error": math.nan}, {"poisoned": False},
                    {"later": math.inf}):  # fmt: skip
        assert len(script.missed([cell(script, **changed)], most)) == 1, changed


def test_a_process_that_fails_is_no_sample(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "__file__", str(tmp_path / "child.py"))
    (tmp_path / "child.py").write_text(
        "import sys\nprint('ready', flush=True)\nassert sys.stdin.readline() == 'go\\n'\n"
        "assert sys.argv[-1] != 'broken', 'no luck'\n"
        'print(\'{"seconds": 0.5, "again": 0.1, "error": 0.2, "poisoned": true}\')\n'
    )
    samples = [script.Sample(name, tmp_path) for name in ("good", "broken")]
    good, broken = script.run(samples)
    assert good["seconds"] == 0.5
    assert broken["error"] == math.inf
    assert "no luck" in capsys.readouterr().out
