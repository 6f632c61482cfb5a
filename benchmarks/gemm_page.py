"""Write docs/evidence/ladder-gemm.md from the committed evidence: ``python benchmarks/gemm_page.py [--check]``.

The evidence is benchmarks/results/h200/gemm-f16.json and gemm-f32.json (``ladders.py gemm --accumulate f16``),
gemm-tuned-f16.json (``ladders.py gemm --tuned``), seed-gemm.json (benchmarks/seed_gemm_h200.py),
gemm.json (benchmarks/gemm_h200.py), gemm-power.json (benchmarks/gemm_power_h200.py), gemm-waves.json
(benchmarks/gemm_waves_h200.py), profile-gemm.json (benchmarks/profile_gemm_h200.py), the SASS figures of
``benchmarks/gemm_static.py`` and the seed's table in benchmarks/seeds/gemm.json. ``--check`` changes nothing and ends
with 1 if the page is out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

from gemm_page_counters import both_sides, counters
from gemm_page_power import KINDS, at_the_limit, layers, power_table, reading, sustained
from gemm_page_tuned import beside_kernels, search_summary, tuned_tables
from gemm_page_waves import layer_summary, layer_table, uneven, wave_table
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
)
from page_tables import markdown_table
from render import provenance

from warploom.bench.gemm import ACCUMULATORS, GemmFamily, settled
from warploom.bench.ladder import config_json
from warploom.core.dtypes import DType
from warploom.kernels.ladder import Rung
from warploom.kernels.matmul.ladder import BEST32, FULL_LADDER, HOPPER_LADDER, LADDER

ACCESSES = ("ldmatrix", "ld.shared", "st.shared", "cp.async")

WHY = {
    "00a": "The WMMA API: a warp loads 16×16 matrices from shared memory, multiplies them and stores the sums, and the "
    "API does not say which lane holds what. ptxas compiles its loads to LDSM.x4, so the rows of 128 and 256 bytes "
    "that they read collide as those of 01b do. An epilogue that needs a sum's row or column has to wait until the "
    "sums are in memory again.",
    "00b": "16 bytes of padding behind each row, of C's tile too: eight rows begin in eight groups of banks. The API "
    "allows no more, because it takes rows at one distance and no swizzle. A's tile takes an eighth more shared "
    "memory.",
    "01a": "The kernel loads every element of a fragment by itself, at the row and column that the fragment's map "
    "gives: 8 loads of 2 bytes for an A operand, 4 for B. Rows are whole cycles of the banks apart, so they collide.",
    "01b": "One ldmatrix for each operand. The instructions fall, the time does not: the eight rows of 16 bytes that "
    "it reads at once still share four banks.",
    "02": "The 16-byte chunk's number is XORed with bits of the row, by a Swizzle<B,M,S> that follows from the tile's "
    "row width. The eight rows fall into eight groups of banks, in the epilogue's tile as well. A thread's copies are "
    "whole periods of the swizzle apart, so one swizzled address and immediates serve them all.",
    "03": "Three shared tiles: the copies of the next two run during the products of this one.",
    "04": "The fragments of the next k-step load during the products of this one, across the border of two tiles. The "
    "copies start in the middle of a tile, and one barrier per tile is enough instead of two.",
    "05": "Tiles of C run in groups of eight rows, so that CTAs that run at the same time share their part of B in the "
    "L2.",
    "06": "Beyond the seed: the XOR on aligned offsets is a sum of signed strides, formed once before the loop, and "
    "one ldmatrix loads two B operands.",
    "07": "Beyond the seed: eight warps share a tile of 128×256, so that each byte from the L2 is used more often. "
    "At the power limit, bytes that do not move are products that run.",
    "best16": "128×64 for each warp and 256×256 for the CTA: f16 accumulators leave enough registers.",
    "best32": "f32 accumulators take twice the registers, so 64×64 is the most for a warp that keeps two sets of "
    "fragments. Groups of sixteen rows of tiles make the area of concurrent tiles nearly square, which reads least.",
}


class Evidence:
    """The rungs with their measurements and their SASS."""

    def __init__(self) -> None:
        self.timed: dict[str, Any] = {kind: read(f"h200/gemm-{kind}.json") for kind in KINDS}
        static = read("static/gemm.json")
        self.kernels: dict[str, Row] = static["kernels"]
        self.nvrtc: str = static["nvrtc"]
        self.power: Any = read("h200/gemm-power.json")
        self.waves: Any = read("h200/gemm-waves.json")
        self.profile: Any = read("h200/profile-gemm.json")
        self.tuned: Any = read("h200/gemm-tuned-f16.json")
        self.kernels_of_seed: Any = read("h200/seed-gemm.json")
        self.products: Any = read("h200/gemm.json")
        self.seed: Any = json.loads((HERE / "seeds" / "gemm.json").read_text(encoding="utf-8"))
        self.rungs: list[Rung[Any]] = list(LADDER.rungs)

    def kind(self, key: str) -> str | None:
        """An accumulator that a rung was timed with, f16 first; None where it was not."""
        return next((kind for kind in KINDS if key in self.rows(kind)), None)

    def rows(self, kind: str) -> dict[str, Row]:
        """The timed rows of one accumulator, by rung."""
        return {row["rung"]: row for row in self.timed[kind]["rows"]}

    def cells(self, kind: str, key: str) -> dict[int, Row]:
        """A rung's cells by size."""
        return {cell["n"]: cell for cell in self.rows(kind)[key]["gpu"]["cells"]}

    def sizes(self, kind: str) -> list[int]:
        """The sizes that were timed."""
        return list(self.cells(kind, "02"))

    def sass(self, key: str, kind: str = "f16", arch: str = "sm_90a") -> Row:
        """The figures of a rung's SASS."""
        return self.kernels[f"{key} {kind} {arch}"]

    def of(self, kind: str) -> Iterator[Rung[Any]]:
        """The rungs that were timed with an accumulator."""
        return (rung for rung in self.rungs if rung.key in self.rows(kind))


