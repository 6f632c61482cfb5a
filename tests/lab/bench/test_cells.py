"""Scripts of cells from end to end, on a GPU that is a simulated clock: checked on NaN, two loads, rows, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.lab.bench.gpu import FakeGpu
from tests.project import load
from warploom_lab.bench import cells as harness
from warploom_lab.bench.cells import CellScript, Figure, Load, Trial


@dataclass(frozen=True)
class Cell:
    """One product of two numbers, so many times."""

    name: str
    width: int


class Products(CellScript[Cell]):
    """Doubling, beside a baseline that may be slower, wrong or absent."""

    file, rounds = "products.json", 3
    baselines = ("baseline", "broken", "wrong")
    figures = (Figure("baseline", 1.5), Figure("baseline", 1.9, {"width": (64,)}, mean=1), Figure("best", 1.0))

    def __init__(self, speed: float = 2.0, change: Callable[[np.ndarray[Any, Any]], Any] = lambda out: None) -> None:
        self.speed, self.change = speed, change

    def cells(self) -> list[Cell]:
        return [Cell("d64", 64), Cell("d128", 128), Cell("d256", 256)]

    def trial(self, cell: Cell) -> Trial:
        sets = [{"x": np.full(cell.width, float(i))} for i in range(self.gpu.sets(1))]
        memory = np.zeros(cell.width)

        def call(seconds: float, factor: float) -> Callable[[Any], Any]:
            def run(x: dict[str, Any]) -> Any:
                self.gpu.now += seconds * (1 if self.gpu.rested else 2)
                np.multiply(x["x"], factor, out=memory, where=np.arange(cell.width) >= self.skipped)
                return memory

            return run

        def broken(x: Any) -> Any:
            raise RuntimeError("no kernel\nfor this")

        calls = {"warploom": call(1e-3, 2.0), "baseline": call(self.speed * 1e-3, 2.0), "wrong": call(1e-4, 3.0)}
        calls = {n: run for n, run in (calls | {"broken": broken}).items() if n in ("warploom", *self.given.baselines)}
        error = lambda name, out: float(np.abs(out - 2 * sets[0]["x"]).max() + 3 * (name == "wrong"))  # noqa: E731
        return Trial(calls, sets, error, 1e12, metered=("warploom",), facts={"width": cell.width})

    skipped = 0


def kept(folder: Any) -> dict[str, Any]:
    return json.loads((folder / "products.json").read_text())


def test_a_run_checks_times_under_both_loads_and_writes(tmp_path, monkeypatch, capsys) -> None:
    gpu = FakeGpu(monkeypatch)
    arguments = ["--out", str(tmp_path / "new"), "--baselines", "baseline", "broken"]
    assert Products().main(arguments, lambda: gpu) == 0
    found = kept(tmp_path / "new")
    assert found["missed"] == []
    assert found["environment"]["power_limit_watts"] == 700.0
    assert "commit" in found["environment"]
    assert [row["cell"] for row in found["cells"]] == ["d64", "d128", "d256"]
    row = found["cells"][0]
    assert row["width"] == 64
    assert row["error"] == {"warploom": 0.0, "baseline": 0.0}
    assert row["not_run"] == {"broken": "RuntimeError: no kernel"}
    assert row["tflops"]["warploom"]["median"] == pytest.approx(500.0), "in company calls take twice as long"
    assert row["rested"]["tflops"]["warploom"]["median"] == pytest.approx(1000.0)
    assert row["ratio"]["baseline"]["median"] == row["rested"]["ratio"]["best"]["median"] == pytest.approx(2.0)
    assert row["sm_mhz"]["warploom"] == 1500
    assert row["rested"]["sm_mhz"]["warploom"] == 1980
    assert row["power"] == {"warploom": {"watts": 600.0, "flops": 3e12}}
    assert min(gpu.pauses) >= 0.020
    assert len(gpu.pauses) == 3 * 2 * 3, "a pause before each rested sample"
    assert "d128" in capsys.readouterr().out


def test_what_is_not_reached_or_wrong_is_exit_code_1(tmp_path, monkeypatch) -> None:
    slow, few = Products(speed=1.2), ["--out", str(tmp_path), "--only", "d64", "--baselines", "baseline"]
    assert slow.main(few, lambda: FakeGpu(monkeypatch)) == 1
    each, mean = kept(tmp_path)["missed"]
    assert each == "d64: 1.2 × baseline, wanted 1.5"
    assert mean.startswith("1.200 × baseline, wanted 1.9 in the mean")
    assert Products().main([*few[:-1], "wrong"], lambda: FakeGpu(monkeypatch)) == 1
    found = kept(tmp_path)
    assert found["missed"] == ["wrong is wrong at d64: 3.00"]
    assert found["cells"][0]["not_run"] == {"wrong": "ValueError: its error is 3.00 of what is allowed"}


def test_elements_that_are_not_written_are_found(tmp_path, monkeypatch) -> None:
    """The memory of a result holds NaN before the call that is checked."""
    lazy = Products()
    lazy.skipped = 1
    assert lazy.main(["--out", str(tmp_path), "--baselines"], lambda: FakeGpu(monkeypatch)) == 1
    assert kept(tmp_path)["missed"][0] == "warploom is wrong at d64: nan"


def test_a_run_that_is_cut_keeps_its_rows(tmp_path, monkeypatch) -> None:
    class Cut(Products):
        def trial(self, cell: Cell) -> Trial:
            if cell.width == 256:
                raise KeyboardInterrupt
            return super().trial(cell)

    with pytest.raises(KeyboardInterrupt):
        Cut().main(["--out", str(tmp_path)], lambda: FakeGpu(monkeypatch))
    assert [row["cell"] for row in kept(tmp_path)["cells"]] == ["d64", "d128"]


def test_a_call_of_ours_that_fails_ends_the_run(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Products, "baselines", ())
    with pytest.raises(AttributeError):
        Products().main(["--out", str(tmp_path)], lambda: FakeGpu(monkeypatch))


def test_ways_of_a_cell_and_ratios_over_one_call(tmp_path, monkeypatch) -> None:
    class TwoWays(Products):
        figures = ()

        def trials(self, cell: Cell) -> dict[str, Trial]:
            trial = self.trial(cell)
            return {"forward": trial, "backward": harness.Trial(trial.calls, trial.sets, trial.error, over="baseline")}

        def rates(self, cell: Cell, load: Load) -> dict[str, Any]:
            return {"us": load.microseconds(), "ratio": load.ratio()}

        def line(self, row: dict[str, Any]) -> str:
            return self.line_head(row)

    arguments = ["--out", str(tmp_path), "--every", "2", "--baselines", "baseline"]
    assert TwoWays().main(arguments, lambda: FakeGpu(monkeypatch)) == 0
    first, last = kept(tmp_path)["cells"]
    assert (first["cell"], last["cell"]) == ("d64", "d256")
    assert set(first["error"]) == {
        f"{way} {name}" for way in ("forward", "backward") for name in ("warploom", "baseline")
    }
    assert first["forward"]["us"]["warploom"] == pytest.approx(2000.0)
    assert first["backward"]["rested"]["us"]["baseline"] == pytest.approx(2000.0)
    assert first["backward"]["ratio"] == {"warploom": {"median": 2.0, "low": 2.0, "high": 2.0}}


SCRIPTS = {
    "attention_cells": "Attention",
    "attention_backward_cells": "Gradients",
    "attention_data_h200": "AttentionData",
    "decode_cells": "DecodeCells",
    "few_queries_cells": "FewQueries",
    "head_cells": "Heads",
    "prefill_cells": "Prefill",
    "varlen_cells": "Varlen",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_names_its_cells_and_their_kernels(name: str, monkeypatch, capsys) -> None:
    """``--compile-only`` of the first and the last cell, without a compiler."""
    sources = []
    monkeypatch.setattr(harness, "build_all", lambda found, arch: sources.extend(found) or found)
    script = getattr(load(name), SCRIPTS[name])()
    assert script.main(["--compile-only", "--every", "1000"]) == 0
    assert sources
    assert capsys.readouterr().out.startswith("2 cells, ")
    names = [script.name_of(cell) for cell in script.cells()]
    assert len(set(names)) == len(names)
