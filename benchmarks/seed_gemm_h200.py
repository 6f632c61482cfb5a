"""The seed's own kernels beside ours: one process, one set of matrices, one load, rounds interleaved.

    git clone https://github.com/yencal/cuda-hgemm-mma SEED
    PYTHONPATH=src python benchmarks/seed_gemm_h200.py --seed SEED [--tuned FILE] [--sizes 4096,8192,16384] [--out DIR]
    PYTHONPATH=src python benchmarks/seed_gemm_h200.py --seed SEED --dry-run    # compiles, needs no GPU

writes ``seed-gemm.json`` to DIR ($OUT by default). The post's kernels 03 to 05 are compiled from its repository (MIT),
every configuration of its tuner, and its tuner's rule picks one for each size: the least mean of ten calls after five.
Ours are each rung's own tile, the tile that the seed's tuner picked, and the one of FILE (what ``ladders.py gemm
--tuned`` wrote). The matrices are uniform in [0, 1), as the seed's. Three loads: rested and sustained as ``ladders.py``
has them, and *bursts*, the seed's own: ten calls after two, after a rest, during which the seed checks results on the
host. Needs torch with CUDA, and ``cuda_fp16.h`` of a CUDA toolkit or of Triton. Two minutes.

Exit code 1 if one of our rungs with its tuned tile is slower than the seed's kernel under sustained load, or wrong.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scripts import HERE, log, parser_of, write

from warploom.bench.environment import environment
from warploom.bench.gemm import LOADS
from warploom.bench.ladder import config_json
from warploom.bench.tables import tile_text
from warploom.core.dtypes import f16, s32, u16
from warploom.cuda.compile import available_cores
from warploom.cuda.cubin import resources
from warploom.cuda.device import cuda_core
from warploom.cuda.launch import load, scalar
from warploom.cuda.store import CompiledKernel
from warploom.kernels.matmul.ladder import LADDER
from warploom.kernels.matmul.ladder_config import RungGemm
from warploom.measure.matmul import PlannedCall, blocks_error, drawn, torch_blocks
from warploom.measure.timing import Candidate, EventClock, Spread, measure
from warploom.ops.matmul import plan_matmul

TUNED = HERE / "results" / "h200" / "gemm-tuned-f16.json"
FILES = {"03": "03_mma_multistage.cuh", "04": "04_mma_pipelining.cuh", "05": "05_mma_final.cuh"}
VARIANTS = {"03": "GetMMAMultistageVariants", "04": "GetMMAMultistageVariants", "05": "GetMMAFinalVariants"}
ONE = 0x3C00
"""1.0 in f16: alpha."""
BURST_REST, BURST_WARM_UP, TUNER_WARM_UP, CALLS, BURSTS = 0.5, 2, 5, 10, 3
ROUNDS = 9
PRELUDE = "typedef unsigned int uint; typedef unsigned int uint32_t;\n"


# -- the seed's kernels
@dataclass(frozen=True)
class Variant:
    """One of the seed's instantiations: its template's arguments."""

    rung: str
    arguments: tuple[str, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """BM, BN, BK, WM, WN, STAGES."""
        return tuple(int(x) for x in self.arguments[:6])

    @property
    def grouped(self) -> bool:
        """Whether its CTAs walk in groups."""
        return self.arguments[6:7] == ("true",)

    @property
    def threads(self) -> int:
        m, n, _, warp_m, warp_n, _ = self.numbers
        return 32 * (m // warp_m) * (n // warp_n)

    @property
    def shared_bytes(self) -> int:
        m, n, k, *_, stages = self.numbers
        return 2 * max(stages * (m + n) * k, m * n)

    def grid(self, size: int) -> tuple[int, int, int]:
        rows, cols = -(-size // self.numbers[0]), -(-size // self.numbers[1])
        return (rows * cols, 1, 1) if self.grouped else (cols, rows, 1)

    def like(self, config: RungGemm) -> RungGemm:
        """Our configuration with this tile."""
        names = ("tile_m", "tile_n", "tile_k", "warp_m", "warp_n", "stages")
        tile = dict(zip(names, self.numbers, strict=True))
        return replace(config, **tile, block_stride=int(self.arguments[7]) if self.grouped else 0)

    def __str__(self) -> str:
        return "x".join(self.arguments[:3]) + "_" + "x".join(self.arguments[3:5]) + "_S" + "_".join(self.arguments[5:])


def variants(seed: Path, rung: str) -> Iterator[Variant]:
    """What the seed's tuner tries for a kernel, read from its source."""
    text = (seed / "src" / "autotune.cuh").read_text(encoding="utf-8")
    body = text[text.index(VARIANTS[rung]) :]
    for found in re.findall(r"TUNE_CONFIG\w*\(Kernel,([^)]*)\)", body[: body.index("};")]):
        yield Variant(rung, tuple(word.strip() for word in found.split(",")))


