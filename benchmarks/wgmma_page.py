"""Write docs/evidence/from-mma-to-wgmma.md and its pictures from committed evidence.

The evidence: attention-d128-bf16.json (``ladders.py attention``), attention-cells.json
(``benchmarks/attention_cells.py``), attention-sweep.json (``benchmarks/sweep_h200.py``), attention-data.json
(``benchmarks/attention_data_h200.py``), profile.json (``benchmarks/profile_h200.py``) and sanitizer-unseen.json
(``benchmarks/sanitize_unseen.py``) below benchmarks/results/h200, and static/hopper-mutants.json (``python -m
tests.hopper.attention_mutants``). ``--check`` changes nothing and ends with 1 if the page or a picture is out of date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import geometric_mean

from ladder_counters import Counters
from page_parts import EVIDENCE, ROOT, Row, filled, main, number, read, spread
from page_sections import alone, rates_beside
from page_tables import power_markdown

from warploom.layout.catalogue import wgmma_accumulator
from warploom.layout.draw import draw_banks, draw_elements
from warploom.layout.shared import SharedLayout
from warploom.layout.swizzle import Swizzle
from warploom_lab.kernels.attention.ladder import HOPPER_LADDER

LENGTHS = (512, 1024, 4096, 16384)
BASELINES = {"torch_cudnn": "× cuDNN", "flash_attention_4": "× FlashAttention-4", "torch_flash": "× torch's flash"}


def rungs(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[str], str]]:
    """A line a rung: what it changes, TFLOP/s at some lengths beside cuDNN, the gain over the rung before."""
    known = {row["rung"]: {c["seq"]: c for c in row["gpu"]["cells"]} for row in rows}
    changes = {rung.key: rung.changes for rung in HOPPER_LADDER.rungs}
    for before, key in pairwise(key for key in ("best", *changes) if key in known):
        gain = geometric_mean(_over(cell, known[before][seq]) for seq, cell in known[key].items())
        cells = (known[key][n] for n in LENGTHS)
        speeds = [f"{c['tflops']['median']:.0f} ({c['ratio']['torch_cudnn']:.2f}×)" for c in cells]
        yield key, changes[key], speeds, f"{gain:.2f}×" + (" (over `best`)" if before == "best" else "")


def _over(cell: Row, before: Row) -> float:
    """How many times as fast as the rung before: paired by rounds where that was kept, else through cuDNN."""
    return cell.get("over_rung_before") or cell["ratio"]["torch_cudnn"] / before["ratio"]["torch_cudnn"]


def defects(found: Row) -> Iterator[tuple[str, str, list[str], str]]:
    """Each defect: the emulator's finding, each tool's reports, how often the GPU's result was right."""
    tools = found["tools"].values()
    for name, findings in found["findings"].items():
        kinds = ", ".join(f"`{kind}`" for kind in dict.fromkeys(f["kind"] for f in findings)) or "nothing"
        right = [of["right"][name] for of in tools if name in of["right"]]
        reports = [str(of["reports"][name]) if name in of["right"] else "–" for of in tools]
        yield name, kinds, reports, f"{sum(right)} of {len(right)}"


def totals(found: Row) -> Iterator[str]:
    """All reports of each tool."""
    for tool, of in found["tools"].items():
        counted = re.search(r"(\d+) (?:errors|hazards)", of["summary"][0]) if of["summary"] else None
        yield f"{tool} {counted[1] if counted else '–'}"


def mask(cell: Row) -> str:
    """Of a cell."""
    return "causal" if cell["causal"] else "full"


def beside(ratios: Row, names: Iterable[str]) -> list[str]:
    """Ratios to baselines, with their spread where that was kept; – where one was not timed."""
    found = (ratios.get(name) for name in names)
    return [spread(x, digits=2) if isinstance(x, Mapping) else number(x, ".2f") for x in found]


def joules(cell: Row) -> str:
    """TFLOP per joule, ours and cuDNN's."""
    energy = (cell["power"].get(name) for name in ("warploom", "torch_cudnn"))
    return " / ".join(number(e and e["tflop_per_joule"], ".2f") for e in energy)


def by_itself(cell: Row) -> str:
    """``550 · 1.17× · 1.23×``: TFLOP/s of a cell alone, and ratios to cuDNN and FlashAttention-4, or –."""
    return "".join(rates_beside(alone([cell]), "warploom", ("torch_cudnn", "flash_attention_4"))) or "–"


def sweep(runs: Iterable[Row]) -> Iterator[Row]:
    """The best of each swept cell, and the best with two consumers, where both were among the last."""
    cells: dict[str, list[Row]] = {}
    for run in runs:
        for row in run["rows"]:
            if row["config"] not in BASELINES:
                cells.setdefault(row["cell"], []).append(row)
    for name in sorted(cells, key=lambda name: [int(x) if x.isdigit() else x for x in name.split(":")]):
        rows = sorted(cells[name], key=lambda row: -row["tflops"]["median"])
        yield rows[0]
        two = next((row for row in rows if "2 consumers" in row["config"]), rows[0])
        yield from [two] if two is not rows[0] else []


def present(rows: Iterable[Row]) -> dict[str, str]:
    """The baselines that some rows were timed beside, and their headers."""
    known = {name for row in rows for name in row["ratio"]}
    return {name: text for name, text in BASELINES.items() if name in known}


def zeros(cells: Sequence[Row]) -> str:
    """What the same kernel reaches on zeros."""
    cell = next(c for c in cells if c.get("zeros"))
    real, empty = cell["power"]["warploom"], cell["zeros"]
    rates = f"{empty['tflops']:.0f} instead of {real['tflops']:.0f} TFLOP/s"
    return f"{rates} at {cell['seq']} tokens, at {empty['watts']:.0f} W and {empty['sm_mhz']} MHz."


def sustained(rows: Sequence[Row]) -> str:
    """A rung's figure between the other rungs, and alone."""
    cell = next(row["gpu"]["cells"][-1] for row in rows if row["rung"] == "h2")
    between, alone = cell["tflops"]["median"], cell["power"]["tflops"]
    return f"h2 at {cell['seq']} tokens reaches {between:.0f} TFLOP/s there, and {alone:.0f} alone for a second"


def page() -> str:
    """The whole page."""
    rows = read("h200/attention-d128-bf16.json")["rows"]
    metered = {"16", "best", *(rung.key for rung in HOPPER_LADDER.rungs)}
    return filled(
        "from-mma-to-wgmma.template.md",
        __name__,
        rows=rows,
        listing=(ROOT / "examples" / "wgmma_pipeline.py").read_text(encoding="utf-8").rstrip("\n"),
        power=power_markdown([row for row in rows if row["rung"] in metered]).rstrip("\n"),
        counters=Counters(read("h200/profile.json")),
    )


def accumulator_picture() -> str:
    """The first warp's 16 rows of an accumulator of 8 columns."""
    grid = draw_elements(wgmma_accumulator(8))
    part = replace(
        grid, title="wgmma.m64nN.D: the rows of warp 0, the first 8 columns", rows=grid.rows[:16], cells=grid.cells[:16]
    )
    return part.svg()


def swizzle_picture() -> str:
    """Eight rows of a tile of 64 columns."""
    return draw_banks(SharedLayout(8, 64, 2, Swizzle.for_row_bytes(128))).svg()


PAGES = {
    EVIDENCE / "from-mma-to-wgmma.md": page,
    EVIDENCE / "wgmma-accumulator.svg": accumulator_picture,
    EVIDENCE / "wgmma-swizzle.svg": swizzle_picture,
}

if __name__ == "__main__":
    sys.exit(main(PAGES))
