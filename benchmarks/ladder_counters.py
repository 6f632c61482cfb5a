"""What counters and ablations say of the ladder: tables and sentences for docs/evidence/ladder-attention.md.

From benchmarks/results/h200/profile.json (``profile_h200.py``), ablations.json (``ablations.py``) and the SASS figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ladder_seeds as seeds
import render
from page_tables import markdown_table

RESULTS = Path(__file__).resolve().parent / "results" / "h200"
Row = Mapping[str, Any]
Kernels = Mapping[str, Row]
SEQ = 4096
"""The length at which every rung's counters were read."""
REFERENCE = "FlashAttention-2"
"""The kernel behind PyTorch's flash backend."""
MATTERS = 1.0
"""Percentage points of the stall samples from which on a change is named."""

MERGED = {
    "0": "ptxas joins accesses to neighbouring scores: STS.64 and LDS.64 where the Program has two of 4 bytes",
    "8 k_slices=off": "for sm_90a ptxas loads a fragment once that the Program loads twice: 80 LDSM an iteration, not "
    "144 as at -O1 and for sm_80",
    "9 k_slices=off": "the same",
}
"""Where the code executes fewer accesses than the Program, which is what the emulator runs."""


def evidence(name: str) -> dict[str, Any]:
    """A committed result of the H200."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def provenance(environment: Row) -> str:
    """GPU, versions and date, and ncu's version where it was noted."""
    version = environment.get("ncu")
    return render.provenance(environment) + (f", ncu {version}" if version else "")


