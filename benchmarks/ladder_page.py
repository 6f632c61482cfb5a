"""Write docs/evidence/ladder-attention.md from the committed evidence: ``python benchmarks/ladder_page.py [--check]``.

The evidence is benchmarks/results/h200/attention-d128-bf16.json and attention-d128-f16.json (``ladders.py
attention``), the SASS figures of ``benchmarks/ladder_static.py`` and the seeds' figures in benchmarks/seeds/.
``--check`` changes nothing and ends with 1 if the page is out of date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import geometric_mean
from typing import Any

import ladder_counters as counted
from page_parts import (
    EVIDENCE,
    Row,
    distance,
    filled,
    loop_changes,
    made_with,
    main,
    number,
    read,
    registers,
    spread,
)

from warploom_lab.kernels.attention.ladder import FULL_LADDER, HOPPER_LADDER
from warploom_lab.kernels.ladder import Rung

HOPPER_KEYS = [rung.key for rung in HOPPER_LADDER.rungs]
SAME_TILE = ("8", "9", "16")
"""Rungs with the tile of the reference kernel, (128,64,4)."""
FALL = 0.02
SHARED_BY_ALL = {str(n) for n in range(8)}
"""Rungs before the ones whose falls are looked at."""


@dataclass(frozen=True)
class Fall:
    """A rung more than 2% below the one before at some length: changes by length, of TFLOP/s and × flash, and means."""

    before: str
    after: str
    rates: Mapping[int, float]
    paired: Mapping[int, float]
    means: tuple[float, float]

    @property
    def name(self) -> str:
        """``10 → 11``."""
        return f"{self.before} → {self.after}"

    @property
    def lengths(self) -> list[int]:
        """Where it falls."""
        return [seq for seq in self.rates if min(self.rates[seq], self.paired[seq]) < -FALL]

    @property
    def in_mean(self) -> bool:
        """Whether it falls in the mean over the lengths too, beside flash."""
        return self.means[1] < -FALL


class Ladder:
    """The rungs with their measurements and their SASS."""

    def __init__(self) -> None:
        self.environment, self.rows = timed("bf16")
        self.f16_environment, self.f16_rows = timed("f16")
        static = {dtype: read(f"static/attention-d128-{dtype}.json") for dtype in ("bf16", "f16")}
        self.kernels, self.f16_kernels = (static[dtype]["kernels"] for dtype in ("bf16", "f16"))
        self.nvrtc = made_with(static["bf16"])
        self.counters = counted.Counters(read("h200/profile.json"))
        self.rungs: list[Rung[Any]] = [rung for rung in FULL_LADDER.rungs if rung.key in self.rows]

    def sass(self, key: str, arch: str | None = None, level: int = 3) -> Row:
        """The figures of a rung's SASS, by default for sm_80 (sm_90a for the rungs that need it)."""
        return self.kernels[f"{key} {arch or ('sm_90a' if key.startswith('h') else 'sm_80')} -O{level}"]

    def listed(self, keys: Iterable[str], arch: str) -> dict[str, Row]:
        """The SASS of rungs."""
        return {key: self.sass(key, arch) for key in keys}

    def geomean(self, key: str) -> tuple[float, float]:
        """(TFLOP/s, ratio to flash), geometric means over all lengths."""
        cells = self.rows[key]["gpu"]["cells"]
        return (
            geometric_mean(cell["tflops"]["median"] for cell in cells),
            geometric_mean(cell["ratio"]["torch_flash"] for cell in cells),
        )

    def same_code(self) -> list[tuple[str, str]]:
        """Rungs that compile to their predecessor's instructions at -O3."""
        pairs = pairwise(rung.key for rung in self.rungs)
        return [(a, b) for a, b in pairs if not b.startswith("h") and self.sass(a)["code"] == self.sass(b)["code"]]

    def apart(self, first: str, second: str, what: str) -> float:
        """How far two rungs are apart at the longest length: in TFLOP/s ("rate"), or beside flash."""
        a, b = (self.rows[key]["gpu"] for key in (first, second))
        if what == "rate":
            return b["tflops"]["median"] / a["tflops"]["median"] - 1
        return b["ratio"]["torch_flash"] / a["ratio"]["torch_flash"] - 1

    def falling(self) -> list[Fall]:
        """The rungs from 8 on that fall."""
        found: list[Fall] = []
        for before, after in pairwise(rung.key for rung in self.rungs):
            pairs = list(zip(*(self.rows[k]["gpu"]["cells"] for k in (before, after)), strict=True))
            rates = {b["seq"]: b["tflops"]["median"] / a["tflops"]["median"] - 1 for a, b in pairs}
            paired = {b["seq"]: b["ratio"]["torch_flash"] / a["ratio"]["torch_flash"] - 1 for a, b in pairs}
            (r0, p0), (r1, p1) = self.geomean(before), self.geomean(after)
            fall = Fall(before, after, rates, paired, (r1 / r0 - 1, p1 / p0 - 1))
            if fall.lengths and after not in SHARED_BY_ALL:
                found.append(fall)
        return found

    def code(self, fall: Fall) -> str:
        """What the second's code does differently."""
        first, second = self.sass(fall.before, "sm_90a"), self.sass(fall.after, "sm_90a")
        told = f"{loop_changes(first, second)}; LDSM → HMMA {distance(first)} → {distance(second)}"
        spills = registers(first), registers(second)
        return told if spills[0] == spills[1] else f"{told}; spills {spills[0]} → {spills[1]}"

    def clock(self, fall: Fall, seq: int) -> float | None:
        """The change of the median clock of a cell's samples; None where it was not read."""
        cells = (cell for key in (fall.before, fall.after) for cell in self.rows[key]["gpu"]["cells"])
        first, second = ((c.get("clock_mhz") or {}).get("median", 0.0) for c in cells if c["seq"] == seq)
        return second / first - 1 if first and second else None

    def moved(self, key: str) -> str:
        """The figures of a rung, and of its predecessor where they differ."""
        keys = [None, *(rung.key for rung in self.rungs)]
        before, hopper = keys[keys.index(key) - 1], key.startswith("h")
        k, rate = self.sass(key), self.rows[key]["gpu"]["tflops"]["median"]
        show = f"`warploom inspect attention --rung {key}"
        if before is None or (hopper and not before.startswith("h")):
            return (
                f"{registers(k)} registers (spilled bytes), {k['loop_instructions']} instructions an iteration, "
                f"{rate:.0f} TFLOP/s. {show}`"
            )
        old, old_rate = self.sass(before), self.rows[before]["gpu"]["tflops"]["median"]
        addresses = [
            f"address registers of LDSM {old['ldsm_address_registers']} → {k['ldsm_address_registers']}, of LDGSTS "
            f"{old['ldgsts_address_registers']} → {k['ldgsts_address_registers']}",
            f"LDSM → HMMA {distance(old)} → {distance(k)}",
        ]
        ncu = self.counters.change(before, key)
        changes = [
            f"registers (spilled bytes) {registers(old)} → {registers(k)}",
            f"instructions an iteration {old['loop_instructions']} → {k['loop_instructions']} ({loop_changes(old, k)})",
            *([] if hopper else addresses),
            *([f"ncu: {ncu}"] if ncu else []),
        ]
        if old["code"] == k["code"]:
            changes = ["the same SASS at -O3, instruction for instruction"]
        return f"{'; '.join(changes)}; {old_rate:.0f} → {rate:.0f} TFLOP/s at 16384. {show} --against {before}`"


