"""Write docs/evidence/ladder-attention.md from the committed evidence: ``python benchmarks/ladder_page.py [--check]``.

The evidence is benchmarks/results/h200/attention-d128-bf16.json and attention-d128-f16.json (``ladders.py
attention``), the SASS figures of ``benchmarks/ladder_static.py`` and the seeds' figures in benchmarks/seeds/.
``--check`` changes nothing and ends with 1 if the page is out of date.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import ladder_counters as counters
import ladder_seeds as seeds
from page_parts import (
    EVIDENCE,
    HERE,
    Row,
    distance,
    filled,
    group_table,
    loop_changes,
    main,
    read,
    registers,
    spread,
    wavefronts,
)
from page_tables import markdown_table
from render import provenance

from warploom.kernels.attention.ladder import FULL_LADDER, HOPPER_LADDER
from warploom.kernels.ladder import Rung

SAME_TILE = ("8", "9", "16")
"""Rungs with the tile of the reference kernel, (128,64,4)."""
FALL = 0.02
SAME_CYCLES = 0.0075
"""Up to so many more cycles are none: ncu's figures of one kernel differ by half of it from run to run."""

WHY = {
    "0": "Scores, probabilities and row statistics go through shared memory: the baseline of the in-register reduction "
    "paper, with an unswizzled tile and its bank conflicts.",
    "1": "The accumulator of Q·Kᵀ is the A operand of P·V without moving a value between lanes. O is multiplied by "
    "1/l, as the seed's kernel 1 is compiled. The bottleneck is ldmatrix on a row-major tile: eight rows in the same "
    "four banks, so eight wavefronts instead of one.",
    "2": "XOR of the 16-byte column with the row spreads eight rows over all banks. The price is address arithmetic: "
    "every fragment gets its own address register.",
    "3": "The copy of the next K block runs during P·V, and that of V during the softmax.",
    "4": "Only a slice of 16 of each operand is live: fewer registers, and larger tiles no longer spill as much.",
    "5": "Written as double buffering of fragments; at -O3 ptxas loads just as early in rung 4.",
    "6": "The scale moves into the exponent: a subtraction and a multiplication per score become one FFMA.",
    "7": "The best of the seeds' search: Q stays in registers, as in rung 3, and fragments are not double-buffered.",
    "8": "The swizzle's XOR on aligned offsets is a sum of signed strides, so that few bases with immediate offsets "
    "address everything; what that frees pays for 32 query rows per warp.",
    "9": "The two registers of each B operand come out of ldmatrix next to each other; no move has to put them there.",
    "10": "The first step writes O instead of adding to zeros, and rescales nothing. A step's code is there twice.",
    "11": "The output's way through shared memory gets the strided addresses of rung 8.",
    "12": "K and V addresses are computed from the block's number; pointers are not carried through the loop. The seed "
    "writes the division by l as a multiplication here, which it is from rung 1 on.",
    "13": "The ragged block, if there is one, comes first. Here all blocks are whole: only the direction changes.",
    "14": "A hint in the output's STG; nothing else.",
    "15": "Shared tiles as panels of 64 columns: one more level of the address, the same accesses.",
    "16": "Row strides are constants in the code instead of parameters.",
    "best": "Two K/V stages with one barrier per step; 256 query rows for eight warps; O is rescaled only when a row's "
    "maximum has grown by more than 2^8, which is exact.",
    "h1": "The tensor cores read K and V from shared memory: no fragments, no ldmatrix, no copies by the consumers.",
    "h2": "Q·Kᵀ of the next block is under way while the softmax of this one runs.",
    "h3": "Named barriers make one warpgroup's softmax fall into the other's products.",
    "h4": "Q is read once by ldmatrix and stays; the wgmma no longer reads Q from shared memory.",
    "h5": "As in the two-stage rung `best`.",
    "h6": "CTAs stay and take tile after tile; the first loads of a tile do not wait for the last stores of another.",
    "h7": "The wait for P·V stands behind the exponentials that do not need it.",
    "h8": "No FMNMX and no shuffle for a block whose predecessors' maxima serve; else mma.sync recomputes its scores. "
    "The loop holds that rare path too, so its counts are more than an iteration executes.",
    "h9": "No FADD for the row sums: P·V is eight columns wider. LOP3 collects the exponents' top bits instead.",
}

