"""A ladder drawn: TFLOP/s of every rung with its spread, or, without a GPU's part, bank conflicts and registers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from warploom.core.errors import ConfigError, UnsupportedDeviceError
from warploom_lab.bench.tables import wavefront_factor

Row = Mapping[str, Any]
FORMATS = (".svg", ".png", ".pdf")
_BAR, _ABOVE, _BASELINE, _SPREAD, _INK = "#3b6ea5", "#d98032", "#8a8a8a", "#1c2b3a", "#222222"
_STYLE = {
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#bbbbbb",
    "svg.hashsalt": "warploom",  # the same file from the same figures
    "svg.fonttype": "none",
}


def plot_ladder(rows: Sequence[Row], out: Path, *, size: int | None = None, title: str = "") -> str:
    """Draw a ladder's rows (``LadderResult.rows``) into ``out``, an SVG, PNG or PDF; returns what was drawn.

    With timed rows: a bar of TFLOP/s a rung at sequence length (or first size) ``size``, by default the last, with the
    10th to 90th percentile, and the baselines as lines. Otherwise: wavefronts of shared memory over the conflict-free
    ones, and registers with spills.

    Raises ConfigError for another ending, no rows or a size that was not timed, UnsupportedDeviceError without
    matplotlib.
    """
    if not rows:
        raise ConfigError("there are no rows to plot")
    matplotlib, pyplot = check_plot(out)
    cells = _cells(rows, size)
    with matplotlib.rc_context(_STYLE):
        if cells:
            figure, what = _speed(pyplot, cells, title), "TFLOP/s"
        else:
            figure, what = _static(pyplot, rows, title), "wavefronts and registers"
        out.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if out.suffix.lower() == ".svg" else None
        figure.savefig(out, dpi=160, bbox_inches="tight", metadata=metadata)
        pyplot.close(figure)
    return what


def check_plot(out: Path) -> tuple[Any, Any]:
    """(matplotlib, pyplot), if a plot can be drawn to ``out``.

    Raises ConfigError for an ending that is none of :data:`FORMATS`, UnsupportedDeviceError without matplotlib.
    """
    if out.suffix.lower() not in FORMATS:
        raise ConfigError(f"a plot's file ends in {', '.join(FORMATS)}, not {out.suffix or 'nothing'!r}: {out}")
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError as error:
        raise UnsupportedDeviceError('plots need matplotlib: pip install -e ".[plot]" has it') from error
    matplotlib.use("Agg")
    return matplotlib, importlib.import_module("matplotlib.pyplot")


def result_title(result: Mapping[str, Any]) -> str:
    """What a result's file is about: element type, head_dim or accumulators, and GPU, as far as it says."""
    config: Row = result["rows"][0].get("config", {}) if result["rows"] else {}
    gpu = (result.get("environment") or {}).get("gpu")
    parts = [f"head_dim {config['head_dim']}" if "head_dim" in config else "", str(config.get("dtype", ""))]
    sums = {row["config"].get("accumulate", "f32") for row in result["rows"] if "config" in row}
    parts.append(f"sums in {sums.pop()}" if len(sums) == 1 and "accumulate" in config else "")
    timed = any(row.get("gpu") for row in result["rows"])
    parts.append(gpu["name"] if gpu and timed else "")
    return ", ".join(part for part in parts if part)


def _label(cell: Row) -> int | None:
    return next((int(cell[name]) for name in ("seq", "m", "rows", "n") if name in cell), None)


def _cells(rows: Sequence[Row], size: int | None) -> list[tuple[Row, Row]]:
    """(row, its cell of the size) of the rows that were timed there."""
    timed = [(row, cell) for row in rows if row.get("gpu") for cell in row["gpu"]["cells"]]
    if not timed:
        if size is not None:
            raise ConfigError(f"nothing was timed, so there is no size {size} to plot; leave it out")
        return []
    sizes = list(dict.fromkeys(_label(cell) for _, cell in timed))
    wanted = sizes[-1] if size is None else size
    if wanted not in sizes:
        raise ConfigError(f"size {size} was not timed; sizes: {', '.join(map(str, sizes))}")
    return [(row, cell) for row, cell in timed if _label(cell) == wanted]


