"""The search behind attention's rung 7: every tile and every way to keep fragments that rung 6's idea allows.

    PYTHONPATH=src python benchmarks/attention_search_h200.py [--seq 4096] [--out DIR] [--dry-run]

writes ``attention-search.json`` to DIR ($OUT by default). The flags searched are the seeds' (Br, Bc, warps, fragments
of Q, K and V kept per step, buffering); all others are rung 6's. Kernels that spill are timed too: spills are what
larger tiles lose by. Each is checked against float64 first. bf16, head_dim 128, 16384 tokens, 16 heads, no mask; a
glance at all, then the fastest with rungs 6 and 7, interleaved. ``--dry-run`` compiles and stops. A minute on 16 cores.
Needs torch with CUDA.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

from scripts import log

from warploom.core.dtypes import bf16
from warploom.core.targets import target
from warploom.kernels.attention.problem import AttentionProblem, Even
from warploom.measure.attention import AttentionOnGpu
from warploom.measure.timing import Candidate, measure
from warploom.tune.attention import ATTENTION
from warploom.tune.build import Built, build_all
from warploom.tune.operation import combinations
from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import write
from warploom_lab.kernels.attention.ladder import FULL_LADDER
from warploom_lab.kernels.attention.ladder_config import RungSm80

TOKENS, HEADS, HEAD_DIM = 16384, 16, 128
SPACE: dict[str, tuple[Any, ...] | None] = {
    "tile_m": (64, 128),
    "tile_n": (32, 64, 128),
    "num_warps": (4, 8),
    "load_q": (0, 2),
    "load_k": (0, 2),
    "load_v": (0, 2),
    "double_buffer": (False, True),
}
FINALISTS, ROUNDS = 8, 15
ARCH = "sm_90a"


def candidates() -> Iterator[RungSm80]:
    """Every configuration of rung 6's idea that is valid."""
    base = FULL_LADDER.rung("6").config
    assert isinstance(base, RungSm80)
    yield from (config for config in combinations(base, SPACE) if not config.check(target(ARCH)))


def compiled(problem: AttentionProblem) -> tuple[dict[RungSm80, Built], Counter[str]]:
    """The candidates' kernels, and how many are none and why."""
    configs, dropped = list(candidates()), Counter[str]()
    sources = [ATTENTION.source(problem, config) for config in configs]
    found: dict[RungSm80, Built] = {}
    for config, built in zip(configs, build_all(sources, ARCH), strict=True):
        reasons = [built] if isinstance(built, str) else built.faults(target(ARCH), sys.maxsize)
        if isinstance(built, str) or reasons:
            dropped[reasons[0]] += 1
        else:
            found[config] = built
    return found, dropped


def searched(problem: AttentionProblem, kernels: dict[RungSm80, Built], dropped: Counter[str]) -> dict[str, Any]:
    """Times of all, of the finalists with their spread, and which of the two rungs is where."""
    from warploom.tune.tuner import gpu_for_tuning

    gpu, workload = gpu_for_tuning(), AttentionOnGpu(problem, 0)
    ready: dict[str, RungSm80] = {}
    for config in kernels:
        if reason := workload.fault(config):
            dropped[reason] += 1
        else:
            ready[str(config)] = config
    runs = {name: Candidate(name, workload.prepare(config)) for name, config in ready.items()}
    glance = measure(list(runs.values()), workload.sets, gpu.clock, rounds=3, warm_up_seconds=0.01)
    ranked = sorted(ready, key=lambda name: glance[name].seconds.median)
    rungs = {key: str(FULL_LADDER.rung(key).config) for key in ("6", "7")}
    last = dict.fromkeys([*ranked[:FINALISTS], *rungs.values()])
    final = measure([runs[name] for name in last], workload.sets, gpu.clock, rounds=ROUNDS)
    work = 4 * problem.batch * HEADS * problem.q_len**2 * HEAD_DIM / 1e12
    rows: list[dict[str, Any]] = []
    for name in sorted(last, key=lambda name: final[name].seconds.median):
        needs = kernels[ready[name]].kernel.resources
        rows.append(
            {
                "config": name,
                "tflops": final[name].seconds.rate(work).json(),
                "registers": needs.registers,
                "spill_bytes": needs.spill_bytes,
                "place": ranked.index(name) + 1,
            }
        )
        log(f"{rows[-1]['tflops']['median']:6.1f}", name, f"registers {needs.registers} ({needs.spill_bytes})")
    rates = {name: float(f"{work / glance[name].seconds.median:.4g}") for name in ranked}
    return {"seq": problem.q_len, "rungs": rungs, "finalists": rows, "glance": rates, "dropped": dict(dropped)}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--dry-run", action="store_true", help="compile and stop")
    given = parser.parse_args()
    problem = AttentionProblem(TOKENS // given.seq, HEADS, HEADS, Even(given.seq, given.seq), HEAD_DIM, bf16)
    kernels, dropped = compiled(problem)
    spilling = sum(bool(built.kernel.resources.spill_bytes) for built in kernels.values())
    log(f"{len(kernels)} kernels compiled, of which {spilling} spill;", dict(dropped))
    if given.dry_run:
        return 0
    found = searched(problem, kernels, dropped)
    write(given.out / "attention-search.json", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
