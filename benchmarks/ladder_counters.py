"""What ncu counted of attention's rungs and ablations, for docs/evidence/ladder-attention.md.

From benchmarks/results/h200/profile.json (``profile_h200.py``) and ablations.json (``ablations.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import ladder_seeds as seeds
from page_parts import Row, number

SEQ = 4096
"""The length at which every rung's counters were read."""
REFERENCE = "FlashAttention-2"
"""The kernel behind PyTorch's flash backend."""
MATTERS = 1.0
"""Percentage points of the stall samples from which on a change is named."""
SAME_CYCLES = 0.0075
"""Up to so many more cycles are none: ncu's figures of one kernel differ by half of it from run to run."""
STALLS = ["short_scoreboard", "long_scoreboard", "wait", "math_pipe_throttle", "mio_throttle", "barrier", "gmma"]
ALL = "all"

MERGED = {
    "0": "ptxas joins accesses to neighbouring scores: STS.64 and LDS.64 where the Program has two of 4 bytes",
    "8 k_slices=off": "for sm_90a ptxas loads a fragment once that the Program loads twice: 80 LDSM an iteration, not "
    "144 as at -O1 and for sm_80",
    "9 k_slices=off": "the same",
}
"""Where the code executes fewer accesses than the Program, which is what the emulator runs."""


class Counters:
    """The counters of rungs, of ablations, and of rungs at other lengths, by name."""

    def __init__(self, profile: Row) -> None:
        self.profile = profile
        self.rungs: dict[str, Row] = {key: one for key, one in profile["rungs"].items() if "counters" in one}
        ablations, lengths = profile.get("ablations", {}), profile.get("lengths", {})
        self.ablations: dict[str, Row] = {key: one for key, one in ablations.items() if "counters" in one}
        self.lengths: dict[str, Row] = {key: one for key, one in lengths.items() if "stalls" in one}
        known = profile.get("reference", {})
        self.reference: dict[str, Row] = {key: one for key, one in known.items() if "sass" in one}

    @property
    def all(self) -> list[tuple[str, Row]]:
        """The rungs, and the reference behind them."""
        return [*self.rungs.items(), *self.reference.items()]

    def of(self, key: str) -> Row:
        """The counters at length 4096 of a rung or an ablation."""
        return (self.rungs.get(key) or self.ablations[key])["counters"]

    def unequal(self) -> list[str]:
        """The kernels in which the two sides do not count the same wavefronts."""
        every = {**self.rungs, **self.ablations}
        return [k for k, one in every.items() if any(p["emulator"] != p["ncu"] for p in one["wavefronts"].values())]

    def beside_reference(self, keys: Iterable[str]) -> Iterator[list[str]]:
        """Warp instructions that a launch executes, by purpose, in millions: the reference's, and ours over them."""
        theirs, *ours = (_executed(one) for one in (self.reference[REFERENCE], *(self.rungs[key] for key in keys)))
        for name in (*dict.fromkeys(name for of in (theirs, *ours) for name in of if name != ALL), ALL):
            count = theirs.get(name, 0)
            beside = ((of.get(name, 0), f" ({of.get(name, 0) / count:.2f}×)" if count else "") for of in ours)
            yield [name, f"{count / 1e6:.1f}", *(f"{n / 1e6:.1f}{ratio}" for n, ratio in beside)]

    def figures(self, claim: Row) -> list[float]:
        """The counters that a seed's figure is about, of its rungs."""
        first, found = claim["figure"].split(",")[0], list[float]()
        for counters in map(self.of, claim["rungs"]):
            if claim["figure"].endswith("of stalls"):
                found.append(float(counters["stall shares, %"].get(first, 0.0)))
            elif first.endswith("pipe"):
                found.append(counters["pipes, %"][first.removesuffix(" pipe").lower()])
            else:
                found.append(counters["memory, %"][first])
        return found

    def hits(self, key: str) -> str:
        """L2 hits of a rung and of its ablation; – where one was not read."""
        pair = [k for k in (key.split()[0], key) if k in self.rungs or k in self.ablations]
        return changed(f"{self.of(k)['memory, %']['L2 hit rate']:.1f}" for k in pair) if len(pair) == 2 else "–"

    def logic(self, opcode: str) -> str:
        """How often kernel 7 executes an opcode, over the unswizzled one."""
        swizzled, plain = (self.of(key)["executed by opcode"] for key in ("7", "7 swizzle=off"))
        return f"{opcode} {swizzled[opcode] / plain[opcode]:.0f}×"

    def change(self, before: str, after: str) -> str:
        """How a rung's counters differ from another's: cycles, instructions, pipes that moved; "" without them."""
        if before not in self.rungs or after not in self.rungs:
            return ""
        first, second = self.of(before), self.of(after)
        pipes = {name: (first["pipes, %"][name], share) for name, share in second["pipes, %"].items()}
        moved = sorted(pipes.items(), key=lambda pipe: -abs(pipe[1][1] - pipe[1][0]))[:3]
        told = [f"{name} {old:.1f} → {new:.1f} %" for name, (old, new) in moved if abs(new - old) >= 2 * MATTERS]
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

    def cycles_told(self, fall: Any) -> str:
        """One or two sentences on the cycles that ncu counts for the two at the lengths of a fall."""
        found = self.cycles(fall.before, fall.after, fall.lengths)
        if not found:
            elsewhere = self.cycles(fall.before, fall.after, [SEQ]).items()
            return "".join(
                f"Its cycles change by {number(change, '+.1%')} at {seq} (ncu)." for seq, change in elsewhere
            )
        shown = ", ".join(f"{number(change, '+.1%')} at {seq}" for seq, change in found.items())
        if max(found.values()) < SAME_CYCLES:
            return f"It takes no more cycles (ncu: {shown}): the code loses nothing, timings of rungs this close move."
        return f"Cycles (ncu): {shown}."

    def fall(self, before: str, after: str, seq: int) -> str:
        """What the counters of two rungs at a length say of the second's being slower; "" where there are none."""
        first, second = self.at(before, seq), self.at(after, seq)
        if first is None or second is None:
            return ""
        changes = {reason: second["stalls"].get(reason, 0.0) - share for reason, share in first["stalls"].items()}
        grown = sorted(changes.items(), key=lambda item: -item[1])[:2]
        found = [
            *_totals(first, second),
            *(f"{reason} {number(change, '+.2f')} cycles per issue" for reason, change in grown if change >= 0.05),
        ]
        hits = [c["memory, %"]["L2 hit rate"] for c in (first, second)]
        if abs(hits[1] - hits[0]) >= MATTERS:
            found.append(f"L2 hits {hits[0]:.1f} → {hits[1]:.1f} %")
        return ", ".join(found)


