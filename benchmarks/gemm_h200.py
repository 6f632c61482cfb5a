"""Matrix products of LLM layers against cuBLAS on one GPU, and the host cost of a call.

Run ``PYTHONPATH=src python benchmarks/gemm_h200.py [--parts shapes,host] [--out DIR]``. Needs torch
with CUDA; writes ``gemm.json`` to DIR ($OUT by default). Times are of CUDA graphs of several calls whose inputs rotate
past the L2; medians of replays, candidates interleaved with cuBLAS. TFLOP/s count 2·m·n·k. Exit code 1 if what
``matmul`` chooses is below :data:`TARGETS`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import warploom
from warploom.core.errors import WarploomError
from warploom.kernels.gemm.choice import expected_seconds, fitting
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.problem import AnyGemmConfig
from warploom.ops.backends import compiled, gpu_target
from warploom.ops.matmul import MatmulPlan, plan_matmul

START = time.perf_counter()
ROTATE_BYTES = 160e6  # more than the L2 holds
CORES = len(os.sched_getaffinity(0))


def log(*words: Any) -> None:
    print(f"[{time.perf_counter() - START:6.1f}]", *words, flush=True)


# -- timing
class Timed:
    """A CUDA graph of ``calls`` calls; ``milliseconds`` of one call per replay."""

    def __init__(self, call: Callable[[int], Any], calls: int) -> None:
        self.calls, self.times = calls, []
        for i in range(2):
            call(i)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for i in range(calls):
                call(i)
        self.events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def replay(self) -> None:
        self.events[0].record()
        self.graph.replay()
        self.events[1].record()
        torch.cuda.synchronize()
        self.times.append(self.events[0].elapsed_time(self.events[1]) / self.calls)

    @property
    def milliseconds(self) -> float:
        return statistics.median(self.times[1:])

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median of the replays."""
        kept = self.times[1:]
        return round((max(kept) - min(kept)) / self.milliseconds, 3)


def race(
    candidates: dict[str, Callable[[int], Any]], flops: float, replays: int = 4, spreads: dict[str, float] | None = None
) -> dict[str, float]:
    """TFLOP/s of each candidate, interleaved; 0 for one that fails. ``spreads`` receives each one's spread."""
    calls = max(2, min(24, int(2.5e12 / flops)))
    timed: dict[str, Timed] = {}
    failed: dict[str, float] = {}
    for name, call in candidates.items():
        try:
            timed[name] = Timed(call, calls)
        except (WarploomError, RuntimeError) as error:
            log("  failed", name, repr(error)[:200])
            failed[name] = 0.0
    for _ in range(replays + 1):
        for entry in timed.values():
            entry.replay()
    if spreads is not None:
        spreads |= {n: t.spread for n, t in timed.items()}
    return {n: round(flops / t.milliseconds / 1e9, 1) for n, t in timed.items()} | failed


def compile_all(plans: Sequence[MatmulPlan]) -> None:
    """Trace (one thread: Python) and compile (all cores) the kernels of plans."""
    programs = {id(p): p for plan in plans for p in (plan.program, plan.finish) if p is not None}
    arch = gpu_target(0).name
    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(lambda p: compiled(p, arch), programs.values()))


def operands(m: int, n: int, k: int, weight_rows: bool, dtype: torch.dtype = torch.float16) -> list[tuple[Any, Any]]:
    """Input sets for C (m, n) = x (m, k) · W: W stored (n, k) and passed transposed, or stored (k, n)."""
    size = 2.0 * (m * k + k * n)
    sets = max(1, min(6, int(ROTATE_BYTES / size) + 1))
    found = []
    for _ in range(sets):
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        w = (
            torch.randn(n, k, device="cuda", dtype=dtype).T
            if weight_rows
            else torch.randn(k, n, device="cuda", dtype=dtype)
        )
        found.append((x, w))
    return found


def ours(
    sets: Sequence[tuple[Any, Any]], config: AnyGemmConfig | None, accumulate: str, out: Any
) -> Callable[[int], Any]:
    return lambda i: warploom.matmul(*sets[i % len(sets)], accumulate=accumulate, config=config, out=out)


def cublas(sets: Sequence[tuple[Any, Any]], out: Any) -> Callable[[int], Any]:
    return lambda i: torch.mm(*sets[i % len(sets)], out=out)


# -- products of layers
TARGETS = {"geomean": 0.75, "least": 0.5}
"""Of what ``matmul`` chooses, relative to cuBLAS, over the products of each layout of the weights."""


def layers() -> list[tuple[str, int, int, int]]:
    """(name, m, n, k) of the 60 products."""
    with (Path(__file__).parent / "gemm_shapes.csv").open() as file:
        return [(r["name"], int(r["m"]), int(r["n"]), int(r["k"])) for r in csv.DictReader(file)]


