"""Queries of few heads on long keys: from where on do tiles beat keys that all SMs share?

    PYTHONPATH=src:. python benchmarks/few_queries_cells.py --out OUT

The kernels of few queries ("few"), the default tiles ("tiles"), those of one consumer ("one"), both also for CTAs of
one tile each ("tiles once", "one once"), and up to 64 queries those of ``mma.sync`` ("small"), over queries, keys,
heads and head_dim: chunks of a prompt, bf16, causal, on one GPU in one process. Every result is checked first, a plane
against float64; then all are timed interleaved as replays of CUDA graphs. Writes OUT/few-queries-cells.json with the
microseconds of each and what :func:`warploom.attention` takes, prints the table, and exits with 1 if a result is wrong
or a choice takes more than 1 / 0.9 of the time of the best. A minute.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from typing import Any

import cell_runs as runs
from cell_runs import Inputs, Run
from varlen_cells import excess

import warploom
from warploom.core.dtypes import bf16
from warploom.core.targets import Target, target
from warploom.kernels.attention.choice import candidates
from warploom.kernels.attention.decode import decode_configuration
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.problem import AttentionProblem, Even, Operands
from warploom.kernels.source import KernelCall

HEADS = ((1, 1, 1), (1, 8, 2), (1, 16, 16), (1, 32, 8), (4, 32, 8))
"""(batch, heads, kv_heads)."""
MOST_FLOPS = 1.2e11
CHECKED_ROWS = 64
MOST_SETS = 8
SAMPLE, WARM_UP = 0.002, 0.004
AT_LEAST = 0.9


def cells() -> list[AttentionProblem]:
    """All of them, but for those that take long, where tiles fill all SMs many times."""
    queries, keys = (16, 32, 64, 128, 256, 512), (512, 1024, 2048, 8192, 65536)
    sizes = [(128, *x) for x in itertools.product(HEADS, queries, keys)]
    sizes += [(64, *x) for x in itertools.product(HEADS[1::2], queries, keys[::2])]
    sizes += [(256, HEADS[3], q, 8192) for q in queries]
    sizes += [(128, (64, 16, 16), q, n) for q in (4, 32, 64) for n in (64, 128, 256, 512)]
    found = [AttentionProblem(*heads, Even(q, n), d, bf16, (None, 0)) for d, heads, q, n in sizes]
    return [p for p in found if p.flops <= MOST_FLOPS]


def name(p: AttentionProblem) -> str:
    """As the table has it."""
    return f"d{p.head_dim} {p.batch}×{p.heads}/{p.kv_heads} {p.q_len} on {p.kv_len}"


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


def calls(goal: Target) -> Iterator[KernelCall]:
    """Of all kernels of all cells."""
    for p in cells():
        for config in kernels(p, goal).values():
            yield from config.calls(p, Operands.contiguous(p), 132)


def fresh(p: AttentionProblem) -> Inputs:
    """Random q, k and v."""
    import torch

    sizes = {"q": (p.q_len, p.heads), "k": (p.kv_len, p.kv_heads), "v": (p.kv_len, p.kv_heads)}
    shapes = {name: (p.batch, *size, p.head_dim) for name, size in sizes.items()}
    return {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for name, shape in shapes.items()}


def error(p: AttentionProblem, x: Inputs, out: Any) -> float:
    """The largest error over what bf16 allows, of some rows of the last head of the last sequence."""
    import torch

    rows = torch.randperm(p.q_len, device="cuda")[:CHECKED_ROWS]
    q, k, v = (x[name][-1, :, -1] for name in "qkv")
    return excess(q[rows], k, v, rows + (p.kv_len - p.q_len), out[-1, rows, -1])


def call(config: Any) -> Run:
    """A call with a configuration."""
    return runs.of_qkv(lambda q, k, v: warploom.attention(q, k, v, causal=True, config=config))


def timed(p: AttentionProblem, goal: Target, rounds: int) -> dict[str, Any]:
    """One cell: checked, and timed."""
    size = 2 * 2 * p.kv_len * p.kv_heads * p.batch * p.head_dim
    sets = [fresh(p) for _ in range(min(MOST_SETS, runs.sets_of(size)))]
    configs = kernels(p, goal)
    named = {key: (call(config), sets) for key, config in configs.items()}
    turns = runs.in_turns(named, lambda _, out: error(p, sets[0], out), rounds, SAMPLE, WARM_UP)
    chosen = str(warploom.plan(*(sets[0][name] for name in "qkv"), causal=True).config)
    keys = {str(config): key for key, config in configs.items()}
    return {
        "cell": name(p),
        "batch": p.batch,
        "heads": p.heads,
        "kv_heads": p.kv_heads,
        "q_len": p.q_len,
        "kv_len": p.kv_len,
        "head_dim": p.head_dim,
        "error": turns.error,
        "chosen": keys.get(chosen, chosen),
        "microseconds": {key: round(1e6 * m.seconds.median / turns.calls, 2) for key, m in turns.found.items()},
    }


def missed(found: list[dict[str, Any]]) -> list[str]:
    """Every wrong result, and every choice that is slower than it should be."""
    said = runs.wrong(found)
    for c in found:
        times, chosen = c["microseconds"], c["chosen"]
        best = min(times, key=lambda key: times[key])
        if times[best] < AT_LEAST * times.get(chosen, math.inf):
            said.append(f"{c['cell']}: {chosen} {times.get(chosen)} µs, {best} {times[best]}")
    return said


def line(c: dict[str, Any]) -> str:
    """A cell as a line of text."""
    speeds = "  ".join(f"{key} {t:.1f}" for key, t in c["microseconds"].items())
    return f"{c['cell']:32} error {max(c['error'].values()):.2f}  {speeds}  chosen: {c['chosen']}"


def main() -> int:
    options = runs.parser_of(__doc__, rounds=3).parse_args()
    goal = target(runs.architecture(options))
    count = runs.compile_all(calls(goal), goal.name)
    print(f"{len(cells())} cells, {count} kernels", flush=True)
    if options.compile_only:
        return 0
    each, file = (lambda p: timed(p, goal, options.rounds)), options.out / "few-queries-cells.json"
    return runs.measured(cells(), each, line, missed, file, otherwise="every choice is among the best")


if __name__ == "__main__":
    sys.exit(main())