def headers() -> Path:
    """A folder with ``cuda_fp16.h``. Raises FileNotFoundError without one."""
    packages = [Path(p) for p in sys.path if p.endswith("site-packages")]
    roots = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), *Path("/usr/local").glob("cuda-*"), *packages]
    for folder, root in product(("include", "triton/backends/nvidia/include", "nvidia/*/include"), roots):
        for found in root.glob(f"{folder}/cuda_fp16.h"):
            return found.parent
    raise FileNotFoundError("cuda_fp16.h is nowhere: install a CUDA toolkit, or torch with Triton")


def compiled(seed: Path, rung: str, arch: str) -> dict[Variant, CompiledKernel]:
    """Every variant of a kernel, as NVRTC and ptxas make it at -O3."""
    text = (seed / "src" / FILES[rung]).read_text(encoding="utf-8")
    text = PRELUDE + text[: text.rindex("template", 0, text.index("struct MMA"))]  # without the host's launcher
    name = re.findall(r"void (\w+_kernel)\(", text)[0]
    wanted = {f"{name}<{', '.join(v.arguments)}>": v for v in variants(seed, rung)}
    core, where = cuda_core(), [str(seed / "src"), str(headers())]
    options = core.ProgramOptions(arch=arch, std="c++17", include_path=where, ptxas_options=["-O3"])
    made = core.Program(text, "c++", options).compile("cubin", name_expressions=tuple(wanted))
    found: dict[Variant, CompiledKernel] = {}
    for expression, variant in wanted.items():
        symbol = made.symbol_mapping[expression]
        symbol = symbol.decode() if isinstance(symbol, bytes) else symbol
        found[variant] = CompiledKernel(symbol, arch, made.code, "", resources(made.code, symbol), False, 0.0)
    return found


class Matrices:
    """Uniform inputs of one size, an output, and candidates on them; two sets, each larger than the L2."""

    def __init__(self, torch: Any, size: int) -> None:
        self.torch, self.size, self.sets = torch, size, 2
        generator = torch.Generator("cuda").manual_seed(size)
        shape = (size, size)
        make = partial(drawn, torch, shape, "uniform", generator, torch.float16)
        self.inputs = [(make(), make()) for _ in range(self.sets)]
        self.out = torch.empty(shape, device="cuda", dtype=torch.float16)

    def theirs(self, variant: Variant, kernel: CompiledKernel) -> Candidate:
        """A kernel of the seed: (M, N, K, alpha, A, B, beta, C)."""
        launch = load(kernel, 0).configure(variant.grid(self.size), variant.threads, shared_bytes=variant.shared_bytes)
        stream = int(self.torch.cuda.current_stream().cuda_stream)
        extent, alpha, beta = scalar(s32, self.size), scalar(u16, ONE), scalar(u16, 0)
        packed = [
            launch.pack((extent, extent, extent, alpha, a.data_ptr(), b.data_ptr(), beta, self.out.data_ptr()))
            for a, b in self.inputs
        ]
        return Candidate(f"seed {variant.rung} {variant}", lambda i: launch.queue(stream, packed[i]))

    def ours(self, name: str, config: RungGemm) -> Candidate:
        """One of our kernels."""
        made = plan_matmul(*self.inputs[0], accumulate=f16, config=config, out=self.out)
        call = PlannedCall(made, 0, self.torch)
        pointers = [(a.data_ptr(), b.data_ptr(), self.out.data_ptr()) for a, b in self.inputs]
        return Candidate(name, lambda i: call.launch(*pointers[i]))

    def errors(self, candidates: dict[str, Candidate]) -> dict[str, float]:
        """How far each is from float64, over what the types allow."""
        blocks = list(torch_blocks(*self.inputs[0]))
        found: dict[str, float] = {}
        for name, candidate in candidates.items():
            self.out.fill_(math.nan)
            candidate.run(0)
            found[name] = blocks_error(blocks, self.out, f16).value
        return found


def mean_of_ten(run: Callable[[int], object], clock: EventClock, warm_up: int) -> float:
    """Seconds of a call: ten in a row after ``warm_up``."""
    for _ in range(warm_up):
        run(0)
    start = clock.mark()
    for _ in range(CALLS):
        run(0)
    return clock.seconds(start, clock.mark()) / CALLS


def bursts(candidates: dict[str, Candidate], clock: EventClock) -> dict[str, list[float]]:
    """Seconds of a call as the seed's benchmark times it: ten calls after two, after a rest."""
    found: dict[str, list[float]] = {name: [] for name in candidates}
    for _, (name, candidate) in product(range(BURSTS), candidates.items()):
        time.sleep(BURST_REST)
        found[name].append(mean_of_ten(candidate.run, clock, BURST_WARM_UP))
    return found


def tuned_configs(path: Path, size: int) -> dict[str, RungGemm]:
    """The tile that a search has found for each rung at a size; none without the file."""
    found: dict[str, RungGemm] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if path.is_file() else ():
        searched = row.get("search", {}).get(str(size))
        if row["rung"] in FILES and searched:
            found[row["rung"]] = RungGemm.parse(next(iter(searched["finalists"])))
    return found


