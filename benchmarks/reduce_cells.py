"""``matmul_reduce``, ``linear_cross_entropy`` and a search among ten million vectors, beside PyTorch, on one GPU.

    PYTHONPATH=src python benchmarks/reduce_cells.py [--out DIR]

Row reductions run beside PyTorch eager, ``torch.compile`` and themselves by ``mma.sync``, the loss beside PyTorch
eager; the search is the nearest of so many vectors by inner product, in blocks. Every result of ours is checked against
float64 first, and timed in company and rested; extra memory is what a call takes beyond its inputs. Writes
matmul-reduce.json, and exits with 1 if a result is wrong or below ``targets.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from scripts import targets

import warploom
from warploom.core.targets import Target, target
from warploom.kernels.matmul.choice import general_for_rows
from warploom_lab.bench.cells import CellScript, Load, Row, Run, Trial

TARGETS = targets()["reduce"]
"""Against PyTorch's faster way, by k; memory; what the paper's experiment must reach."""
OPS = ("max", "logsumexp")
LOSS, SEARCH = "linear_cross_entropy", "search"
BLOCK = 1 << 20
"""Vectors of the search that are looked at in a call."""
CHECKED_ROWS = 256
LOSS_ERROR, SCORE_ERROR = 1e-3, 1e-3
"""The largest absolute errors of a loss and of a score."""
OURS = ("warploom", "mma.sync")
Called = tuple[dict[str, Run], Callable[[Any], float], Row]
"""Who is called, the error of a result of ours over what is allowed, and what else the row says."""


@dataclass(frozen=True)
class Cell:
    """One of OPS over the rows of an (m, k) times (k, n) product, a loss, or a search of m among n vectors."""

    op: str
    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.op} at {self.m}×{self.n}×{self.k}"


def reduction(goal: Target, op: Any, a: Any, b: Any) -> Called:
    """``matmul_reduce``, by its own choice and by ``mma.sync``."""
    product = b.T
    made = warploom.plan_matmul_reduce(a, product, op)
    general, _ = general_for_rows(made.problem.product, goal)
    eager = (lambda x, y: (x @ y).amax(-1)) if op == "max" else (lambda x, y: torch.logsumexp(x @ y, -1))
    fused = torch.compile(eager)
    calls: dict[str, Run] = {
        "warploom": lambda _: warploom.matmul_reduce(a, product, op),
        "torch": lambda _: eager(a, product),
        "torch.compile": lambda _: fused(a, product),
        "mma.sync": lambda _: warploom.matmul_reduce(a, product, op, config=general),
    }
    return calls, partial(reduction_error, op, a, product), {"config": str(made.config)}


def reduction_error(op: str, a: Any, b: Any, found: Any) -> float:
    """The largest error of a few rows over what f32 accumulation may leave."""
    rows, found = a[:CHECKED_ROWS].double(), found[:CHECKED_ROWS].double()
    right, sizes, worst = b.double(), b.double().abs(), list[float]()
    for some, got in zip(rows.split(32), found.split(32), strict=True):
        product, size = some @ right, some.abs() @ sizes
        expected = product.amax(-1) if op == "max" else torch.logsumexp(product, -1)
        allowed = a.shape[1] ** 0.5 * 2.0**-22 * size.amax(-1) + (0.0 if op == "max" else 1e-5)
        worst.append(float(((got - expected).abs() / allowed).max()))
    return float(torch.tensor(worst).max())  # NaN where any is


def loss(x: Any, w: Any) -> Called:
    """The losses of an output layer."""
    words = torch.randint(len(w), (len(x),), device=x.device)
    cross_entropy = partial(torch.nn.functional.cross_entropy, reduction="none")
    calls: dict[str, Run] = {
        "warploom": lambda _: warploom.linear_cross_entropy(x, w, words),
        "torch": lambda _: cross_entropy(x @ w.T, words),
    }

    def error(found: Any) -> float:
        logits = (x[:CHECKED_ROWS].float() @ w.float().T).double()
        off = found[:CHECKED_ROWS].double() - cross_entropy(logits, words[:CHECKED_ROWS])
        return float(off.abs().max()) / LOSS_ERROR

    return calls, error, {}


def search(wanted: Any, stored: Any) -> Called:
    """The best score of each vector that is wanted, and where it is stored."""

    def run(_: Any) -> Any:
        best = torch.full((len(wanted),), -torch.inf, device=wanted.device)
        where = torch.zeros(len(wanted), dtype=torch.int64, device=wanted.device)
        for start in range(0, len(stored), BLOCK):
            score, at = warploom.matmul_reduce(wanted, stored[start : start + BLOCK].T, return_index=True)
            better = score > best
            best, where = torch.where(better, score, best), torch.where(better, at + start, where)
        return best, where

    def error(found: Any) -> float:
        """Of the scores; infinite where a better vector was missed."""
        best, where = found
        off = (wanted.double() * stored[where].double()).sum(-1) - best.double()
        pairs = zip(wanted[:8], best[:8], strict=True)
        better = ((row.float() @ stored.float().T).amax() > top + SCORE_ERROR for row, top in pairs)
        return float("inf") if any(map(bool, better)) else float(off.abs().max()) / SCORE_ERROR

    return {"warploom": run}, error, {"block": BLOCK}


def extra_bytes(call: Callable[[], Any]) -> int:
    """Peak memory of a call beyond what was there before it."""
    memory = torch.cuda
    call()
    memory.synchronize()
    memory.reset_peak_memory_stats()
    before = memory.memory_allocated()
    call()
    memory.synchronize()
    return int(memory.max_memory_allocated() - before)


class Reductions(CellScript[Cell]):
    """The script."""

    file, listed, rounds, sample = "matmul-reduce.json", "rows", 11, 0.02
    baselines = ("torch", "torch.compile")

    def cells(self) -> list[Cell]:
        layer = 8192, 131072, 4096
        products = [Cell(op, *size) for size in (layer, (16384, 16384, 128)) for op in OPS]
        return [*products, Cell(LOSS, *layer), Cell(SEARCH, 1024, 10_000_000, 128)]

    def trial(self, cell: Cell) -> Trial:
        torch.manual_seed(0)
        a, b = (torch.randn(rows, cell.k, device="cuda", dtype=torch.bfloat16) for rows in (cell.m, cell.n))
        of_others = {LOSS: loss, SEARCH: search}
        called = of_others.get(cell.op, partial(reduction, target(self.gpu.arch), cell.op))
        calls, error, more = called(a if cell.op == SEARCH else a / cell.k**0.5, b)
        facts = asdict(cell) | more

        def checked(name: str, found: Any) -> float | None:
            facts[f"{name}_extra_bytes"] = extra_bytes(lambda: calls[name](None))
            return error(found) if name in OURS else None

        kept = {name: run for name, run in calls.items() if name in (*OURS, *self.given.baselines)}
        return Trial(kept, [None], checked, graphs=False, facts=facts)

    def rates(self, cell: Cell, load: Load) -> Row:
        """Seconds, and how many times as fast as each baseline the call is."""
        over = {name: ratio["median"] for name, ratio in load.ratio().items()}
        own = {"over mma.sync": over.pop("mma.sync")} if "mma.sync" in over else {}
        return {f"{name}_s": m.seconds.json() for name, m in load.found.items()} | own | {"over": over}

    def missed(self, rows: list[Row]) -> list[str]:
        """Besides wrong results, what takes too much memory, or too long beside PyTorch."""
        found = super().missed(rows)
        for row in rows:
            if row["op"] != SEARCH and (extra := row["warploom_extra_bytes"] / 2**20) > TARGETS["extra_mib"]:
                found.append(f"{row['cell']}: {extra:.1f} MiB beyond inputs and result")
            if row["op"] in OPS and row["over"]:
                reached, least = min(row["over"].values()), TARGETS["over_pytorch"][str(row["k"])]
                if reached < least:
                    found.append(f"{row['cell']}: {reached:.2f} times the faster of PyTorch's, not {least}")
        return found

    def summary(self, rows: list[Row]) -> Row:
        """The rows as pages ask for them."""
        told = [row | {"error": row["error"]["warploom"]} for row in rows]
        result: Row = {"against_torch": [row for row in told if row["op"] in OPS]}
        for row in told:
            if row["op"] == LOSS:
                result["loss_against_torch"] = row | {"error": row["error"] * LOSS_ERROR}
            elif row["op"] == SEARCH:
                sizes = {"queries": row["m"], "vectors": row["n"], "dimension": row["k"]}
                own = {"s": row["warploom_s"], "extra_bytes": row["warploom_extra_bytes"]}
                result["search_ten_millions"] = row | sizes | own
        return {"targets": TARGETS, "result": result}

    def line(self, row: Row) -> str:
        return f"{self.line_head(row)}  {row['warploom_s']['median'] * 1e3:.3f} ms  {row['over']}"


if __name__ == "__main__":
    sys.exit(Reductions().main())