FALLS = {
    "10 → 11": "changes the epilogue; in the loop ptxas spells the moves MOV instead of IMAD.MOV, which puts them on "
    "the ALU's pipe instead of the FMA's.",
    "12 → 13": "does the same work in an iteration: uniform additions stand for moves, as the block's number counts "
    "down; a few more address instructions come before and after the loop. The seed gained 2.3 points on the A100.",
    "13 → 14": "changes the hint of the output's STG and nothing else.",
    "14 → 15": "addresses panels of 64 columns: the same accesses, other immediate offsets, fewer spills.",
    "15 → 16": "has constants where the row strides were parameters.",
    "16 → best": "has one CTA to an SM (128 KiB of shared memory): nothing runs beside its first loads and its "
    "epilogue, and at length 512 two tiles of 256 queries are all there is of a head.",
    "h2 → h3": "adds two BAR to an iteration, the turns of the two warpgroups; with the overlap of h2 in place they "
    "cost more than they bring. h4 has the same barriers.",
    "h4 → h5": "tests whether a row's maximum grew enough to rescale: FSETP, FSEL, a vote and a branch for the FMUL it "
    "saves.",
    "h5 → h6": "adds waits and branches to an iteration, for a pipeline that runs on into the next tile: that pays "
    "where tiles are short.",
}
"""What the code of a pair does differently, for the pairs that fall."""

COUNTED = {
    "barrier, % of stalls 4 → 5": "here both are the same SASS",
    "mio_throttle, % of stalls 4 → 5": "here both are the same SASS",
    "tensor pipe, % 7 → 8 → 9": "8 → 9 as there; 7 → 8 is half of it: for sm_90a ptxas copies more registers in 8, 304 "
    "to 256 HMMA an iteration, in 7 119 to 128",
    "FMA pipe, % 7 → 8 → 9": "it falls with the copies of 8 → 9 as there; an H200 has twice an A100's FMA rate",
    "ALU pipe, % 7 → 8 → 9": "for sm_90a all copies of 7 are IMAD.MOV (FMA); of those of 8 a third is MOV (ALU), and "
    "they go in 9",
    "short_scoreboard, % of stalls 9 → 10": "ptxas moved LDSM closer to its HMMA there, and away from it here: the "
    "median distance in the loop is 10 in rung 9, 16 in rung 10",
    "wait, % of stalls 9 → 10": "rung 10 fills fixed latencies with 45 more copies",
    "FMA pipe, % 9 → 10": "the same direction: one step of 64 is peeled, and part of its copies stay on this pipe",
}
"""Why a counter is another than the seeds', by figure and rungs."""


class Ladder:
    """The rungs with their measurements and their SASS."""

    def __init__(self) -> None:
        self.environment, self.rows = timed("bf16")
        self.f16_environment, self.f16_rows = timed("f16")
        static = {dtype: read(f"static/attention-d128-{dtype}.json") for dtype in ("bf16", "f16")}
        self.kernels, self.f16_kernels = (static[dtype]["kernels"] for dtype in ("bf16", "f16"))
        self.nvrtc: str = static["bf16"]["nvrtc"]
        self.profile = counters.evidence("profile.json")
        self.counters = counters.Counters(self.profile)
        self.rungs: list[Rung[Any]] = [rung for rung in FULL_LADDER.rungs if rung.key in self.rows]

    def sass(self, key: str, arch: str | None = None, level: int = 3) -> Row:
        """The figures of a rung's SASS, by default for sm_80 (sm_90a for the rungs that need it)."""
        return self.kernels[f"{key} {arch or ('sm_90a' if key.startswith('h') else 'sm_80')} -O{level}"]

    def geomean(self, key: str) -> tuple[float, float]:
        """(TFLOP/s, ratio to flash), geometric means over all lengths."""
        cells = self.rows[key]["gpu"]["cells"]
        rates = (cell["tflops"]["median"] for cell in cells), (cell["ratio"]["torch_flash"] for cell in cells)
        return tuple(math.exp(math.fsum(map(math.log, x)) / len(cells)) for x in rates)  # type: ignore[return-value]


def timed(dtype: str) -> tuple[Row, dict[str, Row]]:
    """(environment, rows by rung) of ``ladders.py attention --dtype DTYPE``; empty where it was not measured."""
    found = read(f"h200/attention-d128-{dtype}.json") or {"environment": {}, "rows": []}
    return found["environment"], {row["rung"]: row for row in found["rows"]}


def search_text(found: Row) -> str:
    """What the search of rung 6's idea found on this GPU, and where rungs 6 and 7 are in it."""
    rows = {row["config"]: row for row in found["finalists"]}
    first, count = found["finalists"][0], len(found["glance"])
    places = [
        f"rung {key} is number {rows[name]['place']} with {spread(rows[name]['tflops'])}"
        for key, name in sorted(found["rungs"].items(), reverse=True)
    ]
    return (
        f"Of {count} configurations `{first['config']}` is the fastest here, {spread(first['tflops'])} TFLOP/s at "
        f"length {found['seq']}, with {first['registers']} registers and {first['spill_bytes']} bytes spilled; "
        f"{' and '.join(places)}. *{provenance(found['environment'])}*"
    )


