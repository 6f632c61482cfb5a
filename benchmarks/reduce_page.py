"""Write docs/evidence/ladder-reduce.md from the committed evidence: ``python benchmarks/reduce_page.py [--check]``.

The evidence is benchmarks/results/h200/reduce.json, reduce-textbook.json and matmul-reduce.json
(``benchmarks/reduce_h200.py``), h100/reduce.json (the same on an H100), and rungs 0 and 1 of attention-d128-bf16.json.
``--check`` changes nothing and ends with 1 if the page is out of date.
"""

from __future__ import annotations

import sys

from page_parts import EVIDENCE, Row, filled, main, read, spread
from page_tables import markdown_table

from warploom_lab.kernels.reduce.ladder import LADDER

OPCODES = ("HMMA", "FMNMX", "FSEL", "SHFL", "LDS", "STS", "BAR", "LOP3", "IMAD.MOV", "WARPSYNC")


def over(first: Row, second: Row) -> float:
    """The ratio of two medians."""
    return first["median"] / second["median"]


def stalls(counted: Row, most: int) -> str:
    """The largest shares of the cycles between two issues of a warp."""
    shares = list(counted["stall_shares_percent"].items())[:most]
    return ", ".join(f"{name.replace('_', ' ')} {share:.0f} %" for name, share in shares)


def milliseconds(row: Row, name: str) -> str:
    """Of a baseline, where it ran."""
    return spread(row[f"{name}_s"], 1e3, 3) if f"{name}_s" in row else "–"


def mebibytes(row: Row) -> str:
    """Beyond inputs and result: ours, PyTorch's, and compiled."""
    extra = (row.get(f"{name}_extra_bytes") for name in ("warploom", "torch", "torch.compile"))
    return " / ".join("–" if x is None else f"{x / 2**20:.0f}" for x in extra)


def sass(rows: dict[str, Row]) -> str:
    """Instructions of an operation by opcode."""
    body: list[list[str]] = []
    for key, row in rows.items():
        counts: dict[str, float] = row["loop_opcodes"]
        known = [counts.get(op, 0.0) for op in OPCODES]
        body.append([key, *(f"{n:g}" for n in (*known, sum(counts.values()) - sum(known), sum(counts.values())))])
    return markdown_table(["rung", *(f"`{op}`" for op in OPCODES), "others", "all"], body)


def by_rung(found: Row) -> dict[str, Row]:
    """The rows of the paper's experiment."""
    return {row["rung"]: row for row in found["result"]["rungs"]}


def faster(rows: dict[str, Row], key: str, than: str) -> float:
    """How many times as many operations a rung does with every SM full."""
    return over(rows[key]["grid"]["speed_up"], rows[than]["grid"]["speed_up"])


def energy(rows: dict[str, Row], key: str, than: str) -> float:
    """How many times less energy an operation of a rung takes there."""
    return rows[than]["grid"]["energy_per_operation_j"] / rows[key]["grid"]["energy_per_operation_j"]


def page() -> str:
    """The whole page."""
    experiment, rungs = read("h200/reduce.json"), read("h200/attention-d128-bf16.json")["rows"]
    cells = ({row["rung"]: row["gpu"]["cells"] for row in rungs}[key] for key in ("0", "1"))
    rows, pairs = by_rung(experiment), list(zip(*cells, strict=True))
    named = {"experiment": experiment, "rows": rows, "ladder": LADDER.rungs, "attention": pairs}
    return filled("ladder-reduce.template.md", __name__, **named)


PAGES = {EVIDENCE / "ladder-reduce.md": page}

if __name__ == "__main__":
    sys.exit(main(PAGES))
