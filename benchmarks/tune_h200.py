"""Tune attention (or matmul) for the GPU at hand and write the winners that ship with the package.

    python benchmarks/tune_h200.py --out OUT --budget 200 [--family gemm]

writes OUT/<gpu>.json (copy it to src/warploom/winners/shipped/) and OUT/tuned/winners.jsonl, every round that was
timed; started again with the same OUT it goes on where it was. A kernel that hangs or makes the GPU unusable ends the
process; the script starts itself again and goes on without that one. Without a GPU, ``--compile-only`` fills the kernel
cache ($WARPLOOM_CACHE) with the first candidates, so that the time on the GPU goes into timing.

Problems: 16384 tokens, heads × head_dim = 2048, bf16 (f16 takes the same winners: the tensor cores run both at one
speed). The lengths that matter most come first, so that a short budget covers every head_dim and mask. Of matmul: the
products in gemm_shapes.csv and squares, f16, B as (n, k) and as (k, n); f16 accumulation for the squares.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from warploom.kernels.gemm.problem import GemmProblem, contiguous_problem
from warploom.tune.family import Family
from warploom.tune.gemm import GemmFamily
from warploom.tune.gpu import gpu_for_tuning
from warploom.tune.space import distinct
from warploom.winners.classes import gemm_class
from warploom.winners.store import WinnerStore, gpu_file_name, package_version

from warploom.bench.environment import environment
from warploom.core.dtypes import bf16, f16, f32
from warploom.core.targets import target
from warploom.kernels.attention.problem import AttentionProblem
from warploom.tune.attention import AttentionFamily
from warploom.tune.build import build_all
from warploom.tune.tuner import HUNG, Effort, GpuLostError, Outcome, Tuner

TOKENS, WIDTH = 16384, 2048
LENGTHS = (4096, 16384, 1024, 8192, 2048, 512)
HEAD_DIMS = (128, 64, 256)
SQUARES = (4096, 8192, 2048, 1024, 16384)


MASKS = {"full": (None, None), "causal": (None, 0)}


def problems(head_dims: list[int], lengths: list[int], masks: list[str]) -> list[AttentionProblem]:
    """Every head_dim and mask at the first length, then at the next."""
    return [
        AttentionProblem(max(1, TOKENS // n), WIDTH // d, WIDTH // d, n, n, d, bf16, window)
        for n in lengths
        for d in head_dims
        for window in (MASKS[mask] for mask in masks)
    ]


def products() -> list[GemmProblem]:
    """Squares, then the products of LLM layers; one problem of each class."""
    with (Path(__file__).parent / "gemm_shapes.csv").open() as file:
        rows = [(int(r["m"]), int(r["n"]), int(r["k"])) for r in csv.DictReader(file)]
    squares = [(n, n, n) for n in SQUARES]
    found = [
        contiguous_problem(m, n, k, f16, sums, b_rows=b_rows)
        for sums, sizes in ((f32, squares), (f16, squares), (f32, rows))
        for m, n, k in sizes
        for b_rows in (False, True)
    ]
    return list({gemm_class(p): p for p in reversed(found)}.values())[::-1]


def compile_only(family: Family[Any, Any], todo: list[Any], arch: str) -> None:
    """The first candidates of every kernel into the disk cache; no GPU is needed."""
    goal = target(arch)
    seen: set[object] = set()
    for problem in todo:
        configs = distinct(c for space in family.spaces(problem, goal) for c in space.combinations())
        configs = [c for c in [family.default(problem, goal), *configs] if not family.misfits(problem, c, goal)]
        fresh = [c for c in configs if (key := family.kernel_key(problem, c)) not in seen and not seen.add(key)]
        start = time.perf_counter()
        built = build_all(family, problem, fresh, arch) if fresh else []
        worth = sum(not isinstance(b, str) and not b.faults(goal) for b in built)
        seconds = time.perf_counter() - start
        print(f"{family.problem_class(problem)}: {len(fresh)} compiled in {seconds:.1f} s, {worth} to time", flush=True)


def write_winners(store: WinnerStore, gpu: str, out: Path) -> Path:
    """The store's winners of this GPU and version as the package's file, replaced whole."""
    winners = sorted(store.winners(gpu, package_version()), key=lambda w: str(w.problem))
    content = {"gpu": gpu, "made_with": environment(), "winners": [w.json() for w in winners]}
    path = out / gpu_file_name(gpu)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, path)
    return path


def describe(outcome: Outcome, seconds: float, flops: int) -> str:
    """One line for the log."""
    dropped = ", ".join(f"{count} × {reason}" for reason, count in outcome.dropped.most_common(4))
    if outcome.winner is None:
        return f"{outcome.problem}: no winner ({dropped or 'the budget was spent'})"
    w = outcome.winner
    remark = (
        "known" if outcome.known else f"{w.candidates} timed in {seconds:.1f} s{'' if outcome.complete else ', cut'}"
    )
    rate = flops / w.seconds / 1e12
    return f"{w.problem}: {rate:.0f} TFLOPS, {w.speedup:.3f}× default, {w.config} ({remark}; dropped: {dropped})"


def main() -> None:
    """Parse the command line and tune."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--family", choices=("attention", "gemm"), default="attention")
    parser.add_argument("--budget", type=float, default=200.0, help="seconds for all problems, compiling included")
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--masks", nargs="+", choices=tuple(MASKS), default=list(MASKS))
    parser.add_argument("--variant-passes", type=int, default=1, help="how often one more flag is tried on the winner")
    parser.add_argument("--most", type=int, help="gemm: configurations of each generator that are tried, by the model")
    parser.add_argument("--compile-only", metavar="ARCH", nargs="?", const="sm_90a")
    parser.add_argument("--worker", action="store_true", help="tune in this very process")
    arguments = parser.parse_args()
    family: Family[Any, Any] = AttentionFamily()
    todo: list[Any] = problems(arguments.head_dims, arguments.lengths, arguments.masks)
    if arguments.family == "gemm":
        family, todo = (GemmFamily() if arguments.most is None else GemmFamily(most=arguments.most)), list(products())
    if arguments.compile_only:
        compile_only(family, todo, arguments.compile_only)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.worker:
        tune(arguments, family, todo)
    else:
        raise SystemExit(supervise(arguments.budget))


def tune(arguments: argparse.Namespace, family: Family[Any, Any], todo: list[Any]) -> None:
    """Tune in this process; the file of winners is written after each problem."""
    gpu, store = gpu_for_tuning(), WinnerStore(arguments.out / "tuned")
    effort = Effort(
        variant_passes=arguments.variant_passes, sample_seconds=0.002, warm_up_seconds=0.002, hung_after_seconds=20.0
    )
    tuner = Tuner(family, gpu, store, budget=arguments.budget, effort=effort)
    for problem in todo:
        start = time.perf_counter()
        try:
            outcome = tuner.tune(problem)
        except GpuLostError as error:
            print(error, flush=True)
            os._exit(HUNG)
        print(describe(outcome, time.perf_counter() - start, problem.flops), flush=True)
        write_winners(store, gpu.name, arguments.out)
    print(f"written to {write_winners(store, gpu.name, arguments.out)}", flush=True)


def supervise(budget: float) -> int:
    """Run the work in another process, again as long as a kernel ends it and time is left; its exit code."""
    end = time.monotonic() + budget
    while True:
        left = max(1.0, end - time.monotonic())
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", "--budget", f"{left:.1f}"]
        code = subprocess.run(command, check=False).returncode
        if code != HUNG or time.monotonic() >= end:
            return code


if __name__ == "__main__":
    main()
