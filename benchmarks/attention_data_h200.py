"""What attention's speed depends on in the data: the kernel with stale maxima, and one without, on four kinds.

    PYTHONPATH=src python benchmarks/attention_data_h200.py --out OUT

The kernel takes it that the maxima of one block serve the next, and recomputes a block's scores where P shows that
they do not. So data matters: independent scores of deviation 1 and of 8, a first key that every query attends to, and
keys that grow from block to block as they are visited, so that every block raises every maximum. Each result is checked
against float64 on random rows; then what a call chooses, the ladder's kernel of the same tile, which looks for maxima
in every block, torch's cuDNN backend and, where it is installed, FlashAttention-4 are timed interleaved. Writes
OUT/attention-data.json; exits with 1 if a result is wrong.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import cell_runs as runs
import torch
from attention_cells import baselines, checked, fresh, problem_of, shape_of
from scripts import parser_of, write

import warploom
from warploom.kernels.attention.choice import choose
from warploom.kernels.attention.decode import Decode
from warploom.kernels.attention.problem import AttentionConfig, AttentionProblem
from warploom.measure.timing import Candidate, measure, paired_spread
from warploom.ops.backends import gpu_target
from warploom_lab.bench.environment import environment
from warploom_lab.kernels.attention.ladder_sm90 import RungSm90

CELLS = (
    (64, False, 4096),
    (64, True, 1024),
    (128, False, 512),
    (128, False, 16384),
    (128, True, 4096),
    (256, False, 16384),
    (256, True, 4096),
)
DEVIATION, GROWTH, SINK = 8.0, 40.0, 80.0
Tensors = tuple[Any, Any, Any]


def wide(q: Any, k: Any, v: Any) -> Tensors:
    """Independent scores of deviation DEVIATION: their maxima grow now and then."""
    return q * DEVIATION, k, v


def sink(q: Any, k: Any, v: Any) -> Tensors:
    """Every query likes the first key, which is visited last: one step of all maxima."""
    q, k = q.clone(), k.clone()
    q[..., 0] += 2.0
    k[:, 0] = 0.0
    k[:, 0, :, 0] = SINK
    return q, k, v


def growing(q: Any, k: Any, v: Any) -> Tensors:
    """Every block raises every maximum by more than is let pass."""
    factor = torch.linspace(GROWTH, 1.0, k.shape[1], device=k.device)[None, :, None, None]
    return q, (k * factor).to(k.dtype), v


KINDS: dict[str, Callable[[Any, Any, Any], Tensors]] = {
    "deviation 1": lambda q, k, v: (q, k, v),
    f"deviation {DEVIATION:.0f}": wide,
    "one key that all attend to": sink,
    "growing in every block": growing,
}


def configs(problem: AttentionProblem) -> tuple[AttentionConfig, AttentionConfig]:
    """What a call chooses for a cell, and the same tile with maxima in every block."""
    chosen, _ = choose(problem, gpu_target(0))
    assert not isinstance(chosen, Decode), "every cell has many queries"
    flags: dict[str, Any] = {f.name: getattr(chosen, f.name) for f in fields(chosen)}
    flags |= {"sum_column": False, "skip_masked": False}
    return chosen, RungSm90(**flags)


def cell(head_dim: int, causal: bool, seq: int) -> list[dict[str, Any]]:
    """One row for each kind of data."""
    problem = problem_of(head_dim, causal, seq)
    shape, flops, (carried, plain) = shape_of(problem), problem.flops, configs(problem)

    def ours(config: AttentionConfig) -> Callable[[Any, Any, Any], Any]:
        return lambda q, k, v: warploom.attention(q, k, v, causal=causal, config=config)

    others = {name: run for name, run in baselines(causal).items() if name != "torch_flash"}
    named = {"carried": ours(carried), "plain": ours(plain), **others}
    count, rows = runs.sets_of(3 * 2 * math.prod(shape)), list[dict[str, Any]]()
    for kind, change in KINDS.items():
        errors, _ = checked({"warploom": named["carried"], "plain": named["plain"]}, shape, causal, change)
        sets = [change(*fresh(shape)) for _ in range(count)]
        timed = [Candidate(name, lambda i, run=run, sets=sets: run(*sets[i])) for name, run in named.items()]
        found = measure(timed, count, runs.clock(), rounds=9, sample_seconds=0.01)
        rows.append(
            {
                "head_dim": head_dim,
                "causal": causal,
                "seq": seq,
                "data": kind,
                "config": str(carried),
                "error": errors,
                "tflops": {n: m.seconds.rate(flops / 1e12).json() for n, m in found.items()},
                "over_plain": paired_spread(found["carried"], found["plain"]).json(),
                "ratio": {name: paired_spread(found["carried"], found[name]).json() for name in others},
            }
        )
        rates = {name: round(rate["median"]) for name, rate in rows[-1]["tflops"].items()}
        mask = "causal" if causal else "full"
        print(f"{head_dim} {mask} {seq} {kind}: {rates}, {rows[-1]['over_plain']}, {errors}", flush=True)
    return rows


def main() -> int:
    """Every cell."""
    parser = parser_of(__doc__)
    out, rows = parser.parse_args().out, list[dict[str, Any]]()
    for of_cell in CELLS:
        rows += cell(*of_cell)
        write(out / "attention-data.json", {"environment": environment(), "rows": rows})
    return int(any(not error <= 1.0 for row in rows for error in row["error"].values()))


if __name__ == "__main__":
    sys.exit(main())