class Counters:
    """The counters of rungs, of ablations, and of rungs at other lengths, by name."""

    def __init__(self, profile: Row) -> None:
        self.rungs: dict[str, Row] = {key: one for key, one in profile["rungs"].items() if "counters" in one}
        ablations, lengths = profile.get("ablations", {}), profile.get("lengths", {})
        self.ablations: dict[str, Row] = {key: one for key, one in ablations.items() if "counters" in one}
        self.lengths: dict[str, Row] = {key: one for key, one in lengths.items() if "stalls" in one}
        known = profile.get("reference", {})
        self.reference: dict[str, Row] = {key: one for key, one in known.items() if "sass" in one}

    def known(self, key: str) -> bool:
        """Whether the counters of a rung or an ablation were read."""
        return key in self.rungs or key in self.ablations

    def of(self, key: str) -> Row:
        """The counters at length 4096 of a rung or an ablation."""
        return (self.rungs.get(key) or self.ablations[key])["counters"]

    # -- tables
    def table(self) -> str:
        """One line a rung: pipes, memory, conflicts, and why warps wait."""
        header = ["rung", "cycles, 10⁶", "issue slots, %", "tensor, %", "FMA, %", "ALU, %", "shared loads, %",
                  "L2 loads, %", "L2 hits, %", "bank conflicts", *STALLS, "HMMA waits for LDSM, %",
                  "LDSM → HMMA there"]  # fmt: skip
        body: list[list[str]] = []
        for key, one in {**self.rungs, **self.reference}.items():
            c, waiting = one["counters"], self.ldmatrix(one["counters"])
            pipes, memory = c["pipes, %"], c["memory, %"]
            body.append([
                key, f"{c['time']['cycles'] / 1e6:.3f}", _one(c["time"]["issue slots, %"]),
                *(_one(pipes[name]) for name in ("tensor", "fma", "alu")),
                *(_one(memory[name]) for name in ("shared loads", "L2 loads", "L2 hit rate")),
                f"{c['bank conflicts']['all shared']:,.0f}", *(_one(stall(c, reason)) for reason in STALLS), *waiting,
            ])  # fmt: skip
        return markdown_table(header, body)

    def ldmatrix(self, counters: Row) -> list[str]:
        """(share of the samples at which an HMMA waits for LDSM, the median distance there)."""
        for pair in pairs(counters):
            if (pair["waits"], pair["for"]) == ("HMMA", "LDSM"):
                return [f"{pair['share, %']:.1f}", str(pair["between"])]
        return ["0.0", "–"] if pairs(counters) else ["", ""]  # none: the samples are on no listing with encodings

    def waiting(self) -> str:
        """Who waits for whom, the three largest of each rung."""
        body: list[list[str]] = []
        for key, one in self.rungs.items():
            shown = [
                f"{p['waits']} for {p['for']} {p['share, %']:.1f}% ({p['between']})" for p in pairs(one["counters"])
            ]
            hottest = (one["counters"].get("samples") or {}).get("hottest", [])[:1]
            spot = [f"{_code(h['sass'])} {h['share, %']:.1f}%{_after(h)}" for h in hottest]
            body.append([key, "; ".join(shown[:3]) or "–", "".join(spot)])
        header = ["rung", "who waits for whom, % of the samples (instructions between)", "the instruction with most"]
        return markdown_table(header, body)

    def beside_reference(self, keys: Iterable[str]) -> str:
        """Warp instructions that a launch executes, by purpose, in millions: the reference's, and ours over them."""
        theirs = _executed(self.reference[REFERENCE])
        ours = [_executed(self.rungs[key]) for key in keys]
        body = [
            [name, _millions(theirs.get(name, 0)), *(_over(of.get(name, 0), theirs.get(name, 0)) for of in ours)]
            for name in (*dict.fromkeys(name for of in (theirs, *ours) for name in of if name != ALL), ALL)
        ]
        return markdown_table(["purpose", REFERENCE, *(f"rung {key}" for key in keys)], body)

    def agreement(self) -> str:
        """In how many kernels both sides count the same wavefronts, and why not in the others."""
        everyone = {**self.rungs, **self.ablations}
        apart = [k for k, one in everyone.items() if any(p["emulator"] != p["ncu"] for p in one["wavefronts"].values())]
        count = f"{len(self.rungs)} rungs and {len(self.ablations)} ablations"
        if not apart:
            return f"The emulator's wavefronts equal ncu's, class by class, in all {count}."
        reasons = "; ".join(f"{key}: {MERGED.get(key, 'not explained')}" for key in apart)
        return f"The emulator's wavefronts equal ncu's, class by class, in all {count} but {len(apart)} ({reasons})."

    def beside_seeds(self, reasons: Mapping[str, str]) -> str:
        """The seeds' counters and ours; ``reasons`` by figure and rungs, for what is different."""
        body: list[list[str]] = []
        for claim in seeds.seed_figures()["counters"]:
            ours = [self.figure(key, claim["figure"]) for key in claim["rungs"]]
            rungs, values = " → ".join(claim["rungs"]), claim["values"]
            if len(values) == 1:
                alike = abs(ours[0] - values[0]) <= 10
            else:
                alike = all(seeds.same_change(ours[i : i + 2], values[i : i + 2]) for i in range(len(values) - 1))
            reason = reasons.get(f"{claim['figure']} {rungs}", "another GPU, whose units are not an A100's")
            body.append([claim["figure"], rungs, " → ".join(f"{v:g}" for v in values) + f" ({claim['gpu']})",
                         " → ".join(map(_one, ours)), seeds.verdict(alike, reason)])  # fmt: skip
        return markdown_table(["figure", "rungs", "seed", "here (H200)", ""], body)

    def figure(self, key: str, name: str) -> float:
        """The counter that a seed's figure is about, by its name."""
        counters, first = self.of(key), name.split(",")[0]
        if name.endswith("of stalls"):
            return stall(counters, first)
        if first.endswith("pipe"):
            return counters["pipes, %"][first.removesuffix(" pipe").lower()]
        return counters["memory, %"][first]

    def change(self, before: str, after: str) -> str:
        """How a rung's counters differ from another's: cycles, instructions, pipes that moved; "" without them."""
        if before not in self.rungs or after not in self.rungs:
            return ""
        first, second = self.of(before), self.of(after)
        pipes = {name: (first["pipes, %"][name], share) for name, share in second["pipes, %"].items()}
        moved = sorted(pipes.items(), key=lambda pipe: -abs(pipe[1][1] - pipe[1][0]))[:3]
        told = [f"{name} {_one(old)} → {_one(new)} %" for name, (old, new) in moved if abs(new - old) >= 2 * MATTERS]
        return ", ".join([*_totals(first, second), *told])

    # -- falls
    def at(self, key: str, seq: int) -> Row | None:
        """The counters of a rung at a length, if they were read."""
        found = self.lengths.get(f"{key} at {seq}")
        if found is None and seq == SEQ and key in self.rungs:
            found = self.rungs[key]["counters"]
        return found

    def cycles(self, before: str, after: str, lengths: Iterable[int]) -> dict[int, float]:
        """Length → the relative change of the cycles that a launch takes, where both were counted."""
        found: dict[int, float] = {}
        for seq in lengths:
            first, second = self.at(before, seq), self.at(after, seq)
            if first is not None and second is not None:
                found[seq] = second["time"]["cycles"] / first["time"]["cycles"] - 1
        return found

    def fall(self, before: str, after: str, seq: int) -> str:
        """What the counters of two rungs at a length say of the second's being slower; "" where there are none."""
        first, second = self.at(before, seq), self.at(after, seq)
        if first is None or second is None:
            return ""
        found = _totals(first, second)
        changes = {reason: stall_cycles(second, reason) - stall_cycles(first, reason) for reason in first["stalls"]}
        grown = sorted(changes, key=lambda reason: -changes[reason])[:2]
        found += [
            f"{reason} {signed(changes[reason], 1)} cycles per issue" for reason in grown if changes[reason] >= 0.05
        ]
        hits = [c["memory, %"]["L2 hit rate"] for c in (first, second)]
        if abs(hits[1] - hits[0]) >= MATTERS:
            found.append(f"L2 hits {hits[0]:.1f} → {hits[1]:.1f} %")
        return ", ".join(found)