def overview(ladder: Ladder) -> str:
    """One line a rung: speed beside the seeds' share of flash, wavefronts, registers, spills."""
    a100 = seeds.seed_figures()["percent_of_flash"]["a100"]
    body: list[list[str]] = []
    for rung in ladder.rungs:
        gpu, config = ladder.rows[rung.key]["gpu"], ladder.rows[rung.key]["config"]
        tflops, (mean, ratio) = gpu["tflops"], ladder.geomean(rung.key)
        share = a100.get(rung.key)
        hopper = rung.key.startswith("h")
        tile = "–" if hopper else f"({config['tile_m']},{config['tile_n']},{config['num_warps']})"
        body.append([rung.key, rung.changes, tile,
                     f"{tflops['median']:.0f} ({tflops['low']:.0f}–{tflops['high']:.0f})",
                     f"{gpu['ratio']['torch_flash']:.2f}", f"{mean:.0f}", f"{ratio:.2f}",
                     f"{share / 100:.2f}" if share else "–", wavefronts(ladder.rows[rung.key]),
                     "–" if hopper else registers(ladder.sass(rung.key)),
                     registers(ladder.sass(rung.key, "sm_90a"))])  # fmt: skip
    header = ["rung", "what changes", "tile", "TFLOP/s at 16384 (10–90 %)", "× flash", "TFLOP/s, mean of lengths",
              "× flash, mean", "seed on A100", "wavefronts: ldmatrix, others", "sm_80 registers (spills)",
              "sm_90a registers (spills)"]  # fmt: skip
    return markdown_table(header, body)


def same_code(ladder: Ladder) -> str:
    """Rungs that compile to their predecessor's instructions at -O3, with both at -O1."""
    body: list[list[str]] = []
    for before, after in pairwise(ladder.rungs):
        if after.key.startswith("h") or ladder.sass(before.key)["code"] != ladder.sass(after.key)["code"]:
            continue
        same = "same" if ladder.sass(before.key, level=1)["code"] == ladder.sass(after.key, level=1)["code"] else ""
        for rung in (before, after):
            for level in (3, 1):
                k = ladder.sass(rung.key, level=level)
                body.append([rung.key, f"-O{level}", registers(k), str(k["loop_instructions"]), distance(k),
                             "same as the rung before" if rung is after and (level == 3 or same) else ""])  # fmt: skip
    return markdown_table(["rung", "ptxas", "registers (spills)", "loop instructions", "LDSM → HMMA", ""], body)


def noise(ladder: Ladder) -> str:
    """How far two rungs of the same code are apart at the longest length: TFLOP/s, and beside flash."""
    first, second = (ladder.rows[key]["gpu"] for key in ("4", "5"))
    rate = second["tflops"]["median"] / first["tflops"]["median"] - 1
    ratio = second["ratio"]["torch_flash"] / first["ratio"]["torch_flash"] - 1
    return f"{abs(rate):.1%} in TFLOP/s and {abs(ratio):.1%} in × flash"


def falling(ladder: Ladder) -> list[tuple[str, str, dict[int, float], dict[int, float]]]:
    """The pairs of rungs from 7 → 8 on where the second is more than 2% below at some length, with the changes.

    Changes are by length, of TFLOP/s and of the ratio to flash.
    """
    found: list[tuple[str, str, dict[int, float], dict[int, float]]] = []
    for before, after in pairwise(rung.key for rung in ladder.rungs):
        if after in {str(n) for n in range(8)}:
            continue
        pairs = list(zip(*(ladder.rows[k]["gpu"]["cells"] for k in (before, after)), strict=True))
        rates = {b["seq"]: b["tflops"]["median"] / a["tflops"]["median"] - 1 for a, b in pairs}
        paired = {b["seq"]: b["ratio"]["torch_flash"] / a["ratio"]["torch_flash"] - 1 for a, b in pairs}
        if min(*rates.values(), *paired.values()) < -FALL:
            found.append((before, after, rates, paired))
    return found


