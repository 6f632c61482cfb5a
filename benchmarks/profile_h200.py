"""Hardware counters of every attention rung, and the emulator's wavefronts beside ncu's, in one run.

    python benchmarks/profile_h200.py [--rung 1,2,8,best] [--only rungs,reference] [--dtype f16] [--out DIR]
    python benchmarks/profile_h200.py --only rungs,ablations --rung "16,16 heads_first=on"

writes profile.json (in f16 profile-f16.json) to DIR ($OUT by default), with a part for each of

- ``rungs``: counters and samples of every rung at batch 4, 16 heads, length 4096, and the wavefronts of shared memory
  at one head of length 256 from both sides;
- ``ablations``: the same counters of a rung with one flag set otherwise;
- ``lengths``: cycles, stalls, L2 and instructions of every rung from 8 on at every length of the ladder's evidence, to
  tell what a rung that falls there loses;
- ``reference``: the same counters and samples of PyTorch's flash backend, and its SASS counted as ours.

Parts and rungs that are left out stay as they are in a file that exists. What ncu refuses is written with the reason.
Exit code 1 if ncu and the emulator count differently where ``ladder_counters.MERGED`` has no reason.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import ablations
from ladder_counters import MERGED

from warploom.checking.report import wavefronts_json
from warploom.core.dtypes import DTYPES
from warploom.core.errors import WarploomError
from warploom.emulate import emulate
from warploom.measure.pytorch import torch_module
from warploom_lab.bench.attention import GPU_TOKENS, AttentionFamily, has_room
from warploom_lab.bench.baselines import sdpa
from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.counters import Profile, compare_wavefronts
from warploom_lab.bench.evidence import environment, write
from warploom_lab.bench.ladder import Family
from warploom_lab.bench.ncu import ncu_version
from warploom_lab.bench.profile import AttentionLaunch, Watched, profile_launches
from warploom_lab.bench.samples import Samples
from warploom_lab.inspect.purpose import count_groups, count_opcodes, is_tensor
from warploom_lab.inspect.sass import Listing
from warploom_lab.kernels.attention.ladder import FULL_LADDER

EMULATED_SEQ = 256
SEQ, BATCH, HEADS = 4096, 4, 16
PARTS = ("rungs", "ablations", "lengths", "reference")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
FLASH_KERNELS = "flash_fwd"
"""What the names of the reference's kernels have in common; those that draw the inputs are not watched."""
OF_LENGTHS = ("time", "stalls", "memory, %", "instructions")
"""The tables that are read at every length: each launch is replayed until all are, so these few."""


def beside_emulator(profile: Profile, family: Family[Any], config: Any) -> dict[str, dict[str, float]]:
    """Wavefronts by class of access, as the emulator counts them at the family's problem and as ncu has."""
    case = family.emulator_case(config, 0)
    return compare_wavefronts(profile, wavefronts_json(emulate(case.program, case.grid, case.arguments)))


def together(launches: Mapping[str, Watched], **options: Any) -> dict[str, Profile | str]:
    """The profile of each launch, from one process; where that fails, from one process each, or why there is none."""
    try:
        return dict(zip(launches, profile_launches(list(launches.values()), seconds=400, **options), strict=True))
    except WarploomError as error:
        print(f"one by one, since together ncu said: {error}", flush=True)
    apart: dict[str, Profile | str] = {}
    for name, launch in launches.items():
        try:
            apart[name] = profile_launches([launch], seconds=60, **options)[0]
        except WarploomError as error:
            apart[name] = str(error)
    return apart


def both_sides(named: dict[str, AttentionLaunch]) -> dict[str, Any]:
    """Counters at length :data:`SEQ`, and both sides' wavefronts at :data:`EMULATED_SEQ`."""
    large = together(named)
    few = {name: AttentionLaunch(one.rung, EMULATED_SEQ, settings=one.settings) for name, one in named.items()}
    small = together(few, tables=("wavefronts",), samples=False)
    rows: dict[str, Any] = {}
    for name, launch in named.items():
        counters, of_few = large[name], small[name]
        if isinstance(counters, str) or isinstance(of_few, str):
            rows[name] = {"refused": counters if isinstance(counters, str) else of_few}
            continue
        wavefronts = beside_emulator(of_few, AttentionFamily(heads=1, seq=EMULATED_SEQ), launch.config)
        rows[name] = {"counters": counters.json(), "wavefronts": wavefronts}
    return rows


@dataclass(frozen=True)
class FlashLaunch:
    """One launch of the reference: full attention on random inputs."""

    seq: int
    batch: int
    heads: int
    dtype: str = "bf16"

    @property
    def config(self) -> None:
        """It has none that we know."""

    @property
    def program(self) -> None:
        """Its cubin is PyTorch's: ncu's own listing stands in."""

    def run(self) -> None:
        """Launch it once."""
        torch = torch_module()
        torch.manual_seed(0)
        kind = {"bf16": torch.bfloat16, "f16": torch.float16}[self.dtype]
        shape = self.batch, self.seq, self.heads, 128
        q, k, v = (torch.randn(shape, device="cuda").to(kind).transpose(1, 2) for _ in range(3))
        sdpa("torch_flash")(q, k, v)
        torch.cuda.synchronize()


