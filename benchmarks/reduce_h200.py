"""The reduction experiments on this machine's GPU, in one run of about two minutes.

    python benchmarks/reduce_h200.py [--only experiment,textbook,baselines] [--out FOLDER]

writes to ``$OUT`` (else to the folder out): ``reduce.json`` (the paper's experiment in its three settings, with energy
and ncu's counters), ``reduce-textbook.json`` (its own baseline, by ``wmma``, in the same settings), and what
``reduce_cells.py`` does. Exit code 1 if a result is wrong or below ``benchmarks/targets.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from reduce_cells import TARGETS, Reductions
from reduce_counters import add_counters
from textbook import measured

from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import write as write_json
from warploom_lab.bench.reduce import run_experiment
from warploom_lab.kernels.reduce.ladder import LADDER

Row = Mapping[str, Any]
IN_REGISTERS = ("3", "4", "5")


def below_experiment(found: Row) -> list[str]:
    """What of the paper's experiment is wrong or below target."""
    rows = {row["rung"]: row for row in found["rungs"]}
    wrong = [f"rung {key} is wrong on the emulator" for key, row in rows.items() if not row["right"] or row["findings"]]
    best = max(rows[key]["grid"]["speed_up"]["median"] for key in IN_REGISTERS)
    reached = best / rows["1w"]["grid"]["speed_up"]["median"]
    if reached < TARGETS["over_compiled"]:
        least = TARGETS["over_compiled"]
        wrong.append(f"in registers, grid filled: {reached:.2f} times the baseline as compiled, not {least}")
    return wrong


def main() -> int:
    """Run, write, print; the exit code."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="experiment,textbook,baselines", help="parts, with commas between")
    options = parser.parse_args()
    parts, wrong = options.only.split(","), list[str]()

    def write(name: str, found: object) -> None:
        write_json(options.out / name, {"targets": TARGETS, "result": found})

    def progress(text: str, done: float) -> None:
        print(f"{done:4.0%} {text}", flush=True)

    if "experiment" in parts:
        experiment = run_experiment(LADDER.rungs, True, progress)
        progress("counters", 0.9)
        add_counters(experiment)
        write("reduce.json", experiment)
        wrong += below_experiment(experiment)
        for row in experiment["rungs"]:
            print(row["rung"], row["launch"], row["loop"], row["grid"], sep="\n  ", flush=True)
        print(experiment.get("counters_refused", ""))
    if "textbook" in parts:
        progress("textbook", 0.3)
        baseline = measured()
        write("reduce-textbook.json", baseline)
        for key, row in baseline.items():
            print(key, row["launch"], row["loop"], row["grid"], sep="\n  ", flush=True)
    print("\n".join(wrong) if wrong else "every result right, every target reached")
    missed = Reductions().main(["--out", str(options.out)]) if "baselines" in parts else 0
    return int(bool(wrong) or missed)


if __name__ == "__main__":
    sys.exit(main())
