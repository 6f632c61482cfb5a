"""Random matrix products beside cuBLAS on one GPU, as kernels and as calls: shapes that nobody has tuned.

    PYTHONPATH=src python benchmarks/random_products.py [--seed N] [--count N] [--out DIR]

m is 1 … 16384, n and k are multiples of 8 up to 32768, spread evenly over their logarithms; row-major operands and
transposed ones (nn, nt, tn), fp16 and bf16. The figures hold for the kernels, which are CUDA graphs on inputs that
rotate past the L2; ``calls`` are eager calls one after another, whichever of host and GPU takes longer. Random rows and
columns of each result are held against float64. Writes random-products.json. Exit code 1 if a kernel was wrong, if the
geometric mean to cuBLAS is below 1.08, or a product below 0.90, as a kernel or as a call.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import warploom
from warploom.core.dtypes import DType, bf16, f16, f32
from warploom.core.targets import Target
from warploom.kernels.matmul.choice import choose
from warploom.kernels.matmul.problem import MatmulProblem, Matrix, aligned_elements, contiguous_problem
from warploom.kernels.source import KernelCall
from warploom.measure.matmul import torch_error
from warploom_lab.bench.cells import CellScript, Figure, Inputs, Run, Trial

SEED, COUNT = 34, 200
MOST_FLOPS, MOST_BYTES = 4e12, 1e9
"""Larger products are drawn again: a few of them would take most of the time."""
ROTATED_BYTES, GRAPH_SECONDS, MOST_CALLS = 160e6, 1e-3, 64
CHECKED = 192
"""Rows and columns that are checked."""
CUBLAS = "cublas"
MEAN, LEAST = 1.08, 0.90


@dataclass(frozen=True)
class Product:
    """C (m, n) = A · B; ``layout`` as BLAS names it: "t" is stored transposed."""

    m: int
    n: int
    k: int
    layout: str
    dtype: DType

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.m}×{self.n}×{self.k} {self.layout} {self.dtype}"

    @property
    def flops(self) -> int:
        """Floating-point operations."""
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """Memory of all three matrices."""
        return 2 * (self.m * self.k + self.k * self.n + self.m * self.n)

    @property
    def problem(self) -> MatmulProblem:
        """What is asked."""
        found = contiguous_problem(self.m, self.n, self.k, self.dtype, f32, b_rows=self.layout[1] == "n")
        stride = self.m if self.k > 1 else 0
        turned = Matrix(False, stride, 0, aligned_elements(stride))
        return replace(found, a=turned) if self.layout[0] == "t" and self.m > 1 else found

    def inputs(self) -> Inputs:
        """Random A and B."""
        import torch

        sizes = zip(self.layout, ((self.m, self.k), (self.k, self.n)), strict=True)
        dtype = torch.float16 if self.dtype is f16 else torch.bfloat16
        return tuple(
            torch.randn(size[::-1] if how == "t" else size, device="cuda", dtype=dtype).T
            if how == "t"
            else torch.randn(size, device="cuda", dtype=dtype)
            for how, size in sizes
        )


def drawn(seed: int, count: int) -> Iterator[Product]:
    """So many products of a seed."""
    chance = random.Random(seed)

    def extent(most: int, step: int) -> int:
        return step * round(math.exp(chance.uniform(0.0, math.log(most // step))))

    while count:
        layout, dtype = chance.choice(("nn", "nt", "tn")), chance.choice((f16, bf16))
        found = Product(extent(16384, 1), extent(32768, 8), extent(32768, 8), layout, dtype)
        if found.flops <= MOST_FLOPS and found.bytes <= MOST_BYTES:
            count -= 1
            yield found


class RandomProducts(CellScript[Product]):
    """The script."""

    file, rounds, sample = "random-products.json", 5, 0.004
    baselines = (CUBLAS,)
    figures = (Figure(CUBLAS, MEAN, mean=20), Figure(CUBLAS, LEAST))

    def options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seed", type=int, default=SEED)
        parser.add_argument("--count", type=int, default=COUNT)

    def cells(self) -> Iterator[Product]:
        return drawn(self.given.seed, self.given.count)

    def calls(self, cell: Product, goal: Target) -> Iterator[KernelCall]:
        yield from choose(cell.problem, goal)[0].calls(cell.problem, 132)

    def trials(self, cell: Product) -> dict[str, Trial]:
        import torch

        about = max(cell.flops / 6e14, cell.bytes / 4e12)
        sets = [cell.inputs() for _ in range(max(2, min(6, int(ROTATED_BYTES / cell.bytes) + 1)))]
        turns = max(1, min(MOST_CALLS // len(sets), round(GRAPH_SECONDS / about / len(sets))))
        out = torch.empty(cell.m, cell.n, device="cuda", dtype=sets[0][0].dtype)
        a, b = sets[0]
        rows = torch.randperm(cell.m, device="cuda")[:CHECKED]
        cols = torch.randperm(cell.n, device="cuda")[:CHECKED]
        left, right = a[rows], b[:, cols]

        def error(_: str, found: Any) -> float:
            return float(f"{min(torch_error(found[rows][:, cols], left, right, f32).value, 1e300):.3g}")

        calls: dict[str, Run] = {
            "warploom": lambda x: warploom.matmul(*x, out=out),
            CUBLAS: lambda x: torch.mm(*x, out=out),
        }
        facts = {"m": cell.m, "n": cell.n, "k": cell.k, "layout": cell.layout, "dtype": cell.dtype.name}
        facts["config"] = str(warploom.plan_matmul(a, b).config)
        kernels = Trial(calls, sets, error, cell.flops, turns=turns, facts=facts)
        return {"": kernels, "calls": Trial(calls, sets[:1], error, cell.flops, graphs=False)}

    def missed(self, rows: list[Any]) -> list[str]:
        as_calls = [{**row["calls"], "cell": f"{row['cell']} as a call"} for row in rows]
        return super().missed(rows) + [said for figure in self.figures for said in figure.missed(as_calls)]

    def line(self, row: Any) -> str:
        loads = (row, row["rested"], row["calls"])
        ratios = "  ".join(f"{load['ratio'][CUBLAS]['median']:.3f}" for load in loads if CUBLAS in load["ratio"])
        return f"{self.line_head(row)}  {ratios}  {row['config']}"


if __name__ == "__main__":
    sys.exit(RandomProducts().main())