def tried(x: Any, w: Any, top: int) -> list[AnyGemmConfig]:
    """What ``matmul`` chooses, then the next best of each generator by the cost model."""
    first, goal = plan_matmul(x, w), gpu_target(0)
    problem = first.problem
    found: list[AnyGemmConfig] = [first.config]
    ranked = sorted(fitting(problem, goal)[0], key=lambda c: expected_seconds(problem, c, goal))
    for kind, most in ((HopperGemmConfig, top), (GemmConfig, max(2, top // 2))):
        kept: list[AnyGemmConfig] = []
        for c in (c for c in ranked if isinstance(c, kind)):  # different tiles, and one other split of the first
            same = sum(replace(c, split_k=1) == replace(t, split_k=1) for t in kept)
            if same < 2 and len(kept) < most:
                kept.append(c)
        found += kept
    return list(dict.fromkeys(found))


def shapes(result: dict[str, Any], top: int) -> None:
    """The 60 products, W as n×k and as k×n: what is chosen, and the next best of both generators."""
    table: list[dict[str, Any]] = []
    cells: list[tuple[str, int, int, int, bool, list[AnyGemmConfig]]] = []
    plans: list[MatmulPlan] = []
    for name, m, n, k in layers():
        for weight_rows in (True, False):
            x = torch.empty(m, k, device="cuda", dtype=torch.float16)
            w = torch.empty((n, k) if weight_rows else (k, n), device="cuda", dtype=torch.float16)
            w = w.T if weight_rows else w
            configs = tried(x, w, top)
            cells.append((name, m, n, k, weight_rows, configs))
            plans += [plan_matmul(x, w, config=c) for c in configs]
    log("shapes: compiling", len({id(p.program) for p in plans}))
    compile_all(plans)
    log("shapes: compiled")
    for name, m, n, k, weight_rows, configs in cells:
        sets = operands(m, n, k, weight_rows)
        out = torch.empty(m, n, device="cuda", dtype=torch.float16)
        calls: dict[str, Callable[[int], Any]] = {"cublas": cublas(sets, out)}
        calls |= {str(c): ours(sets, c, "f32", out) for c in configs}
        spreads: dict[str, float] = {}
        rates = race(calls, 2.0 * m * n * k, 4, spreads)
        mine = {c: v for c, v in rates.items() if c != "cublas"}
        general = [v for c, v in mine.items() if not c.startswith("wgmma")]
        table.append({
            "name": name, "weights": "n×k" if weight_rows else "k×n", "cublas": rates["cublas"],
            "chosen": rates[str(configs[0])], "best mma.sync": max(general), "best": max(mine.values()),
            "config": str(configs[0]), "rates": rates, "spread": spreads,
        })  # fmt: skip
        del sets, out, calls
    result["shapes"] = table
    for weights in ("n×k", "k×n"):
        of = [t for t in table if t["weights"] == weights]
        for key in ("chosen", "best mma.sync", "best"):
            ratios = [t[key] / t["cublas"] for t in of]
            summary = {"geomean": float(np.exp(np.mean(np.log(ratios)))), "least": min(ratios)}
            result.setdefault("shapes_summary", {})[f"{weights} {key}"] = summary
    log("shapes", result["shapes_summary"])


def below(result: dict[str, Any]) -> list[str]:
    """What is below the targets."""
    summary = result.get("shapes_summary", {})
    return [
        f"{weights}: {name} {summary[f'{weights} chosen'][name]:.2f} of cuBLAS, not {target}"
        for weights in ("n×k", "k×n")
        for name, target in TARGETS.items()
        if f"{weights} chosen" in summary and summary[f"{weights} chosen"][name] < target
    ]


def host(result: dict[str, Any]) -> None:
    """Microseconds of host time per call."""
    a, b = (torch.randn(64, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    times: dict[str, float] = {}
    for name, call in (("matmul", lambda: warploom.matmul(a, b)), ("torch", lambda: a @ b)):
        for _ in range(100):
            call()
        rounds = []
        for _ in range(20):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(100):
                call()
            rounds.append((time.perf_counter() - begin) * 1e4)
        times[name] = round(statistics.median(rounds), 2)
    result["host_us"] = times
    log("host µs per call", times)


def report(result: dict[str, Any]) -> None:
    for row in result.get("shapes", ()):
        peer = row["cublas"]
        ratios = " ".join(f"{key} {row[key] / peer:.2f}" for key in ("chosen", "best mma.sync", "best"))
        print(f"{row['name']:24} {row['weights']} cublas {peer:6.1f} {ratios} {row['config']}")
    for key in ("shapes_summary", "host_us"):
        print(key, json.dumps(result.get(key)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="shapes,host")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument(
        "--top", type=int, default=4, help="wgmma configurations tried per product, and half as many others"
    )
    arguments = parser.parse_args()
    properties = torch.cuda.get_device_properties(0)
    result: dict[str, Any] = {
        "gpu": properties.name, "torch": torch.__version__, "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }  # fmt: skip
    parts = {"shapes": lambda r: shapes(r, arguments.top), "host": host}
    try:
        for part in arguments.parts.split(","):
            parts[part](result)
            log("done", part)
    finally:
        result["seconds"] = round(time.perf_counter() - START, 1)
        (Path(arguments.out) / "gemm.json").write_text(json.dumps(result, indent=1))
        report(result)
    missed = below(result)
    for text in missed:
        print("below target:", text)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
