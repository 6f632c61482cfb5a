"""Hardware counters of every matmul rung, and the emulator's wavefronts beside ncu's, in one run.

    python benchmarks/profile_gemm_h200.py [--rung 01b,02] [--size 4096] [--out FILE]

writes profile-gemm.json to ``$OUT`` (else to the folder out): counters and samples of every rung on a square product,
and the wavefronts of shared memory from both sides on a ragged one that the emulator runs as well. What ncu refuses is
written with the reason. Exit code 1 if ncu and the emulator count differently.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from warploom.bench.counters import compare_wavefronts
from warploom.bench.environment import environment
from warploom.bench.gemm import GemmFamily
from warploom.bench.ladder import wavefronts_json
from warploom.bench.profile_gemm import GemmLaunch, profile_gemm
from warploom.core.errors import WarploomError
from warploom.emulate import emulate
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.ladder import LADDER

SMALL = (328, 264, 200)
"""m, n and k of the product that both count: ragged for every tile."""
RUNGS = [rung.key for rung in LADDER.rungs if isinstance(rung.config, GemmConfig)]


def emulated(launch: GemmLaunch) -> dict[str, dict[str, int]]:
    """Wavefronts by class of access."""
    case = GemmFamily(launch.m, launch.n, launch.k).emulator_case(launch.config, 0)
    return wavefronts_json(emulate(case.program, case.grid, case.arguments))


def measure(rungs: list[str], size: int) -> dict[str, Any]:
    """{rung: counters, and both sides' wavefronts}."""
    large = profile_gemm([GemmLaunch(key, size, size, size) for key in rungs], seconds=200)
    few = [GemmLaunch(key, *SMALL) for key in rungs]
    small = profile_gemm(few, tables=("wavefronts",), samples=False, seconds=100)
    return {
        key: {"counters": counters.json(), "wavefronts": compare_wavefronts(counted, emulated(launch))}
        for key, counters, counted, launch in zip(rungs, large, small, few, strict=True)
    }


def main() -> int:
    """Measure, write, and say where the two sides differ."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rung", default=",".join(RUNGS), help="with commas between")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")) / "profile-gemm.json")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"environment": environment(None), "size": options.size, "small": SMALL}
    try:
        result["rungs"] = measure(options.rung.split(","), options.size)
    except WarploomError as error:
        result["refused"] = str(error)
    options.out.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    if "refused" in result:
        print(result["refused"])
        return 1
    apart = False
    for key, found in result["rungs"].items():
        counters = found["counters"]
        print(f"{key}: pipes {counters.get('pipes, %')}, memory {counters.get('memory, %')}")
        differing = {n: p for n, p in found["wavefronts"].items() if p["emulator"] != p["ncu"]}
        print(f"  wavefronts {'differ: ' + str(differing) if differing else 'equal: ' + str(found['wavefronts'])}")
        apart |= bool(differing)
    return int(apart)


if __name__ == "__main__":
    sys.exit(main())