def falls(ladder: Ladder) -> str:
    """Every rung that falls, where, by how much in the mean of the lengths, and what its code does differently."""
    body: list[list[str]] = []
    for before, after, rates, paired in falling(ladder):
        (r0, p0), (r1, p1) = ladder.geomean(before), ladder.geomean(after)
        first, second = ladder.sass(before, "sm_90a"), ladder.sass(after, "sm_90a")
        code = f"{loop_changes(first, second)}; LDSM → HMMA {distance(first)} → {distance(second)}"
        if registers(first) != registers(second):
            code += f"; spills {registers(first)} → {registers(second)}"
        means = _signed(r1 / r0 - 1), _signed(p1 / p0 - 1)
        body.append([f"{before} → {after}", _lengths(rates), means[0], _lengths(paired), means[1], code])
    header = ["rungs", "TFLOP/s lower at", "mean", "× flash lower at", "mean", "SASS for sm_90a, one iteration"]
    return markdown_table(header, body)


def fall_cells(ladder: Ladder) -> str:
    """Each length at which a pair of :func:`falls` falls: the changes, the clock's, and what the counters say."""
    body: list[list[str]] = []
    for before, after, rates, paired in falling(ladder):
        for seq in rates:
            if min(rates[seq], paired[seq]) >= -FALL:
                continue
            clocks = [clock(ladder.rows[key], seq) for key in (before, after)]
            body.append([f"{before} → {after}", str(seq), _signed(rates[seq]), _signed(paired[seq]),
                         _signed(clocks[1] / clocks[0] - 1) if all(clocks) else "–",
                         ladder.counters.fall(before, after, seq) or "not read"])  # fmt: skip
    header = ["rungs", "length", "TFLOP/s", "× flash", "clock while timed", "counters of the second against the first"]
    return markdown_table(header, body)


def clock(row: Row, seq: int) -> float:
    """The median clock of a cell's samples in MHz; 0 where it was not read."""
    (cell,) = (cell for cell in row["gpu"]["cells"] if cell["seq"] == seq)
    return (cell.get("clock_mhz") or {}).get("median", 0.0)


def fall_notes(ladder: Ladder) -> str:
    """What is known of each pair of :func:`falls`: what its code does differently, and whether it takes more cycles."""
    lines: list[str] = []
    for before, after, rates, paired in falling(ladder):
        pair = f"{before} → {after}"
        told = FALLS.get(pair, "differs in an iteration as the table says.")
        where = [seq for seq in rates if min(rates[seq], paired[seq]) < -FALL]
        lines.append(f"- **{pair}** {told} {cycles_told(ladder, before, after, where)}")
    return "\n".join(lines)


def cycles_told(ladder: Ladder, before: str, after: str, lengths: Iterable[int]) -> str:
    """One or two sentences on the cycles that ncu counts for the two at the lengths of a fall."""
    found = ladder.counters.cycles(before, after, lengths)
    if not found:
        elsewhere = ladder.counters.cycles(before, after, [counters.SEQ])
        return "".join(f"Its cycles change by {_signed(change)} at {seq} (ncu)." for seq, change in elsewhere.items())
    shown = ", ".join(f"{_signed(change)} at {seq}" for seq, change in found.items())
    if max(found.values()) < SAME_CYCLES:
        return f"It takes no more cycles (ncu: {shown}): the code loses nothing, timings of rungs this close move."
    return f"Cycles (ncu): {shown}."


def mean_falls(ladder: Ladder) -> str:
    """Which pairs fall by more than 2% beside flash in the mean of the lengths."""
    pairs = [(b, a) for b, a, _, _ in falling(ladder) if ladder.geomean(a)[1] / ladder.geomean(b)[1] - 1 < -FALL]
    if not pairs:
        return "In its mean over the lengths no rung falls by more than 2%."
    return f"In its mean over the lengths these fall by more than 2%: {', '.join(f'{b} → {a}' for b, a in pairs)}."


def _signed(change: float) -> str:
    return f"{change:+.1%}".replace("-", "−")


def _lengths(changes: Mapping[int, float]) -> str:
    return ", ".join(f"{seq} ({_signed(change)})" for seq, change in changes.items() if change < -FALL) or "–"


def walk(ladder: Ladder) -> str:
    """A paragraph a rung: the idea, then what moved against the rung before."""
    parts: list[str] = []
    for before, rung in zip([None, *ladder.rungs], ladder.rungs, strict=False):
        parts.append(f"### {rung.name[0].upper()}{rung.name[1:]}\n\n{WHY[rung.key]}\n\n{moved(ladder, before, rung)}\n")
    return "\n".join(parts)


