"""Attention with V's own head_dim and with sinks, both directions, on one GPU in one process.

    PYTHONPATH=src python benchmarks/head_cells.py --out OUT

bf16, 16384 tokens. head_dim 192 with 128 for V, and 128 with 64, full and causal: the configuration that a call chooses
beside others that fit, cuDNN as PyTorch has it, and FlashAttention-4 wherever ``flash_attn.cute`` can be imported.
Sinks at 64/8 heads of 64, causal, with and without a window of 128: beside the same call without them. The gradients of
each too, which take what the forward call returned. Every result of this package is checked first against float64 (some
rows of a head, the gradients of one group of heads whole); then all are timed interleaved as replays of CUDA graphs, on
inputs that rotate past the L2. Writes OUT/head-cells.json after each cell, prints the table, and exits with 1 if a
result is wrong. ``--compile-only`` needs no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import cell_runs as runs
from cell_runs import Inputs, Run

import warploom
from warploom.bench.peers import flash_attention_4
from warploom.core.dtypes import bf16
from warploom.core.targets import Target, target
from warploom.kernels.attention.backward import TENSORS, BackwardOperands, BackwardProblem
from warploom.kernels.attention.backward_choice import choose as choose_backward
from warploom.kernels.attention.choice import choose
from warploom.kernels.attention.gradient_reference import gradient_reference
from warploom.kernels.attention.problem import AttentionProblem, Operands
from warploom.kernels.attention.reference import attention_error, attention_reference, seen_of
from warploom.kernels.attention.sm90 import ForwardSm90
from warploom.kernels.source import KernelCall

TOKENS = 16384
CHECKED_ROWS = 128
MOST_SCORES = 2**27
"""Scores of the gradients' reference at a time."""
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


@dataclass(frozen=True)
class Cell:
    """One problem; ``v_dim`` is V's head_dim."""

    head_dim: int
    v_dim: int
    heads: int
    kv_heads: int
    causal: bool
    length: int
    window: int | None = None
    sinks: bool = False

    @property
    def name(self) -> str:
        """As the table has it."""
        mask = ("causal" if self.causal else "full") + (f" window {self.window}" if self.window else "")
        dims = f"d{self.head_dim}" if self.v_dim == self.head_dim else f"d{self.head_dim}/{self.v_dim}"
        return f"{dims} {self.heads}/{self.kv_heads} {mask} {self.length}{' sinks' if self.sinks else ''}"

    @property
    def problem(self) -> AttentionProblem:
        """The forward problem."""
        sides, v_dim = (self.window, 0 if self.causal else None), self.v_dim if self.v_dim != self.head_dim else 0
        return AttentionProblem(
            TOKENS // self.length, self.heads, self.kv_heads, self.length, self.length, self.head_dim, bf16, sides,
            sinks=self.sinks, v_dim=v_dim,
        )  # fmt: skip

    @property
    def others(self) -> tuple[str, ...]:
        """Configurations that are timed besides."""
        return OTHERS[self.head_dim] if self.v_dim != self.head_dim else ()

    @property
    def options(self) -> dict[str, Any]:
        """Of the calls."""
        return {"causal": self.causal, "window": None if self.window is None else (self.window, None)}


def cells() -> list[Cell]:
    """All of them."""
    return [
        *(Cell(d, v, 16, 16, causal, n) for d, v in ((192, 128), (128, 64)) for causal in (False, True)
          for n in (4096, 16384)),
        *(Cell(64, 64, 64, 8, True, 4096, window, sinks=True) for window in (None, 128)),
    ]  # fmt: skip


def fresh(cell: Cell) -> Inputs:
    """Random arrays, and what the forward pass makes of them."""
    import torch

    def make(heads: int, cols: int) -> Any:
        shape = TOKENS // cell.length, cell.length, heads, cols
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x = {"q": make(cell.heads, cell.head_dim), "k": make(cell.kv_heads, cell.head_dim)}
    x |= {"v": make(cell.kv_heads, cell.v_dim), "dout": make(cell.heads, cell.v_dim)}
    x["sinks"] = torch.randn(cell.heads, device="cuda") if cell.sinks else None
    x["out"], x["lse"] = forward(cell, return_lse=True)(x)
    return x


def forward(cell: Cell, *, config: str | None = None, sinks: bool = True, return_lse: bool = False) -> Run:
    """This package's call."""
    how = {**cell.options, "config": config, "return_lse": return_lse}
    return lambda x: warploom.attention(x["q"], x["k"], x["v"], sinks=x["sinks"] if sinks else None, **how)


def backward(cell: Cell, *, sinks: bool = True) -> Run:
    """The call of its gradients."""
    names = "dout", "q", "k", "v", "out", "lse"
    return lambda x: warploom.attention_backward(
        *(x[name] for name in names), sinks=x["sinks"] if sinks else None, **cell.options
    )


