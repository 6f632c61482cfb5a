"""Products whose tiles are not whole waves of CTAs: whole tiles, a split K and stream-K beside cuBLAS on one GPU.

    PYTHONPATH=src python benchmarks/gemm_waves_h200.py [--parts waves,layers] [--rows 256,2048] [--out DIR]

writes ``gemm-waves.json`` to DIR ($OUT by default). ``waves`` are square-ish products of 1 to 4 waves of tiles and a
little more; ``layers`` the products of ``gemm_shapes.csv`` with the given rows, both layouts of the weights. For each
schedule the two configurations that the cost model expects most of are timed, all ``mma.sync`` with f32 sums; every
configuration is first held against float64 on poisoned results and workspaces, and its bits against another run's.
Candidates are interleaved and rested. Needs torch with CUDA.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

import torch
from gemm_cells import Layer, compile_all
from scripts import log, products

from warploom.core.dtypes import f16, f32
from warploom.core.errors import WarploomError
from warploom.kernels.matmul.choice import BEST32, candidates_sm80, fitting
from warploom.kernels.matmul.cost import seconds
from warploom.kernels.matmul.problem import contiguous_problem
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.measure.matmul import PlannedCall, torch_error
from warploom.measure.monitor import GpuMonitor
from warploom.measure.timing import Candidate, EventClock, Measured, measure
from warploom.ops.backends import gpu_target
from warploom.ops.matmul import MatmulPlan, plan_matmul
from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.environment import environment
from warploom_lab.bench.evidence import write

WAVE_DEPTH = 4096
WAVE_TILES = ((12, 11), (13, 11), (18, 11), (12, 22), (23, 12), (36, 11), (37, 11), (24, 22), (25, 22))
"""(rows, columns) of tiles of 128×256: 1, 1.08, 1.5, 2, 2.09, 3, 3.08, 4 and 4.17 waves on 132 multiprocessors."""
SCHEDULES = ("whole", "split_k", "stream_k")
REPEATS = 10
"""Runs whose bits are compared."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Product(Layer):
    """C (m, n) = x (m, k) · W; W stored as k×n, or as n×k and passed transposed."""

    rows: bool

    @property
    def weights(self) -> str:
        """How W is stored."""
        return "k×n" if self.rows else "n×k"

    def inputs(self, make: Any = torch.randn) -> tuple[Any, Any]:
        """x and W."""
        shapes = (self.m, self.k), (self.k, self.n) if self.rows else (self.n, self.k)
        x, w = (make(shape, device="cuda", dtype=torch.float16) for shape in shapes)
        return x, w if self.rows else w.T

    def configurations(self, each: int) -> list[tuple[str, MatmulSm80]]:
        """Of each schedule the best by the cost model."""
        target = gpu_target(0)
        problem = contiguous_problem(self.m, self.n, self.k, f16, f32, b_rows=self.rows)
        found, _ = fitting(problem, candidates_sm80(problem), target)
        found.sort(key=lambda c: seconds(problem, c, target))
        return [(s, c) for s in SCHEDULES for c in [c for c in found if schedule_of(c) == s][:each]]

    def plans(self, each: int) -> list[MatmulPlan]:
        """Of all configurations, without data."""
        inputs = self.inputs(torch.empty)
        return [plan_matmul(*inputs, config=config) for _, config in self.configurations(each)]


def schedule_of(config: MatmulSm80) -> str:
    """One of SCHEDULES."""
    return "stream_k" if config.stream_k else "split_k" if config.split_k > 1 else "whole"


def listed(part: str, rows: set[int]) -> list[Product]:
    """What a part measures."""
    if part == "waves":
        sizes = ((r * BEST32.tile_m, c * BEST32.tile_n) for r, c in WAVE_TILES)
        return [Product(f"{m}x{n}x{WAVE_DEPTH}", m, n, WAVE_DEPTH, True) for m, n in sizes]
    return [Product(*size, b_rows) for size in products() if size[1] in rows for b_rows in (False, True)]


