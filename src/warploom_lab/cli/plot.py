"""``warploom plot``: a ladder's JSON as bars; also what ``warploom ladder --plot`` draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from warploom.cli.errors import explains_errors
from warploom.cli.output import note

PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw the progression: an .svg, .png or .pdf (needs matplotlib)."),
]


@explains_errors
def plot(
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="What ladder --json wrote.")],
    out: Annotated[Path, typer.Option(help="File to draw: .svg, .png or .pdf.")],
    size: Annotated[
        int | None, typer.Option(help="Sequence length (or first size) to show; default the last one timed.")
    ] = None,
    title: Annotated[str, typer.Option(help="Title; default what the file says.")] = "",
) -> None:
    """Draw a ladder: TFLOP/s of every rung beside the baselines.

    Bars show the spread. A ladder without timings is drawn by its bank conflicts and registers.

    \b
    Examples:
      warploom plot benchmarks/results/h200/attention-d128-bf16.json --out ladder.svg
      warploom plot attention.json --size 4096 --out ladder.png
    """
    from warploom.core.errors import ConfigError

    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is no JSON: {error}") from error
    draw(_ladder(result, file), out, size, title)


def _ladder(result: Any, file: Path) -> dict[str, Any]:
    """A result whose rows are rungs that can be drawn. Raises ConfigError that says what else the file holds."""
    from warploom.core.errors import ConfigError

    wanted = "give a file that warploom ladder attention (or gemm) --json wrote"
    if isinstance(result, dict) and "rungs" in result:
        raise ConfigError(f"{file} is warploom ladder reduce's, in cycles, of which there is no picture: {wanted}")
    rows = result.get("rows") if isinstance(result, dict) else None
    if not isinstance(rows, list):
        raise ConfigError(f"{file} has no rows: {wanted}")
    for row in rows:
        if not isinstance(row, dict) or not {"rung", "name", "config", "wavefronts", "gpu"} <= set(row):
            raise ConfigError(f"the rows of {file} are no rungs of a ladder: {wanted}")
    return result


def draw(result: dict[str, Any], out: Path, size: int | None = None, title: str = "") -> None:
    """The rows of a ladder's result as a picture, and a note that says which."""
    from warploom_lab.bench.plot import plot_ladder, result_title

    drawn = plot_ladder(result["rows"], out, size=size, title=title or result_title(result))
    note(f"{drawn} drawn to {out}")
