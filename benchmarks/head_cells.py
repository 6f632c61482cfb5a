"""Attention with V's own head_dim and with sinks, both directions, on one GPU in one process.

    PYTHONPATH=src:. python benchmarks/head_cells.py --out OUT

bf16, 16384 tokens. head_dim 192 with 128 for V, and 128 with 64, full and causal: the configuration that a call chooses
beside others that fit, cuDNN as PyTorch has it, and FlashAttention-4 wherever ``flash_attn.cute`` can be imported.
Sinks at 64/8 heads of 64, causal, with and without a window of 128: beside the same call without them. The gradients of
each too, which take what the forward call returned. Every result of this package is checked first against float64 (some
rows of a head, the gradients of one group of heads whole); then all are timed interleaved as replays of CUDA graphs, on
inputs that rotate past the L2. Writes OUT/head-cells.json after each cell, prints the table, and exits with 1 if a
result is wrong. ``--compile-only`` needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import attention_backward_cells as gradients
import cell_runs as runs
from attention_backward_cells import Cell, error_of, forward, ours, sets_of
from cell_runs import Inputs, Run

from warploom.core.dtypes import bf16
from warploom.core.targets import Target, target
from warploom.kernels.attention.choice import choose
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.problem import Operands
from warploom.kernels.attention.reference import attention_error, attention_reference, seen_of
from warploom.kernels.source import KernelCall
from warploom_lab.bench.baselines import flash_attention_4

CHECKED_ROWS = 128
OTHERS = {
    192: (
        "attention_sm90(consumers=2, tile_n=96, stages=2, head_dim=192, v_dim=128, q_in_registers=false)",
        "attention_sm90(consumers=2, tile_n=112, stages=2, head_dim=192, v_dim=128, persistent=false, "
        "q_in_registers=false, sum_column=true)",
    ),
    128: (
        "attention_sm90(consumers=3, tile_n=128, stages=2, head_dim=128, v_dim=64, q_in_registers=false)",
        "attention_sm90(consumers=2, tile_n=176, stages=2, head_dim=128, v_dim=64, persistent=false, "
        "q_in_registers=false)",
    ),
}
"""Configurations of the forward pass beside the chosen one, by head_dim."""


def cells() -> list[Cell]:
    """All of them."""
    return [
        *(
            Cell.of(d, causal, n, n, 16, 16, v_dim=v)
            for d, v in ((192, 128), (128, 64))
            for causal in (False, True)
            for n in (4096, 16384)
        ),
        *(Cell.of(64, True, 4096, 4096, 64, 8, window, sinks=True) for window in (None, 128)),
    ]


def others_of(cell: Cell) -> tuple[str, ...]:
    """Configurations that are timed besides."""
    return OTHERS[cell.head_dim] if cell.v_dim else ()


def baselines(cell: Cell) -> dict[str, Any]:
    """Others on q, k and v, where they can be imported; none with sinks."""
    latest, _ = flash_attention_4()
    if cell.sinks:
        return {}
    found: dict[str, Any] = {"cudnn": runs.sdpa("torch_cudnn", causal=cell.causal)}
    return found | ({"flash_attention_4": lambda *qkv: latest(*qkv, causal=cell.causal)} if latest else {})


def forward_error(cell: Cell, x: Inputs, out: Any) -> float:
    """The largest |o - o64| over what bf16 allows, of random rows of one head."""
    import torch

    rows, head = torch.randperm(cell.q_len, device="cuda")[:CHECKED_ROWS], cell.heads - 1
    seen = seen_of(cell.q_len, cell.kv_len, cell.window, rows=rows, device="cuda")
    sinks = x["sinks"][head] if cell.sinks else None
    given = x["q"][0, rows, head], x["k"][0, :, -1], x["v"][0, :, -1]
    reference = attention_reference(*given, dtype=bf16, seen=seen, sinks=sinks)
    return attention_error(out[0, rows, head], reference, bf16).value


def timed(cell: Cell, rounds: int) -> dict[str, Any]:
    """One cell: checked, and timed."""
    others, sets = baselines(cell), sets_of(cell)
    right = error_of(cell, sets[0])
    forwards: dict[str, Run] = {"warploom": forward(cell)}
    forwards |= {text: forward(cell, config=text) for text in others_of(cell)}
    backwards = {"warploom": ours(cell)}
    if cell.sinks:
        forwards["without"], backwards["without"] = forward(cell, sinks=False), ours(cell, sinks=False)
    forwards |= {name: runs.of_qkv(run) for name, run in others.items()}
    backwards |= {name: runs.through_autograd(run) for name, run in others.items()}
    result: dict[str, Any] = {"cell": cell.name, "config": str(choose(cell, target("sm_90a"))[0])}
    errors, failed, unchecked = dict[str, float](), dict[str, str](), ("without", *others)
    for direction, named, flops, error in (
        ("forward", forwards, cell.flops, lambda out: forward_error(cell, sets[0], out)),
        ("backward", backwards, cell.gradients.flops, right),
    ):
        turns = runs.in_turns(
            {name: (run, sets) for name, run in named.items()},
            lambda name, out, error=error: None if name in unchecked else error(out),
            rounds,
            others=others,
        )
        result[direction] = {"tflops": turns.tflops(flops), "ratio": turns.ratio()}
        errors |= turns.error if direction == "forward" else {"backward": turns.error["warploom"]}
        failed |= {f"{direction} {name}": why for name, why in turns.failed.items()}
    return result | {"error": errors, "not_run": failed}


def calls(cell: Cell, goal: Target) -> Iterator[KernelCall]:
    """Of all kernels of a cell."""
    operands = Operands.contiguous(cell)
    for problem in (cell, replace(cell, sinks=False)):
        yield from choose(problem, goal)[0].calls(problem, operands, 132)
    for config in map(ForwardSm90.parse, others_of(cell)):
        yield from config.calls(cell, operands, 132)
    for one in (cell, replace(cell, sinks=False)):
        yield from gradients.calls(one, argparse.Namespace(sync=False, config=[]), goal)


def line(c: dict[str, Any]) -> str:
    """A cell as lines of text."""
    directions = (f"\n  {name}: " + runs.speeds(**c[name]) for name in ("forward", "backward"))
    return f"{c['cell']:34} error {max(c['error'].values()):.2f}  {c['not_run'] or ''}{''.join(directions)}"


def main() -> int:
    options = runs.parser_of(__doc__, rounds=7).parse_args()
    arch = runs.architecture(options)
    runs.compile_all((call for cell in cells() for call in calls(cell, target(arch))), arch)
    if options.compile_only:
        return 0
    each, file = runs.on_one_stream(lambda cell: timed(cell, options.rounds)), options.out / "head-cells.json"
    return runs.measured(cells(), each, line, runs.wrong, file, otherwise="every result is right")


if __name__ == "__main__":
    sys.exit(main())