class Running(PlannedCall):
    """A plan's launches on inputs that rotate, with a workspace of its own."""

    def __init__(self, made: MatmulPlan, inputs: list[tuple[Any, Any]], out: Any) -> None:
        super().__init__(made, 0, torch)
        self._inputs, self._out = inputs, out
        self._addresses = [(a.data_ptr(), b.data_ptr(), out.data_ptr()) for a, b in inputs]

    def __call__(self, index: int) -> None:
        self.launch(*self._addresses[index])

    def refuse_faults(self) -> None:
        """Raises RuntimeError for what is wrong with the results on poisoned memory."""
        self._poison()
        error = torch_error(self._out, *self._inputs[0], f32)
        if not error.ok:
            raise RuntimeError(f"error {error.value:.3g} of what the types allow")
        first = self._out.clone()
        for _ in range(REPEATS):
            self._poison()
            if not torch.equal(first, self._out):
                raise RuntimeError("equal calls give other bits")

    def _poison(self) -> None:
        self._out.fill_(math.nan)
        self._memory.fill_(math.nan)
        self(0)


def rate(product: Product, found: Measured) -> Row:
    """TFLOP/s and microseconds."""
    seconds = found.seconds.median
    return {"tflops": round(product.flops / seconds / 1e12, 1), "microseconds": round(seconds * 1e6, 1)}


def measured(product: Product, each: int, rounds: int) -> Row:
    """Every schedule's best and cuBLAS on one product."""
    torch.manual_seed(0)
    inputs = [product.inputs() for _ in range(max(2, product.sets))]
    out = torch.empty(product.m, product.n, device="cuda", dtype=torch.float16)
    candidates = [Candidate("cublas", lambda i: torch.mm(*inputs[i], out=out))]
    tried: dict[str, Row] = {}
    for schedule, config in product.configurations(each):
        cell = tried[str(config)] = {"schedule": schedule}
        try:
            running = Running(plan_matmul(*inputs[0], config=config, out=out), inputs, out)
            running.refuse_faults()
        except (WarploomError, RuntimeError) as failure:
            cell["refused"] = str(failure)[:300]
        else:
            candidates.append(Candidate(str(config), running))
    clock = EventClock(int(torch.cuda.current_stream().cuda_stream))
    times = measure(
        candidates,
        len(inputs),
        clock,
        rounds=rounds,
        sample_seconds=0.006,
        pause_seconds=0.02,
        warm_up_seconds=0.02,
        monitor=GpuMonitor.of(0),
    )
    row: Row = {"m": product.m, "n": product.n, "k": product.k, "weights": product.weights}
    row["cublas"] = rate(product, times.pop("cublas"))
    for name, found in times.items():
        tried[name] |= rate(product, found)
    for schedule in SCHEDULES:
        of = {c: cell for c, cell in tried.items() if cell["schedule"] == schedule and "tflops" in cell}
        if of:
            best = max(of, key=lambda c: of[c]["tflops"])
            row[schedule] = {"config": best, "tflops": of[best]["tflops"], "microseconds": of[best]["microseconds"]}
    return row | {"tried": tried}


def shares(row: Row) -> dict[str, float]:
    """Each schedule's rate over cuBLAS', and that of the best of all."""
    found = {s: row[s]["tflops"] / row["cublas"]["tflops"] for s in SCHEDULES if s in row}
    return found | {"best": max(found.values())}


def summary(rows: list[Row]) -> Row:
    """Geometric mean and least of each of the shares."""
    found: Row = {}
    for what in (*SCHEDULES, "best"):
        if of := [share[what] for share in map(shares, rows) if what in share]:
            found[what] = {"geomean": round(geometric_mean(of), 3), "least": round(min(of), 3), "products": len(of)}
    return found


def main() -> None:
    """Measure the parts asked for; the file is written after each product."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", default="waves,layers")
    parser.add_argument("--rows", default="256,2048", help="of the layers' products")
    parser.add_argument("--each", type=int, default=2, help="configurations of each schedule")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    rows = {int(x) for x in options.rows.split(",")}
    wanted = {part: listed(part, rows) for part in options.parts.split(",")}
    log("compiled", compile_all(plan for of in wanted.values() for p in of for plan in p.plans(options.each)))
    sms = int(torch.cuda.get_device_properties(0).multi_processor_count)
    result: Row = {"environment": environment(0), "multiprocessors": sms}
    for part, of in wanted.items():
        found = result[part] = {"products": dict[str, Row]()}
        for product in of:
            row = found["products"][f"{product.name} {product.weights}"] = measured(
                product, options.each, options.rounds
            )
            found["summary"] = summary(list(found["products"].values()))
            told = {what: round(share, 3) for what, share in shares(row).items()}
            log(product.name, product.weights, "cublas", row["cublas"]["tflops"], told)
            write(options.out / "gemm-waves.json", result)
        log(part, found["summary"])


if __name__ == "__main__":
    main()
