"""Rows of a ladder's results as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from warploom.bench.tables import Rows, beside_first_peer, rate_text, size_of, static_cells


def markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [header, ["---"] * len(header), *body]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def gpu_markdown(rows: Rows) -> str:
    """TFLOP/s and, in brackets, the ratio to the first peer: a row for each rung, a column for each size."""
    cells = [{size_of(c): c for c in (row["gpu"] or {}).get("cells", ())} for row in rows]
    sizes = list(dict.fromkeys(size for of_row in cells for size in of_row))
    body = [
        [row["rung"], row["name"], *(beside_first_peer(of_row.get(size)) for size in sizes)]
        for row, of_row in zip(rows, cells, strict=True)
    ]
    return markdown_table(["rung", "name", *sizes], body)


def static_markdown(rows: Rows) -> str:
    """What needs no GPU: bank conflicts, registers and spills."""
    return markdown_table(*static_cells(rows))


def peers_markdown(rows: Rows) -> str:
    """The peers' own TFLOP/s, from the cells of the row that has most of them."""
    cells = max(((row["gpu"] or {}).get("cells", ()) for row in rows), key=len, default=())
    names = list(dict.fromkeys(name for cell in cells for name in cell["peers"]))
    body = [[n, *(rate_text(c["peers"][n]["tflops"]) if n in c["peers"] else "–" for c in cells)] for n in names]
    return markdown_table(["baseline", *(size_of(cell) for cell in cells)], body)


def power_cells(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """(header, cells) of the rows and peers that were run for power: speed under that load, watts, clock, energy."""
    body: list[list[str]] = []
    peers: dict[str, Mapping[str, Any]] = {}
    label = ""
    for row in rows:
        for cell in (row["gpu"] or {}).get("cells", ()):
            if cell.get("power"):
                label = size_of(cell)
                body.append([row["rung"], row["name"], *_power(cell["power"])])
                peers |= {name: peer["power"] for name, peer in cell["peers"].items() if peer.get("power")}
    body += [["", name, *_power(power)] for name, power in peers.items()]
    return ["rung", "name", f"TFLOP/s, {label}", "W", "MHz", "TFLOP/J"], body


def _power(power: Mapping[str, Any]) -> list[str]:
    clock = power["sm_mhz"]
    return [f"{power['tflops']:.0f}", f"{power['watts']:.0f}", "–" if clock is None else f"{clock:.0f}",
            f"{power['tflop_per_joule']:.3f}"]  # fmt: skip


def power_markdown(rows: Rows) -> str:
    """Watts, clock and TFLOP per joule at the size that was run for power, the peers last."""
    return markdown_table(*power_cells(rows))


MARKDOWN_TABLES = {
    "gpu": gpu_markdown, "static": static_markdown, "peers": peers_markdown, "power": power_markdown,
}  # fmt: skip
"""The tables of a ladder's rows that a Markdown file can ask for."""