STALLS = ("short_scoreboard", "long_scoreboard", "wait", "math_pipe_throttle", "mio_throttle", "barrier", "gmma")


def stall(counters: Row, reason: str) -> float:
    """A reason's share of the cycles between two issues of a warp, in %."""
    return float(counters["stall shares, %"].get(reason, 0.0))


def stall_cycles(counters: Row, reason: str) -> float:
    """Warp cycles spent so per issued instruction."""
    return float(counters["stalls"].get(reason, 0.0))


def _totals(first: Row, second: Row) -> list[str]:
    """How the cycles and the executed instructions of two launches differ."""
    changes = (("cycles", "time", "cycles"), ("instructions", "instructions", "all"))
    return [f"{name} {signed(second[table][of] / first[table][of] - 1)}" for name, table, of in changes]


def pairs(counters: Row) -> list[Row]:
    """Who waits for whom, the largest share first; none where ncu took no samples."""
    return (counters.get("samples") or {}).get("who waits for whom", [])


def _pairs(one: Row) -> list[Row]:
    return pairs(one["counters"])


def _after(spot: Row) -> str:
    return f", {spot['between']} after {_code(spot['waits for'])}" if "waits for" in spot else ""


def _code(text: str) -> str:
    """SASS as code in Markdown; labels have backticks of their own."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


ALL = "all"


def _executed(one: Row) -> dict[str, int]:
    """Executed warp instructions by purpose, with their sum behind them."""
    groups: Mapping[str, int] = one["counters"]["executed by purpose"]
    return {**groups, ALL: sum(groups.values())}


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f}"


def _over(count: int, reference: int) -> str:
    return _millions(count) + (f" ({count / reference:.2f}×)" if reference else "")


def _one(value: float) -> str:
    return f"{value:.1f}"


def signed(change: float, unit: float = 100) -> str:
    """``+1.2%``, or with ``unit`` 1 ``+1.2``."""
    text = f"{change:+.1%}" if unit == 100 else f"{change:+.2f}"
    return text.replace("-", "−")


# -- ablations ---------------------------------------------------------------------------------------------------------

SHOWS = {
    "1 async_copy=off": "copies through registers, unswizzled",
    "2 async_copy=off": "copies through registers",
    "7 swizzle=off": "no swizzle: bank conflicts, but few address registers",
    "8 swizzle=off": "no swizzle, larger tile",
    "8 tile_m=64": "the strided swizzle at kernel 7's tile",
    "8 tile_m=64 swizzle=off": "no swizzle at kernel 7's tile",
    "8 k_slices=off": "fragments row by column",
    "8 opt_level=1": "ptxas at -O1",
    "8 k_slices=off opt_level=1": "fragments row by column, ptxas at -O1",
    "9 k_slices=off": "fragments row by column, K row-major",
}


def ablation_table(timed: Row, counters: Counters) -> str:
    """Each ablation beside its rung: TFLOP/s at both lengths, wavefronts, registers, L2 hits."""
    rows = {row["rung"]: row for row in timed["rows"]}
    body: list[list[str]] = []
    for key, row in rows.items():
        whole = rows[key.split()[0]]
        if row is whole:
            continue
        cells = [
            f"{a['tflops']['median']:.0f} → {b['tflops']['median']:.0f} "
            f"({signed(b['ratio']['torch_flash'] / a['ratio']['torch_flash'] - 1)})"
            for a, b in zip(whole["gpu"]["cells"], row["gpu"]["cells"], strict=True)
        ]
        hits = [counters.of(k)["memory, %"]["L2 hit rate"] for k in (key.split()[0], key) if counters.known(k)]
        found = _change(map(_ldmatrix, (whole, row))), _change(map(_registers, (whole, row)))
        body.append([f"`{key}`", SHOWS[key], *cells, *found, _change(map(_one, hits)) if len(hits) == 2 else "–"])
    lengths = [f"TFLOP/s at {cell['seq']} (× flash)" for cell in timed["rows"][0]["gpu"]["cells"]]
    header = ["ablation", "what it is", *lengths, "ldmatrix × ideal", "sm_90a registers (spilled)", "L2 hits, %"]
    return markdown_table(header, body)


def _change(pair: Any) -> str:
    before, after = pair
    return before if before == after else f"{before} → {after}"


def _ldmatrix(row: Row) -> str:
    w = row["wavefronts"]["ldmatrix"]
    return f"{w['actual'] / w['ideal']:.2f}"


def _registers(row: Row) -> str:
    found = row["targets"]["sm_90a"]
    return f"{found['registers']} ({found['spill_bytes']})"


LOGIC = ("LOP3", "SHF", "IMAD.SHL")
SWIZZLE_COLUMNS = ("registers", "instructions", "LDSM addresses", "LDGSTS addresses", *LOGIC)


def swizzle_table(kernels: Kernels) -> str:
    """Part 8's comparison at (64,64,4): kernels 7 and 8 with and without the swizzle, seed → here."""
    body: list[list[str]] = []
    for key, ours, theirs in (
        ("7, no swizzle", "7 (64,64,4) unswizzled", "7_64_64_no_swizzling"),
        ("7, swizzle", "7 (64,64,4)", "7_64_64_swizzling"),
        ("8, no swizzle", "8 (64,64,4) unswizzled", "8_64_64_no_swizzling"),
        ("8, swizzle", "8 (64,64,4)", "8_64_64_swizzling"),
    ):
        here, seed = kernels[f"{ours} sm_80 -O3"], seeds.published(theirs)
        counts = {name: here["counts"].get(name, 0) for name in LOGIC}
        found = {"registers": here["registers"], "instructions": here["instructions"],
                 "LDSM addresses": here["ldsm_address_registers"],
                 "LDGSTS addresses": here["ldgsts_address_registers"], **counts}  # fmt: skip
        wanted = seed | {"LDSM addresses": seed["ldsm_address_registers"],
                         "LDGSTS addresses": seed["ldgsts_address_registers"]}  # fmt: skip
        looped = sum(here["loop_counts"].get(name, 0) for name in LOGIC)
        body.append([key, *(f"{wanted[name]} → {found[name]}" for name in SWIZZLE_COLUMNS), str(looped)])
    return markdown_table(["kernel", *SWIZZLE_COLUMNS, "the last three in an iteration, here"], body)


