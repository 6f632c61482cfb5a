"""What the scripts of cells share."""

import json

import pytest
from tests.project import load


@pytest.mark.parametrize(("wanted", "status"), [(2, 0), (3, 1)])
def test_a_run_writes_what_it_has_after_each_cell(tmp_path, capsys, wanted, status):
    file, written = tmp_path / "new" / "cells.json", []

    def timed(cell):
        written.append(len(json.loads(file.read_text())["cells"]) if file.exists() else 0)
        return {"speed": cell}

    def missed(found):
        return [f"{c['speed']} is slow" for c in found if c["speed"] < wanted]

    run = load("cell_runs").measured
    assert run([2, 4, 5], timed, lambda c: f"cell {c['speed']}", missed, file, {"peer": "1.0"}) == status
    assert written == [0, 1, 2]
    kept = json.loads(file.read_text())
    assert [c["speed"] for c in kept["cells"]] == [2, 4, 5]
    assert kept["environment"]["peer"] == "1.0"
    assert kept["missed"] == ["2 is slow"] * status
    assert "cell 4" in capsys.readouterr().out
