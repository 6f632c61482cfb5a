"""Write docs/evidence/from-mma-to-wgmma.md and its pictures from committed evidence.

The evidence: attention-d128-bf16.json (``ladders.py attention``), attention-cells.json
(``benchmarks/attention_cells.py``), attention-sweep.json (``benchmarks/sweep_h200.py``), attention-data.json
(``benchmarks/attention_data_h200.py``), profile.json (``benchmarks/profile_h200.py``) and sanitizer-unseen.json
(``benchmarks/sanitize_unseen.py``) below benchmarks/results/h200, and static/hopper-mutants.json (``python -m
tests.hopper.attention_mutants``). ``--check`` changes nothing and ends with 1 if the page or a picture is out of date.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from ladder_counters import Counters
from page_parts import EVIDENCE, HERE, ROOT, Row, filled, main, read, spread
from page_tables import markdown_table, power_markdown
from render import provenance

from warploom.kernels.attention.ladder import HOPPER_LADDER
from warploom.layout.catalogue import wgmma_accumulator
from warploom.layout.draw import draw_banks, draw_elements
from warploom.layout.shared import SharedLayout
from warploom.layout.swizzle import Swizzle

LENGTHS = (512, 1024, 4096, 16384)
BASELINES = {"torch_cudnn": "cuDNN", "flash_attention_4": "FlashAttention-4", "torch_flash": "torch's flash"}


def listing() -> str:
    """The example's text."""
    return (ROOT / "examples" / "wgmma_pipeline.py").read_text(encoding="utf-8")


def rungs(rows: Sequence[Row]) -> str:
    """A line a rung: TFLOP/s at some lengths beside cuDNN, the gain over the rung before."""
    known = {row["rung"]: row for row in rows}
    changes = {rung.key: rung.changes for rung in HOPPER_LADDER.rungs}
    body: list[list[str]] = []
    for before, key in pairwise(key for key in ("best", *changes) if key in known):
        cells = {c["seq"]: c for c in known[key]["gpu"]["cells"]}
        old = {c["seq"]: c for c in known[before]["gpu"]["cells"]}
        gains = [_over(cells[seq], old[seq]) for seq in cells]
        gain = math.exp(sum(map(math.log, gains)) / len(gains))
        speeds = [
            f"{c['tflops']['median']:.0f} ({c['ratio']['torch_cudnn']:.2f}×)" for c in (cells[n] for n in LENGTHS)
        ]
        body.append([key, changes[key], *speeds, f"{gain:.2f}×" + (" (over `best`)" if before == "best" else "")])
    return markdown_table(["rung", "what changes", *(f"seq {n}" for n in LENGTHS), "gain"], body)


def _over(cell: Row, before: Row) -> float:
    """How many times as fast as the rung before: paired by rounds where that was kept, else through cuDNN."""
    return cell.get("over_rung_before") or cell["ratio"]["torch_cudnn"] / before["ratio"]["torch_cudnn"]


def mutants(found: Row) -> str:
    """What was caught, by configuration."""
    body = [
        [name, f"`{row['config']}`", str(row["mutants"]), str(row["caught"]),
         str(len(row["equivalent"])), ", ".join(f"{kind} {n}" for kind, n in row["by"].items())]
        for name, row in found["configs"].items()
    ]  # fmt: skip
    return markdown_table(["kernel", "configuration", "mutants", "caught", "equivalent", "by"], body)


def reasons(found: Row) -> str:
    """Why the others need no catching."""
    used = {label for row in found["configs"].values() for label in row["equivalent"]}
    listed = "\n".join(f"- *{label}*: {found['reasons'][label]}." for label in found["reasons"] if label in used)
    return f"No mutant survives without a reason. These are equivalent:\n\n{listed}"


def unseen(found: Row) -> str:
    """Each defect: the emulator's finding, each tool's reports, how often the GPU's result was right."""
    if not found:
        return "*Not measured yet.*"
    tools = found["tools"]
    body: list[list[str]] = []
    for name, findings in found["findings"].items():
        kinds = ", ".join(f"`{kind}`" for kind in dict.fromkeys(f["kind"] for f in findings)) or "nothing"
        reports = [str(of["reports"][name]) if name in of["right"] else "–" for of in tools.values()]
        right = [of["right"][name] for of in tools.values() if name in of["right"]]
        body.append([name, kinds, *reports, f"{sum(right)} of {len(right)}"])
    table = markdown_table(["the pipeline", "emulator", *tools, "right on the GPU"], body)
    totals = ", ".join(f"{tool} {_total(of)}" for tool, of in tools.items())
    return (
        f"{table}\nThe table counts reports that name the kernel, in one run under each tool. All reports:\n{totals}."
    )