def stalled(counters: Row) -> list[str]:
    """The shares of the cycles between two issues of a warp that go to each of STALLS."""
    return [f"{counters['stall shares, %'].get(reason, 0.0):.1f}" for reason in STALLS]


def _totals(first: Row, second: Row) -> list[str]:
    """How the cycles and the executed instructions of two launches differ."""
    changes = (("cycles", "time", "cycles"), ("instructions", "instructions", "all"))
    return [f"{name} {number(second[table][of] / first[table][of] - 1, '+.1%')}" for name, table, of in changes]


def _executed(one: Row) -> dict[str, int]:
    """Executed warp instructions by purpose, with their sum behind them."""
    groups: Mapping[str, int] = one["counters"]["executed by purpose"]
    return {**groups, ALL: sum(groups.values())}


def _pairs(counters: Row) -> list[Row]:
    """Who waits for whom, the largest share first; none where ncu took no samples."""
    return (counters.get("samples") or {}).get("who waits for whom", [])


def ldmatrix(counters: Row) -> list[str]:
    """(share of the samples at which an HMMA waits for LDSM, the median distance there)."""
    for pair in _pairs(counters):
        if (pair["waits"], pair["for"]) == ("HMMA", "LDSM"):
            return [f"{pair['share, %']:.1f}", str(pair["between"])]
    return ["0.0", "–"] if _pairs(counters) else ["", ""]  # none: the samples are on no listing with encodings


def waiting(counters: Row) -> list[str]:
    """Who waits for whom, the three largest, and the instruction with most samples."""
    shown = [f"{p['waits']} for {p['for']} {p['share, %']:.1f}% ({p['between']})" for p in _pairs(counters)[:3]]
    hottest = (counters.get("samples") or {}).get("hottest", [])[:1]
    after = [f", {h['between']} after {_code(h['waits for'])}" if "waits for" in h else "" for h in hottest]
    spot = [f"{_code(h['sass'])} {h['share, %']:.1f}%{more}" for h, more in zip(hottest, after, strict=True)]
    return ["; ".join(shown) or "–", "".join(spot)]


def _code(text: str) -> str:
    """SASS as code in Markdown; labels have backticks of their own."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def merged(key: str) -> str:
    """A kernel of MERGED with its reason."""
    return f"{key}: {MERGED.get(key, 'not explained')}"


def alike(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Whether a single figure is within ten points of the seed's, or every change is like the seed's."""
    if len(theirs) == 1:
        return abs(ours[0] - theirs[0]) <= 10
    return all(seeds.same_change(ours[i : i + 2], theirs[i : i + 2]) for i in range(len(theirs) - 1))


# -- ablations and fragment intensity


def ablations(rows: Iterable[Row]) -> list[tuple[str, Row, Row]]:
    """Each ablation by its name, behind its rung."""
    known = {row["rung"]: row for row in rows}
    return [(key, known[key.split()[0]], row) for key, row in known.items() if " " in key]


def ablated_rates(whole: Row, row: Row) -> list[str]:
    """TFLOP/s of the rung and of the ablation at each length, and the change beside flash."""
    return [
        f"{a['tflops']['median']:.0f} → {b['tflops']['median']:.0f} "
        f"({number(b['ratio']['torch_flash'] / a['ratio']['torch_flash'] - 1, '+.1%')})"
        for a, b in zip(whole["gpu"]["cells"], row["gpu"]["cells"], strict=True)
    ]


def changed(pair: Iterable[str]) -> str:
    """``before → after``, or what both are."""
    return " → ".join(dict.fromkeys(pair))


def ldmatrix_factor(row: Row) -> str:
    """Wavefronts of ldmatrix over the ideal ones."""
    w = row["wavefronts"]["ldmatrix"]
    return f"{w['actual'] / w['ideal']:.2f}"


def spilled(row: Row) -> str:
    """Registers and spilled bytes for sm_90a."""
    found = row["targets"]["sm_90a"]
    return f"{found['registers']} ({found['spill_bytes']})"


def intensity(rows: int, columns: int, *, k_slices: bool) -> float:
    """Products of fragments per fragment loaded, for ``rows`` × ``columns`` of them.

    Along the inner dimension each fragment is loaded once; row by column, those of B once for each row of A.
    """
    loads = rows + columns if k_slices else rows * columns + rows
    return rows * columns / loads


def per_load(kernel: Row) -> str:
    """Products of an iteration over its ldmatrix."""
    counts = kernel["loop_counts"]
    return f"{counts['HMMA']} / {counts['LDSM']} = {kernel['mma_per_ldmatrix']:.2f}"


def logic(counts: Mapping[str, int]) -> int:
    """Logic and shifts."""
    return sum(counts.get(name, 0) for name in ("LOP3", "SHF", "IMAD.SHL"))