def profile_reference(launches: Sequence[FlashLaunch]) -> list[Profile]:
    """Counters and samples of each launch; raises what :func:`profile_launches` does."""
    return profile_launches(launches, kernels=FLASH_KERNELS, module="benchmarks.profile_h200")


def sass(samples: Samples) -> dict[str, Any]:
    """What ncu lists of a kernel, counted as ``ladder_static.py`` counts a cubin.

    The main loop is what runs as often as the product that runs most often. ``registers`` is one more than the highest
    that the code names.
    """
    listed = [spot for spot in samples.spots if spot.instruction.mnemonic != "NOP"]
    code = [spot.instruction for spot in listed]
    often = max((spot.executed for spot in listed if is_tensor(spot.instruction)), default=0)
    loop = [spot.instruction for spot in listed if often and spot.executed == often]
    return {
        "registers": Listing("", "", tuple(code)).highest_register,
        "instructions": len(code),
        "groups": count_groups(code),
        "counts": count_opcodes(code),
        "loop_instructions": len(loop),
        "loop_groups": count_groups(loop),
        "loop_counts": count_opcodes(loop),
        "ldsm_to_hmma": None,
    }


def reference(dtype: str) -> dict[str, Any]:
    """Counters and SASS of FlashAttention-2, or why there are none."""
    try:
        (found,) = profile_reference([FlashLaunch(SEQ, BATCH, HEADS, dtype)])
    except WarploomError as error:
        return {"refused": str(error)}
    listed = {} if found.samples is None else {"sass": sass(found.samples)}
    return {"counters": found.json()} | listed


def part(name: str, rungs: list[str], dtype: str) -> dict[str, Any]:
    """One of :data:`PARTS` as it is written."""
    flags = () if dtype == "bf16" else (f"dtype={dtype}",)
    if name == "reference":
        return {"FlashAttention-2": reference(dtype)}
    named = [key for key in rungs if " " in key]  # ablations
    rungs = [key for key in rungs if key not in named]
    if name == "rungs":
        return both_sides({key: AttentionLaunch(key, SEQ, BATCH, HEADS, flags) for key in rungs})
    if name == "ablations":
        every = {ablations.name(*one): one for one in ablations.ABLATIONS}
        return both_sides(
            {
                key: AttentionLaunch(rung, SEQ, BATCH, HEADS, (*settings, *flags))
                for key, (rung, settings) in every.items()
                if key in named or not named
            }
        )
    launches = {
        f"{key} at {seq}": AttentionLaunch(key, seq, max(1, GPU_TOKENS // seq), HEADS, flags)
        for seq in LENGTHS  # the outer loop: inputs are drawn once a length
        for key in rungs
        if key not in {str(n) for n in range(8)}
    }
    found = together(launches, tables=OF_LENGTHS, samples=False)
    return {name: {"refused": one} if isinstance(one, str) else brief(one) for name, one in found.items()}


def brief(profile: Profile) -> dict[str, Any]:
    """What :data:`OF_LENGTHS` told, without what was not read."""
    return {name: profile.tables[name] for name in OF_LENGTHS if name in profile.tables}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rung", help="names of rungs and ablations, commas between; default all")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--dtype", choices=("bf16", "f16"), default="bf16")
    options = parser.parse_args()
    fitting = [rung.key for rung in FULL_LADDER.rungs if has_room(rung, 128, DTYPES[options.dtype])]
    out = options.out / ("profile.json" if options.dtype == "bf16" else f"profile-{options.dtype}.json")
    result = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    result["environment"] = environment(None) | {"ncu": ncu_version()}
    apart = False
    for name in options.only.split(","):
        measured = part(name, options.rung.split(",") if options.rung else fitting, options.dtype)
        result[name] = result.get(name, {}) | measured
        write(out, result)
        for key, found in measured.items():
            apart |= tell(key, found)
    return int(apart)


def tell(key: str, found: dict[str, Any]) -> bool:
    """Print a line or two; whether the two sides' wavefronts differ."""
    if "refused" in found:
        print(f"{key}: {found['refused']}")
        return False
    if "counters" not in found:
        print(f"{key}: {found['time']}")
        return False
    counters = found["counters"]
    waiting = (counters.get("samples") or {}).get("who waits for whom", [])[:1]
    print(f"{key}: pipes {counters.get('pipes, %')}, stalls {list(counters['stall shares, %'].items())[:4]}, {waiting}")
    differing = {n: p for n, p in found.get("wavefronts", {}).items() if p["emulator"] != p["ncu"]}
    if differing:
        print(f"  wavefronts differ: {differing}; {MERGED.get(key, 'unexplained')}")
    return bool(differing) and key not in MERGED


if __name__ == "__main__":
    sys.exit(main())
