"""Matrix products of LLM layers beside cuBLAS on one GPU; everything is checked first.

    PYTHONPATH=src python benchmarks/gemm_h200.py [--only NAME …] [--out DIR]

writes ``gemm.json`` to DIR ($OUT by default); needs torch with CUDA. y = x·Wᵀ for the products of ``gemm_shapes.csv``,
W stored as (n, k) and as (k, n): cuBLAS, what ``matmul`` chooses, what the cost model would choose without ``wgmma``,
and the next of both kernels by the cost model. Every element is held against float64. A row's own figures are rested,
``company`` has those in turns; two large products, with W as (n, k), are also run alone and without a rest (``large``).

Exit code 1 if a kernel was wrong, or something is below what ``targets.json`` says under "products", for what
``matmul`` chooses and for ``mma.sync`` alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from scripts import products, targets

import warploom
from warploom.core.dtypes import f16, f32
from warploom.core.targets import Target, target
from warploom.kernels.matmul.choice import candidates_sm80, candidates_sm90, choose, fitting
from warploom.kernels.matmul.cost import seconds
from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem, contiguous_problem
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.source import KernelCall
from warploom.measure.matmul import blocks_error, torch_blocks
from warploom_lab.bench.cells import CellScript, Figure, Inputs, Load, Row, Run, Trial

ROTATE_BYTES = 160e6
"""The operands of one rotation: three times what the L2 holds."""
GRAPH_SECONDS, MOST_CALLS = 1e-3, 96
"""A graph holds so many calls that the gaps between two graphs do not count."""
CUBLAS = "cublas"
LARGE = ("llama3-8b.gate_up.m8192 n×k", "llama3-70b.down.m8192 n×k")
KEYS = {"chosen": "chosen", "mma.sync": "best mma.sync"}
"""Words of ``targets.json`` → whose ratio to cuBLAS must reach them, over the products of each layout."""


@dataclass(frozen=True)
class Product:
    """y (m, n) = x (m, k) · Wᵀ; W is stored as (n, k), or with ``rows`` as (k, n)."""

    layer: str
    m: int
    n: int
    k: int
    rows: bool

    @property
    def weights(self) -> str:
        """The layout of W."""
        return "k×n" if self.rows else "n×k"

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.layer} {self.weights}"

    @property
    def flops(self) -> int:
        """Floating-point operations: 2 · m · n · k."""
        return 2 * self.m * self.n * self.k

    @property
    def sets(self) -> int:
        """Input sets whose rotation does not fit the L2."""
        return max(2, min(6, int(ROTATE_BYTES / (2.0 * self.k * (self.m + self.n))) + 1))

    @property
    def turns(self) -> int:
        """Rotations of one graph, of about :data:`GRAPH_SECONDS` on an H200."""
        about = max(self.flops / 6e14, 2.0 * self.k * (self.m + self.n) / 4e12)
        return max(1, min(MOST_CALLS // self.sets, round(GRAPH_SECONDS / about / self.sets)))

    @property
    def problem(self) -> MatmulProblem:
        """What is asked."""
        return contiguous_problem(self.m, self.n, self.k, f16, f32, b_rows=self.rows)

    def inputs(self) -> Inputs:
        """Random f16 x and Wᵀ."""
        import torch

        shapes = (self.m, self.k), (self.k, self.n) if self.rows else (self.n, self.k)
        x, w = (torch.randn(shape, device="cuda", dtype=torch.float16) for shape in shapes)
        return x, w if self.rows else w.T

    def trial(self, configs: dict[str, Any], **more: Any) -> Trial:
        """cuBLAS, and calls with configurations (None: what ``matmul`` chooses by itself), all into one result."""
        import torch

        sets = [self.inputs() for _ in range(self.sets)]
        out = torch.empty(self.m, self.n, device="cuda", dtype=torch.float16)
        reference = list(torch_blocks(*sets[0]))

        def ours(config: Any) -> Run:
            return lambda x: warploom.matmul(*x, config=config, out=out)

        def error(name: str, found: Any) -> float:
            return float(f"{min(blocks_error(reference, found, f32).value, 1e300):.3g}")

        calls: dict[str, Run] = {CUBLAS: lambda x: torch.mm(*x, out=out)}
        calls |= {name: ours(config) for name, config in configs.items()}
        optional = [name for name, config in configs.items() if config is not None]
        return Trial(calls, sets, error, self.flops, turns=self.turns, over=CUBLAS, optional=optional, **more)


def layers() -> Iterator[Product]:
    """The 60 products in both layouts."""
    return (Product(*size, rows) for size in products() for rows in (False, True))


@cache
def by_cost(problem: MatmulProblem, candidates: Callable[[MatmulProblem], Any], goal: Target) -> list[Any]:
    """The configurations that fit, the best by the cost model first."""
    found, _ = fitting(problem, candidates(problem), goal)
    return sorted(found, key=lambda c: seconds(problem, c, goal))


@cache
def tried(product: Product, goal: Target, general: int, bulk: int) -> dict[str, MatmulConfig]:
    """What ``matmul`` chooses, then the best by the cost model: ``general`` of ``mma.sync``, ``bulk`` of ``wgmma``.

    Of one tile at most two: with its best split of K (or none), and the next.
    """
    problem, found = product.problem, list[Any]()
    found.append(choose(problem, goal)[0])
    for candidates, most in ((candidates_sm80, general), (candidates_sm90, bulk)):
        kept: list[Any] = []
        for c in by_cost(problem, candidates, goal):
            same = sum(replace(c, split_k=1) == replace(t, split_k=1) for t in kept)
            if same < 2 and len(kept) < most:
                kept.append(c)
        found += kept
    return {str(config): config for config in found}


class Products(CellScript[Product]):
    """The script."""

    file, listed, sample, loads = "gemm.json", "shapes", 0.003, ("rested", "company")
    baselines = (CUBLAS,)

    def options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--general", type=int, default=4, help="mma.sync configurations timed")
        parser.add_argument("--bulk", type=int, default=2, help="and wgmma configurations")
        wanted = targets()["products"]
        of = [(key, {"weights": (layout,)}, wanted[word]) for word, key in KEYS.items() for layout in ("n×k", "k×n")]
        self.figures = [
            figure
            for key, where, least in of
            for figure in (Figure(key, least["geomean"], where, mean=1), Figure(key, least["least"], where))
        ]

    def cells(self) -> Iterator[Product]:
        return layers()

    def tried(self, cell: Product, goal: Target) -> dict[str, MatmulConfig]:
        """The configurations that are timed; the first is what ``matmul`` chooses."""
        return tried(cell, goal, self.given.general, self.given.bulk)

    def calls(self, cell: Product, goal: Target) -> Iterator[KernelCall]:
        for config in self.tried(cell, goal).values():
            yield from config.calls(cell.problem, 132)

    def trial(self, cell: Product) -> Trial:
        chosen, *others = self.tried(cell, target(self.gpu.arch)).items()
        configs: dict[str, Any] = {chosen[0]: None, **dict(others)}
        metered = [CUBLAS, *configs] if cell.name in LARGE else ()
        return cell.trial(configs, metered=metered, facts={"name": cell.layer, "weights": cell.weights})

    def rates(self, cell: Product, load: Load) -> Row:
        """TFLOP/s of cuBLAS, of what is chosen, of the cost model's ``mma.sync``, and of the fastest; by all names."""
        goal, spread = target(self.gpu.arch), load.tflops()
        rates = {name: rate["median"] for name, rate in spread.items()}
        ranked = sorted((name for name in rates if name != CUBLAS), key=lambda name: -rates[name])
        general = str(by_cost(cell.problem, candidates_sm80, goal)[0])
        names = {
            "chosen": next(iter(self.tried(cell, goal))),
            "mma.sync": general,
            "best mma.sync": next((name for name in ranked if name.startswith(MatmulSm80.word)), ""),
            "best": next(iter(ranked), ""),
        }
        row: Row = {"rates": rates, "configs": names, "spread": {n: [x["low"], x["high"]] for n, x in spread.items()}}
        row |= {CUBLAS: rates.get(CUBLAS, float("nan"))} | {key: rates.get(name, 0.0) for key, name in names.items()}
        return row | {"ratio": {key: {"median": row[key] / row[CUBLAS]} for key in names}}

    def summary(self, rows: list[Row]) -> Row:
        """Rested and sustained figures of the large products."""
        found: Row = {}
        for row in rows:
            fastest = {
                "cublas": CUBLAS,
                "chosen": row["configs"]["chosen"],
                "mma.sync": row["configs"]["best mma.sync"],
            }
            for kernel, name in fastest.items() if "power" in row else ():
                low, high = row["spread"][name]
                rested = {"median": row["rates"][name], "low": low, "high": high, "sm_mhz": row["sm_mhz"].get(name)}
                of = {"config": name, "error": row["error"][name], "rested": rested}
                found.setdefault(row["name"], {})[kernel] = of | {"sustained": row["power"].get(name)}
        return {"large": found}

    def configs(self, rows: list[Row]) -> set[str]:
        return {name for row in rows for load in (row, row["company"]) for name in load["configs"].values()}

    def line(self, row: Row) -> str:
        ratios = "  ".join(f"{key} {ratio['median']:.2f}" for key, ratio in row["ratio"].items())
        return f"{self.line_head(row)}  cuBLAS {row[CUBLAS]:.0f}  {ratios}"


if __name__ == "__main__":
    sys.exit(Products().main())