def timed(dtype: str) -> tuple[Row, dict[str, Row]]:
    """(environment, rows by rung) of ``ladders.py attention --dtype DTYPE``; empty where it was not measured."""
    found = read(f"h200/attention-d128-{dtype}.json") or {"environment": {}, "rows": []}
    return found["environment"], {row["rung"]: row for row in found["rows"]}


def places(found: Row) -> str:
    """Where rungs 6 and 7 are in a search."""
    rows = {row["config"]: row for row in found["finalists"]}
    return " and ".join(
        f"rung {key} is number {rows[name]['place']} with {spread(rows[name]['tflops'])}"
        for key, name in sorted(found["rungs"].items(), reverse=True)
    )


def lower_at(changes: Mapping[int, float]) -> str:
    """The lengths of a fall."""
    return ", ".join(f"{seq} ({number(change, '+.1%')})" for seq, change in changes.items() if change < -FALL) or "–"


def grid_orders(ablated: Row, counters: counted.Counters) -> tuple[list[tuple[str, Row, Row]], Row, counted.Counters]:
    """Ablations by the order of the grid, their environment and counters: an H200's, else those of an H100."""
    for rows, of in ((ablated, counters), (read("h100/ablations.json"), None)):
        turned = [one for one in counted.ablations(rows.get("rows", [])) if "heads_first" in one[0]]
        if turned:
            return turned, rows["environment"], of or counted.Counters(read("h100/profile.json") or {"rungs": {}})
    return [], {}, counters


def page() -> str:
    """The whole page."""
    ladder, search = Ladder(), read("h200/attention-search.json")
    reference = {key: one["sass"] for key, one in ladder.counters.reference.items()}
    return filled(
        "ladder-attention.template.md",
        __name__,
        "ladder_counters",
        "ladder_seeds",
        ladder=ladder,
        search=search,
        reference=reference and reference | ladder.listed(SAME_TILE, "sm_90a"),
        ablated=read("h200/ablations.json"),
    )


PAGES = {EVIDENCE / "ladder-attention.md": page}

if __name__ == "__main__":
    sys.exit(main(PAGES))