def executed_logic(counters: Counters) -> str:
    """How often kernel 7 executes logic and shifts, over the unswizzled one."""
    swizzled, plain = (counters.of(key)["executed by opcode"] for key in ("7", "7 swizzle=off"))
    return ", ".join(f"{name} {swizzled[name] / plain[name]:.0f}×" for name in ("LOP3", "SHF"))


# -- fragment intensity ------------------------------------------------------------------------------------------------


def intensity(rows: int, columns: int, *, k_slices: bool) -> float:
    """Products of fragments per fragment loaded, for ``rows`` × ``columns`` of them.

    Along the inner dimension each fragment is loaded once; row by column, those of B once for each row of A.
    """
    loads = rows + columns if k_slices else rows * columns + rows
    return rows * columns / loads


def intensity_table(kernels: Kernels) -> str:
    """Part 5's figure in the three ways of counting it."""
    told = seeds.seed_figures()["fragment_intensity_part5"]
    orders = ("k-slices", "row by column")
    body = [["the seed's figures", *(f"{told[o]:g}" for o in orders), f"{told[orders[0]] / told[orders[1]]:.2f}"]]
    derived = [intensity(2, 8, k_slices=order == "k-slices") for order in orders]
    body.append(["8×8 fragments of Q·Kᵀ, a warp's 2 rows and 8 columns of them: products per fragment loaded",
                 *(f"{value:.2f}" for value in derived), f"{derived[0] / derived[1]:.2f}"])  # fmt: skip
    for tile in ("(64,64,4)", "(128,64,4)"):
        found = [kernels[f"8 {tile} {order} sm_80 -O3"] for order in orders]
        cells = [
            f"{k['loop_counts']['HMMA']} / {k['loop_counts']['LDSM']} = {k['mma_per_ldmatrix']:.2f}" for k in found
        ]
        ratio = found[0]["mma_per_ldmatrix"] / found[1]["mma_per_ldmatrix"]
        body.append([f"HMMA / LDSM in an iteration of rung 8 at {tile}", *cells, f"{ratio:.2f}"])
    return markdown_table(["count", *orders, "ratio"], body)
