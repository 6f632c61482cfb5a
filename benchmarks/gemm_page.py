"""Write docs/evidence/ladder-gemm.md from the committed evidence: ``python benchmarks/gemm_page.py [--check]``.

The evidence is benchmarks/results/h200/gemm-f16.json and gemm-f32.json (``ladders.py gemm --accumulate f16``),
gemm-tuned-f16.json and gemm-tuned-starts-f16.json (``ladders.py gemm --tuned``), gemm.json
(benchmarks/gemm_h200.py), gemm-power.json (benchmarks/gemm_power_h200.py), gemm-waves.json
(benchmarks/gemm_waves_h200.py), profile-gemm.json (benchmarks/profile_gemm_h200.py), the SASS figures of
``benchmarks/gemm_static.py`` and the seed's table in benchmarks/seeds/gemm.json. ``--check`` changes nothing and ends
with 1 if the page is out of date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from statistics import geometric_mean
from typing import Any

from gemm_page_counters import both_sides
from page_parts import (
    EVIDENCE,
    HERE,
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

from warploom.core.dtypes import f16
from warploom.emulate import emulate
from warploom_lab.bench.gemm import GemmFamily, settled
from warploom_lab.bench.ladder import config_json, finding_json, wavefronts_json
from warploom_lab.bench.tables import tile_text
from warploom_lab.kernels.ladder import Rung
from warploom_lab.kernels.matmul.ladder import BEST32, HOPPER_LADDER, LADDER

KINDS = ("f16", "f32")
CONDITIONS = tuple((data, load) for data in ("uniform", "normal") for load in ("sustained", "rested"))
BESIDE_OURS = "gemm_beside_ours_2026-11-22.json"
"""The seed's kernels beside ours, measured once; its "method" says how."""
SCHEDULES = ("whole", "split_k", "stream_k")
FULL_CLOCK, TENSOR_CORES, HMMA_FLOPS = 1980, 132 * 4, 2 * 16 * 8 * 16
"""MHz of the H200's multiprocessors where power does not limit them, their tensor cores, FLOPs of an mma.sync."""


# -- the ladder


class Timed:
    """The timed rows of each accumulator by rung, and the figures of their SASS."""

    def __init__(self) -> None:
        found = {kind: read(f"h200/gemm-{kind}.json") for kind in KINDS}
        self.made: Row = {kind: of["environment"] for kind, of in found.items()}
        self.rows: dict[str, dict[str, Row]] = {
            kind: {row["rung"]: row for row in of["rows"]} for kind, of in found.items()
        }
        static = read("static/gemm.json")
        self.kernels: dict[str, Row] = static["kernels"]
        self.nvrtc = made_with(static)

    def cells(self, kind: str, key: str) -> dict[int, Row]:
        """A rung's cells by size."""
        return {cell["n"]: cell for cell in self.rows[kind][key]["gpu"]["cells"]}

    def sizes(self, kind: str) -> list[str]:
        """The sizes that were timed, as heads of columns."""
        return [f"N = {n}" for n in self.cells(kind, "02")]

    def f16_kernels(self, arch: str) -> dict[str, Row]:
        """The figures of the kernels with f16 accumulators, by rung."""
        return {r.key: self.kernels[f"{r.key} f16 {arch}"] for r in LADDER.rungs if r.config is not BEST32}

    def needs(self, key: str, kind: str, arch: str) -> str:
        """Registers and spills of a rung, where it was compiled."""
        found = self.kernels.get(f"{key} {kind} {arch}")
        return "–" if found is None else registers(found)

    def moved(self, key: str) -> str:
        """The figures of a rung, and of its predecessor where there is one; TFLOP/s of what was timed."""
        rung = LADDER.rung(key)
        before = next((a for a, b in pairwise(LADDER.rungs) if b is rung), None)
        kind = "f32" if rung.config is BEST32 else "f16"
        k = self.kernels[f"{key} {kind} sm_90a"]
        show = f"`warploom inspect gemm --rung {key} --arch sm_90a"
        if before is None or kind == "f32":
            return (
                f"{registers(k)} registers (spilled bytes) and {k['loop_instructions']} instructions an iteration on "
                f"sm_90a{self._rates(kind, rung)}. {show}`"
            )
        old = self.kernels[f"{before.key} {kind} sm_90a"]
        changes = [
            f"registers (spilled bytes) {registers(old)} → {registers(k)}",
            f"instructions an iteration {old['loop_instructions']} → {k['loop_instructions']} ({loop_changes(old, k)})",
            f"address registers of LDSM {old['ldsm_address_registers']} → {k['ldsm_address_registers']}, of LDGSTS "
            f"{old['ldgsts_address_registers']} → {k['ldgsts_address_registers']}",
            f"LDSM → HMMA {distance(old)} → {distance(k)}",
        ]
        return f"On sm_90a: {'; '.join(changes)}{self._rates(kind, before, rung)}. {show} --against {before.key}`"

    def _rates(self, kind: str, *rungs: Rung[Any]) -> str:
        """`, 112 → 397 TFLOP/s at N = 8192`; nothing where a rung was not timed."""
        if any(rung.key not in self.rows[kind] for rung in rungs):
            return ""
        rates = [f"{self.cells(kind, rung.key)[8192]['tflops']['median']:.0f}" for rung in rungs]
        return f"{'; ' if len(rungs) > 1 else ', '}{' → '.join(rates)} TFLOP/s at N = 8192"


