"""``warploom ladder reduce``: the paper's experiment, a product of 16×16 tiles with its row maxima."""

from __future__ import annotations

from typing import Any

import typer

from warploom.cli.errors import explains_errors
from warploom.cli.options import JsonFile, On, RungList, chosen_rungs, on_gpu
from warploom.cli.output import console, progress_bar, write_json


@explains_errors
def reduce(rung: RungList = None, on: On = "auto", json: JsonFile = None) -> None:
    """Row maxima of 16×16 products: through shared memory, done fairly, and in registers.

    Every rung runs on the emulator with all checks and is compiled for sm_90a; on a GPU it is timed in three settings:
    one warp per launch, a loop inside one warp, a grid that fills the GPU. Exit code 1 if a rung is wrong.

    \b
    Examples:
      warploom ladder reduce
      warploom ladder reduce --on gpu --json reduce.json
    """
    from warploom.bench.environment import environment
    from warploom.bench.reduce import run_experiment
    from warploom.kernels.reduce.ladder import LADDER

    timed = on_gpu(on)
    with progress_bar() as progress:
        found = run_experiment(chosen_rungs(LADDER, rung), timed, progress)
    if json != "-":
        _print(found, timed)
    if json is not None:
        write_json({"environment": environment()} | found, json)
    if any(not row["right"] or row["findings"] for row in found["rungs"]):
        raise typer.Exit(1)


def _print(found: dict[str, Any], timed: bool) -> None:
    from rich.table import Table

    table = Table(title="Row maxima of 16×16 products", title_justify="left", box=None, padding=(0, 2, 0, 0))
    heads = ["rung", "", "right", "registers", "shared", "barriers", "shuffles", "wavefronts", "conflicts", "SASS"]
    if timed:
        heads += ["launch µs", "graph µs", "paper's µs", "cycles/op", "Gop/s", "nJ/op", "×"]
    for head in heads:
        table.add_column(head, justify="left" if head in ("rung", "") else "right")
    base = found["rungs"][0].get("grid", {}).get("operations_per_s", {}).get("median", 0.0)
    for row in found["rungs"]:
        compiled = row["compiled"]
        cells = [row["rung"], row["name"], "yes" if row["right"] and not row["findings"] else "NO",
                 compiled.get("registers", "–"), row["shared_bytes"], row["barriers"], row["shuffles"],
                 row["wavefronts"], row["bank_conflicts"], compiled.get("instructions", "–")]  # fmt: skip
        if timed:
            launch, grid = row["launch"], row["grid"]
            rate, energy = grid["operations_per_s"]["median"], grid.get("energy_per_operation_j")
            cells += [f"{launch[key]['median'] * 1e6:.2f}" for key in ("launch_s", "graph_s")]
            cells += [f"{launch['paper_protocol_s'] * 1e6:.2f}", f"{row['loop']['cycles_per_operation']['median']:.0f}"]
            cells += [f"{rate / 1e9:.2f}", "–" if energy is None else f"{energy * 1e9:.2f}"]
            cells += [f"{rate / base:.1f}" if base else "–"]
        table.add_row(*map(str, cells))
    console().print(table)