def _total(of_tool: Row) -> str:
    counted = re.search(r"(\d+) (?:errors|hazards)", of_tool["summary"][0]) if of_tool["summary"] else None
    return counted[1] if counted else "–"


def cells(found: Row) -> str:
    """Every cell: TFLOP/s, ratios with their spread, TFLOP per joule."""
    baselines = [p for p in BASELINES if any(p in c["ratio"] for c in found["cells"])]
    body: list[list[str]] = []
    for c in sorted(found["cells"], key=lambda c: (c["head_dim"], c["causal"], c["seq"])):
        ratios = [_ratio(c["ratio"].get(name)) for name in baselines]
        energy = [c.get("power", {}).get(name) for name in ("warploom", "torch_cudnn")]
        joules = " / ".join("–" if e is None else f"{e['tflop_per_joule']:.2f}" for e in energy)
        ours = c.get("power", {}).get("warploom")
        load = "–" if ours is None else f"{ours['watts']:.0f} W, {ours['sm_mhz']} MHz"
        mask = "causal" if c["causal"] else "full"
        body.append([str(c["head_dim"]), mask, str(c["seq"]), spread(c["tflops"]["warploom"]), *ratios, load, joules])
    header = [
        "head_dim",
        "mask",
        "seq",
        "TFLOP/s",
        *(f"× {BASELINES[p]}" for p in baselines),
        "load",
        "TFLOP/J, cuDNN's",
    ]
    return markdown_table(header, body)


def _ratio(ratio: Row | float | None) -> str:
    if ratio is None:
        return "–"
    if isinstance(ratio, Mapping):
        return f"{ratio['median']:.2f} ({ratio['low']:.2f}–{ratio['high']:.2f})"
    return f"{ratio:.2f}"


def data(found: Row) -> str:
    """Every cell and kind of data: what calls run, the same with a fresh maximum in every block, cuDNN."""
    if not found:
        return "*Not measured yet.*"
    body = [
        [f"{r['head_dim']} {'causal' if r['causal'] else 'full'} {r['seq']}", r["data"],
         *(spread(r["tflops"][name]) for name in ("carried", "plain", "torch_cudnn")),
         *(_ratio(r[over]) for over in ("over_plain", "over_cudnn"))]
        for r in found["rows"]
    ]  # fmt: skip
    header = ["head_dim, mask, seq", "scores", "stale max", "fresh max", "cuDNN", "× fresh max", "× cuDNN"]
    suits = next(iter({r["data"]: None for r in found["rows"]}))
    gains, least = ([r["over_plain"]["median"] for r in found["rows"] if (r["data"] == suits) == yes] for yes in (1, 0))
    worth = f"worth {min(gains) - 1:.0%} to {max(gains) - 1:.0%}"
    told = (
        f"On independent scores of deviation 1 both flags together are {worth}; if maxima grow they cost up to\n"
        f"{1 - min(least):.0%}."
    )
    return f"{markdown_table(header, body)}\n{told}"


def sweep(found: Row) -> str:
    """The best of each swept cell beside the best with two consumers, where both were among the last."""
    body: list[list[str]] = []
    baselines = [p for p in BASELINES if any(p in row["ratio"] for run in found["runs"] for row in run["rows"])]
    for row_set in _by_cell(found):
        best = row_set[0]
        two = next((r for r in row_set if "2 consumers" in r["config"]), best)
        for row in [best] if two is best else [best, two]:
            ratios = [f"{row['ratio'][name]:.2f}" if name in row["ratio"] else "–" for name in baselines]
            joules = f"{row['power']['tflop_per_joule']:.2f}" if row["power"] else "–"
            body.append([row["cell"].replace(":", " "), f"`{row['config']}`", spread(row["tflops"]), *ratios, joules])
    header = ["head_dim, mask, seq", "configuration", "TFLOP/s", *(f"× {BASELINES[p]}" for p in baselines), "TFLOP/J"]
    return markdown_table(header, body)


