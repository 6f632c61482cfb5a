"""Attention with V's own head_dim and with sinks, both directions, on one GPU in one process.

    PYTHONPATH=src:. python benchmarks/head_cells.py --out OUT

bf16, 16384 tokens. head_dim 192 with 128 for V, and 128 with 64, full and causal: the configuration that a call chooses
beside others that fit, cuDNN as PyTorch has it, and FlashAttention-4 wherever ``flash_attn.cute`` can be imported.
Sinks at 64/8 heads of 64, causal, with and without a window of 128: beside the same call without them. The gradients of
each too, which take what the forward call returned. Every result is checked against float64 (some rows of a head, the
gradients of one group of heads whole), and timed in company and rested. Writes OUT/head-cells.json, and exits with 1 if
a result is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import attention_backward_cells as gradients
from attention_backward_cells import Cell, error_of, forward, ours, sets_of
from attention_others import of_qkv, plane_error, sdpa, through_autograd

from warploom.core.targets import Target, target
from warploom.kernels.attention.choice import choose
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.problem import ArrayStrides
from warploom.kernels.source import KernelCall
from warploom_lab.bench.baselines import flash_attention_4
from warploom_lab.bench.cells import CellScript, Row, Trial, rates_line

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
    found: dict[str, Any] = {"cudnn": sdpa("torch_cudnn", causal=cell.causal)}
    return found | ({"flash_attention_4": lambda *qkv: latest(*qkv, causal=cell.causal)} if latest else {})


def calls(cell: Cell, goal: Target) -> Iterator[KernelCall]:
    """Of all kernels of a cell."""
    operands = ArrayStrides.contiguous(cell)
    for problem in (cell, replace(cell, sinks=False)):
        yield from choose(problem, goal)[0].calls(problem, operands, 132)
    for config in map(ForwardSm90.parse, others_of(cell)):
        yield from config.calls(cell, operands, 132)
    for one in (cell, replace(cell, sinks=False)):
        yield from gradients.calls(one, goal)


class Heads(CellScript[Cell]):
    """The script."""

    file, baselines = "head-cells.json", ("cudnn", "flash_attention_4")

    def cells(self) -> list[Cell]:
        return cells()

    def calls(self, cell: Cell, goal: Target) -> Iterator[KernelCall]:
        return calls(cell, goal)

    def trials(self, cell: Cell) -> dict[str, Trial]:
        others, sets = baselines(cell), sets_of(cell, self.gpu)
        others = {name: run for name, run in others.items() if name in self.given.baselines}
        right = error_of(cell, sets[0])
        forwards = {"warploom": forward(cell)} | {text: forward(cell, config=text) for text in others_of(cell)}
        backwards = {"warploom": ours(cell)}
        if cell.sinks:
            forwards["without"], backwards["without"] = forward(cell, sinks=False), ours(cell, sinks=False)
        forwards |= {name: of_qkv(run) for name, run in others.items()}
        backwards |= {name: through_autograd(run) for name, run in others.items()}

        def error(name: str, out: Any) -> float | None:
            if name == "without":
                return None
            return right(out) if isinstance(out, tuple) else plane_error(sets[0], out, cell.window, 0, -1)

        facts = {"config": str(choose(cell, target(self.gpu.arch))[0])}
        return {
            "forward": Trial(forwards, sets, error, cell.flops, facts=facts),
            "backward": Trial(backwards, sets, error, cell.gradients.flops),
        }

    def line(self, row: Row) -> str:
        return self.line_head(row) + "".join(f"\n  {way}: {rates_line(row[way])}" for way in ("forward", "backward"))


if __name__ == "__main__":
    sys.exit(Heads().main())
