"""Rows as tables: for the terminal (rich) and, generated from committed result files, for Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]
_MARKER = re.compile(r"(<!-- table: (?P<spec>[^>]*?) -->\n)(?P<body>.*?)(<!-- end table -->)", re.DOTALL)


def ladder_cells(rows: Rows) -> tuple[list[str], list[list[str]]]:
    """(header, cells) of a ladder: GPU columns only where a row has them."""
    seqs = [cell for row in rows for cell in (row["gpu"] or {}).get("cells", ())]
    sizes = sorted({_size(cell) for cell in seqs})
    targets = list(dict.fromkeys(arch for row in rows for arch in row["targets"]))
    peers = list(dict.fromkeys(peer for cell in seqs for peer in cell["ratio"]))
    header = ["rung", "name", "error / bound", "findings", "ldmatrix × ideal", "other shared × ideal"]
    header += [f"{arch} registers (spilled)" for arch in targets]
    for size in sizes:
        header += [f"TFLOP/s {size}", *(f"× {peer} {size}" for peer in peers)]
    body: list[list[str]] = []
    for row in rows:
        cells = [row["rung"], row["name"], f"{row['error']['value'] / row['error']['bound']:.2f}"]
        cells += [str(sum(f["count"] for f in row["findings"]) or "none"), *_conflicts(row["wavefronts"])]
        cells += [_target(row["targets"].get(arch)) for arch in targets]
        by_size = {_size(cell): cell for cell in (row["gpu"] or {}).get("cells", ())}
        for size in sizes:
            cell = by_size.get(size)
            cells.append(_rate(cell["tflops"]) if cell else "–")
            cells += [f"{cell['ratio'][p]:.2f}" if cell and p in cell["ratio"] else "–" for p in peers]
        body.append(cells)
    return header, body


def ladder_table(rows: Rows) -> Any:
    """A ``rich`` table of a ladder's rows."""
    from rich.table import Table

    header, body = ladder_cells(rows)
    table = Table(title="registers per thread; spills in bytes; wavefronts over the conflict-free ideal")
    for number, name in enumerate(header):
        table.add_column(name, justify="left" if number == 1 else "right", overflow="fold")
    for cells in body:
        table.add_row(*cells)
    return table


def markdown_table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rows = [header, ["---"] * len(header), *body]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def fill_markdown(text: str, tables: Mapping[str, str]) -> str:
    """``text`` with the body of every ``<!-- table: NAME -->`` … ``<!-- end table -->`` replaced by ``tables[NAME]``.

    Raises KeyError for a name without a table.
    """

    def replaced(match: re.Match[str]) -> str:
        return match[1] + tables[match["spec"].strip()] + match[4]

    return _MARKER.sub(replaced, text)


def _size(cell: Mapping[str, Any]) -> str:
    return f"seq {cell['seq']:>5}" if "seq" in cell else str(cell.get("label", ""))


def _rate(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.0f} ({spread['low']:.0f}–{spread['high']:.0f})"


def _conflicts(wavefronts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """(ldmatrix's, the others') executed wavefronts over the ideal ones."""

    def factor(names: list[str]) -> str:
        ideal = sum(wavefronts[n]["ideal"] for n in names)
        return f"{sum(wavefronts[n]['actual'] for n in names) / ideal:.2f}" if ideal else "–"

    matrix = [n for n in wavefronts if n == "ldmatrix"]
    return [factor(matrix), factor([n for n in wavefronts if n != "ldmatrix"])]


def _target(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "–"
    if "registers" not in entry:
        return "does not fit" if "not_for" in entry else "error"
    spilled = entry["spill_bytes"]
    return f"{entry['registers']} ({'?' if spilled is None else spilled})"