def moved(ladder: Ladder, before: Rung[Any] | None, rung: Rung[Any]) -> str:
    """The figures of a rung, and of its predecessor where they differ."""
    k, rate = ladder.sass(rung.key), ladder.rows[rung.key]["gpu"]["tflops"]["median"]
    show = f"`warploom inspect attention --rung {rung.key}"
    if before is None or (rung.key.startswith("h") and not before.key.startswith("h")):
        return (f"{registers(k)} registers (spilled bytes), {k['loop_instructions']} instructions an iteration, "
                f"{rate:.0f} TFLOP/s. {show}`")  # fmt: skip
    old, old_rate = ladder.sass(before.key), ladder.rows[before.key]["gpu"]["tflops"]["median"]
    changes = [
        f"registers (spilled bytes) {registers(old)} → {registers(k)}",
        f"instructions an iteration {old['loop_instructions']} → {k['loop_instructions']} ({loop_changes(old, k)})",
        f"address registers of LDSM {old['ldsm_address_registers']} → {k['ldsm_address_registers']}, of LDGSTS "
        f"{old['ldgsts_address_registers']} → {k['ldgsts_address_registers']}",
        f"LDSM → HMMA {distance(old)} → {distance(k)}",
        f"{old_rate:.0f} → {rate:.0f} TFLOP/s at 16384",
    ]
    if rung.key.startswith("h"):
        del changes[2:4]
    if counted := ladder.counters.change(before.key, rung.key):
        changes.insert(-1, f"ncu: {counted}")
    if old["code"] == k["code"]:
        changes = ["the same SASS at -O3, instruction for instruction", changes[-1]]
    return f"{'; '.join(changes)}. {show} --against {before.key}`"


def page() -> str:
    """The whole page."""
    ladder = Ladder()
    mma = [rung.key for rung in ladder.rungs if not rung.key.startswith("h")]
    hopper = [rung.key for rung in HOPPER_LADDER.rungs]
    first = seeds.seed_figures()["spills_part5_first_table"]
    ablated = counters.evidence("ablations.json")
    figures = {
        "OVERVIEW": overview(ladder), "GROUPS": group_table({key: ladder.sass(key) for key in mma}),
        "HOPPER": group_table({key: ladder.sass(key) for key in hopper}),
        "SAME": same_code(ladder), "FALLS": falls(ladder), "CELLS": fall_cells(ladder), "NOISE": noise(ladder),
        "COUNTERS": f"{ladder.counters.table()}\n*{counters.provenance(ladder.profile['environment'])}*",
        "WAITING": ladder.counters.waiting(),
        "AGREEMENT": ladder.counters.agreement(), "THEIRCOUNTERS": ladder.counters.beside_seeds(COUNTED),
        "ABLATIONS": f"{counters.ablation_table(ablated, ladder.counters)}\n*{provenance(ablated['environment'])}*",
        "INTENSITY": counters.intensity_table(ladder.f16_kernels),
        "SWIZZLE": counters.swizzle_table(ladder.f16_kernels),
        "TYPES": seeds.types_apart(ladder.f16_kernels, ladder.kernels),
        "LOGIC": counters.executed_logic(ladder.counters),
        "NOTES": fall_notes(ladder), "MEAN": mean_falls(ladder), "WALK": walk(ladder),
        "NEED": seeds.register_need(), "SPILLS": seeds.spill_table(ladder.f16_kernels),
        "CLAIMS": seeds.claims_table(ladder.f16_kernels), "COUNTS": seeds.counts_table(ladder.f16_kernels),
        "USED": str(ladder.f16_kernels["1 sm_80 -O3"]["registers"]),
        "THEIRS": str(seeds.seed_figures()["registers_used_part3"]),
        "NEAR": f"{seeds.NEAR:.0%}", "NVRTC": ladder.nvrtc, "MADE": provenance(ladder.environment),
        "FIRST": "; ".join(f"{tile} as {' / '.join(map(str, of))}" for tile, of in first.items()),
    }  # fmt: skip
    measured: list[str] = []
    if ladder.counters.reference:
        measured.append("REFERENCE")
        listed = {key: one["sass"] for key, one in ladder.counters.reference.items()}
        figures["EXECUTED"] = ladder.counters.beside_reference(SAME_TILE)
        figures["ITERATION"] = group_table(listed | {key: ladder.sass(key, "sm_90a") for key in SAME_TILE})
        figures["THEIRREGISTERS"] = ", ".join(str(one["registers"]) for one in listed.values())
    if ladder.f16_rows:
        measured.append("F16")
        figures["SHARES"] = seeds.shares_table(ladder.f16_rows, ladder.rows)
        figures["MADEF16"] = provenance(ladder.f16_environment)
    if searched := read("h200/attention-search.json"):
        measured.append("SEARCH")
        figures["SEARCH"] = search_text(searched)
    return filled(HERE / "ladder-attention.template.md", figures, measured)


PAGES = {EVIDENCE / "ladder-attention.md": page}

if __name__ == "__main__":
    sys.exit(main(PAGES))
