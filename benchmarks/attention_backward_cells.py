"""``warploom.attention_backward`` as users call it, beside the kernels of others, on one GPU in one process.

    PYTHONPATH=src:. python benchmarks/attention_backward_cells.py --out OUT

Baselines: cuDNN and FlashAttention-2 as PyTorch has them, and FlashAttention-4 wherever ``flash_attn.cute`` can be
imported. 16384 tokens, heads × head_dim = 2048, bf16; head_dim 64 to 256, full and causal, sequences of 512 to 16384;
then grouped heads, a window, lengths that no tile divides, head_dim 192 with a V of 128, and few key heads. Every
gradient, those of baselines included, is checked by element against float64 first (one group of heads); then all are
timed in turns as replays of CUDA graphs, on inputs that rotate past the L2. FLOPs are those of five products, and all
kernels of a call count. ``--sync`` times the kernels for GPUs without wgmma instead, in as much shared memory as this
one has. Writes OUT/attention-backward-cells.json after each cell, prints the table, and exits with 1 if a result is
wrong (a baseline's from twice our bound on) or a figure below is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import attention_others as others
from attention_others import sdpa, through_autograd
from tests.kernels.gradient_reference import gradient_reference

import warploom
from warploom.core.dtypes import bf16
from warploom.core.targets import Target, target
from warploom.kernels.attention.backward_choice import KINDS, choose
from warploom.kernels.attention.choice import choose as choose_forward
from warploom.kernels.attention.problem import BACKWARD, ArrayStrides, AttentionProblem, BackwardProblem, Even
from warploom.kernels.attention.scores import seen_of
from warploom.kernels.settings import read
from warploom.kernels.source import KernelCall
from warploom_lab.bench import baselines
from warploom_lab.bench.cells import Figure, Inputs, Run, TorchGpu, Trial

TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEAD_DIMS = (64, 96, 128, 192, 256)
MOST_SCORES = 2**28
"""Scores of the reference at a time: 2 GiB of float64, in some twenty arrays."""


class Cell(AttentionProblem):
    """One problem."""

    @classmethod
    def of(
        cls,
        head_dim: int,
        causal: bool,
        q_len: int,
        kv_len: int,
        heads: int,
        kv_heads: int,
        window: int | None = None,
        batch: int = 0,
        **more: Any,
    ) -> Cell:
        """About TOKENS tokens where no ``batch`` is given; ``window``: keys before a query's own."""
        batch, sides = batch or _batch(q_len, kv_len), (window, 0 if causal else None)
        return cls(batch, heads, kv_heads, Even(q_len, kv_len), head_dim, bf16, window=sides, **more)

    @property
    def causal(self) -> bool:
        """Whether later keys are hidden."""
        return self.window[1] == 0

    @property
    def name(self) -> str:
        """As the table has it."""
        lengths = str(self.q_len) if self.q_len == self.kv_len else f"{self.q_len}×{self.kv_len}"
        group = f" {self.heads}/{self.kv_heads} heads" if self.heads != self.kv_heads else ""
        dims = f"{self.head_dim}/{self.v_dim}" if self.v_dim else str(self.head_dim)
        more = (f" window {self.window[0]}" if self.window[0] else "") + (" sinks" if self.sinks else "")
        more += f" batch {self.batch}" if self.batch != _batch(self.q_len, self.kv_len) else ""
        return f"d{dims} {'causal' if self.causal else 'full'} {lengths}{group}{more}"

    @property
    def gradients(self) -> BackwardProblem:
        """The backward problem."""
        return BackwardProblem(self)


