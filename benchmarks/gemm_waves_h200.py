"""Products whose tiles are not whole waves of CTAs: whole tiles, a split K and stream-K beside cuBLAS on one GPU.

    PYTHONPATH=src python benchmarks/gemm_waves_h200.py [--parts waves,layers] [--rows 256,2048] [--out DIR]

writes ``gemm-waves.json`` to DIR ($OUT by default). ``waves`` are square-ish products of 1 to 4 waves of tiles and a
little more; ``layers`` the products of ``gemm_shapes.csv`` with the given rows, both layouts of the weights. For each
schedule the two configurations that the cost model expects most of are timed, all ``mma.sync`` with f32 sums; every
configuration is first held against float64 on poisoned results and workspaces, and its bits against another run's.
Candidates are interleaved and rested. Needs torch with CUDA.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from warploom.bench.environment import environment
from warploom.bench.gemm import torch_error
from warploom.bench.monitor import GpuMonitor
from warploom.bench.timing import Candidate, EventClock, measure
from warploom.core.dtypes import f16, f32
from warploom.core.errors import WarploomError
from warploom.cuda.device import cuda_core
from warploom.kernels.matmul.choice import BEST32, candidates_sm80, fitting
from warploom.kernels.matmul.problem import contiguous_problem
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.source import KernelSource
from warploom.ops.backends import gpu_target
from warploom.ops.matmul import MatmulPlan, plan_matmul
from warploom.tune.build import build_all

WAVE_DEPTH = 4096
WAVE_TILES = ((12, 11), (13, 11), (18, 11), (12, 22), (23, 12), (36, 11), (37, 11), (24, 22), (25, 22))
"""(rows, columns) of tiles of 128×256: 1, 1.08, 1.5, 2, 2.09, 3, 3.08, 4 and 4.17 waves on 132 multiprocessors."""
SCHEDULES = ("whole", "split_k", "stream_k")
REPEATS = 10
"""Runs whose bits are compared."""
ROTATED_BYTES = 160e6
START = time.perf_counter()


def log(*words: Any) -> None:
    print(f"[{time.perf_counter() - START:6.1f}]", *words, flush=True)


@dataclass(frozen=True)
class Product:
    """C (m, n) = x (m, k) · W; W stored as k×n, or as n×k and passed transposed."""

    name: str
    m: int
    n: int
    k: int
    rows: bool

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def inputs(self) -> tuple[Any, Any]:
        x = torch.randn(self.m, self.k, device="cuda", dtype=torch.float16)
        if self.rows:
            return x, torch.randn(self.k, self.n, device="cuda", dtype=torch.float16)
        return x, torch.randn(self.n, self.k, device="cuda", dtype=torch.float16).T

    def configurations(self, each: int) -> dict[str, list[MatmulSm80]]:
        """By schedule, the best by the cost model first."""
        target = gpu_target(0)
        problem = contiguous_problem(self.m, self.n, self.k, f16, f32, b_rows=self.rows)
        found, _ = fitting(problem, candidates_sm80(problem), target)
        found.sort(key=lambda c: c.seconds(problem, target))
        return {schedule: [c for c in found if _schedule(c) == schedule][:each] for schedule in SCHEDULES}


def _schedule(config: MatmulSm80) -> str:
    return "stream_k" if config.stream_k else "split_k" if config.split_k > 1 else "whole"


def products(part: str, rows: set[int]) -> list[Product]:
    """What a part measures."""
    if part == "waves":
        sizes = ((r * BEST32.tile_m, c * BEST32.tile_n) for r, c in WAVE_TILES)
        return [Product(f"{m}x{n}x{WAVE_DEPTH}", m, n, WAVE_DEPTH, True) for m, n in sizes]
    with (Path(__file__).parent / "gemm_shapes.csv").open(encoding="utf-8") as file:
        sizes = [(r["name"], int(r["m"]), int(r["n"]), int(r["k"])) for r in csv.DictReader(file)]
    return [Product(*size, b_rows) for size in sizes if size[1] in rows for b_rows in (False, True)]


class Running:
    """A plan's launches on inputs that rotate, with a workspace of its own."""

    def __init__(self, made: MatmulPlan, inputs: list[tuple[Any, Any]], out: Any) -> None:
        steps = made.steps()
        self._prepared = steps.prepare(("a", "b", "out"), 0)
        self._memory = torch.empty(steps.words, device="cuda")
        self._inputs, self._out = inputs, out
        self._addresses = [(a.data_ptr(), b.data_ptr()) for a, b in inputs]

    def __call__(self, index: int) -> None:
        self._prepared.queue((*self._addresses[index], self._out.data_ptr()), "torch", self._memory.data_ptr())

    def faults(self) -> str | None:
        """What is wrong with the results on poisoned memory, if anything."""
        self._poison()
        error = torch_error(self._out, *self._inputs[0], f32)
        if not error.ok:
            return f"error {error.value:.3g} of what the types allow"
        first = self._out.clone()
        for _ in range(REPEATS):
            self._poison()
            if not torch.equal(first, self._out):
                return "equal calls give other bits"
        return None

    def _poison(self) -> None:
        self._out.fill_(math.nan)
        self._memory.fill_(math.nan)
        self(0)


