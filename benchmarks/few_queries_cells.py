"""Queries of few heads on long keys: from where on do tiles beat keys that all SMs share?

    PYTHONPATH=src:. python benchmarks/few_queries_cells.py --out OUT

The kernels of few queries ("few"), the default tiles ("tiles"), those of one consumer ("one"), both also for CTAs of
one tile each ("tiles once", "one once"), and up to 64 queries those of ``mma.sync`` ("small"), over queries, keys,
heads and head_dim: chunks of a prompt, bf16, causal, on one GPU in one process. Every result is checked first, a plane
against float64, and timed in company and rested. Writes OUT/few-queries-cells.json with the microseconds of each and
what :func:`warploom.attention` takes, and exits with 1 if a result is wrong or a choice takes more than 1 / 0.9 of the
time of the best.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any

from attention_others import fresh, of_qkv, plane_error

import warploom
from warploom.core.dtypes import bf16
from warploom.core.targets import Target, target
from warploom.kernels.attention.choice import candidates
from warploom.kernels.attention.decode import decode_configuration
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.problem import ArrayStrides, AttentionProblem, Even
from warploom.kernels.source import KernelCall
from warploom_lab.bench.cells import CellScript, Load, Row, Run, Trial

HEADS = ((1, 1, 1), (1, 8, 2), (1, 16, 16), (1, 32, 8), (4, 32, 8))
"""(batch, heads, kv_heads)."""
MOST_FLOPS = 1.2e11
MOST_SETS = 8
AT_LEAST = 0.9


def cells() -> list[AttentionProblem]:
    """All of them, but for those that take long, where tiles fill all SMs many times."""
    queries, keys = (16, 32, 64, 128, 256, 512), (512, 1024, 2048, 8192, 65536)
    sizes = [(128, *x) for x in itertools.product(HEADS, queries, keys)]
    sizes += [(64, *x) for x in itertools.product(HEADS[1::2], queries, keys[::2])]
    sizes += [(256, HEADS[3], q, 8192) for q in queries]
    sizes += [(128, (64, 16, 16), q, n) for q in (4, 32, 64) for n in (64, 128, 256, 512)]
    found = [AttentionProblem(*heads, Even(q, n), d, bf16, window=(None, 0)) for d, heads, q, n in sizes]
    return [p for p in found if p.flops <= MOST_FLOPS]


def kernels(p: AttentionProblem, goal: Target) -> dict[str, Any]:
    """The configurations that are timed."""
    tiles, *general = candidates(p, goal)
    found: dict[str, Any] = {"few": decode_configuration(p.on_cache, goal), "tiles": tiles}
    if isinstance(tiles, ForwardSm90):
        found |= {"tiles once": tiles.once, "one": tiles.narrow, "one once": tiles.narrow.once}
    if p.q_len <= 64:
        fitting = [c for c in general if isinstance(c, ForwardSm80) and not c.check(goal)]
        found["small"] = min(fitting, key=lambda c: c.tile_m)
    return {key: c for key, c in found.items() if not (c.check(goal) or c.violations(p))}


def call(config: Any) -> Run:
    """A call with a configuration."""
    return of_qkv(lambda q, k, v: warploom.attention(q, k, v, causal=True, config=config))


class FewQueries(CellScript[AttentionProblem]):
    """The script."""

    file, rounds, sample = "few-queries-cells.json", 3, 0.002

    def cells(self) -> list[AttentionProblem]:
        return cells()

    def name_of(self, cell: AttentionProblem) -> str:
        return f"d{cell.head_dim} {cell.batch}×{cell.heads}/{cell.kv_heads} {cell.q_len} on {cell.kv_len}"

    def calls(self, cell: AttentionProblem, goal: Target) -> Iterator[KernelCall]:
        for config in kernels(cell, goal).values():
            yield from config.calls(cell, ArrayStrides.contiguous(cell), 132)

    def trial(self, cell: AttentionProblem) -> Trial:
        size = 2 * 2 * cell.kv_len * cell.kv_heads * cell.batch * cell.head_dim
        sets = [fresh(cell) for _ in range(min(MOST_SETS, self.gpu.sets(size)))]
        configs = kernels(cell, target(self.gpu.arch))
        chosen = str(warploom.plan(*sets[0].values(), causal=True).config)
        keys = {str(config): key for key, config in configs.items()}
        facts: Row = {n: getattr(cell, n) for n in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim")}

        calls = {key: call(config) for key, config in configs.items()}
        error = lambda _, out: plane_error(sets[0], out, cell.window, -1, -1)  # noqa: E731
        return Trial(calls, sets, error, facts=facts | {"chosen": keys.get(chosen, chosen)})

    def rates(self, cell: AttentionProblem, load: Load) -> Row:
        return {"microseconds": load.microseconds()}

    def missed(self, rows: list[Row]) -> list[str]:
        """Every wrong result, and every choice that is slower than it should be."""
        found = super().missed(rows)
        for c in rows:
            times, chosen = c["microseconds"], c["chosen"]
            best = min(times, key=lambda key: times[key])
            if times[best] < AT_LEAST * times.get(chosen, math.inf):
                found.append(f"{c['cell']}: {chosen} {times.get(chosen)} µs, {best} {times[best]}")
        return found

    def line(self, row: Row) -> str:
        speeds = "  ".join(f"{key} {t:.1f}" for key, t in row["microseconds"].items())
        return f"{self.line_head(row)}  {speeds}  chosen: {row['chosen']}"


if __name__ == "__main__":
    sys.exit(FewQueries().main())
