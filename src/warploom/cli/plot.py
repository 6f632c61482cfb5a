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
    file: Annotated[Path, typer.Argument(metavar="FILE.json", help="What ladder --json or bench wrote.")],
    out: Annotated[Path, typer.Option(help="File to draw: .svg, .png or .pdf.")],
    size: Annotated[
        int | None, typer.Option(help="Sequence length (or first size) to show; default the last one timed.")
    ] = None,
    title: Annotated[str, typer.Option(help="Title; default what the file says.")] = "",
) -> None:
    """Draw a ladder: TFLOP/s of every rung with its spread beside the peers; without timings, conflicts and registers.

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
    if not isinstance(result, dict) or "rows" not in result:
        raise ConfigError(f"{file} has no rows: give a file that warploom ladder --json or warploom bench wrote")
    draw(result, out, size, title)


def ready_to_plot(out: Path) -> None:
    """Raises ConfigError or UnsupportedDeviceError if :func:`draw` could not write ``out``: before minutes of work."""
    from warploom.bench.plot import check_plot

    check_plot(out)


def draw(result: dict[str, Any], out: Path, size: int | None = None, title: str = "") -> None:
    """The rows of a ladder's result as a picture, and a note that says which."""
    from warploom.bench.plot import plot_ladder, result_title

    drawn = plot_ladder(result["rows"], out, size=size, title=title or result_title(result))
    note(f"{drawn} drawn to {out}")