class Bench:
    """Times on GPU 0."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds
        self.sms = int(torch.cuda.get_device_properties(0).multi_processor_count)
        self._monitor = GpuMonitor(cuda_core().Device(0).pci_bus_id)
        self._clock = EventClock(int(torch.cuda.current_stream().cuda_stream))

    def row(self, product: Product, each: int) -> dict[str, Any]:
        """Every schedule's best and cuBLAS on one product."""
        count = max(2, min(6, int(ROTATED_BYTES / (2.0 * product.k * (product.m + product.n))) + 1))
        inputs = [product.inputs() for _ in range(count)]
        out = torch.empty(product.m, product.n, device="cuda", dtype=torch.float16)
        candidates = [Candidate("cublas", lambda i: torch.mm(*inputs[i], out=out))]
        tried: dict[str, dict[str, Any]] = {}
        for schedule, configs in product.configurations(each).items():
            for config in configs:
                cell = tried[str(config)] = {"schedule": schedule}
                try:
                    running = Running(plan_matmul(*inputs[0], config=config, out=out), inputs, out)
                    fault = running.faults()
                except (WarploomError, RuntimeError) as failure:
                    cell["refused"] = str(failure)[:300]
                    continue
                if fault is None:
                    candidates.append(Candidate(str(config), running))
                else:
                    cell["refused"] = fault
        times = measure(candidates, count, self._clock, rounds=self._rounds, sample_seconds=0.006, pause_seconds=0.02,
                        warm_up_seconds=0.02, monitor=self._monitor)  # fmt: skip
        row: dict[str, Any] = {
            "m": product.m,
            "n": product.n,
            "k": product.k,
            "weights": "k×n" if product.rows else "n×k",
        }
        for name, found in times.items():
            rate = {"tflops": round(product.flops / found.seconds.median / 1e12, 1),
                    "microseconds": round(found.seconds.median * 1e6, 1)}  # fmt: skip
            if name == "cublas":
                row["cublas"] = rate
            else:
                tried[name] |= rate
        for schedule in SCHEDULES:
            of = {c: cell for c, cell in tried.items() if cell["schedule"] == schedule and "tflops" in cell}
            if of:
                best = max(of, key=lambda c: of[c]["tflops"])
                row[schedule] = {"config": best, "tflops": of[best]["tflops"], "microseconds": of[best]["microseconds"]}
        row["tried"] = tried
        return row


def compile_all(wanted: list[Product], each: int) -> None:
    """Compile on all cores."""
    sources: dict[KernelSource, None] = {}
    for product in wanted:
        a = torch.empty(product.m, product.k, device="cuda", dtype=torch.float16)
        b = torch.empty((product.k, product.n) if product.rows else (product.n, product.k), device="cuda",
                        dtype=torch.float16)  # fmt: skip
        for configs in product.configurations(each).values():
            for config in configs:
                made = plan_matmul(a, b if product.rows else b.T, config=config)
                sources |= dict.fromkeys(call.source for call in made.calls)
    arch = gpu_target(0).name
    log("compiling", len(sources))
    build_all(list(sources), arch)
    log("compiled")


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric mean and least of each schedule's rate over cuBLAS', and of the best of all."""
    found: dict[str, Any] = {}
    for what in (*SCHEDULES, "best"):
        shares = [
            (max(row[s]["tflops"] for s in SCHEDULES if s in row) if what == "best" else row[what]["tflops"])
            / row["cublas"]["tflops"]
            for row in rows
            if what == "best" or what in row
        ]
        if shares:
            mean = math.exp(sum(map(math.log, shares)) / len(shares))
            found[what] = {"geomean": round(mean, 3), "least": round(min(shares), 3), "products": len(shares)}
    return found


def main() -> None:
    """Measure the parts asked for; the file is written after each product."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", default="waves,layers")
    parser.add_argument("--rows", default="256,2048", help="of the layers' products")
    parser.add_argument("--each", type=int, default=2, help="configurations of each schedule")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    options = parser.parse_args()
    bench = Bench(options.rounds)
    rows = {int(x) for x in options.rows.split(",")}
    wanted = {part: products(part, rows) for part in options.parts.split(",")}
    compile_all([p for listed in wanted.values() for p in listed], options.each)
    result: dict[str, Any] = {"environment": environment(0), "multiprocessors": bench.sms}
    for part, listed in wanted.items():
        result[part] = {"products": {}}
        for product in listed:
            torch.manual_seed(0)
            row = bench.row(product, options.each)
            result[part]["products"][f"{product.name} {row['weights']}"] = row
            result[part]["summary"] = summary(list(result[part]["products"].values()))
            shares = {s: round(row[s]["tflops"] / row["cublas"]["tflops"], 3) for s in SCHEDULES if s in row}
            log(product.name, row["weights"], "cublas", row["cublas"]["tflops"], shares)
            (options.out / "gemm-waves.json").write_text(json.dumps(result, indent=1, default=str) + "\n")
        log(part, result[part]["summary"])


if __name__ == "__main__":
    main()