def _speed(pyplot: Any, cells: Sequence[tuple[Row, Row]], title: str) -> Any:
    """Bars of TFLOP/s with spread, coloured by the instructions that multiply, and a line for each baseline."""
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.2 + 0.42 * len(cells)), 4.6))
    spreads = [cell["tflops"] for _, cell in cells]
    low, middle, high = (np.array([spread[key] for spread in spreads]) for key in ("low", "median", "high"))
    places = range(len(cells))
    above = [_is_warpgroup(row) for row, _ in cells]
    axes.bar(places, middle, 0.74, color=[_ABOVE if a else _BAR for a in above])
    axes.errorbar(
        places, middle, yerr=[middle - low, high - middle], fmt="none", ecolor=_SPREAD, elinewidth=1.0, capsize=2.5
    )
    top = max(high)
    for place in places:
        axes.text(
            place,
            high[place] + 0.012 * top,
            f"{middle[place]:.0f}",
            ha="center",
            va="bottom",
            fontsize=8,
            color=_INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )
    top = max(top, _baseline_lines(axes, cells))
    axes.set_ylim(0, 1.09 * top)
    axes.set_ylabel("TFLOP/s")
    _name_rungs(axes, [row for row, _ in cells])
    if any(above) and not all(above):
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in (_BAR, _ABOVE)]
        axes.legend(handles, ["mma.sync", "wgmma"], loc="upper left", frameon=False)
    axes.set_title("; ".join(filter(None, (title, _title(cells[0][1])))), loc="left", fontsize=11)
    return figure


def _name_rungs(axes: Any, rows: Sequence[Row]) -> None:
    """The rungs below their bars, and lines across behind these."""
    names = [f"{row['rung']}  {_short(row)}" for row in rows]
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_xticks(range(len(rows)), names, rotation=55, ha="right", rotation_mode="anchor", fontsize=8.5)
    axes.yaxis.grid(True, color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", length=0)


def _is_warpgroup(row: Row) -> bool:
    """Whether a row's kernel multiplies by wgmma: its configuration has consumer warpgroups, not of ``mma.sync``."""
    config = row.get("config", {})
    return "consumers" in config and not config.get("mma_sync", False)


def _baseline_lines(axes: Any, cells: Sequence[tuple[Row, Row]]) -> float:
    """A dashed line for each baseline, named at its right end; returns the highest."""
    baselines = {
        name: baseline["tflops"]["median"] for _, cell in cells for name, baseline in cell["baselines"].items()
    }
    for name, rate in baselines.items():
        axes.axhline(rate, color=_BASELINE, linestyle=(0, (5, 3)), linewidth=1.0, zorder=0)
        axes.annotate(
            f"{name.replace('_', ' ')}\n{rate:.0f}",
            (1.0, rate),
            xytext=(4, 0),
            fontsize=8,
            color="#5a5a5a",
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            va="center",
        )
    return max(baselines.values(), default=0.0)


def _short(row: Row) -> str:
    """A rung's name without what its number says already."""
    return str(row["name"]).partition(": ")[2] or str(row["name"]).removeprefix(f"{row['rung']}_")


def _title(cell: Row) -> str:
    label = ", ".join(f"{name} {cell[name]}" for name in ("batch", "heads", "seq", "m", "n", "k") if name in cell)
    return f"{label}; median, 10th–90th percentile" if label else "median, 10th–90th percentile"


def _static(pyplot: Any, rows: Sequence[Row], title: str) -> Any:
    """Two panels: wavefronts over the ideal, and registers with spilled bytes above them."""
    size = (max(6.0, 1.2 + 0.42 * len(rows)), 6.0)
    figure, (upper, lower) = pyplot.subplots(2, 1, figsize=size, sharex=True, layout="constrained")
    places = range(len(rows))
    for shift, what, color in ((-0.2, "ldmatrix", _BAR), (0.2, "other shared accesses", _ABOVE)):
        heights = [wavefront_factor(row["wavefronts"], matrix=what == "ldmatrix") or 0.0 for row in rows]
        upper.bar([p + shift for p in places], heights, 0.38, color=color, label=what)
    upper.axhline(1.0, color=_BASELINE, linestyle=(0, (5, 3)), linewidth=1.0)
    upper.set_ylabel("wavefronts / conflict-free")
    upper.legend(frameon=False, loc="upper right")
    upper.set_title("; ".join(filter(None, (title, "bank conflicts and registers"))), loc="left", fontsize=11)
    archs = list(dict.fromkeys(arch for row in rows for arch in row["targets"]))
    for number, arch in enumerate(archs):
        entries = [row["targets"].get(arch, {}) for row in rows]
        shift = 0.4 * (number - (len(archs) - 1) / 2)
        heights = [entry.get("registers", 0) for entry in entries]
        lower.bar([p + shift for p in places], heights, 0.38, color=(_BAR, _ABOVE, _BASELINE)[number % 3], label=arch)
        for place, height, entry in zip(places, heights, entries, strict=True):
            if entry.get("spill_bytes"):
                lower.text(
                    place + shift,
                    height + 3,
                    f"+{entry['spill_bytes']} B",
                    rotation=90,
                    ha="center",
                    va="bottom",
                    fontsize=6.5,
                    color=_INK,
                )
    lower.axhline(255, color=_BASELINE, linestyle=(0, (5, 3)), linewidth=1.0)
    lower.set_ylim(0, 320)
    lower.set_ylabel("registers (+ spilled bytes)")
    if archs:
        lower.legend(frameon=False, loc="upper left", ncols=len(archs))
    for axes in (upper, lower):
        _name_rungs(axes, rows)
    return figure