Kernels = dict[str, dict[Variant, CompiledKernel]]
"""By rung."""


def chosen(matrices: Matrices, kernels: Kernels, clock: EventClock) -> dict[str, Variant]:
    """What the seed's tuner takes for each rung."""
    found: dict[str, Variant] = {}
    for rung, of in kernels.items():
        seconds = {v: mean_of_ten(matrices.theirs(v, kernel).run, clock, TUNER_WARM_UP) for v, kernel in of.items()}
        found[rung] = min(seconds, key=lambda v: seconds[v])
    log(f"N = {matrices.size}: the seed's tuner takes", {rung: str(v) for rung, v in found.items()})
    return found


def entrants(best: dict[str, Variant], tuned: dict[str, RungGemm]) -> dict[str, RungGemm]:
    """Our configurations, by ``"03 tuned"``: a rung's own, at the seed's tile, and what our search has found."""
    found: dict[str, RungGemm] = {}
    for rung, variant in best.items():
        own = LADDER.rung(rung).config
        assert isinstance(own, RungGemm)
        found |= {f"{rung} own": own, f"{rung} its tile": variant.like(own)}
        if rung in tuned:
            found[f"{rung} tuned"] = tuned[rung]
    return found


def contest(torch: Any, size: int, kernels: Kernels, tuned: Path) -> Iterator[dict[str, Any]]:
    """A row for each of our configurations: its rate and the seed's under each load."""
    matrices, clock = Matrices(torch, size), EventClock(int(torch.cuda.current_stream().cuda_stream))
    best = chosen(matrices, kernels, clock)
    configs = entrants(best, tuned_configs(tuned, size))
    candidates = {name: matrices.ours(name, config) for name, config in configs.items()}
    candidates |= {
        f"{rung} seed": replace(matrices.theirs(v, kernels[rung][v]), name=f"{rung} seed") for rung, v in best.items()
    }
    errors = matrices.errors(candidates)
    seconds: dict[str, dict[str, Sequence[float]]] = {}
    for load_name, rest in LOADS.items():
        times = measure(list(candidates.values()), matrices.sets, clock, rounds=ROUNDS, pause_seconds=rest)
        seconds[load_name] = {name: found.samples for name, found in times.items()}
    seconds["bursts"] = {**bursts(candidates, clock)}
    for name, config in configs.items():
        rung, _, kind = name.partition(" ")
        loads = {load_name: beside(size, of[name], of[f"{rung} seed"]) for load_name, of in seconds.items()}
        yield {
            "rung": rung,
            "n": size,
            "kind": kind,
            "tile": tile_text(config_json(config)),
            "seed_tile": str(best[rung]),
            "error": {"ours": errors[name], "seed": errors[f"{rung} seed"]},
            "loads": loads,
        }


def beside(size: int, ours: Sequence[float], seed: Sequence[float]) -> dict[str, Any]:
    """TFLOP/s of both, and the spread of how many times faster ours is, round by round."""
    rates = (float(f"{2 * size**3 / float(np.median(of)) / 1e12:.4g}") for of in (ours, seed))
    ratios = Spread.of([their / our for our, their in zip(ours, seed, strict=True)])
    return {"ours": next(rates), "seed": next(rates), "ratio": ratios.json()}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seed", type=Path, required=True, help="a checkout of the seed's repository")
    parser.add_argument("--tuned", type=Path, default=TUNED)
    parser.add_argument("--sizes", default="4096,8192,16384")
    parser.add_argument("--dry-run", action="store_true", help="compile for sm_90a and stop")
    given = parser.parse_args()
    arch = "sm_90a"
    kernels = {rung: compiled(given.seed, rung, arch) for rung in FILES}
    for rung, of in kernels.items():
        log(rung, {str(v): (k.resources.registers, k.resources.spill_bytes) for v, k in of.items()})
    if given.dry_run:
        return 0
    import torch

    log(f"{available_cores()} cores, {torch.cuda.get_device_name()}")
    found: list[dict[str, Any]] = []
    for size in map(int, given.sizes.split(",")):
        for row in contest(torch, size, kernels, given.tuned):
            found.append(row)
            log(
                f"{row['rung']} {row['kind']:9} {row['tile']:28}",
                *(f"{k} {v['ours']:.0f}/{v['seed']:.0f} = {v['ratio']['median']:.3f}" for k, v in row["loads"].items()),
            )
    write(given.out / "seed-gemm.json", {"environment": environment(0), "rows": found})
    judged = [row for row in found if row["kind"] == "tuned"] or [row for row in found if row["kind"] == "its tile"]
    slow = [f"{r['rung']} at {r['n']}" for r in judged if r["loads"]["sustained"]["ratio"]["median"] < 1.0]
    wrong = [f"{r['rung']} at {r['n']}" for r in found if not r["error"]["ours"] <= 1.0]
    log("slower than the seed's:", slow or "none", "wrong:", wrong or "none")
    return int(bool(slow or wrong))


if __name__ == "__main__":
    sys.exit(main())
