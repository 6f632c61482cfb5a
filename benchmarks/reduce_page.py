"""Write docs/evidence/ladder-reduce.md from the committed evidence: ``python benchmarks/reduce_page.py [--check]``.

The evidence is benchmarks/results/h200/reduce.json, reduce-textbook.json and matmul-reduce.json
(``benchmarks/reduce_h200.py``), h100/reduce.json (the same on an H100), and rungs 0 and 1 of attention-d128-bf16.json.
``--check`` changes nothing and ends with 1 if the page is out of date.
"""

from __future__ import annotations

import sys
from typing import Any

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


def page() -> str:
    """The whole page."""
    experiment, baselines, attention = (
        read(f"h200/{name}.json") for name in ("reduce", "matmul-reduce", "attention-d128-bf16")
    )
    hopper = read("h100/reduce.json")
    rows: dict[str, Any] = {row["rung"]: row for row in experiment["result"]["rungs"]}
    cells = ({r["rung"]: r for r in attention["rows"]}[key]["gpu"]["cells"] for key in ("0", "1"))
    return filled(
        "ladder-reduce.template.md",
        __name__,
        rows=rows,
        published=experiment["result"]["paper"],
        hopper=hopper,
        hopper_rows={row["rung"]: row for row in hopper["result"]["rungs"]} if hopper else {},
        ladder=LADDER.rungs,
        in_registers=("3", "4", "5"),
        baselines=baselines["result"],
        search=baselines["result"]["search_ten_millions"],
        textbook=read("h200/reduce-textbook.json"),
        attention=[(a["seq"], a["tflops"], b["tflops"]) for a, b in zip(*cells, strict=True)],
        cycles=lambda key: rows[key]["loop"]["cycles_per_operation"],
        through_shared=("1", "1w", "2"),
        faster=lambda key, than: over(rows[key]["grid"]["speed_up"], rows[than]["grid"]["speed_up"]),
        energy=lambda key, than: (
            rows[than]["grid"]["energy_per_operation_j"] / rows[key]["grid"]["energy_per_operation_j"]
        ),
        sass=sass(rows).rstrip(),
        environment=experiment["environment"],
    )


PAGES = {EVIDENCE / "ladder-reduce.md": page}

if __name__ == "__main__":
    sys.exit(main(PAGES))
