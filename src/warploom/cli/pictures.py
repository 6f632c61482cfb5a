"""Grids of layouts in the terminal and as files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warploom.cli.output import console, note
from warploom.core.errors import WarploomError

if TYPE_CHECKING:
    from rich.table import Table

    from warploom.layout.draw import Drawing, Grid

_INCH = 96


def terminal_table(grid: Grid) -> Table:
    """The grid as a coloured table; the smaller texts follow the main ones."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=grid.title, title_justify="left", title_style="bold", box=None, padding=(0, 0), pad_edge=False)
    table.caption = "\n".join((*grid.notes, *grid.caption))
    table.caption_justify = "left"
    table.add_column(grid.corner, justify="right", style="dim", no_wrap=True)
    for index, name in enumerate(grid.columns):
        if grid.gap[1] and index and index % grid.gap[1] == 0:
            table.add_column("", min_width=1)
        table.add_column(Text(name, style="dim"), justify="center", no_wrap=True)
    for number, (name, line) in enumerate(zip(grid.rows, grid.cells, strict=True)):
        if grid.gap[0] and number and number % grid.gap[0] == 0:
            table.add_row()
        cells: list[Any] = [f"{name} "]
        for index, cell in enumerate(line):
            if grid.gap[1] and index and index % grid.gap[1] == 0:
                cells.append("")
            text = Text(f" {cell.text}", style=f"#1b1f24 on {cell.fill}")
            text.append(f" {cell.small} " if cell.small else " ", style=f"#5b6470 on {cell.fill}")
            cells.append(text)
        table.add_row(*cells)
    return table


def show(grid: Grid) -> None:
    """Print the grid: where a terminal is too narrow, in parts of some columns each, one below the other."""
    out = console()
    widest = max((len(c.text) + len(c.small) + 3 for line in grid.cells for c in line), default=4)
    each = max(1, (out.width - 12) // widest) if out.is_terminal else len(grid.columns)
    each -= each % grid.gap[1] if 0 < grid.gap[1] < each else 0
    out.width = max(out.width, each * widest + 12)
    for start in range(0, len(grid.columns), each):
        last = start + each >= len(grid.columns)
        part = replace(
            grid,
            title=grid.title if start == 0 else "",
            columns=grid.columns[start : start + each],
            cells=tuple(line[start : start + each] for line in grid.cells),
            notes=grid.notes if last else (),
            caption=grid.caption if last else (),
        )
        out.print(terminal_table(part))


def write_svg(grid: Grid, path: str) -> None:
    """The grid as an SVG file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(grid.svg(), encoding="utf-8")
    note(f"written to {path}")


def write_png(grid: Grid, path: str) -> None:
    """The grid as a PNG file, through matplotlib. Raises WarploomError where that is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise WarploomError('PNG needs matplotlib: pip install -e ".[plot]" has it; or write --svg') from None
    drawing = grid.drawing()
    figure = Figure(figsize=(drawing.width / _INCH, drawing.height / _INCH), dpi=2 * _INCH)
    FigureCanvasAgg(figure)
    _paint(figure, drawing)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")  # whatever the file is called
    note(f"written to {path}")


def _paint(figure: Any, drawing: Drawing) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.axis("off")
    for b in drawing.boxes:
        style = "round,pad=0,rounding_size=3"
        axes.add_patch(FancyBboxPatch((b.x, b.y), b.width, b.height, boxstyle=style, fc=b.fill, ec="#00000022", lw=0.7))
    aligned = {"start": "left", "middle": "center", "end": "right"}
    for t in drawing.labels:
        axes.text(
            t.x,
            t.y,
            t.text,
            size=t.size * 72 / _INCH,
            color=t.colour,
            ha=aligned[t.anchor],
            va="center_baseline",
            family="monospace",
            weight="bold" if t.bold else "normal",
            parse_math=False,
        )
