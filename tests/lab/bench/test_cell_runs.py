"""What the scripts of cells share."""

import json

import pytest

from tests.project import load
from warploom.measure.timing import Measured, Spread


@pytest.mark.parametrize(("wanted", "status"), [(2, 0), (3, 1)])
def test_a_run_writes_what_it_has_after_each_cell(tmp_path, capsys, wanted, status):
    file, written = tmp_path / "new" / "cells.json", []

    def timed(cell):
        written.append(len(json.loads(file.read_text())["cells"]) if file.exists() else 0)
        return {"speed": cell}

    def missed(found):
        return [f"{c['speed']} is slow" for c in found if c["speed"] < wanted]

    run = load("cell_runs").measured
    assert run([2, 4, 5], timed, lambda c: f"cell {c['speed']}", missed, file, {"baseline": "1.0"}) == status
    assert written == [0, 1, 2]
    kept = json.loads(file.read_text())
    assert [c["speed"] for c in kept["cells"]] == [2, 4, 5]
    assert kept["environment"]["baseline"] == "1.0"
    assert kept["missed"] == ["2 is slow"] * status
    assert "cell 4" in capsys.readouterr().out


def test_of_others_one_may_fail(monkeypatch):
    torch, runs = pytest.importorskip("torch"), load("cell_runs")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(runs, "graphed", lambda candidate, *_: candidate)
    monkeypatch.setattr(runs, "clock", lambda: None)
    timed = Measured(Spread.of([2.0]), None, (2.0,))
    monkeypatch.setattr(runs, "measure", lambda candidates, *_, **__: {c.name: timed for c in candidates})
    sets = [{"q": torch.zeros(2)}, {"q": torch.zeros(2)}]

    def broken(x):
        raise RuntimeError("no kernel\nfor this")

    named = {"warploom": (lambda x: x["q"], sets), "baseline": (lambda x: x["q"], sets), "broken": (broken, sets)}
    turns = runs.in_turns(
        named, lambda name, out: 0.5 if name == "warploom" else None, 3, others=["baseline", "broken"]
    )
    assert (turns.error, turns.failed) == ({"warploom": 0.5}, {"broken": "RuntimeError: no kernel"})
    assert turns.tflops(1e12)["warploom"]["median"] == 1.0, "two calls in two seconds"
    assert set(turns.ratio()) == {"baseline"}
    with pytest.raises(RuntimeError, match="no kernel"):
        runs.in_turns({"warploom": (broken, sets)}, lambda *_: 0.5, 3)


def test_figures_hold_cells_or_their_mean():
    runs = load("cell_runs")
    cells = [{"cell": f"d{d}", "head_dim": d, "ratio": {"baseline": {"median": r}}} for d, r in ((64, 0.9), (128, 1.6))]
    alone, narrow = runs.Figure("baseline", 1.0), {"head_dim": (64,)}
    assert runs.below(cells, [alone]) == ["d64: 0.9 × baseline, wanted 1.0"]
    assert runs.below(cells, [runs.Figure("other", 9.0), runs.Figure("baseline", 0.9, narrow)]) == []
    assert runs.below(cells, [runs.Figure("baseline", 1.1, mean=2), runs.Figure("baseline", 9.0, mean=3)]) == []
    (said,) = runs.below(cells, [runs.Figure("baseline", 1.3, mean=2)])
    assert said.startswith("1.200 × baseline, wanted 1.3 in the mean")
    wrong = [{"cell": "d64", "error": {"ours": float("nan"), "baseline": 1.5, "right": 1.0}}]
    assert runs.wrong(wrong, {"baseline": 2.0}) == ["ours is wrong at d64: nan"]
