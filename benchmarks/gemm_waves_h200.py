"""Products whose tiles are not whole waves of CTAs: whole tiles, a split K and stream-K beside cuBLAS on one GPU.

    PYTHONPATH=src python benchmarks/gemm_waves_h200.py [--only NAME …] [--out DIR]

writes ``gemm-waves.json`` to DIR ($OUT by default). ``waves`` are square-ish products of 1 to 4 waves of tiles and a
little more; ``layers`` the products of ``gemm_shapes.csv`` with 256 and 2048 rows, both layouts of the weights. For
each schedule the two configurations that the cost model expects most of are timed, all ``mma.sync`` with f32 sums;
every configuration is first held against float64, and its bits against another run's. Figures are rested; ``company``
of a cell has those in turns.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from statistics import geometric_mean
from typing import Any

from gemm_h200 import CUBLAS, Product, by_cost, layers

from warploom.core.targets import Target, target
from warploom.kernels.matmul.choice import BEST32, candidates_sm80
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.source import KernelCall
from warploom_lab.bench.cells import CellScript, Inputs, Load, Row, Trial

WAVE_DEPTH = 4096
WAVE_TILES = ((12, 11), (13, 11), (18, 11), (12, 22), (23, 12), (36, 11), (37, 11), (24, 22), (25, 22))
"""(rows, columns) of tiles of 128×256: 1, 1.08, 1.5, 2, 2.09, 3, 3.08, 4 and 4.17 waves on 132 multiprocessors."""
LAYER_ROWS = 256, 2048
SCHEDULES = ("whole", "split_k", "stream_k")
REPEATS = 10
"""Runs whose bits are compared."""


def schedule_of(config: MatmulSm80) -> str:
    """One of SCHEDULES."""
    return "stream_k" if config.stream_k else "split_k" if config.split_k > 1 else "whole"


def shares(row: Row) -> dict[str, float]:
    """Each schedule's rate over cuBLAS', and that of the best of all."""
    found = {s: row[s]["tflops"] / row["cublas"]["tflops"] for s in SCHEDULES if s in row}
    return found | {"best": max(found.values())}


class Waves(CellScript[Product]):
    """The script."""

    file, sample, loads, baselines = "gemm-waves.json", 0.006, ("rested", "company"), (CUBLAS,)

    def options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--each", type=int, default=2, help="configurations of each schedule")

    def cells(self) -> Iterator[Product]:
        for r, c in WAVE_TILES:
            m, n = r * BEST32.tile_m, c * BEST32.tile_n
            yield Product(f"{m}x{n}x{WAVE_DEPTH}", m, n, WAVE_DEPTH, True)
        yield from (product for product in layers() if product.m in LAYER_ROWS)

    def tried(self, cell: Product, goal: Target) -> dict[str, MatmulSm80]:
        """Of each schedule the best by the cost model."""
        found = by_cost(cell.problem, candidates_sm80, goal)
        each = [[c for c in found if schedule_of(c) == s][: self.given.each] for s in SCHEDULES]
        return {str(c): c for of in each for c in of}

    def calls(self, cell: Product, goal: Target) -> Iterator[KernelCall]:
        for config in self.tried(cell, goal).values():
            yield from config.calls(cell.problem, 132)

    def trial(self, cell: Product) -> Trial:
        facts = {"m": cell.m, "n": cell.n, "k": cell.k, "weights": cell.weights}
        trial = cell.trial(self.tried(cell, target(self.gpu.arch)), facts=facts)

        def error(name: str, out: Any) -> float | None:
            """Infinite where equal calls give other bits."""
            import torch

            found, first, x = trial.error(name, out), out.clone(), trial.sets_of(name)[0]
            steady = name == CUBLAS or all(torch.equal(first, again(name, x)) for _ in range(REPEATS))
            return found if steady else math.inf

        def again(name: str, x: Inputs) -> Any:
            self.gpu.poison(trial.calls[name](x))
            return trial.calls[name](x)

        return replace(trial, error=error)

    def rates(self, cell: Product, load: Load) -> Row:
        """TFLOP/s and microseconds of cuBLAS, of everything that was tried, and of each schedule's best."""
        configs, times = self.tried(cell, target(self.gpu.arch)), load.microseconds()
        rates = {n: {"tflops": round(cell.flops / us / 1e6, 1), "microseconds": us} for n, us in times.items()}
        tried = {n: {"schedule": schedule_of(c), **rates.get(n, {})} for n, c in configs.items()}
        row: Row = {"cublas": rates.get(CUBLAS), "tried": tried}
        for schedule in SCHEDULES:
            of = [n for n, c in configs.items() if schedule_of(c) == schedule and n in rates]
            if of:
                best = max(of, key=lambda n: rates[n]["tflops"])
                row[schedule] = {"config": best, **rates[best]}
        return row

    def summary(self, rows: list[Row]) -> Row:
        """The products of each part, and geometric mean and least of the shares of cuBLAS' rate."""
        import torch

        found: Row = {"multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count}
        for part in ("waves", "layers"):
            of = {row["cell"]: row for row in rows if row["cell"][0].isdigit() == (part == "waves")}
            each, means = [shares(row) for row in of.values()], dict[str, Row]()
            for what in (*SCHEDULES, "best"):
                if some := [share[what] for share in each if what in share]:
                    mean = round(geometric_mean(some), 3)
                    means[what] = {"geomean": mean, "least": round(min(some), 3), "products": len(some)}
            found[part] = {"products": of, "summary": means}
        return found

    def configs(self, rows: list[Row]) -> set[str]:
        return {row[s]["config"] for row in rows for s in SCHEDULES if s in row}

    def line(self, row: Row) -> str:
        told = {what: round(share, 3) for what, share in shares(row).items()}
        return f"{self.line_head(row)}  cublas {row['cublas']['tflops']}  {told}"


if __name__ == "__main__":
    sys.exit(Waves().main())