def counted(profile: Row) -> str:
    """What the counters of h8 and h9 say beside those of the rung before."""
    known, rungs = Counters(profile), pairwise(("h7", "h8", "h9"))
    return "\n".join(f"- **{after}** beside {before}: {known.change(before, after)}." for before, after in rungs)


def _by_cell(found: Row) -> list[list[Row]]:
    """The configurations of each cell, the fastest first, in the order of head_dim, mask and length."""
    cells: dict[str, list[Row]] = {}
    for run in found["runs"]:
        for row in run["rows"]:
            if row["config"] not in BASELINES:
                cells.setdefault(row["cell"], []).append(row)
    order = sorted(cells, key=lambda name: (int(name.split(":")[0]), name.split(":")[1], int(name.split(":")[2])))
    return [sorted(cells[name], key=lambda row: -row["tflops"]["median"]) for name in order]


def made(environment: Row) -> str:
    """What the cells were measured with."""
    latest = environment.get("flash_attention_4")
    return provenance(environment) + (f", flash-attn-4 {latest}" if latest else "")


def zeros(found: Row) -> str:
    """What the same kernel reaches on zeros, where it was measured."""
    pairs = [(c["power"]["warploom"], c["zeros"], c["seq"]) for c in found["cells"] if c.get("zeros")]
    if not pairs:
        return "it would be faster, and draw less."
    real, empty, seq = pairs[0]
    rates = f"{empty['tflops']:.0f} instead of {real['tflops']:.0f} TFLOP/s"
    return f"{rates} at {seq} tokens, at {empty['watts']:.0f} W and {empty['sm_mhz']} MHz."


def power(rows: Sequence[Row]) -> str:
    """The rungs run for power."""
    chosen = [row for row in rows if row["rung"] in {"16", "best", *(rung.key for rung in HOPPER_LADDER.rungs)}]
    metered = any(cell.get("power") for row in chosen for cell in (row["gpu"] or {}).get("cells", ()))
    return power_markdown(chosen) if metered else "*The rungs have not been run for power yet; see the cells below.*"


def sustained(rows: Sequence[Row]) -> str:
    """A rung's figure between the other rungs, and alone."""
    for row in rows:
        cell = row["gpu"]["cells"][-1]
        if row["rung"] == "h2" and cell.get("power"):
            between, alone = cell["tflops"]["median"], cell["power"]["tflops"]
            return f"h2 at {cell['seq']} tokens reaches {between:.0f} TFLOP/s there, and {alone:.0f} alone for a second"
    return "h2 is faster between the other rungs than alone"


def page() -> str:
    """The whole page."""
    ladder, found, broken = read("h200/attention-d128-bf16.json"), read("h200/attention-cells.json"), read(
        "static/hopper-mutants.json")  # fmt: skip
    limit = found["environment"].get("power_limit_watts")
    figures = {
        "LISTING": listing(), "UNSEEN": unseen(read("h200/sanitizer-unseen.json")), "MUTANTS": mutants(broken),
        "REASONS": reasons(broken), "MINUTES": f"{broken['core_seconds'] / 120:.0f}", "RUNGS": rungs(ladder["rows"]),
        "LIMIT": f"{limit:.0f}" if limit else "700", "ZEROS": zeros(found), "POWER": power(ladder["rows"]),
        "SUSTAINED": sustained(ladder["rows"]), "COUNTED": counted(read("h200/profile.json")),
        "CELLS": cells(found), "SWEEP": sweep(read("h200/attention-sweep.json")),
        "DATA": data(read("h200/attention-data.json")), "MADE": made(found["environment"]),
    }  # fmt: skip
    return filled(HERE / "from-mma-to-wgmma.template.md", figures)


def accumulator_picture() -> str:
    """The first warp's 16 rows of an accumulator of 8 columns."""
    grid = draw_elements(wgmma_accumulator(8))
    part = replace(grid, title="wgmma.m64nN.D: the rows of warp 0, the first 8 columns", rows=grid.rows[:16],
                   cells=grid.cells[:16])  # fmt: skip
    return part.svg()


def swizzle_picture() -> str:
    """Eight rows of a tile of 64 columns."""
    return draw_banks(SharedLayout(8, 64, 2, Swizzle.for_row_bytes(128))).svg()


PAGES = {
    EVIDENCE / "from-mma-to-wgmma.md": page, EVIDENCE / "wgmma-accumulator.svg": accumulator_picture,
    EVIDENCE / "wgmma-swizzle.svg": swizzle_picture,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(PAGES))
