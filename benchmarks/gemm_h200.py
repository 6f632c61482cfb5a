"""Matrix products against cuBLAS on one GPU: correctness, the ladder, a sweep of tiles, and the products of LLM layers.

Run ``PYTHONPATH=src python benchmarks/gemm_h200.py [--parts check,ladder,sweep,shapes,host] [--out DIR]``. Needs torch
with CUDA; writes ``gemm.json`` to DIR ($OUT by default). Times are of CUDA graphs of several calls whose inputs rotate
past the L2; medians of replays, candidates interleaved with cuBLAS. TFLOP/s count 2·m·n·k.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import warploom
from warploom.core.dtypes import f16, f32
from warploom.core.errors import WarploomError
from warploom.core.targets import target
from warploom.kernels.gemm.choice import MACHINES, candidates, seconds
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.ladder import BEST16, BEST32, LADDER
from warploom.kernels.gemm.reference import UNIT_ROUNDOFF, accumulation_bound
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


def race(candidates: dict[str, Callable[[int], Any]], flops: float, replays: int = 4) -> dict[str, float]:
    """TFLOP/s of each candidate, interleaved; 0 for one that fails."""
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


def ours(sets: Sequence[tuple[Any, Any]], config: GemmConfig | None, accumulate: str, out: Any) -> Callable[[int], Any]:
    return lambda i: warploom.matmul(*sets[i % len(sets)], accumulate=accumulate, config=config, out=out)


def cublas(sets: Sequence[tuple[Any, Any]], out: Any) -> Callable[[int], Any]:
    return lambda i: torch.mm(*sets[i % len(sets)], out=out)


def accumulate_of(config: GemmConfig) -> str:
    return config.accumulate.name


# -- correctness
def worst(a: Any, b: Any, c: Any, accumulate: str) -> float:
    """The largest error over what the types allow at that element (at most 1 is right); NaN is infinite."""
    product, magnitude = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    kind = f16 if accumulate == "f16" else f32
    gamma = accumulation_bound(a.shape[-1], kind)
    u = UNIT_ROUNDOFF[{torch.float16: "f16", torch.bfloat16: "bf16", torch.float32: "f32"}[c.dtype]]
    allowed = u * (1 + gamma) * product.abs() + gamma * (1 + u) * magnitude + 2.0**-24 * (a.shape[-1] / 16 + 1)
    error = (c.double() - product).abs()
    return float(torch.where(error.isnan(), torch.inf, error / allowed).max())


def check(result: dict[str, Any]) -> None:
    """Every rung on one size, and random problems of every layout; element by element."""
    a, b = (torch.randn(520, 520, device="cuda", dtype=torch.float16) for _ in range(2))
    rungs = {r.key: r.config for r in LADDER.rungs}
    compile_all([plan_matmul(a, b, accumulate=accumulate_of(c), config=c) for c in rungs.values()])
    found = {
        key: worst(a, b, warploom.matmul(a, b, accumulate=accumulate_of(c), config=c), accumulate_of(c))
        for key, c in rungs.items()
    }
    problems = list(random_problems(64))
    compile_all([plan_matmul(x, y, **options) for x, y, options in problems])
    errors = []
    for x, y, options in problems:
        c = warploom.matmul(x, y, **options)
        errors.append(worst(x, y, c, options["accumulate"]))
        if errors[-1] > 1:
            log("  wrong:", tuple(x.shape), x.stride(), tuple(y.shape), y.stride(), options, errors[-1])
    again = [warploom.matmul(x, y, **options) for x, y, options in problems[:8] for _ in range(2)]
    equal = all(torch.equal(p, q) for p, q in zip(again[::2], again[1::2], strict=True))
    result["check"] = {"rungs": found, "random_problems": len(errors), "random_worst": max(errors), "repeatable": equal}
    log("check", result["check"])


def random_problems(count: int) -> Any:
    rng = np.random.default_rng(5)
    for i in range(count):
        m, n, k = (int(x) for x in np.exp(rng.uniform(0, 6.5, 3)).astype(int) + 1)
        dtype = torch.bfloat16 if rng.random() < 0.3 else torch.float16
        options: dict[str, Any] = {"accumulate": "f16" if dtype is torch.float16 and rng.random() < 0.2 else "f32"}
        if rng.random() < 0.4:
            options["out_dtype"] = "f32"
        batch = () if rng.random() < 0.7 else (int(rng.integers(1, 4)),)
        pad = int(rng.choice([0, 0, 1, 2, 4, 8]))

        def matrix(rows: int, cols: int, batch: tuple[int, ...] = batch, pad: int = pad, dtype: Any = dtype) -> Any:
            if rng.random() < 0.5:
                return torch.randn(*batch, rows, cols + pad, device="cuda", dtype=dtype)[..., :cols]
            return torch.randn(*batch, cols, rows + pad, device="cuda", dtype=dtype)[..., :rows].transpose(-1, -2)

        if i % 8 == 0:  # a long sum of few elements
            m, n, k = m % 40 + 1, n % 60 + 1, 4 * k + 1024
        yield matrix(m, k), matrix(k, n, batch if rng.random() < 0.5 else ()), options


# -- the ladder
def ladder(result: dict[str, Any]) -> None:
    rows = {r.key: r.config for r in LADDER.rungs}
    found: dict[str, dict[str, float]] = {}
    for n in (4096, 8192):
        sets = operands(n, n, n, False)
        out = torch.empty(n, n, device="cuda", dtype=torch.float16)
        compile_all([plan_matmul(*sets[0], out=out, accumulate=accumulate_of(c), config=c) for c in rows.values()])
        calls: dict[str, Callable[[int], Any]] = {"cublas": cublas(sets, out)}
        calls |= {key: ours(sets, c, accumulate_of(c), out) for key, c in rows.items()}
        for key, value in race(calls, 2.0 * n**3, 5).items():
            found.setdefault(key, {})[str(n)] = value
        log("ladder", n, {k: v[str(n)] for k, v in found.items()})
    result["ladder"] = found


# -- tiles
def sweep_configs(base: GemmConfig) -> dict[str, GemmConfig]:
    tiles = [
        (128, 128, 32, 64, 64, 4, 1), (128, 128, 32, 64, 64, 3, 2), (128, 128, 64, 64, 64, 3, 1),
        (128, 128, 64, 64, 64, 3, 2), (128, 128, 32, 64, 32, 4, 1), (128, 128, 64, 64, 32, 3, 1),
        (128, 256, 32, 64, 64, 3, 1), (128, 256, 32, 64, 64, 4, 1), (128, 256, 32, 64, 64, 6, 1),
        (128, 256, 64, 64, 64, 3, 1), (128, 256, 64, 64, 64, 4, 1), (256, 128, 32, 64, 64, 4, 1),
        (256, 128, 64, 64, 64, 3, 1), (256, 128, 64, 64, 64, 4, 1), (64, 256, 32, 64, 64, 4, 1),
        (64, 256, 32, 64, 64, 3, 2), (256, 64, 32, 64, 64, 4, 1), (256, 256, 32, 64, 64, 4, 1),
    ]  # fmt: skip
    if base.accumulate is f16:
        tiles += [(256, 128, 32, 128, 64, 4, 1), (256, 128, 64, 128, 64, 3, 1), (128, 256, 32, 64, 128, 4, 1),
                  (256, 256, 32, 128, 64, 4, 1), (256, 256, 32, 64, 128, 4, 1)]  # fmt: skip
    names = ("tile_m", "tile_n", "tile_k", "warp_m", "warp_n", "stages", "min_ctas")
    found: dict[str, GemmConfig] = {}
    for tile in tiles:
        m, n, k, wm, wn, stages, ctas = tile
        config = replace(base, **dict(zip(names, tile, strict=True)))
        found[f"{m}x{n}x{k} {wm}x{wn} s{stages}" + (f" c{ctas}" if ctas > 1 else "")] = config
    first = base
    found |= {
        "best, static strides": replace(first, static_strides=True),
        "best, recomputed": replace(first, strided=False),
        "best, narrow B": replace(first, wide_b=False),
        "best, not pipelined": replace(first, pipelined=False),
        "best, -O1": replace(first, opt_level=1),
        "best, stride 4": replace(first, block_stride=4),
        "best, stride 16": replace(first, block_stride=16),
    }
    goal = target("sm_90a")
    return {name: c for name, c in found.items() if not c.check(goal)}


def sweep(result: dict[str, Any]) -> None:
    found: dict[str, Any] = {}
    for base in (BEST32, BEST16):
        configs = sweep_configs(base)
        for weight_rows in (False, True):
            for n in (4096, 8192):
                sets = operands(n, n, n, weight_rows)
                out = torch.empty(n, n, device="cuda", dtype=torch.float16)
                kind = base.accumulate.name
                compile_all([plan_matmul(*sets[0], out=out, accumulate=kind, config=c) for c in configs.values()])
                calls: dict[str, Callable[[int], Any]] = {"cublas": cublas(sets, out)}
                calls |= {name: ours(sets, c, kind, out) for name, c in configs.items()}
                rates = race(calls, 2.0 * n**3, 3)
                found[f"{kind} {'nt' if weight_rows else 'nn'} {n}"] = rates
                top = sorted(rates.items(), key=lambda x: -x[1])[:6]
                log("sweep", kind, "nt" if weight_rows else "nn", n, top)
    result["sweep"] = found


# -- products of layers
def shapes(result: dict[str, Any], top: int) -> None:
    """The 60 products, W as n×k and as k×n: what is chosen, and the next best by the cost model."""
    with (Path(__file__).parent / "gemm_shapes.csv").open() as file:
        rows = [(r["name"], int(r["m"]), int(r["n"]), int(r["k"])) for r in csv.DictReader(file)]
    goal = gpu_target(0)
    machine = MACHINES[goal.name]
    table: list[dict[str, Any]] = []
    chosen: list[tuple[str, int, int, int, bool, list[GemmConfig]]] = []
    plans: list[MatmulPlan] = []
    for name, m, n, k in rows:
        for weight_rows in (True, False):
            x = torch.empty(m, k, device="cuda", dtype=torch.float16)
            w = torch.empty((n, k) if weight_rows else (k, n), device="cuda", dtype=torch.float16)
            w = w.T if weight_rows else w
            first = plan_matmul(x, w)
            problem = first.problem
            fitting = [
                c for c in candidates(problem)
                if not c.check(goal, a_k_contiguous=True, b_k_contiguous=weight_rows) and not problem.misfits(c)
            ]  # fmt: skip
            fitting.sort(key=lambda c: seconds(problem, c, machine, goal.shared_per_sm))
            tried: list[GemmConfig] = []
            for c in fitting:  # different tiles, and one other split of the first
                same = sum(replace(c, split_k=1) == replace(t, split_k=1) for t in tried)
                if same < 2 and len(tried) < top:
                    tried.append(c)
            chosen.append((name, m, n, k, weight_rows, tried))
            plans += [plan_matmul(x, w, config=c) for c in tried]
    log("shapes: compiling", len({id(p.program) for p in plans}))
    compile_all(plans)
    log("shapes: compiled")
    for name, m, n, k, weight_rows, tried in chosen:
        sets = operands(m, n, k, weight_rows)
        out = torch.empty(m, n, device="cuda", dtype=torch.float16)
        calls: dict[str, Callable[[int], Any]] = {"cublas": cublas(sets, out)}
        calls |= {str(c): ours(sets, c, "f32", out) for c in tried}
        rates = race(calls, 2.0 * m * n * k, 3)
        mine = {c: v for c, v in rates.items() if c != "cublas"}
        table.append({
            "name": name, "weights": "n×k" if weight_rows else "k×n", "cublas": rates["cublas"],
            "chosen": next(iter(mine.values())), "best": max(mine.values()), "rates": rates,
        })  # fmt: skip
        del sets, out, calls
    result["shapes"] = table
    for weights in ("n×k", "k×n"):
        of = [t for t in table if t["weights"] == weights]
        for key in ("chosen", "best"):
            ratios = [t[key] / t["cublas"] for t in of]
            summary = {"geomean": float(np.exp(np.mean(np.log(ratios)))), "least": min(ratios)}
            result.setdefault("shapes_summary", {})[f"{weights} {key}"] = summary
    log("shapes", result["shapes_summary"])


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
    print("\nrung       " + "".join(f"{n:>9}" for n in (4096, 8192)))
    for key, rates in result.get("ladder", {}).items():
        print(f"{key:10} " + "".join(f"{rates[str(n)]:9.1f}" for n in (4096, 8192)))
    for key, rates in result.get("sweep", {}).items():
        print(key, "; ".join(f"{n}: {v}" for n, v in sorted(rates.items(), key=lambda x: -x[1])[:7]))
    for row in result.get("shapes", ()):
        best = max((v, n) for n, v in row["rates"].items() if n != "cublas")[1]
        short = best.split(",BLOCK")[0] + "".join(f",{w}" for w in best.split(",") if w.startswith("split"))
        peer = row["cublas"]
        ratios = f"chosen {row['chosen'] / peer:.2f} best {row['best'] / peer:.2f}"
        print(f"{row['name']:24} {row['weights']} cublas {peer:6.1f} {ratios} {short}")
    for key in ("shapes_summary", "host_us", "check"):
        print(key, json.dumps(result.get(key)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="check,ladder,sweep,shapes,host")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--top", type=int, default=5, help="configurations tried per product")
    arguments = parser.parse_args()
    properties = torch.cuda.get_device_properties(0)
    result: dict[str, Any] = {
        "gpu": properties.name, "torch": torch.__version__, "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
    }  # fmt: skip
    parts = {"check": check, "ladder": ladder, "sweep": sweep, "host": host,
             "shapes": lambda r: shapes(r, arguments.top)}  # fmt: skip
    try:
        for part in arguments.parts.split(","):
            parts[part](result)
            log("done", part)
    finally:
        result["seconds"] = round(time.perf_counter() - START, 1)
        (Path(arguments.out) / "gemm.json").write_text(json.dumps(result, indent=1))
        report(result)


if __name__ == "__main__":
    main()
