"""The static evidence of docs/evidence/ladder-attention.md: what every rung compiles to, as figures in JSON.

    python benchmarks/ladder_static.py [--dtype f16] [--out DIR]

bf16 is what the H200's figures are of, f16 what the seeds compiled. Needs NVRTC and nvdisasm, no GPU; takes about two
minutes on two cores. Registers and counts are comparable with those of a GPU's evidence where its NVRTC is the same
one: for the committed files, pip install "nvidia-cuda-nvrtc==13.0.*".
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from warploom.core.dtypes import DTYPES, DType, bf16
from warploom.cuda.compile import available_cores
from warploom.cuda.device import nvrtc_version
from warploom.ir.program import Program
from warploom_lab.bench.attention import has_room
from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import write as write_json
from warploom_lab.inspect import SassReport, inspect_program
from warploom_lab.inspect.subjects import attention_program
from warploom_lab.kernels.attention.ladder import FULL_LADDER

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "static"
SPILL_TILES = ((64, 32), (64, 64), (128, 32), (128, 64), (128, 128))
"""(tile_m, tile_n) of the spill tables in part 5 of the seeds, with four warps."""


Subjects = Mapping[str, tuple[Any, str, int | None]]
"""What is compiled by its name in the evidence: a configuration, for which target, at which level (None: its own)."""


def subjects(dtype: DType = bf16) -> Subjects:
    """Every rung at -O3 and -O1 for both targets, and the tiles and ablations that the seeds print."""
    kept = [rung for rung in FULL_LADDER.rungs if has_room(rung, 128, dtype)]
    rungs = {rung.key: replace(rung.config, dtype=dtype) for rung in kept}
    found: dict[str, tuple[Any, str, int | None]] = {}
    for key, config in rungs.items():
        hopper = config.requires == "sm_90a"
        for arch, level in (("sm_90a", 3),) if hopper else (("sm_80", 3), ("sm_80", 1), ("sm_90a", 3)):
            found[f"{key} {arch} -O{level}"] = config, arch, level

    def variant(key: str, what: str, **flags: Any) -> None:
        found[f"{key} {what} sm_80 -O3"] = replace(rungs[key], **flags), "sm_80", 3

    for key, (tile_m, tile_n) in product(("3", "4"), SPILL_TILES):
        variant(key, f"({tile_m},{tile_n},4)", tile_m=tile_m, tile_n=tile_n)
    for key in ("7", "8"):
        variant(key, "(64,64,4)", tile_m=64)
        variant(key, "(64,64,4) unswizzled", tile_m=64, swizzle=False)
        # Part 5's two orders of fragments: row by column needs slices of Q as well.
        for tile_m in (64, 128):
            order = {"tile_m": tile_m, "load_q": 2}
            variant(key, f"({tile_m},64,4) k-slices", **order)
            variant(key, f"({tile_m},64,4) row by column", k_slices=False, **order)
    variant("7", "(128,64,4)", tile_m=128)
    # Kernel 7 loads Q once and kernel 8 in slices: this tells the fragments' share of the spills from the swizzle's.
    variant("7", "(128,64,4) load_2_2_2", tile_m=128, load_q=2)
    return found


def figures_of(program: Program, arch: str, opt_level: int | None) -> dict[str, Any]:
    """Compile a Program and count."""
    report = inspect_program(program, arch, program.opt_level if opt_level is None else opt_level)
    known = report.known_occupancy()
    code = "\n".join(map(str, report.instructions))
    return {
        "digest": program.digest,
        "registers": report.registers,
        "stack_bytes": report.stack_bytes,
        "spill_store_bytes": report.spill_store_bytes,
        "spill_load_bytes": report.spill_load_bytes,
        "instructions": len(report.instructions),
        "loop_instructions": len(report.loop_instructions),
        "warps_per_sm": known.warps_per_sm if known else None,
        "limited_by": list(known.limited_by) if known else [],
        "groups": report.groups,
        "loop_groups": report.loop_groups,
        "counts": report.counts,
        "loop_counts": report.loop_counts,
        "ldsm_address_registers": len(report.address_registers("LDSM")),
        "ldgsts_address_registers": len(report.address_registers("LDGSTS")),
        "mma_per_ldmatrix": report.mma_per_ldmatrix,
        "ldsm_to_hmma": load_use_distance(report),
        "code": hashlib.sha256(code.encode()).hexdigest()[:16],
    }


def load_use_distance(report: SassReport) -> dict[str, float] | None:
    """How many instructions stand between an LDSM of the main loop and the first HMMA that reads what it loads.

    ``median``, and the share of the LDSM with at most two between (``short``): those HMMA wait for the scoreboard. None
    without such pairs.
    """
    distances = report.ldmatrix_to_mma
    if not distances:
        return None
    short = sum(distance <= 2 for distance in distances) / len(distances)
    return {"median": statistics.median(distances), "short": round(short, 3)}


def write(subjects: Subjects, traced: Callable[[Any], Program], out: Path) -> None:
    """Compile and count every subject, on all cores, and write the figures by name."""

    def run(subject: tuple[Any, str, int | None]) -> dict[str, Any]:
        config, arch, level = subject
        return figures_of(traced(config), arch, level)

    with ThreadPoolExecutor(available_cores()) as pool:
        rows = dict(zip(subjects, pool.map(run, subjects.values()), strict=True))
    write_json(out, {"nvrtc": ".".join(map(str, nvrtc_version())), "kernels": rows})
    print(f"{len(rows)} kernels written to {out}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.set_defaults(out=RESULTS)
    parser.add_argument("--dtype", choices=("bf16", "f16"), default="bf16")
    options = parser.parse_args()
    file = options.out / f"attention-d128-{options.dtype}.json"
    write(subjects(DTYPES[options.dtype]), attention_program, file)


if __name__ == "__main__":
    main()
