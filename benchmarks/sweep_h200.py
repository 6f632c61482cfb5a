"""Every combination of tiles and flags of ``wgmma`` attention, under sustained load and beside the baselines.

    PYTHONPATH=src python benchmarks/sweep_h200.py --out OUT [--cells 128:full:16384 …]

The tuner (``warploom tune``) tries one more flag at a time on short samples. At the power limit that is not enough:
here all combinations are built, checked against float64 and timed interleaved with FlashAttention-4 and cuDNN where
they are there, in samples long enough for the clock to follow, and the best half goes on to longer ones. Writes
OUT/attention-sweep.json, which the defaults in ``kernels/attention/choice.py`` are taken from. ``--dry-run`` compiles
and stops, without a GPU.
"""

from __future__ import annotations

import time
from itertools import product
from typing import Any

from attention_cells import problem_of

from warploom.core.dtypes import bf16
from warploom.core.targets import target
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.problem import AttentionConfig, AttentionProblem
from warploom.measure.attention import AttentionOnGpu
from warploom.measure.monitor import GpuMonitor
from warploom.measure.timing import Candidate, Measured, measure, paired_ratio
from warploom.tune.attention import ATTENTION
from warploom.tune.build import build_all
from warploom.tune.tuner import gpu_for_tuning
from warploom_lab.bench.attention import baselines
from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import environment, write
from warploom_lab.bench.power import power_of

SM90 = target("sm_90a")
CELLS = tuple(
    f"{d}:{mask}:{n}"
    for d, mask, n in product((64, 128, 256), ("full", "causal"), (16384, 4096, 1024, 8192, 2048, 512))
)
ROUNDS = ((3, 0.006, 10), (5, 0.015, 4), (11, 0.03, 4))
"""(rounds, seconds of a sample, how many stay)."""
BOTH, NEVER = (False, True), (False,)


def space(head_dim: int, causal: bool) -> list[ForwardSm90]:
    """Combinations worth building: what lost in every cell of an earlier sweep is left out."""
    found: list[ForwardSm90] = []

    def add(consumers: int, tiles: tuple[int, ...], stages: tuple[int, ...], **choices: tuple[bool, ...]) -> None:
        flags = {"turns": BOTH, "skip_masked": BOTH if causal else NEVER} | choices
        unset = dict.fromkeys(("persistent", "q_in_registers", "sum_column"), False)
        for tile_n, count, values in product(tiles, stages, product(*flags.values())):
            settings = unset | dict(zip(flags, values, strict=True))
            config = ForwardSm90(consumers, tile_n, count, head_dim, bf16, **settings)
            if not config.check(SM90):
                found.append(config)

    if head_dim == 64:
        add(3, (96, 112, 128), (2, 3), persistent=BOTH, sum_column=(True,))
        add(3, (96,), (2,), persistent=(True,), q_in_registers=(True,), sum_column=(True,))
        add(2, (64, 128), (3,), persistent=(True,), q_in_registers=BOTH, sum_column=(True,))
    elif head_dim == 128:
        add(3, (64, 80), (2,), persistent=BOTH)
        add(2, (64, 128), (2,), persistent=(True,), q_in_registers=BOTH, sum_column=BOTH)
    else:
        add(2, (48, 64, 80), (2,), persistent=BOTH)
    return found


def built(problem: AttentionProblem, causal: bool) -> list[AttentionConfig]:
    """The default and the combinations that compile without spills, on all cores."""
    wanted = dict.fromkeys((ATTENTION.choose(problem, SM90)[0], *space(problem.head_dim, causal)))
    configs = [c for c in wanted if not ATTENTION.violations(c, problem, SM90)]
    kernels = build_all([ATTENTION.source(problem, c) for c in configs], SM90.name)
    return [c for c, k in zip(configs, kernels, strict=True) if not isinstance(k, str) and not k.faults(SM90)]


def named(cell: str) -> AttentionProblem:
    """The problem of a cell: head_dim:mask:length."""
    head_dim, mask, length = cell.split(":")
    return problem_of(int(head_dim), mask == "causal", int(length))


class Cell:
    """One head_dim, mask and length: its candidates, built and checked, and its baselines."""

    def __init__(self, name: str) -> None:
        self.problem = named(name)
        self.causal = self.problem.window == (None, 0)
        self.default = ATTENTION.choose(self.problem, SM90)[0]
        self.workload = AttentionOnGpu(self.problem, 0)
        self.candidates = {
            str(c): Candidate(str(c), self.workload.prepare(c))
            for c in built(self.problem, self.causal)
            if self.workload.fault(c) is None
        }
        self.baselines = baselines(self.workload.inputs, self.causal, ("torch_cudnn",))

    def best(self, clock: Any) -> tuple[list[str], dict[str, Measured]]:
        """The names that stayed, the fastest first, and the last round of timing."""
        left, found = list(self.candidates), dict[str, Measured]()
        for rounds, seconds, keep in ROUNDS:
            timed = [*(self.candidates[name] for name in dict.fromkeys((*left, str(self.default)))), *self.baselines]
            found = measure(
                timed, self.workload.sets, clock, rounds=rounds, sample_seconds=seconds, warm_up_seconds=0.01
            )
            left = sorted(left, key=lambda name: found[name].seconds.median)[:keep]
        return left, found


def main() -> None:
    """Sweep the cells."""
    parser = parser_of(__doc__)
    parser.add_argument("--cells", nargs="+", default=list(CELLS), help="head_dim:mask:length")
    parser.add_argument("--dry-run", action="store_true", help="compile and stop")
    options = parser.parse_args()
    if options.dry_run:
        for name in options.cells:
            problem = named(name)
            print(f"{name}: {len(built(problem, problem.window == (None, 0)))} candidates", flush=True)
        return
    gpu, monitor = gpu_for_tuning(), GpuMonitor.of(0)
    rows: list[dict[str, Any]] = []
    for name in options.cells:
        start = time.monotonic()
        cell = Cell(name)
        seconds = time.monotonic() - start
        left, found = cell.best(gpu.clock)
        print(f"{name}: {len(cell.candidates)} candidates, built in {seconds:.0f} s", flush=True)
        timed = cell.candidates | {p.name: p for p in cell.baselines}
        for one in dict.fromkeys((*left, str(cell.default), *(p.name for p in cell.baselines))):
            ratios = {p.name: round(paired_ratio(found[one], found[p.name]), 4) for p in cell.baselines}
            metered = one in (left[0], *ratios)
            drawn = power_of(timed[one], cell.workload.sets, gpu.clock, monitor, window=0.4) if metered else None
            row = {
                "cell": name,
                "config": one,
                "tflops": found[one].seconds.rate(cell.problem.flops / 1e12).json(),
                "ratio": ratios,
                "power": drawn and drawn.json(cell.problem.flops),
            }
            rows.append(row)
            print(f"  {row['tflops']['median']:6.1f}  {ratios}  {row['power'] or ''}  {one}", flush=True)
        write(options.out / "attention-sweep.json", {"runs": [{"environment": environment(), "rows": rows}]})


if __name__ == "__main__":
    main()
