"""Matrix products of LLM layers beside cuBLAS on one GPU, and the host's cost of a call; everything is checked first.

    PYTHONPATH=src python benchmarks/gemm_h200.py [--parts host,shapes,large] [--only NAME,…] [--out DIR]

writes ``gemm.json`` to DIR ($OUT by default); needs torch with CUDA. Inputs rotate past the L2, several calls are one
CUDA graph, and every element of what a graph wrote over NaN is held against float64 before the graph is timed.

- ``shapes``: y = x·Wᵀ for the products of ``gemm_shapes.csv``, W stored as (n, k) and as (k, n): cuBLAS, what
  ``matmul`` chooses, what the cost model would choose without ``wgmma``, and the fastest others of both kernels at a
  glance. Interleaved, with a rest of twice a sample before each, as in the ladder; median, 10th and 90th percentile.
- ``large``: some large products, with W as (n, k), each kernel also alone and without a rest, with its watts.
- ``host``: microseconds of host time of a repeated call.

Exit code 1 if a kernel was wrong, or something is below what ``targets.json`` says under "products", for what
``matmul`` chooses and for ``mma.sync`` alone, or above its "host_microseconds".
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import gemm_cells as cells
import numpy as np
import torch
from gemm_cells import CUBLAS, Bench, Layer, Operands, compile_all, cublas, ours
from host_cost import microseconds
from scripts import START, log, products, targets

import warploom
from warploom.core.errors import WarploomError
from warploom.kernels.matmul.problem import MatmulConfig
from warploom.measure.timing import Measured
from warploom.ops.backends import gpu_target
from warploom.ops.matmul import MatmulPlan, plan_matmul
from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.environment import environment
from warploom_lab.bench.evidence import write

LAYOUTS = {"n×k": True, "k×n": False}
LARGE = ("llama3-8b.gate_up.m8192", "llama3-70b.down.m8192")
KEYS = ("chosen", "mma.sync", "best mma.sync", "best")
"""What ``matmul`` runs; what the cost model would take without ``wgmma``; the fastest of those that were timed."""
HELD = {"chosen": "chosen", "mma.sync": "best mma.sync"}
"""Words of ``targets.json`` → whose ratio to cuBLAS must reach them, over the products of each layout."""
Row = dict[str, Any]


def layers(only: Sequence[str] = ()) -> list[Layer]:
    """The 60 products; those whose names contain one of ``only``."""
    found = (Layer(*product) for product in products())
    return [layer for layer in found if not only or any(word in layer.name for word in only)]


def planned(layer: Layer, weight_rows: bool, config: MatmulConfig | None = None) -> MatmulPlan:
    """What runs such a product on GPU 0: with a configuration, or as ``matmul`` chooses."""
    x = torch.empty(layer.m, layer.k, device="cuda", dtype=torch.float16)
    w = torch.empty((layer.n, layer.k) if weight_rows else (layer.k, layer.n), device="cuda", dtype=torch.float16)
    return plan_matmul(x, w.T if weight_rows else w, config=config)


# -- the sixty products
def shapes(bench: Bench, only: Sequence[str], general: int, bulk: int) -> Iterator[Row]:
    """A row for each product and layout of the weights."""
    target, every = gpu_target(0), layers(only)
    configs: dict[tuple[str, str], list[MatmulConfig]] = {}
    plans: list[MatmulPlan] = []
    for layer in every:
        for layout, weight_rows in LAYOUTS.items():
            first = planned(layer, weight_rows)
            found = configs[layer.name, layout] = cells.tried(first.problem, first.config, target, general, bulk)
            plans += [replace(first, config=config) for config in found]
    log("shapes: compiled", compile_all(plans))
    for layer in every:
        operands = Operands(layer)
        for layout, weight_rows in LAYOUTS.items():
            row = cell(bench, layer, operands, weight_rows, configs[layer.name, layout])
            row = {"name": layer.name, "weights": layout, **row}
            log(
                row["name"],
                layout,
                f"cuBLAS {row[CUBLAS]:.0f}",
                *(f"{key} {_ratio(row, key):.2f}" for key in KEYS),
                *row["wrong"].items(),
            )
            yield row
        del operands
        torch.cuda.empty_cache()  # the next product's extents are others


def cell(bench: Bench, layer: Layer, operands: Operands, weight_rows: bool, configs: Sequence[MatmulConfig]) -> Row:
    """One product and layout; the first of ``configs`` is what ``matmul`` chooses."""
    sets, out = operands.sets(weight_rows), operands.out
    chosen = str(configs[0])
    general = str(cells.general_choice(planned(layer, weight_rows).problem, gpu_target(0)))
    kernels: dict[str, Callable[[int], Any]] = {CUBLAS: cublas(sets, out), chosen: ours(sets, None, out)}
    kernels |= {str(c): ours(sets, c, out) for c in configs[1:]}
    graphs, errors, wrong = bench.ready(kernels, layer, operands)
    glances = bench.glance(graphs, layer)
    kept = cells.finalists(glances, chosen, general)
    slowest = max((glances[name] for name in kept), default=0.0)
    found = bench.rested([graph for graph in graphs if graph.name in kept], slowest)
    work = layer.flops * layer.calls
    rates = {name: one.seconds.rate(work / 1e12) for name, one in found.items()}
    row: Row = {"rates": {name: float(f"{rate.median:.4g}") for name, rate in rates.items()}}
    ranked = sorted((name for name in row["rates"] if name != CUBLAS), key=lambda name: -row["rates"][name])
    names = {
        "chosen": chosen,
        "mma.sync": general,
        "best mma.sync": next((name for name in ranked if cells.is_general(name)), ""),
        "best": next(iter(ranked), ""),
    }
    row |= {CUBLAS: row["rates"].get(CUBLAS, math.nan)} | {key: row["rates"].get(names[key], 0.0) for key in KEYS}
    row |= {"configs": names, "spread": {n: [float(f"{x:.4g}") for x in (r.low, r.high)] for n, r in rates.items()}}
    row["mhz"] = {name: one.clock_mhz.median for name, one in found.items() if one.clock_mhz is not None}
    row["error"] = {name: errors[name] for name in found}
    row["glance"] = {name: float(f"{work / s / 1e12:.4g}") for name, s in glances.items()}
    return row | {"wrong": wrong}


def _ratio(row: Mapping[str, Any], key: str) -> float:
    return row[key] / row[CUBLAS]


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Geometric mean and least ratio to cuBLAS over the products of each layout, for each of :data:`KEYS`."""
    found: dict[str, dict[str, float]] = {}
    for layout in LAYOUTS:
        of = [row for row in rows if row["weights"] == layout]
        for key in KEYS if of else ():
            ratios = np.array([_ratio(row, key) for row in of])
            mean = float(np.exp(np.log(ratios).mean())) if ratios.min() > 0 else 0.0
            found[f"{layout} {key}"] = {"geomean": round(mean, 4), "least": round(float(ratios.min()), 4)}
    return found