def tile(config: Row) -> str:
    """The seed's parameters: ``BM=128 BN=128 BK=64 WM=64 WN=64 STAGES=3 BLOCK_STRIDE=8``."""
    words = {"BM": "tile_m", "BN": "tile_n", "BK": "tile_k", "WM": "warp_m", "WN": "warp_n", "STAGES": "stages",
             "BLOCK_STRIDE": "block_stride"}  # fmt: skip
    return " ".join(f"{word}={config[name]}" for word, name in words.items())


def outdated(evidence: Evidence, kind: str) -> str:
    """Which rungs were timed as another Program than today's, or do not say as which; "" where none was."""
    family, rows = GemmFamily(), evidence.rows(kind)
    found = [
        rung.key for rung in FULL_LADDER.rungs
        if rung.key in rows and rows[rung.key].get("digest") != _digest(family, rung, ACCUMULATORS[kind])
    ]  # fmt: skip
    return f"; of an earlier Program, or without its digest: {', '.join(found)}" if found else ""


def _digest(family: GemmFamily, rung: Rung[Any], accumulate: DType) -> str:
    (settled_rung,) = settled([rung], accumulate, {})
    return family.emulator_case(settled_rung.config, 0).program.digest


def speeds(evidence: Evidence, kind: str) -> str:
    """TFLOP/s with spread and the share of cuBLAS, a row a rung, a column a size; cuBLAS itself last."""
    sizes = evidence.sizes(kind)
    body: list[list[str]] = []
    for key in evidence.rows(kind):
        cells = evidence.cells(kind, key)
        body.append([key, *(f"{spread(cells[n]['tflops'])} · {cells[n]['ratio']['cublas']:.0%}" for n in sizes)])
    cells = evidence.cells(kind, "02")
    body.append(["00 cuBLAS", *(spread(cells[n]["peers"]["cublas"]["tflops"]) for n in sizes)])
    return markdown_table(["rung", *(f"N = {n}" for n in sizes)], body)


def overview(evidence: Evidence) -> str:
    """What each rung changes, its parameters, and what needs no clock."""
    body: list[list[str]] = []
    for rung in evidence.rungs:
        kind = evidence.kind(rung.key)
        emulated = ["–", "–"]
        if kind is not None:
            row = evidence.rows(kind)[rung.key]
            error, findings = row["error"]["value"] / row["error"]["bound"], sum(f["count"] for f in row["findings"])
            emulated = [f"{error:.2f}", str(findings or "none")]
        compiled = (
            registers(evidence.sass(rung.key, k, a)) if f"{rung.key} {k} {a}" in evidence.kernels else "–"
            for k in KINDS
            for a in ("sm_80", "sm_90a")
        )
        body.append([rung.key, rung.changes, tile(config_json(rung.config)), *emulated, *compiled])
    header = ["rung", "what changes", "parameters", "error / bound", "findings",
              *(f"registers (spills) {k}, {a}" for k in KINDS for a in ("sm_80", "sm_90a"))]  # fmt: skip
    return markdown_table(header, body)