def peers(cell: Cell) -> dict[str, Any]:
    """Others on q, k and v, where they can be imported; none with sinks."""
    latest, _ = flash_attention_4()
    if cell.sinks:
        return {}
    found: dict[str, Any] = {"cudnn": runs.sdpa("torch_cudnn", causal=cell.causal)}
    return found | ({"flash_attention_4": lambda *qkv: latest(*qkv, causal=cell.causal)} if latest else {})


# -- checked, then timed


def seen(cell: Cell) -> Any:
    """Which scores count."""
    return seen_of(cell.length, cell.length, cell.problem.window, device="cuda")


def forward_error(cell: Cell, x: Inputs, out: Any) -> float:
    """The largest |o - o64| over what bf16 allows, of random rows of one head."""
    import torch

    rows, head = torch.randperm(cell.length, device="cuda")[:CHECKED_ROWS], cell.heads - 1
    given, sinks = (x["q"][0, rows, head], x["k"][0, :, -1], x["v"][0, :, -1]), x["sinks"]
    of_head = None if sinks is None else sinks[head]
    return attention_error(
        out[0, rows, head], attention_reference(*given, dtype=bf16, seen=seen(cell)[rows], sinks=of_head), bf16
    ).value


def backward_error(cell: Cell, x: Inputs, found: Any) -> float:
    """The largest error of the gradients over what is allowed, of the first key head's group."""
    group = cell.heads // cell.kv_heads
    first = {n: x[n][:, :, : 1 if n in "kv" else group].transpose(1, 2) for n in ("dout", "q", "k", "v", "out")}
    sinks = x["sinks"][:group] if cell.sinks else None
    rows = max(1, MOST_SCORES // (TOKENS * group))
    reference = gradient_reference(**first, dtype=bf16, seen=seen(cell), sinks=sinks, rows=rows)
    dq, dk, dv = (g.transpose(1, 2) for g in found[:3])
    return max(reference.excess(dq[:, :group], dk[:, :1], dv[:, :1], *(g[:group] for g in found[3:])).values())


def timed(cell: Cell, rounds: int) -> dict[str, Any]:
    """One cell: checked, and timed."""
    p, others = cell.problem, peers(cell)
    forwards: dict[str, Run] = {"warploom": forward(cell), **{text: forward(cell, config=text) for text in cell.others}}
    backwards: dict[str, Run] = {"warploom": backward(cell)}
    if cell.sinks:
        forwards["without"], backwards["without"] = forward(cell, sinks=False), backward(cell, sinks=False)
    forwards |= {name: runs.of_qkv(run) for name, run in others.items()}
    backwards |= {name: runs.through_autograd(run) for name, run in others.items()}
    rows = TOKENS * (cell.heads * (cell.head_dim + cell.v_dim) + cell.kv_heads * (cell.head_dim + cell.v_dim))
    sets = [fresh(cell) for _ in range(runs.sets_of(2 * rows))]
    result: dict[str, Any] = {"cell": cell.name, "config": str(choose(p, target("sm_90a"))[0])}
    errors, failed, unchecked = dict[str, float](), dict[str, str](), ("without", *others)
    for direction, named, flops, error in (
        ("forward", forwards, p.flops, forward_error), ("backward", backwards, BackwardProblem(p).flops, backward_error)
    ):  # fmt: skip
        turns = runs.in_turns(
            {name: (run, sets) for name, run in named.items()},
            lambda name, out, error=error: None if name in unchecked else error(cell, sets[0], out), rounds,
            others=others,
        )  # fmt: skip
        result[direction] = {"tflops": turns.tflops(flops), "ratio": turns.ratio()}
        errors |= turns.error if direction == "forward" else {"backward": turns.error["warploom"]}
        failed |= {f"{direction} {name}": why for name, why in turns.failed.items()}
    return result | {"error": errors, "not_run": failed}


def calls(cell: Cell, goal: Target) -> Iterator[KernelCall]:
    """Of all kernels of a cell."""
    p, whole = cell.problem, BackwardProblem(cell.problem)
    operands = Operands.contiguous(p)
    for sinks, lse in ((p.sinks, False), (p.sinks, True), (False, False)):
        problem = replace(p, sinks=sinks, lse=lse)
        yield from choose(problem, goal)[0].calls(problem, operands, 132)
    for config in map(ForwardSm90.parse, cell.others):
        yield from config.calls(p, operands, 132)
    q, k, v, out = operands.strides
    like = {"q": q, "k": k, "v": v, "out": out, "dout": out, "dq": q, "dk": k, "dv": v}
    lying = BackwardOperands(tuple(like[name] for name in TENSORS), "bshd")
    yield from choose_backward(whole, goal)[0].calls(whole, lying, 132)


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
