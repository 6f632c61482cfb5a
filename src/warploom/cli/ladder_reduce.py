"""``warploom ladder reduce``: the paper's experiment, a product of 16×16 tiles with its row maxima."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer

from warploom.cli.errors import explains_errors
from warploom.cli.options import JsonFile, On, on_gpu
from warploom.cli.output import console, listed, note, progress_bar, write_json
from warploom.cli.rungs import RungList, chosen_rungs


@explains_errors
def reduce(rung: RungList = None, on: On = "auto", json: JsonFile = None) -> None:
    """Row maxima of 16×16 products, in three ways.

    They go through shared memory, through shared memory done fairly, and stay in registers.

    Every rung runs on the emulator with all checks and is compiled for sm_90a; on a GPU it is timed in three settings:
    one warp per launch, a loop inside one warp, a grid that fills the GPU. Power is sampled over seconds through NVML
    (nvidia-ml-py). Exit code 1 if a rung is wrong.

    \b
    Examples:
      warploom ladder reduce
      warploom ladder reduce --rung 1w,4
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
    from warploom.bench.resources import missing_compiler

    rows = found["rungs"]
    _table("Row maxima of 16×16 products, one of them", _static, rows)
    if (reason := missing_compiler()) is not None:
        note(reason)
    if not timed:
        return
    _table("A launch of one warp (times a launch, energy as the paper has it: power × latency)", _launched, rows)
    _table("Operations inside the kernel: one warp, and every SM full", _inside, rows)
    for gpu, row in found["paper"].items():
        (slow, fast), (much, little) = row["latency_ms"], row["energy_mj"]
        note(
            f"the paper on an {gpu}: {slow * 1e3:.1f} and {fast * 1e3:.1f} µs a launch, {row['speed_up']} times as "
            f"fast; {much} and {little} mJ, {row['energy_gain']} times"
        )


def _table(title: str, cells: Callable[[dict[str, Any], dict[str, Any]], dict[str, str]], rows: list[Any]) -> None:
    """A line for each rung; ``cells`` gives head → text of a rung, beside the first one."""
    lines = [{"rung": row["rung"], "": row["name"]} | cells(row, rows[0]) for row in rows]
    console().print(listed(title, lines, ("rung", "")))


def _static(row: dict[str, Any], _: dict[str, Any]) -> dict[str, str]:
    compiled = row["compiled"]
    return {
        "ok": "yes" if row["right"] and not row["findings"] else "NO",
        "registers": str(compiled.get("registers", "–")),
        "shared": str(row["shared_bytes"]),
        "barriers": str(row["barriers"]),
        "shuffles": str(row["shuffles"]),
        "wavefronts": str(row["wavefronts"]),
        "conflicts": str(row["bank_conflicts"]),
        "SASS": str(compiled.get("instructions", "–")),
    }


def _launched(row: dict[str, Any], first: dict[str, Any]) -> dict[str, str]:
    one, base = row["launch"], first["launch"]
    return {
        "plain µs": f"{one['launch_s']['median'] * 1e6:.2f}",
        "×": f"{base['launch_s']['median'] / one['launch_s']['median']:.2f}",
        "graph µs": f"{one['graph_s']['median'] * 1e6:.3f}",
        "× ": f"{base['graph_s']['median'] / one['graph_s']['median']:.2f}",
        "mean of 1000 µs": f"{one['paper_protocol_s']['median'] * 1e6:.2f}",
        "W": _number(one.get("watts"), 1, "{:.0f}"),
        "mJ": _number(one.get("energy_per_operation_j"), 1e3, "{:.3f}"),
    }


def _inside(row: dict[str, Any], first: dict[str, Any]) -> dict[str, str]:
    loop, grid = row["loop"]["cycles_per_operation"], row["grid"]
    energy, base = grid.get("energy_per_operation_j"), first["grid"].get("energy_per_operation_j")
    return {
        "cycles/op": f"{loop['median']:.0f}",
        "×": f"{first['loop']['cycles_per_operation']['median'] / loop['median']:.2f}",
        "Gop/s": f"{grid['operations_per_s']['median'] / 1e9:.2f}",
        "× ": f"{grid['speed_up']['median']:.2f}",
        "W": _number(grid.get("watts"), 1, "{:.0f}"),
        "idle": _number(grid.get("idle_watts"), 1, "{:.0f}"),
        "nJ/op": _number(energy, 1e9, "{:.2f}"),
        "energy ×": f"{base / energy:.1f}" if base and energy else "–",
    }


def _number(value: float | None, factor: float, form: str) -> str:
    return "–" if value is None else form.format(value * factor)