def hopper(evidence: Evidence) -> str:
    """What the rungs fed by the TMA change, with error, findings, registers and their best speed."""
    body: list[list[str]] = []
    rows = evidence.rows("f32")
    for rung in HOPPER_LADDER.rungs:
        row = rows.get(rung.key)
        if row is None:
            continue  # not measured yet
        findings = sum(f["count"] for f in row["findings"])
        target = row["targets"]["sm_90a"]
        cells = evidence.cells("f32", rung.key).values()
        fastest = max(cells, key=lambda cell: cell["tflops"]["median"])
        body.append([
            rung.key, rung.changes, f"{row['error']['value'] / row['error']['bound']:.2f}", str(findings or "none"),
            f"{target['registers']} ({target['spill_bytes']})",
            f"{spread(fastest['tflops'])} at N = {fastest['n']} · {fastest['ratio']['cublas']:.0%}",
        ])  # fmt: skip
    header = ["rung", "what changes", "error / bound", "findings", "sm_90a registers (spills)", "fastest TFLOP/s"]
    return markdown_table(header, body)


def wavefronts(evidence: Evidence) -> str:
    """Wavefronts per instruction beside the ideal, for each class of access."""
    body: list[list[str]] = []
    for rung in evidence.of("f16"):
        found = evidence.rows("f16")[rung.key]["wavefronts"]
        body.append([rung.key, *(_per_access(found[name]) for name in ACCESSES)])
    return markdown_table(["rung", *ACCESSES], body)


def _per_access(entry: Row) -> str:
    """``32.0 (ideal 4.0)``; – without such accesses."""
    if not entry["accesses"]:
        return "–"
    return f"{entry['actual'] / entry['accesses']:.1f} (ideal {entry['ideal'] / entry['accesses']:.1f})"


def beside_seed(evidence: Evidence) -> str:
    """The seed's TFLOP/s on an A100 and ours, and both steps from rung to rung."""
    theirs = evidence.seed["tflops"]
    body: list[list[str]] = []
    before: str | None = None
    for key in ("01a", "01b", "02", "03", "04", "05"):
        cells = evidence.cells("f16", key)
        line = [key]
        for n in (4096, 8192, 16384):
            line += [f"{theirs[key][str(n)]}", f"{cells[n]['tflops']['median']:.0f}"]
        line += [f"{theirs[key]['8192'] / theirs['cublas']['8192']:.0%}", f"{cells[8192]['ratio']['cublas']:.0%}"]
        if before is not None:
            step = cells[8192]["over_rung_before"]
            line += [f"{theirs[key]['8192'] / theirs[before]['8192']:.2f}×", f"{step:.2f}×"]
        body.append(line + ["–"] * (11 - len(line)))
        before = key
    header = ["rung", *(f"{who}, N = {n}" for n in (4096, 8192, 16384) for who in ("seed", "here")),
              "seed, % of cuBLAS", "here, % of cuBLAS", "seed, over the rung before", "here"]  # fmt: skip
    return markdown_table(header, body)


def walk(evidence: Evidence) -> str:
    """A paragraph a rung: the idea, then what moved against the rung before."""
    parts: list[str] = []
    for before, rung in pairwise([None, *evidence.rungs]):
        assert rung is not None
        parts.append(f"### {rung.name}\n\n{WHY[rung.key]}\n\n{moved(evidence, before, rung)}\n")
    return "\n".join(parts)


