"""``warploom ladder reduce`` without a GPU."""

from __future__ import annotations

import json

import pytest

from warploom.core.errors import UnsupportedDeviceError
from warploom_lab.bench import reduce
from warploom_lab.kernels.reduce.ladder import LADDER


@pytest.fixture
def ladder(invoke, monkeypatch):
    """What the command shows without a compiler."""

    def missing(*_):
        raise UnsupportedDeviceError("no compiler")

    monkeypatch.setattr("warploom_lab.bench.ladder.compiled", missing)
    monkeypatch.setattr(reduce, "inspect_program", missing)

    def run(*words):
        done = invoke("ladder", "reduce", "--on", "cpu", *words)
        assert done.exit_code == 0, done.output
        return done.output

    return run


def test_every_rung_is_shown_with_what_the_paper_counts(ladder, tmp_path):
    shown = ladder("--json", str(tmp_path / "rows.json"))
    assert all(rung.name in shown for rung in LADDER.rungs)
    rows = {row["rung"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rungs"]}
    assert list(rows) == [rung.key for rung in LADDER.rungs]
    assert all(row["right"] and not row["findings"] for row in rows.values())
    assert [rows[k]["shared_bytes"] for k in ("1", "2", "4")] == [1024, 1024, 0]
    assert [rows[k]["barriers"] for k in ("1", "4")] == [1, 0]
    assert rows["1"]["bank_conflicts"] > rows["2"]["bank_conflicts"] == 0


def test_one_rung_alone(ladder):
    shown = ladder("--rung", "4")
    assert LADDER.rung("4").name in shown
    assert LADDER.rung("1").name not in shown