# -- large products, alone
def large(bench: Bench, only: Sequence[str], rows: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    """{kernel: rested and sustained figures} of each large product; ``rows`` tell the fastest ``mma.sync`` there."""
    fastest = {row["name"]: row["configs"]["best mma.sync"] for row in rows if row["weights"] == "n×k"}
    for layer in layers(only or LARGE):
        operands = Operands(layer)
        sets, problem = operands.sets(True), planned(layer, True).problem
        general = fastest.get(layer.name) or str(cells.general_choice(problem, gpu_target(0)))
        configs: dict[str, Any] = {"chosen": None, "mma.sync": general}
        kernels: dict[str, Callable[[int], Any]] = {CUBLAS: cublas(sets, operands.out)}
        kernels |= {name: ours(sets, config, operands.out) for name, config in configs.items()}
        graphs, errors, wrong = bench.ready(kernels, layer, operands)
        rested = bench.rested(graphs, max(bench.glance(graphs, layer).values(), default=0.0))
        work = layer.flops * layer.calls
        found: Row = {name: {"wrong": why} for name, why in wrong.items()}
        for graph in graphs:
            sustained = bench.sustained(graph, work)
            found[graph.name] = {
                "error": errors[graph.name],
                "rested": _rested(rested[graph.name], work),
                "sustained": sustained,
            }
        for name, config in configs.items():
            found.setdefault(name, {})["config"] = str(config or planned(layer, True).config)
        yield layer.name, found
        del operands, sets, graphs, kernels


def _rested(found: Measured, work: float) -> Row:
    clock = found.clock_mhz
    return {**found.seconds.rate(work / 1e12).json(), "sm_mhz": None if clock is None else round(clock.median)}


# -- the host
def host() -> Row:
    """Microseconds of host time of a call on small matrices: ours and PyTorch's."""
    a, b = (torch.randn(64, 64, device="cuda", dtype=torch.float16) for _ in range(2))
    calls: dict[str, Callable[[], object]] = {"matmul": lambda: warploom.matmul(a, b), "torch": lambda: a @ b}
    return {name: spread.json() for name, spread in microseconds(calls, torch.cuda.synchronize).items()}


# -- what must be reached
def missed(result: Mapping[str, Any], targets: Mapping[str, Any]) -> list[str]:
    """What was wrong, and what is below or above the targets."""
    found = [
        f"{row['name']} {row['weights']}: {name}: {why}"
        for row in result.get("shapes", ())
        for name, why in row["wrong"].items()
    ]
    found += [
        f"{product}: {name}: {row['wrong']}"
        for product, rows in result.get("large", {}).items()
        for name, row in rows.items()
        if "wrong" in row
    ]
    reached = result.get("summary", {})
    for word, key in HELD.items():
        for layout in LAYOUTS:
            for figure, least in targets["products"][word].items():
                value = reached.get(f"{layout} {key}", {}).get(figure)
                if value is not None and not value >= least:
                    found.append(f"{word}, weights {layout}: {figure} {value:.3f} of cuBLAS, not {least}")
    cost = result.get("host_us", {}).get("matmul")
    if cost is not None and not cost["median"] <= targets["host_microseconds"]["matmul"]:
        found.append(f"host: {cost['median']} µs a call, not {targets['host_microseconds']['matmul']}")
    return found


def main() -> int:
    """Measure the parts asked for; the file is written as they come."""
    parser = parser_of(__doc__)
    parser.add_argument("--parts", default="host,shapes,large")
    parser.add_argument("--only", default="", help="products whose names contain one of these words, with commas")
    parser.add_argument("--general", type=int, default=4, help="mma.sync configurations looked at")
    parser.add_argument("--bulk", type=int, default=2, help="and wgmma configurations")
    options = parser.parse_args()
    parts, only = options.parts.split(","), [word for word in options.only.split(",") if word]
    bench = Bench()
    method = {
        "rounds": cells.ROUNDS,
        "sample_seconds": cells.SAMPLE_SECONDS,
        "least_pause_seconds": cells.PAUSE_SECONDS,
        "pause_over_longest_sample": cells.PAUSE_SAMPLES,
    }
    result: Row = {"environment": environment(0), "method": method}

    def save() -> None:
        result["seconds"] = round(time.perf_counter() - START, 1)
        timed = {name for row in result.get("shapes", ()) for name in row["configs"].values()}
        timed |= {row["config"] for of in result.get("large", {}).values() for row in of.values() if "config" in row}
        write(options.out / "gemm.json", result, timed)

    try:
        if "host" in parts:
            result["host_us"] = host()
            log("host µs per call", result["host_us"])
        if "shapes" in parts:
            rows = result["shapes"] = []
            for row in shapes(bench, only, options.general, options.bulk):
                rows.append(row)
                result["summary"] = summary(rows)
                save()
            log("summary", result["summary"])
        if "large" in parts:
            found = result["large"] = {}
            for name, of in large(bench, only, result.get("shapes", [])):
                found[name] = of
                save()
                for kernel, row in of.items():
                    log(name, kernel, {key: value for key, value in row.items() if key != "config"})
    except (WarploomError, RuntimeError) as failure:
        result["failed"] = repr(failure)[:500]
    save()
    below = missed(result, targets()) + ([result["failed"]] if "failed" in result else [])
    for text in below:
        print("missed:", text)
    return int(bool(below))


if __name__ == "__main__":
    sys.exit(main())