@cache
def emulated(key: str) -> Row:
    """Error, findings and wavefronts of a rung with f16 sums, from the emulator now: of rungs that were never timed."""
    (rung,) = settled([LADDER.rung(key)], f16, {})
    case = GemmFamily().emulator_case(rung.config, 0)
    emulation = emulate(case.program, case.grid, case.arguments)
    return {
        "error": asdict(case.errors()),
        "findings": [finding_json(finding) for finding in emulation.findings],
        "wavefronts": wavefronts_json(emulation),
    }


def tile(config: Any) -> str:
    """The seed's parameters: ``BM=128 BN=128 BK=64 WM=64 WN=64 STAGES=3 BLOCK_STRIDE=8``."""
    words = {
        "BM": "tile_m",
        "BN": "tile_n",
        "BK": "tile_k",
        "WM": "warp_m",
        "WN": "warp_n",
        "STAGES": "stages",
        "BLOCK_STRIDE": "block_stride",
    }
    return " ".join(f"{word}={config_json(config)[name]}" for word, name in words.items())


def cublas(cell: Row) -> str:
    """TFLOP/s of cuBLAS in a cell, with their spread."""
    return spread(cell["baselines"]["cublas"]["tflops"])


def beside_cublas(cell: Row) -> str:
    """TFLOP/s with spread and the share of cuBLAS."""
    return f"{spread(cell['tflops'])} · {cell['ratio']['cublas']:.0%}"


def error(row: Row | None) -> str:
    """A rung's error over its bound."""
    return f"{row['error']['value'] / row['error']['bound']:.2f}" if row else "–"


def findings(row: Row | None) -> str:
    """How many findings the emulator has."""
    return str(sum(f["count"] for f in row["findings"]) or "none") if row else "–"


def per_access(entry: Row) -> str:
    """``32.0 (ideal 4.0)``; – without such accesses."""
    if not entry["accesses"]:
        return "–"
    return f"{entry['actual'] / entry['accesses']:.1f} (ideal {entry['ideal'] / entry['accesses']:.1f})"


def stalls(counted: Row) -> str:
    """The two reasons that most cycles between issues go to."""
    shares = sorted(counted["stall shares, %"].items(), key=lambda item: -item[1])
    return ", ".join([f"{name} {share:.0f} %" for name, share in shares if name != "selected"][:2])


# -- power


def load(power: Row | None) -> list[str]:
    """TFLOP/s, watts, clock and TFLOP per joule."""
    return [number((power or {}).get(key), "g") for key in ("tflops", "watts", "sm_mhz", "tflop_per_joule")]


def fastest(rows: Iterable[Row], rate: Callable[[Row], float] = lambda row: row["tflops"]) -> Row:
    """The row with the highest rate."""
    return max(rows, key=rate)


def by_mma(rows: dict[str, Row]) -> dict[str, Row]:
    """Those of kernels that multiply by ``mma.sync``."""
    return {key: row for key, row in rows.items() if "consumers" not in row["config"]}


