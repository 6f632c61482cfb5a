"""Hardware counters of a few attention rungs, and the emulator's wavefronts beside ncu's, in one run.

    python benchmarks/profile_h200.py [--rung 1,2,8,best] [--out FILE]

writes profile.json to ``$OUT`` (else to the folder out): for each rung the counters at batch 4, 16 heads, length 4096,
and the wavefronts of shared memory at one head of length 256 from both sides. A rung that ncu refuses is written with
the reason. Exit code 1 if ncu and the emulator count differently.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from warploom.bench.attention import AttentionFamily
from warploom.bench.environment import environment
from warploom.bench.ladder import wavefronts_json
from warploom.bench.profile import compare_wavefronts, profile_attention
from warploom.core.errors import WarploomError
from warploom.emulate import emulate
from warploom.kernels.attention.ladder import FULL_LADDER

EMULATED_SEQ = 256


def emulated_wavefronts(rung: str) -> dict[str, dict[str, int]]:
    """Wavefronts by class of access at one head of :data:`EMULATED_SEQ` tokens."""
    case = AttentionFamily(heads=1, seq=EMULATED_SEQ).emulator_case(FULL_LADDER.rung(rung).config, 0)
    return wavefronts_json(emulate(case.program, case.grid, case.arguments))


def measure(rung: str) -> dict[str, Any]:
    """Counters, and both sides' wavefronts; or {"refused": why}."""
    try:
        counters = profile_attention(rung, seq=4096, batch=4, heads=16)
        small = profile_attention(rung, seq=EMULATED_SEQ)
    except WarploomError as error:
        return {"refused": str(error)}
    return {"counters": counters.json(), "wavefronts": compare_wavefronts(small, emulated_wavefronts(rung)),
            "small": small.json()}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rung", default="1,2,8,best", help="rungs, with commas between")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "out")) / "profile.json")
    options = parser.parse_args()
    rungs = {rung: measure(rung) for rung in options.rung.split(",")}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"environment": environment(None), "rungs": rungs}
    options.out.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    apart = False
    for rung, found in rungs.items():
        if "refused" in found:
            print(f"rung {rung}: {found['refused']}")
            continue
        counters = found["counters"]
        print(f"rung {rung}: pipes {counters.get('pipes, %')}, stalls {list(counters['stall shares, %'].items())[:4]}")
        for name, pair in found["wavefronts"].items():
            apart |= pair["emulator"] != pair["ncu"]
            print(f"  {name}: emulator {pair['emulator']:.0f}, ncu {pair['ncu']:.0f}")
    return int(apart)


if __name__ == "__main__":
    sys.exit(main())
