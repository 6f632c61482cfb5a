"""``warploom ladder reduce`` without a GPU."""

from __future__ import annotations

import json

from warploom.bench import reduce, resources
from warploom.core.errors import UnsupportedDeviceError
from warploom.kernels.reduce.ladder import LADDER


def test_every_rung_is_shown_with_what_the_paper_counts(invoke, tmp_path, monkeypatch):
    def missing(*_):
        raise UnsupportedDeviceError("no compiler")

    monkeypatch.setattr(resources, "compiled", missing)
    monkeypatch.setattr(reduce, "inspect_program", missing)
    out = tmp_path / "rows.json"
    done = invoke("ladder", "reduce", "--on", "cpu", "--json", str(out))
    assert done.exit_code == 0, done.output
    assert all(rung.name in done.output for rung in LADDER.rungs)
    found = json.loads(out.read_text())
    rows = {row["rung"]: row for row in found["rungs"]}
    assert list(rows) == [rung.key for rung in LADDER.rungs]
    assert all(row["right"] and not row["findings"] for row in rows.values())
    assert [rows[k]["shared_bytes"] for k in ("1", "2", "4")] == [1024, 1024, 0]
    assert [rows[k]["barriers"] for k in ("1", "4")] == [1, 0]
    assert rows["1"]["bank_conflicts"] > 0
    assert rows["2"]["bank_conflicts"] == 0


def test_one_rung_alone(invoke):
    done = invoke("ladder", "reduce", "--rung", "4", "--on", "cpu")
    assert done.exit_code == 0
    assert LADDER.rung("4").name in done.output
    assert LADDER.rung("1").name not in done.output
