"""``warploom.attention`` as users call it, beside the kernels of others, on one GPU in one process.

    PYTHONPATH=src python benchmarks/attention_cells.py --out OUT

Baselines: PyTorch's flash and cuDNN backends, and FlashAttention-4 wherever ``flash_attn.cute`` can be imported. 16384
tokens, heads × head_dim = 2048, bf16; head_dim 64, 128 and 256, full and causal, sequences of 512 to 16384. Every
kernel, baselines included, is checked against float64 on fresh inputs with a poisoned output first; then all are timed
interleaved, on inputs that rotate past the L2, and each is run alone for power (watts, the clock under that load,
TFLOP per joule). Writes OUT/attention-cells.json with every cell and its spread after each cell, prints the table, and
exits with 1 if a result is wrong or a figure below is missed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection
from typing import Any

import cell_runs as runs
import torch
from cell_runs import Figure, Found
from scripts import parser_of

import warploom
from warploom.core.dtypes import bf16
from warploom.kernels.attention.problem import AttentionProblem, Even
from warploom.kernels.attention.reference import attention_error, attention_reference, seen_of
from warploom.measure.monitor import GpuMonitor
from warploom.measure.timing import Candidate, measure, paired_spread
from warploom_lab.bench.baselines import flash_attention_4
from warploom_lab.bench.power import power_of

TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
CASES = ((128, False), (128, True), (64, False), (64, True), (256, False), (256, True))
CHECKED_ROWS = 128
UNMETERED = ("torch_flash",)
"""Baselines that are timed but not run for power: each costs most of a second a cell."""

ZEROS = 128, False, 4096
"""The cell that is run on zeros too."""


def at(head_dim: int, causal: bool, lengths: Collection[int] = LENGTHS) -> dict[str, Collection[Any]]:
    """Cells of a head_dim and mask at some lengths."""
    return {"head_dim": (head_dim,), "causal": (causal,), "seq": lengths}


FIGURES = (
    *(
        Figure("torch_flash", least, at(d, causal), mean=len(LENGTHS))
        for d, causal, least in ((128, False, 1.15), (128, True, 1.10), (64, False, 1.05), (256, False, 1.00))
    ),
    Figure("torch_cudnn", 1.05, at(128, False, (1024, 4096, 16384))),
    Figure("torch_cudnn", 1.00, at(128, True, (1024, 4096, 16384))),
    *(Figure("flash_attention_4", 1.00, at(128, causal, (1024, 4096, 16384))) for causal in (False, True)),
    *(Figure("torch_cudnn", 1.00, at(d, causal, (4096, 16384))) for d in (64, 256) for causal in (False, True)),
    *(Figure("flash_attention_4", 1.00, at(64, causal, LENGTHS[1:])) for causal in (False, True)),
    *(Figure("torch_cudnn", 1.00, at(d, True, LENGTHS[:1])) for d in (64, 128, 256)),
)

Run = Callable[[Any, Any, Any], Any]


def largest_error(inputs: tuple[Any, Any, Any], out: Any, causal: bool) -> float:
    """The largest |o - o64| over what bf16 allows, of random rows of batch 0, head 0; NaN counts as infinite."""
    q, k, v = inputs
    rows = torch.randperm(q.shape[1], device=q.device)[:CHECKED_ROWS]
    seen = seen_of(q.shape[1], k.shape[1], (None, 0 if causal else None), rows=rows, device=q.device)
    reference = attention_reference(q[0, rows, 0], k[0, :, 0], v[0, :, 0], bf16, seen=seen)
    return attention_error(out[0, rows, 0], reference, bf16).value


def fresh(shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
    """Random q, k, v."""
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))  # type: ignore[return-value]


def problem_of(head_dim: int, causal: bool, seq: int) -> AttentionProblem:
    """A cell's problem."""
    heads = WIDTH // head_dim
    return AttentionProblem(TOKENS // seq, heads, heads, Even(seq, seq), head_dim, bf16, (None, 0 if causal else None))


def shape_of(problem: AttentionProblem) -> tuple[int, ...]:
    """That of q, k, v and the result."""
    return problem.batch, problem.q_len, problem.heads, problem.head_dim


def baselines(causal: bool) -> dict[str, Run]:
    """Every baseline that can be imported here."""
    found = {name: runs.sdpa(name, causal=causal) for name in ("torch_flash", "torch_cudnn")}
    latest, _ = flash_attention_4()
    if latest is not None:
        found["flash_attention_4"] = lambda q, k, v: latest(q, k, v, causal=causal)
    return found


def checked(
    named: dict[str, Run], shape: tuple[int, ...], causal: bool, change: Callable[[Any, Any, Any], Any] = lambda *x: x
) -> tuple[dict[str, float], dict[str, str]]:
    """(error of each, why a baseline could not run), on random inputs that ``change`` made something of.

    The memory that the output is likely to get is full of NaN.
    """
    inputs, errors, failed = change(*fresh(shape)), dict[str, float](), dict[str, str]()
    for name, run in named.items():
        torch.full(shape, math.nan, device="cuda", dtype=torch.bfloat16)
        try:
            errors[name] = largest_error(inputs, run(*inputs), causal)
        except Exception as error:
            if name == "warploom":
                raise
            failed[name] = runs.said(error)
    return errors, failed


def cell(head_dim: int, causal: bool, seq: int, monitor: GpuMonitor, power: bool) -> Found:
    """One head_dim, mask and length: checked, timed, and run for power."""
    problem = problem_of(head_dim, causal, seq)
    shape, flops = shape_of(problem), problem.flops
    ours: Run = lambda q, k, v: warploom.attention(q, k, v, causal=causal)  # noqa: E731
    every = {"warploom": ours, **baselines(causal)}
    errors, failed = checked(every, shape, causal)
    count = runs.sets_of(3 * 2 * math.prod(shape))
    sets = [fresh(shape) for _ in range(count)]
    candidates = {
        name: Candidate(name, lambda i, run=run: run(*sets[i])) for name, run in every.items() if name not in failed
    }
    found = measure(list(candidates.values()), count, runs.clock(), rounds=11, sample_seconds=0.015, monitor=monitor)
    metered = [name for name in candidates if power and name not in UNMETERED]
    drawn = {name: load(candidates[name], count, flops, monitor) for name in metered}
    empty: Found = {}
    if power and (head_dim, causal, seq) == ZEROS:  # only to show why no figure may come from zeros
        nothing = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
        empty["zeros"] = load(Candidate("zeros", lambda _: ours(nothing, nothing, nothing)), 1, flops, monitor)
    return empty | {
        "cell": f"head_dim {head_dim} {'causal' if causal else 'full'} {seq}",
        "head_dim": head_dim,
        "causal": causal,
        "seq": seq,
        "batch": shape[0],
        "heads": shape[2],
        "config": str(warploom.plan(*sets[0], causal=causal).config),
        "error": {"metric": "max |o - o64| / bf16 bound", "value": errors["warploom"], "bound": 1.0},
        "baseline_errors": {name: value for name, value in errors.items() if name != "warploom"},
        "not_run": failed,
        "tflops": {name: m.seconds.rate(flops / 1e12).json() for name, m in found.items()},
        "ratio": {name: paired_spread(found["warploom"], m).json() for name, m in found.items() if name != "warploom"},
        "power": {name: power for name, power in drawn.items() if power is not None},
    }


def load(candidate: Candidate, sets: int, flops: int, monitor: GpuMonitor) -> Found | None:
    """Watts, clock and TFLOP/s of a kernel alone."""
    found = power_of(candidate, sets, runs.clock(), monitor)
    return None if found is None else found.json(flops)


def missed(cells: list[dict[str, Any]]) -> list[str]:
    """Every figure that is not reached, and every wrong result, a baseline's included."""
    found: list[str] = []
    for c in cells:
        wrong = {"warploom": c["error"]["value"], **c["baseline_errors"]}
        found += [f"{name} is wrong at {c['cell']}" for name, error in wrong.items() if not error <= 1.0]
    return found + runs.below(cells, FIGURES)


def unchecked(cells: list[dict[str, Any]]) -> list[str]:
    """Baselines of a figure that no cell has, with the reason."""
    absent = sorted({f.baseline for f in FIGURES} - {name for c in cells for name in c["ratio"]})
    reasons = {name: reason for c in cells for name, reason in c["not_run"].items()}
    return [f"{name}: {reasons.get(name) or flash_attention_4()[1]}" for name in absent]


def line(c: dict[str, Any]) -> str:
    """A cell as a line of text."""
    parts = [f"{c['cell']:26}"]
    for name, speed in c["tflops"].items():
        watts = c["power"].get(name)
        ratio = c["ratio"].get(name)
        text = f"{name} {speed['median']:.1f}" + (f" ×{ratio['median']:.3f}" if ratio else "")
        if watts:
            text += f" ({watts['watts']:.0f} W, {watts['sm_mhz']} MHz, {watts['tflop_per_joule']:.3f} TFLOP/J)"
        parts.append(text)
    return "  ".join(parts) + (f"  not run: {c['not_run']}" if c["not_run"] else "")


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--power-lengths", type=int, nargs="*", default=list(LENGTHS), help="lengths run for power")
    options = parser.parse_args()
    monitor = GpuMonitor.of(0)
    head = {"power_limit_watts": monitor.power_limit(), "flash_attention_4": flash_attention_4()[1]}
    found: list[Found] = []

    def timed(which: tuple[int, bool, int]) -> Found:
        found.append(cell(*which, monitor, which[2] in options.power_lengths))
        return found[-1]

    todo = [(head_dim, causal, seq) for seq in options.lengths for head_dim, causal in CASES]
    file = options.out / "attention-cells.json"
    code = runs.measured(todo, timed, line, missed, file, head, more=lambda found: {"unchecked": unchecked(found)})
    print("\n".join(f"not compared with {text}" for text in unchecked(found)))
    return code


if __name__ == "__main__":
    sys.exit(main())