def _batch(q_len: int, kv_len: int) -> int:
    """As many sequences as have about TOKENS tokens."""
    return max(1, TOKENS // max(q_len, kv_len))


def few_key_heads() -> list[Cell]:
    """Problems whose tiles of keys are fewer than the multiprocessors, or about as many."""
    sizes = [(2, 128, 4096, 48, 1), (1, 128, 4096, 64, 8), (1, 128, 4096, 28, 4), (1, 128, 2048, 32, 8)]
    sizes += [(1, d, 4096, 8, 1) for d in (64, 128, 256)]
    return [Cell.of(d, True, n, n, heads, kv_heads, batch=batch) for batch, d, n, heads, kv_heads in sizes]


def cells() -> list[Cell]:
    """All of them."""
    sizes: list[tuple[Any, ...]] = [
        (d, causal, n, n, WIDTH // d, WIDTH // d) for d in HEAD_DIMS for causal in (False, True) for n in LENGTHS
    ]
    sizes += [(128, True, n, n, 64, 8) for n in (4096, 16384)] + [(128, True, 16384, 16384, 16, 16, 1024)]
    sizes += [(128, causal, 3001, 5003, 16, 16) for causal in (False, True)]
    wide = [Cell.of(192, causal, n, n, 16, 16, v_dim=128) for causal in (False, True) for n in (4096, 16384)]
    return [*(Cell.of(*size) for size in sizes), *wide, *few_key_heads()]


NARROW = {"head_dim": (64, 128)}
FIGURES = (
    Figure("cudnn", 1.0),
    Figure("flash_attention_4", 0.97, NARROW),
    Figure("flash_attention_4", 1.05, NARROW, mean=1),
    Figure("best", 1.2, {"head_dim": (256,)}),
)
SYNC_FIGURES = (Figure("flash_attention_2", 1.0),)
ARGUMENTS = ("dout", "q", "k", "v", "out", "lse")


def fresh(cell: Cell) -> Inputs:
    """Random q, k, v and dO, and what the forward pass makes of them."""
    import torch

    x = others.fresh(cell)
    x["dout"] = torch.randn(*x["q"].shape[:-1], cell.value_dim, device="cuda", dtype=torch.bfloat16)
    x |= {"sinks": torch.randn(cell.heads, device="cuda")} if cell.sinks else {}
    x["out"], x["lse"] = forward(cell, return_lse=True)(x)
    return x


# -- who is timed


def forward(cell: Cell, *, sinks: bool = True, **how: Any) -> Run:
    """The forward pass."""
    how["window"] = cell.window
    return lambda x: warploom.attention(x["q"], x["k"], x["v"], sinks=x.get("sinks") if sinks else None, **how)


def ours(cell: Cell, config: str | None = None, *, deterministic: bool = False, sinks: bool = True) -> Run:
    """This package's call."""
    how = {"window": cell.window, "config": config, "deterministic": deterministic}
    return lambda x: warploom.attention_backward(
        *(x[name] for name in ARGUMENTS), sinks=x.get("sinks") if sinks else None, **how
    )


def cudnn(cell: Cell) -> Run | None:
    """PyTorch's cuDNN backend; it has no windows."""
    if cell.window[0] is not None or (cell.causal and cell.q_len != cell.kv_len):
        return None
    grouped = {"enable_gqa": True} if cell.heads != cell.kv_heads else {}
    return through_autograd(sdpa("torch_cudnn", causal=cell.causal, **grouped))


def flash_attention_2(cell: Cell) -> Run:
    """PyTorch's copy."""
    sides = {
        "window_size_left": -1 if cell.window[0] is None else cell.window[0],
        "window_size_right": 0 if cell.causal else -1,
    }
    where = None, None, cell.q_len, cell.kv_len, 0.0, cell.causal
    return others.flash_attention_2(lambda _: where, gradients=True, **sides)


def flash_attention_4(cell: Cell) -> Run | None:
    """The newest release, wherever it can be imported."""
    latest, _ = baselines.flash_attention_4()
    if latest is None:
        return None
    window = {} if cell.window[0] is None else {"window_size": cell.window}
    return through_autograd(lambda q, k, v: latest(q, k, v, causal=cell.causal, **window))


BASELINES: dict[str, Callable[[Cell], Run | None]] = {
    "cudnn": cudnn,
    "flash_attention_2": flash_attention_2,
    "flash_attention_4": flash_attention_4,
}


def default_is_deterministic(cell: Cell) -> bool:
    """Whether a call runs the same kernels with and without ``deterministic``."""
    goal = target("sm_90a")
    return choose(cell.gradients, goal) == choose(BackwardProblem(cell, False, True), goal)


# -- checked


def error_of(cell: Cell, x: Inputs) -> Callable[[Any], float]:
    """The largest error of gradients over what is allowed, of the first key head and the query heads that share it."""
    import torch

    group = cell.heads // cell.kv_heads
    first = {n: x[n][:, :, : 1 if n in "kv" else group].transpose(1, 2) for n in ("dout", "q", "k", "v", "out")}
    seen = None if cell.window == (None, None) else seen_of(cell.q_len, cell.kv_len, cell.window, device="cuda")
    sinks = x["sinks"][:group] if cell.sinks else None
    rows = max(1, MOST_SCORES // (cell.batch * cell.kv_len * group))
    reference = gradient_reference(**first, dtype=bf16, seen=seen, sinks=sinks, rows=rows)
    torch.cuda.empty_cache()

    def error(found: tuple[Any, ...]) -> float:
        dq, dk, dv = (g.transpose(1, 2) for g in found[:3])
        further = (g[:group] for g in found[3:] if cell.sinks)
        return max(reference.excess(dq[:, :group], dk[:, :1], dv[:, :1], *further).values())

    return error


def sets_of(cell: Cell, gpu: TorchGpu) -> list[Inputs]:
    """Inputs that rotate past the L2."""
    moved = 2 * cell.batch * cell.head_dim * (3 * cell.heads * cell.q_len + 2 * cell.kv_heads * cell.kv_len)
    return [fresh(cell) for _ in range(gpu.sets(moved))]


def calls(cell: Cell, goal: Target, texts: Iterable[str | None] = (None,)) -> Iterator[KernelCall]:
    """The launches of the forward pass and of the backward configurations (None: what a call chooses)."""
    forward, backward = replace(cell, lse=True), cell.gradients
    operands = ArrayStrides.contiguous(forward)
    yield from choose_forward(forward, goal)[0].calls(forward, operands, 132)
    strides = {name: operands.strides["out" if name == "dout" else name.removeprefix("d")] for name in BACKWARD}
    for text in texts:
        config = read(text, KINDS) or choose(backward, goal)[0]
        yield from config.calls(backward, ArrayStrides(strides), 132)


class Gradients(others.AttentionScript[Cell]):
    """The script."""

    rounds, baselines = 9, tuple(BASELINES)

    def options(self, parser: argparse.ArgumentParser) -> None:
        super().options(parser)
        parser.add_argument("--sync", action="store_true", help="the kernels without wgmma, beside FlashAttention-2")

    def cells(self) -> list[Cell]:
        self.figures = SYNC_FIGURES if self.given.sync else FIGURES
        self.file = f"attention-backward-{'sync-' * self.given.sync}cells.json"
        return cells()

    def configurations(self, cell: Cell) -> dict[str, str | None]:
        """The configurations of this package, in their notation (None: what a call chooses), by name."""
        first = str(choose(cell.gradients, target("sm_100a"))[0]) if self.given.sync else None
        return {"warploom": first} | {text: text for text in self.asked(cell.head_dim)}

    def calls(self, cell: Cell, goal: Target) -> Iterator[KernelCall]:
        return calls(cell, goal, self.configurations(cell).values())

    def trial(self, cell: Cell) -> Trial:
        sets, configs = sets_of(cell, self.gpu), self.configurations(cell)
        error, found = error_of(cell, sets[0]), dict[str, Run | None]()
        found |= {name: ours(cell, text) for name, text in configs.items()}
        if not self.given.sync and not default_is_deterministic(cell):
            found["deterministic"] = ours(cell, deterministic=True)
        found |= {name: BASELINES[name](cell) for name in self.given.baselines}
        how = {"window": cell.window, "config": configs["warploom"]}
        plan = warploom.plan_attention_backward(*(sets[0][n] for n in ARGUMENTS), **how)
        names = "head_dim", "causal", "q_len", "kv_len", "heads", "kv_heads", "batch"
        facts = {name: getattr(cell, name) for name in names}
        return Trial(
            {name: run for name, run in found.items() if run is not None},
            sets,
            lambda _, out: error(out),
            cell.gradients.flops,
            optional=self.given.config,
            facts=facts | {"config": str(plan.config), "workspace_mib": plan.workspace_bytes / 2**20},
        )


if __name__ == "__main__":
    sys.exit(Gradients().main())
