"""Rows of a ladder's results as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from warploom_lab.bench.tables import Rows, beside_first_baseline, rate_text, size_of, static_cells


def markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [header, ["---"] * len(header), *body]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def gpu_markdown(rows: Rows) -> str:
    """TFLOP/s and, in brackets, the ratio to the first baseline: a row for each rung, a column for each size."""
    cells = [{size_of(c): c for c in (row["gpu"] or {}).get("cells", ())} for row in rows]
    sizes = list(dict.fromkeys(size for of_row in cells for size in of_row))
    body = [
        [row["rung"], row["name"], *(beside_first_baseline(of_row.get(size)) for size in sizes)]
        for row, of_row in zip(rows, cells, strict=True)
    ]
    return markdown_table(["rung", "name", *sizes], body)


def static_markdown(rows: Rows) -> str:
    """What needs no GPU: bank conflicts, registers and spills."""
    return markdown_table(*static_cells(rows))


def baselines_markdown(rows: Rows) -> str:
    """The baselines' own TFLOP/s, from the cells of the row that has most of them."""
    cells = max(((row["gpu"] or {}).get("cells", ()) for row in rows), key=len, default=())
    names = list(dict.fromkeys(name for cell in cells for name in cell["baselines"]))
    body = [
        [n, *(rate_text(c["baselines"][n]["tflops"]) if n in c["baselines"] else "–" for c in cells)] for n in names
    ]
    return markdown_table(["baseline", *(size_of(cell) for cell in cells)], body)


def power_cells(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """(header, cells) of rows and baselines that were run for power: speed under that load, watts, clock, energy."""
    body: list[list[str]] = []
    baselines: dict[str, Mapping[str, Any]] = {}
    label = ""
    for row in rows:
        for cell in (row["gpu"] or {}).get("cells", ()):
            if cell.get("power"):
                label = size_of(cell)
                body.append([row["rung"], row["name"], *_power(cell["power"])])
                baselines |= {
                    name: baseline["power"] for name, baseline in cell["baselines"].items() if baseline.get("power")
                }
    body += [["", name, *_power(power)] for name, power in baselines.items()]
    return ["rung", "name", f"TFLOP/s, {label}", "W", "MHz", "TFLOP/J"], body


def _power(power: Mapping[str, Any]) -> list[str]:
    clock = power["sm_mhz"]
    return [
        f"{power['tflops']:.0f}",
        f"{power['watts']:.0f}",
        "–" if clock is None else f"{clock:.0f}",
        f"{power['tflop_per_joule']:.3f}",
    ]


def power_markdown(rows: Rows) -> str:
    """Watts, clock and TFLOP per joule at the size that was run for power, the baselines last."""
    return markdown_table(*power_cells(rows))


MARKDOWN_TABLES = {
    "gpu": gpu_markdown,
    "static": static_markdown,
    "baselines": baselines_markdown,
    "power": power_markdown,
}
"""The tables of a ladder's rows that a Markdown file can ask for."""
