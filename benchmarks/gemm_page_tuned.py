"""The parts of docs/evidence/ladder-gemm.md about searched tiles and about the seed's own kernels (see gemm_page)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from page_parts import spread
from page_tables import markdown_table

from warploom.bench.tables import tile_text

Row = Mapping[str, Any]
CONDITIONS = tuple((data, load) for data in ("uniform", "normal") for load in ("sustained", "rested"))
LOADS = ("sustained", "rested", "bursts")


def tuned_tables(evidence: Any) -> str:
    """A table for each size: which tile won for every rung, and TFLOP/s under each load and on each kind of data."""
    rows = evidence.tuned["rows"]
    sizes = list(dict.fromkeys(cell["n"] for row in rows for cell in row["gpu"]["cells"]))
    return "\n".join(f"N = {n}:\n\n{_table(rows, n)}" for n in sizes)


def _table(rows: list[Row], n: int) -> str:
    body: list[list[str]] = []
    peers: dict[str, str] = {}
    for row in rows:
        cells = {(c["data"], c["load"]): c for c in row["gpu"]["cells"] if c["n"] == n}
        config = next((c["config"] for c in cells.values() if "config" in c), row["config"])
        body.append([row["rung"], tile_text(config) or "its own", *_rates(cells)])
        peers |= {" ".join(key): spread(cell["peers"]["cublas"]["tflops"]) for key, cell in cells.items()}
    body.append(["00 cuBLAS", "", *(peers.get(" ".join(key), "–") for key in CONDITIONS)])
    return markdown_table(["rung", "tile", *(f"{data}, {load}" for data, load in CONDITIONS)], body)


def _rates(cells: Mapping[tuple[str, str], Row]) -> Iterator[str]:
    for key in CONDITIONS:
        cell = cells.get(key)
        yield f"{spread(cell['tflops'])} · {cell['ratio']['cublas']:.0%}" if cell else "–"


def search_summary(evidence: Any) -> str:
    """How many configurations each rung's search timed, of how many; why the others were not."""
    parts: list[str] = []
    for row in evidence.tuned["rows"]:
        of = next(iter(row.get("search", {}).values()), None)
        if of is not None and of["timed"] > 1:
            parts.append(f"{row['rung']} {of['timed']} of {of['timed'] + sum(of['dropped'].values())}")
    told = ", ".join(parts)
    return f"Timed at the smallest size, of all that belong to the rung: {told}. The others spill or do not fit."


def beside_kernels(evidence: Any) -> str:
    """The seed's kernel and ours under each load, TFLOP/s and how many times faster ours is."""
    body: list[list[str]] = []
    for row in evidence.kernels_of_seed["rows"]:
        loads = [f"{of['seed']:.0f} → {of['ours']:.0f} · {of['ratio']['median']:.2f}×"
                 for of in (row["loads"][load] for load in LOADS)]  # fmt: skip
        body.append([row["rung"], str(row["n"]), row["seed_tile"], row["kind"], row["tile"], *loads])
    return markdown_table(["rung", "N", "the seed's tile", "ours", "tile", *LOADS], body)
