"""A ladder drawn from its evidence: TFLOP/s of every rung with its spread, beside the peers (for ``render.py``)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
_BAR, _ABOVE, _PEER, _SPREAD, _INK = "#3b6ea5", "#d98032", "#8a8a8a", "#1c2b3a", "#222222"
_STYLE = {
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#bbbbbb",
    "svg.hashsalt": "warploom",  # the same file from the same figures
    "svg.fonttype": "none",
}


def draw_ladder(result: Row, out: Path, size: int | None = None) -> None:
    """A bar a rung at sequence length (or side of the products) ``size``, by default the last, as an SVG.

    Bars show the 10th to 90th percentile, lines the peers.
    """
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    timed = [(row, cell) for row in result["rows"] if row["gpu"] for cell in row["gpu"]["cells"]]
    size = _size(timed[-1][1]) if size is None else size
    with matplotlib.rc_context(_STYLE):
        figure = _speed(pyplot, [(row, cell) for row, cell in timed if _size(cell) == size], _about(result))
        figure.savefig(out, bbox_inches="tight", metadata={"Date": None})
        pyplot.close(figure)


def _size(cell: Row) -> int:
    return cell["seq"] if "seq" in cell else cell["n"]


def _about(result: Row) -> str:
    """Element type, head_dim or accumulators, and GPU."""
    config: Row = result["rows"][0]["config"]
    parts = [f"head_dim {config['head_dim']}" if "head_dim" in config else "", str(config["dtype"])]
    sums = {row["config"].get("accumulate", "f32") for row in result["rows"]}
    parts.append(f"sums in {sums.pop()}" if len(sums) == 1 and "accumulate" in config else "")
    return ", ".join(part for part in (*parts, result["environment"]["gpu"]["name"]) if part)


def _speed(pyplot: Any, cells: Sequence[tuple[Row, Row]], title: str) -> Any:
    """Bars of TFLOP/s with spread, coloured by the instructions that multiply, and a line for each peer."""
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.2 + 0.42 * len(cells)), 4.6))
    spreads = [cell["tflops"] for _, cell in cells]
    middle = [spread["median"] for spread in spreads]
    low = [m - s["low"] for m, s in zip(middle, spreads, strict=True)]
    high = [s["high"] - m for m, s in zip(middle, spreads, strict=True)]
    places = range(len(cells))
    above = [_is_warpgroup(row) for row, _ in cells]
    axes.bar(places, middle, 0.74, color=[_ABOVE if a else _BAR for a in above])
    axes.errorbar(places, middle, yerr=[low, high], fmt="none", ecolor=_SPREAD, elinewidth=1.0, capsize=2.5)
    top = max(s["high"] for s in spreads)
    for place, spread in zip(places, spreads, strict=True):
        text = f"{spread['median']:.0f}"
        axes.text(place, spread["high"] + 0.012 * top, text, ha="center", va="bottom", fontsize=8, color=_INK,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8})  # fmt: skip
    top = max(top, _peer_lines(axes, cells))
    axes.set_ylim(0, 1.09 * top)
    axes.set_xlim(-0.6, len(cells) - 0.4)
    axes.set_xticks(list(places), [f"{row['rung']}  {_short(row)}" for row, _ in cells], rotation=55, ha="right",
                    rotation_mode="anchor", fontsize=8.5)  # fmt: skip
    axes.set_ylabel("TFLOP/s")
    axes.yaxis.grid(True, color="#e4e4e4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", length=0)
    if any(above) and not all(above):
        handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in (_BAR, _ABOVE)]
        axes.legend(handles, ["mma.sync", "wgmma"], loc="upper left", frameon=False)
    axes.set_title(f"{title}; {_title(cells[0][1])}", loc="left", fontsize=11)
    return figure


def _is_warpgroup(row: Row) -> bool:
    """Whether a row's kernel multiplies by wgmma: its configuration has consumer warpgroups, not of ``mma.sync``."""
    config = row.get("config", {})
    return "consumers" in config and not config.get("mma_sync", False)


def _peer_lines(axes: Any, cells: Sequence[tuple[Row, Row]]) -> float:
    """A dashed line for each peer, named at its right end; returns the highest."""
    peers = {name: peer["tflops"]["median"] for _, cell in cells for name, peer in cell["peers"].items()}
    for name, rate in peers.items():
        axes.axhline(rate, color=_PEER, linestyle=(0, (5, 3)), linewidth=1.0, zorder=0)
        axes.annotate(f"{name.replace('_', ' ')}\n{rate:.0f}", (1.0, rate), xytext=(4, 0), fontsize=8, color="#5a5a5a",
                      xycoords=("axes fraction", "data"), textcoords="offset points", va="center")  # fmt: skip
    return max(peers.values(), default=0.0)


def _short(row: Row) -> str:
    """A rung's name without what its number says already."""
    return str(row["name"]).partition(": ")[2] or str(row["name"]).removeprefix(f"{row['rung']}_")


def _title(cell: Row) -> str:
    label = ", ".join(f"{name} {cell[name]}" for name in ("batch", "heads", "seq", "m", "n", "k") if name in cell)
    return f"{label}; median, 10th–90th percentile"