def of_power(timed: Timed, power: Row, products: list[Row]) -> dict[str, Any]:
    """What the sentences about power are made of."""
    last = {kind: {key: row["gpu"]["cells"][-1] for key, row in rows.items()} for kind, rows in timed.rows.items()}
    ratios: dict[Any, list[float]] = {}
    for row in products:
        for group in (int(row["name"].rpartition(".m")[2]), row["weights"]):
            ratios.setdefault(group, []).append(row["best mma.sync"] / row["cublas"])
    cells = {kind: [timed.cells(kind, key)[8192] for key in by_mma(rows)] for kind, rows in timed.rows.items()}
    ours = {kind: [r for name, r in power[kind].items() if name != "cublas" and "tflops" in r] for kind in KINDS}

    def at_full_clock(what: str) -> float:
        """TFLOP/s of so many cycles per mma, were the clock FULL_CLOCK."""
        return TENSOR_CORES * HMMA_FLOPS / power["rate"][f"f32 64x64 mma {what}"]["cycles_per_mma"] * FULL_CLOCK / 1e6

    limit = {kind: fastest(last[kind][key]["power"] for key in by_mma(rows)) for kind, rows in timed.rows.items()}
    return {
        "hot": [cell["power"] for cells in last.values() for key, cell in cells.items() if not key.startswith("01")],
        "limit": limit | {"cublas": last["f32"]["best32"]["baselines"]["cublas"]["power"]},
        "layers": sorted(item for item in ratios.items() if isinstance(item[0], int)),
        "layouts": [item for item in ratios.items() if isinstance(item[0], str)],
        "best": {kind: fastest(of) for kind, of in ours.items()},
        "at_full_clock": at_full_clock,
        "rested": {kind: fastest(of, lambda cell: cell["tflops"]["median"]) for kind, of in cells.items()},
        "products": [row for kind in KINDS for row in power[kind].values() if "watts" in row],
    }


def at_rows(layer: tuple[int, list[float]]) -> str:
    """The mean ratio at a number of rows."""
    return f"{geometric_mean(layer[1]):.2f}× at {layer[0]}"


# -- searched tiles, the seed's kernels, uneven tiles


def tuned_tile(row: Row, n: int) -> str:
    """The tile that won for a rung at a size."""
    config = next((c["config"] for c in row["gpu"]["cells"] if c["n"] == n and "config" in c), row["config"])
    return tile_text(config) or "its own"


def contest(of: Row) -> str:
    """TFLOP/s of the seed's kernel and of ours, and how many times faster ours is."""
    return f"{of['seed']:.0f} → {of['ours']:.0f} · {of['ratio']['median']:.2f}×"


def searched(rows: Iterable[Row]) -> Iterator[str]:
    """How many configurations each rung's search timed, of how many."""
    for row in rows:
        of = next(iter(row.get("search", {}).values()), None)
        if of is not None and of["timed"] > 1:
            yield f"{row['rung']} {of['timed']} of {of['timed'] + sum(of['dropped'].values())}"


def at_conditions(rows: Iterable[Row], n: int, told: Callable[[Row], str]) -> list[str]:
    """What is told of the cell of some rows at a size under each of CONDITIONS."""
    cells = {(c["data"], c["load"]): c for row in rows for c in row["gpu"]["cells"] if c["n"] == n}
    return [told(cells[key]) if key in cells else "–" for key in CONDITIONS]


def sizes_of(rows: Iterable[Row]) -> list[int]:
    """The sizes of all cells."""
    return list(dict.fromkeys(cell["n"] for row in rows for cell in row["gpu"]["cells"]))


def scheduled(row: Row) -> list[str]:
    """TFLOP/s of each schedule's best, and beside cuBLAS."""
    rates = (row[s]["tflops"] if s in row else None for s in SCHEDULES)
    return ["–" if rate is None else f"{rate:.0f} ({rate / row['cublas']['tflops']:.2f})" for rate in rates]


def fastest_schedule(row: Row) -> str:
    """The schedule whose best is the fastest."""
    return max((s for s in SCHEDULES if s in row), key=lambda s: row[s]["tflops"])


def waves_of(row: Row, waves: Row) -> float:
    """Waves of BEST32's tiles."""
    return -(-row["m"] // BEST32.tile_m) * -(-row["n"] // BEST32.tile_n) / waves["multiprocessors"]


def uneven(waves: Row) -> Iterator[str]:
    """What a fraction of a wave costs with whole tiles, and with stream-K."""
    counted = sorted(((waves_of(row, waves), row) for row in waves["waves"]["products"].values()), key=lambda x: x[0])
    for (few, before), (more, after) in pairwise(counted):
        if few == int(few) and more < few + 0.2:
            losses = (1.0 - after[s]["tflops"] / before["whole"]["tflops"] for s in ("whole", "stream_k"))
            yield "from {:g} to {:.2f} waves {:.0%} and {:.0%}".format(few, more, *losses)


def seeds(file: str) -> Row:
    """A file of the seed's figures."""
    return json.loads((HERE / "seeds" / file).read_text(encoding="utf-8"))


def page() -> str:
    """The whole page."""
    timed, power, products = Timed(), read("h200/gemm-power.json"), read("h200/gemm.json")
    figures = of_power(timed, power, products["shapes"]) | {"ladder": timed, "power": power, "both_sides": both_sides}
    return filled("ladder-gemm.template.md", __name__, hopper=HOPPER_LADDER.rungs, **figures)


PAGES = {EVIDENCE / "ladder-gemm.md": page}

if __name__ == "__main__":
    sys.exit(main(PAGES))