def moved(evidence: Evidence, before: Rung[Any] | None, rung: Rung[Any]) -> str:
    """The figures of a rung, and of its predecessor where there is one; TFLOP/s of what was timed."""
    kind = "f32" if rung.config is BEST32 else "f16"
    k = evidence.sass(rung.key, kind)
    show = f"`warploom inspect gemm --rung {rung.key} --arch sm_90a"
    if before is None or kind == "f32":
        return (f"{registers(k)} registers (spilled bytes) and {k['loop_instructions']} instructions an iteration on "
                f"sm_90a{_rates(evidence, kind, rung)}. {show}`")  # fmt: skip
    old = evidence.sass(before.key, kind)
    changes = [
        f"registers (spilled bytes) {registers(old)} → {registers(k)}",
        f"instructions an iteration {old['loop_instructions']} → {k['loop_instructions']} ({loop_changes(old, k)})",
        f"address registers of LDSM {old['ldsm_address_registers']} → {k['ldsm_address_registers']}, of LDGSTS "
        f"{old['ldgsts_address_registers']} → {k['ldgsts_address_registers']}",
        f"LDSM → HMMA {distance(old)} → {distance(k)}",
    ]
    return f"On sm_90a: {'; '.join(changes)}{_rates(evidence, kind, before, rung)}. {show} --against {before.key}`"


def _rates(evidence: Evidence, kind: str, *rungs: Rung[Any]) -> str:
    """`, 112 → 397 TFLOP/s at N = 8192`; nothing where a rung was not timed."""
    if any(rung.key not in evidence.rows(kind) for rung in rungs):
        return ""
    rates = [f"{evidence.cells(kind, rung.key)[8192]['tflops']['median']:.0f}" for rung in rungs]
    return f"{'; ' if len(rungs) > 1 else ', '}{' → '.join(rates)} TFLOP/s at N = 8192"


def page() -> str:
    """The whole page."""
    evidence = Evidence()
    keys = [rung.key for rung in evidence.rungs if rung.config is not BEST32]
    figures = {
        "OVERVIEW": overview(evidence), "WAVEFRONTS": wavefronts(evidence), "SEED": beside_seed(evidence),
        "F16": speeds(evidence, "f16"), "F32": speeds(evidence, "f32"), "WALK": walk(evidence),
        "GROUPS": group_table({key: evidence.sass(key) for key in keys}),
        "GROUPS80": group_table({key: evidence.sass(key, arch="sm_80") for key in keys}),
        "HOPPER": hopper(evidence), "SUSTAINED": sustained(evidence), "NVRTC": evidence.nvrtc,
        "SAMPLES": str(evidence.cells("f16", "02")[8192]["samples"]),
        "MADE16": provenance(evidence.timed["f16"]["environment"]) + outdated(evidence, "f16"),
        "MADE32": provenance(evidence.timed["f32"]["environment"]) + outdated(evidence, "f32"),
    }  # fmt: skip
    figures |= {"SHORT": at_the_limit(evidence), "LAYERS": layers(evidence)}
    parts: dict[str, dict[str, Callable[[Evidence], str]]] = {
        "power": {
            "RATE": lambda e: power_table(e.power["rate"]), "POWER16": lambda e: power_table(e.power["f16"]),
            "POWER32": lambda e: power_table(e.power["f32"]), "READING": reading,
            "MADEPOWER": lambda e: provenance(e.power["environment"]),
        },
        "tuned": {
            "TUNED": tuned_tables, "SEARCHED": search_summary,
            "MADETUNED": lambda e: provenance(e.tuned["environment"]),
        },
        "kernels_of_seed": {
            "THEIRS": beside_kernels, "MADETHEIRS": lambda e: provenance(e.kernels_of_seed["environment"]),
        },
        "waves": {
            "WAVES": wave_table, "UNEVEN": uneven, "FEWTILES": layer_table, "SCHEDULES": layer_summary,
            "MADEWAVES": lambda e: provenance(e.waves["environment"]),
        },
        "profile": {
            "COUNTERS": counters, "BOTH": both_sides, "PROFILED": lambda e: str(e.profile["size"]),
            "MADEPROFILE": lambda e: f"{provenance(e.profile['environment'])}, ncu {e.profile['environment']['ncu']}",
        },
    }  # fmt: skip
    measured = {name for name in parts if getattr(evidence, name)}
    figures |= {key: write(evidence) for name in measured for key, write in parts[name].items()}
    return filled(HERE / "ladder-gemm.template.md", figures, measured)


PAGES = {EVIDENCE / "ladder-gemm.md": page}

if __name__ == "__main__":
    sys.exit(main(PAGES))
