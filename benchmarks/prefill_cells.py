"""Prompts and chunks of prompts on a cache in pages, beside the same keys side by side, on one GPU in one process.

    PYTHONPATH=src:. python benchmarks/prefill_cells.py --out OUT

``warploom.attention_paged`` at pages of 64, 128 and 256 and without ("no pages"), beside ``attention`` ("attention")
and ``attention_varlen`` ("packed") on keys that lie side by side, and beside the kernels of few queries at pages of 64
("few queries"). bf16, causal, heads × head_dim = 2048; head_dim 64 and 128. Prompts of 4000 tokens, chunks of 512
queries whose sequences have 8100 keys with them, and where tiles and the kernels of few queries meet, 32 to 128
queries, what is taken there ("chosen"). Pages are in random order, with NaN in all that no sequence has. Every result
is checked against float64, and timed in company and rested. Writes OUT/prefill-cells.json, and exits with 1 if a result
is wrong, or if pages of a prompt or chunk run at less than 0.95 of the rate of ``attention``.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attention_others import AttentionScript, fresh, plane_error
from varlen_cells import WIDTH

import warploom
from warploom.core.dtypes import bf16
from warploom.core.targets import Target, target
from warploom.kernels.attention.choice import CACHED_KINDS, CachedConfig, choose, choose_cached, choose_packed
from warploom.kernels.attention.decode import decode_configuration
from warploom.kernels.attention.problem import ArrayStrides, AttentionProblem, Cached, Even, Packed
from warploom.kernels.settings import read
from warploom.kernels.source import KernelCall
from warploom_lab.bench.cells import Figure, Inputs, Run, Trial

PAGES = 64, 128, 256
SPARE_PAGES = 7
CAUSAL = None, 0


@dataclass(frozen=True)
class Cell:
    """``queries`` of each sequence, which has ``keys`` keys with them; ``judged``: whether pages must keep up."""

    head_dim: int
    batch: int
    queries: int
    keys: int
    kv_heads: int | None = None
    judged: bool = True

    @property
    def heads(self) -> tuple[int, int]:
        """Of queries and of keys."""
        heads = WIDTH // self.head_dim
        return heads, self.kv_heads or heads

    @property
    def name(self) -> str:
        """As the table has it."""
        heads, kv_heads = self.heads
        group = "" if heads == kv_heads else f" {heads}/{kv_heads} heads"
        return f"d{self.head_dim} {self.batch}×{self.queries} on {self.keys}{group}"

    @property
    def flops(self) -> int:
        """Of the two products."""
        q, n = self.queries, self.keys
        return 4 * WIDTH * self.batch * (q * n - q * (q - 1) // 2)

    @property
    def even(self) -> AttentionProblem:
        """The problem with its keys side by side."""
        return AttentionProblem(
            self.batch, *self.heads, Even(self.queries, self.keys), self.head_dim, bf16, window=CAUSAL
        )

    def problem(self, page: int) -> AttentionProblem:
        """What ``attention_paged`` is asked."""
        capacity = -(-self.keys // max(1, page)) * max(1, page)
        entries = capacity // page if page else 0
        cached = Cached(self.queries, capacity, page, self.batch * entries + SPARE_PAGES if page else 0, entries)
        return AttentionProblem(self.batch, *self.heads, cached, self.head_dim, bf16, window=CAUSAL)


def cells() -> list[Cell]:
    """All of them."""
    found = [Cell(d, *size) for d in (64, 128) for size in ((8, 4000, 4000), (4, 512, 8100))]
    found.append(Cell(128, 4, 512, 8100, 4))
    return [*found, *(Cell(128, batch, q, 8100, 4, judged=False) for batch in (1, 8) for q in (32, 64, 128))]


def in_pages(x: Any, page: int, order: Any) -> Any:
    """(batch, keys, heads, head_dim) in pages that come in an order; NaN behind the last keys and in spare pages."""
    import torch

    batch, keys = x.shape[:2]
    each = -(-keys // page)
    whole = torch.full((batch, each * page, *x.shape[2:]), math.nan, device="cuda", dtype=x.dtype)
    whole[:, :keys] = x
    found = torch.full((batch * each + SPARE_PAGES, page, *x.shape[2:]), math.nan, device="cuda", dtype=x.dtype)
    found[order] = whole.view(batch * each, page, *x.shape[2:])
    return found


def drawn(cell: Cell) -> Inputs:
    """Random q, k and v, side by side and in pages."""
    import torch

    x = fresh(cell.even)
    for name, rows in (("q_starts", cell.queries), ("k_starts", cell.keys)):
        x[name] = torch.arange(cell.batch + 1, device="cuda", dtype=torch.int32) * rows
    x["lengths"] = torch.full((cell.batch,), cell.keys, device="cuda", dtype=torch.int32)
    for page in PAGES:
        each = -(-cell.keys // page)
        order = torch.randperm(cell.batch * each + SPARE_PAGES, device="cuda")[: cell.batch * each]
        x[f"table {page}"] = order.view(cell.batch, each).to(torch.int32)
        x |= {f"{name} {page}": in_pages(x[name], page, order) for name in "kv"}
    return x


def contiguous(x: Inputs) -> Any:
    """``attention``."""
    return warploom.attention(x["q"], x["k"], x["v"], causal=True)


def packed(x: Inputs) -> Any:
    """``attention_varlen``."""
    q, k, v = (x[name].flatten(0, 1) for name in "qkv")
    return warploom.attention_varlen(q, k, v, x["q_starts"], x["k_starts"], causal=True).view_as(x["q"])


def paged(page: int, config: CachedConfig | None = None) -> Run:
    """``attention_paged``."""

    def run(x: Inputs) -> Any:
        k, v, table = (x[f"{name} {page}"] for name in ("k", "v", "table")) if page else (x["k"], x["v"], None)
        return warploom.attention_paged(x["q"], k, v, x["lengths"], block_table=table, config=config)

    return run


def largest_error(cell: Cell, x: Inputs, out: Any) -> float:
    """The largest error over what bf16 allows, of some rows of the first and the last sequence."""
    planes = (0, cell.heads[0] - 1), (cell.batch - 1, 0)
    return max(plane_error(x, out, CAUSAL, *plane) for plane in planes)


# -- kernels that are compiled before
def typical(cell: Cell) -> AttentionProblem:
    """The packed problem of a cell."""
    rows, keys = cell.batch * cell.queries, cell.batch * cell.keys
    return AttentionProblem(cell.batch, *cell.heads, Packed(rows, keys), cell.head_dim, bf16, window=CAUSAL)


def calls(cell: Cell, goal: Target) -> Iterator[KernelCall]:
    """Of all kernels of a cell."""
    d, (h, g) = cell.head_dim, cell.heads
    q, kv = (h * d, d), (g * d, d)
    packed = ArrayStrides({"q": q, "k": kv, "v": kv, "out": q})
    tiled: Any = choose_packed(typical(cell), goal)
    yield from tiled.calls(typical(cell), packed, 132)
    yield from choose(cell.even, goal)[0].calls(cell.even, ArrayStrides.contiguous(cell.even), 132)
    rows = (cell.queries * h * d, d, h * d)
    for page in (0, *PAGES):
        problem = cell.problem(page)
        of_page = ((page or cell.keys) * g * d, d, g * d)
        table = (problem.cache.table_pages,)
        lying = ArrayStrides({"q": rows, "k": of_page, "v": of_page, "out": rows, "table": table})
        chosen, _ = choose_cached(problem, lying, goal, 132)
        for config in dict.fromkeys((tiled, decode_configuration(problem, goal), chosen)):
            yield from config.calls(problem, lying, 132)


class Prefill(AttentionScript[Cell]):
    """The script."""

    file = "prefill-cells.json"
    figures = tuple(Figure(f"pages of {page}", 0.95, {"judged": (True,)}) for page in PAGES)

    def cells(self) -> list[Cell]:
        return cells()

    def calls(self, cell: Cell, goal: Target) -> Iterator[KernelCall]:
        return calls(cell, goal)

    def called(self, cell: Cell) -> dict[str, Run]:
        """Who is timed."""
        goal = target(self.gpu.arch)
        few = paged(64, decode_configuration(cell.problem(64), goal))
        if not cell.judged:
            tiled: Any = choose_packed(typical(cell), goal)
            return {"attention": contiguous, "chosen": paged(64), "pages of 64": paged(64, tiled), "few queries": few}
        found: dict[str, Run] = {"attention": contiguous, "packed": packed, "no pages": paged(0)}
        found |= {f"pages of {page}": paged(page) for page in PAGES} | {"few queries": few}
        return found | {text: paged(64, read(text, CACHED_KINDS)) for text in self.asked(cell.head_dim)}

    def trial(self, cell: Cell) -> Trial:
        kv_heads = cell.heads[1]
        count = self.gpu.sets(2 * cell.head_dim * 2 * kv_heads * cell.keys * cell.batch)
        sets = [drawn(cell) for _ in range(count)]
        facts = dataclasses.asdict(cell) | {"kv_heads": kv_heads}
        error = lambda _, out: largest_error(cell, sets[0], out)  # noqa: E731
        return Trial(
            self.called(cell), sets, error, cell.flops, over="attention", optional=self.given.config, facts=facts
        )


if __name__ == "__main__":
    sys.exit(Prefill().main())
