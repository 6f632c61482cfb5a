"""Packed sequences of even and of uneven lengths that take the same FLOPs, on one GPU in one process.

    PYTHONPATH=src:. python benchmarks/varlen_cells.py --out OUT

``warploom.attention_varlen`` on uneven lengths ("uneven") beside itself on even ones ("even") and ``attention`` there
("dense"); on the uneven ones also FlashAttention-2 as PyTorch has it, and FlashAttention-4 where ``flash_attn.cute``
can be imported. bf16, heads × head_dim = 2048; head_dim 64 and 128, causal and full, and grouped heads. Lengths are a
geometric progression from the longest to a sixteenth of it, shuffled, with an empty sequence among them, and NaN in the
rows behind. Every result is checked first, rows of several sequences against float64, and timed in company and rested.
Writes OUT/varlen-cells.json, prints the table with what whole blocks alone would leave of even lengths' rate ("whole
blocks"), and exits with 1 if a result is wrong or uneven lengths run at less than 0.95 of even ones' rate.
``--backward`` does the same for gradients and writes OUT/varlen-backward-cells.json.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import attention_others as others
from attention_others import rows_error
from tests.kernels.gradient_reference import gradient_reference

import warploom
from warploom.core.dtypes import bf16
from warploom.core.targets import Target, target
from warploom.kernels.attention.backward_choice import choose as choose_backward
from warploom.kernels.attention.choice import choose, choose_packed
from warploom.kernels.attention.problem import BACKWARD, ArrayStrides, AttentionProblem, BackwardProblem, Even, Packed
from warploom.kernels.source import KernelCall
from warploom.ops.attention_varlen import attention_varlen_backward
from warploom_lab.bench import baselines
from warploom_lab.bench.cells import Figure, Inputs, Row, Run, Trial

WIDTH = 2048
SPREAD = 16
"""How many times as long as the shortest sequence the longest one is."""
BEHIND = 64
"""Rows of no sequence."""
ROWS = 64
"""Query rows of a consumer."""
STEP = 32
"""Keys that P·V leaves out at a time."""
MOST_SCORES = 2**26
"""Of the gradients' reference at a time."""


@dataclass(frozen=True)
class Cell:
    """``batch`` sequences of ``length``, and as many uneven ones that take as many FLOPs."""

    head_dim: int
    causal: bool
    batch: int
    length: int
    kv_heads: int | None = None

    @property
    def heads(self) -> int:
        """Of the queries."""
        return WIDTH // self.head_dim

    @property
    def kinds(self) -> tuple[int, int]:
        """Heads of queries and of keys."""
        return self.heads, self.kv_heads or self.heads

    @property
    def name(self) -> str:
        """As the table has it."""
        group = "" if self.kv_heads is None else f" {self.heads}/{self.kv_heads} heads"
        return f"d{self.head_dim} {'causal' if self.causal else 'full'} {self.batch}×{self.length}{group}"

    @property
    def even(self) -> list[int]:
        """All as long."""
        return [self.length] * self.batch

    @cached_property
    def uneven(self) -> list[int]:
        """A geometric progression whose squares add up to those of the even ones; the last has no rows."""
        weights = [SPREAD ** (-i / (self.batch - 1)) for i in range(self.batch)]
        factor = self.length * math.sqrt(self.batch / sum(w * w for w in weights))
        found = [*(round(factor * w) for w in weights), 0]
        random.Random(0).shuffle(found)
        return found

    @property
    def packed(self) -> AttentionProblem:
        """What is asked, whatever the lengths."""
        window = None, 0 if self.causal else None
        return AttentionProblem(self.batch, *self.kinds, Packed(WIDTH, WIDTH), self.head_dim, bf16, window=window)

    @property
    def dense(self) -> AttentionProblem:
        """The even lengths in an array of four dimensions."""
        return replace(self.packed, sequences=Even(self.length, self.length))

    def whole_blocks(self) -> float:
        """The rate of uneven lengths over that of even ones that the forward pass's products leave.

        Q·Kᵀ has whole blocks of keys, P·V parts of them, and consumers have 64 rows: a sequence's last ones are beyond
        it.
        """
        config: Any = choose_packed(self.packed, target("sm_90a"))

        def products(n: int, first: int) -> float:
            found, whole = 0.0, -(-(min(n, first + config.tile_m) if self.causal else n) // config.tile_n)
            for row in range(first, min(n, first + config.tile_m), ROWS):
                seen = (min(n, row + ROWS) if self.causal else n) - (whole - 1) * config.tile_n
                found += whole - 1 + (1 + max(1, -(-seen // STEP)) * STEP / config.tile_n) / 2
            return found

        even, uneven = (
            sum(products(n, first) for n in lengths for first in range(0, n, config.tile_m)) / self.flops(lengths)
            for lengths in (self.even, self.uneven)
        )
        return even / uneven

    def flops(self, lengths: list[int], *, backward: bool = False) -> int:
        """Of the two products, or the five of the backward pass."""
        scores = sum(n * (n + 1) // 2 if self.causal else n * n for n in lengths)
        return (10 if backward else 4) * self.heads * self.head_dim * scores


def cells() -> list[Cell]:
    """All of them."""
    found = [Cell(d, causal, *size) for d in (64, 128) for causal in (False, True) for size in ((32, 1024), (8, 4096))]
    return [*found, Cell(128, True, 8, 4096, kv_heads=4)]


def fresh(cell: Cell, lengths: list[int], *, backward: bool = False) -> Inputs:
    """Random q, k and v, NaN behind them, and where sequences begin; of a backward pass what the forward one gives."""
    import torch

    total = sum(lengths)

    def make(heads: int) -> Any:
        x = torch.randn(total + BEHIND, heads, cell.head_dim, device="cuda", dtype=torch.bfloat16)
        x[total:] = math.nan
        return x

    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
    heads, kv_heads = cell.kinds
    x = {"q": make(heads), "k": make(kv_heads), "v": make(kv_heads), "starts": starts, "longest": max(lengths)}
    if backward:
        x["out"], x["lse"] = warploom.attention_varlen(
            x["q"], x["k"], x["v"], starts, causal=cell.causal, return_lse=True
        )
        x["dout"] = make(heads)
    return x


def ours(cell: Cell, config: str | None = None) -> Run:
    """This package's call."""
    return lambda x: warploom.attention_varlen(x["q"], x["k"], x["v"], x["starts"], causal=cell.causal, config=config)


def our_gradients(cell: Cell, config: str | None = None) -> Run:
    """This package's backward pass."""
    names = "dout", "q", "k", "v", "out", "lse", "starts"
    return lambda x: attention_varlen_backward(*(x[n] for n in names), causal=cell.causal, config=config)


def dense_gradients(cell: Cell) -> Run:
    """``attention_backward``, where all sequences are as long."""

    def run(x: Inputs) -> Any:
        size = cell.batch, cell.length
        dout, q, k, v, out = (x[n][:-BEHIND].unflatten(0, size) for n in ("dout", "q", "k", "v", "out"))
        lse = x["lse"][:, :-BEHIND].unflatten(1, size).transpose(0, 1).contiguous()
        found = warploom.attention_backward(dout, q, k, v, out, lse, causal=cell.causal)
        return tuple(g.flatten(0, 1) for g in found)

    return run


def dense(cell: Cell) -> Run:
    """``attention``, where all sequences are as long; the result in the place that packed ones have."""

    def run(x: Inputs) -> Any:
        q, k, v = (x[name][:-BEHIND].unflatten(0, (cell.batch, cell.length)) for name in "qkv")
        return warploom.attention(q, k, v, causal=cell.causal).flatten(0, 1)

    return run


def flash_attention_2(cell: Cell, *, gradients: bool = False) -> Run:
    """PyTorch's copy."""
    return others.flash_attention_2(
        lambda x: (x["starts"], x["starts"], x["longest"], x["longest"], 0.0, cell.causal), gradients=gradients
    )


def flash_attention_4(cell: Cell) -> Run | None:
    """The newest release, wherever it can be imported."""
    latest, _ = baselines.flash_attention_4("flash_attn_varlen_func")
    if latest is None:
        return None

    def run(x: Inputs) -> Any:
        qkv = (x[n][:-BEHIND] for n in "qkv")  # it multiplies what lies behind by zero, which NaN survives
        where = {f"cu_seqlens_{side}": x["starts"] for side in "qk"}
        where |= {f"max_seqlen_{side}": x["longest"] for side in "qk"}
        return latest(*qkv, **where, causal=cell.causal)

    return run


# -- checked, then timed
def largest_error(cell: Cell, x: Inputs, lengths: list[int], out: Any) -> float:
    """The largest |o - o64| over what bf16 allows, of rows of the longest, the shortest and the last sequences."""
    worst, starts = 0.0, [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: lengths[i])
    group = cell.heads // cell.kinds[1]
    for number in {order[0], order[-1], max(order), min(order)}:
        own, head = slice(starts[number], starts[number] + lengths[number]), number % cell.heads
        q, k, v = x["q"][own, head], x["k"][own, head // group], x["v"][own, head // group]
        worst = max(worst, rows_error(q, k, v, out[own, head], cell.packed.window))
    return worst


def largest_gradient_error(cell: Cell, x: Inputs, lengths: list[int], found: Any) -> float:
    """The largest error over what is allowed, of the first key head of the longest and the shortest sequence."""
    import torch

    group, worst = cell.heads // cell.kinds[1], 0.0
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: lengths[i])
    for number in (order[0], order[-1]):
        first, n = sum(lengths[:number]), lengths[number]
        at = torch.arange(n, device="cuda")
        seen = at[None] <= at[:, None] if cell.causal else None
        given = {"dq": found[0], "dk": found[1], "dv": found[2], **{k: x[k] for k in ("dout", "q", "k", "v", "out")}}
        y = {k: of[first : first + n, : 1 if k[-1] in "kv" else group].transpose(0, 1) for k, of in given.items()}
        gradients = y.pop("dq"), y.pop("dk"), y.pop("dv")
        reference = gradient_reference(**y, dtype=bf16, seen=seen, rows=MOST_SCORES // (n * group))
        worst = max(worst, *reference.excess(*gradients).values())
    return worst


def calls(cell: Cell, goal: Target, backward: bool) -> Iterator[KernelCall]:
    """Of all kernels of a cell."""
    d, (h, g), packed, even = cell.head_dim, cell.kinds, cell.packed, cell.dense
    q, kv = (h * d, d), (g * d, d)
    strides = {name: kv if name in ("k", "v", "dk", "dv") else q for name in BACKWARD}
    operands = ArrayStrides(strides)
    for problem in (packed, replace(packed, lse=True)) if backward else (packed,):
        yield from choose_packed(problem, goal).calls(problem, operands, 132)
    yield from choose(even, goal)[0].calls(even, ArrayStrides.contiguous(even), 132)
    if not backward:
        return
    gradients, whole = BackwardProblem(replace(packed, lse=True)), BackwardProblem(even)
    yield from choose_backward(gradients, goal)[0].calls(gradients, operands, 132)
    lying = {name: (cell.length * row, head, row) for name, (row, head) in strides.items()}
    yield from choose_backward(whole, goal)[0].calls(whole, ArrayStrides(lying), 132)


class Varlen(others.AttentionScript[Cell]):
    """The script."""

    baselines = ("flash_attention_2", "flash_attention_4")
    figures = (Figure("even", 0.95), Figure("dense", 0.95))

    def options(self, parser: argparse.ArgumentParser) -> None:
        super().options(parser)
        parser.add_argument("--backward", action="store_true", help="gradients")

    def cells(self) -> list[Cell]:
        self.file = "varlen-backward-cells.json" if self.given.backward else "varlen-cells.json"
        return cells()

    def calls(self, cell: Cell, goal: Target) -> Iterator[KernelCall]:
        return calls(cell, goal, self.given.backward)

    def called(self, cell: Cell) -> dict[str, tuple[Run, list[int]]]:
        """Who is timed, and on which lengths."""
        backward = self.given.backward
        mine, even = (our_gradients, dense_gradients) if backward else (ours, dense)
        found = {"uneven": (mine(cell), cell.uneven), "even": (mine(cell), cell.even), "dense": (even(cell), cell.even)}
        found |= {text: (mine(cell, text), cell.uneven) for text in self.asked(cell.head_dim)}
        of_others = {"flash_attention_2": flash_attention_2(cell, gradients=backward)}
        if not backward and (newest := flash_attention_4(cell)) is not None:
            of_others["flash_attention_4"] = newest
        return found | {name: (of_others[name], cell.uneven) for name in self.given.baselines if name in of_others}

    def trial(self, cell: Cell) -> Trial:
        listed, backward = self.called(cell), self.given.backward
        count = self.gpu.sets(cell.head_dim * 2 * 2 * sum(cell.kinds) * sum(cell.uneven))
        inputs = {str(n): [fresh(cell, n, backward=backward) for _ in range(count)] for n in (cell.even, cell.uneven)}
        sets = {name: inputs[str(lengths)] for name, (_, lengths) in listed.items()}
        error_of = largest_gradient_error if backward else largest_error
        facts = {name: getattr(cell, name) for name in ("head_dim", "causal", "batch", "length")}
        return Trial(
            {name: run for name, (run, _) in listed.items()},
            sets,
            lambda name, out: error_of(cell, sets[name][0], listed[name][1], out),
            {name: cell.flops(lengths, backward=backward) for name, (_, lengths) in listed.items()},
            ours="uneven",
            optional=self.given.config,
            facts=facts | {"lengths": cell.uneven, "whole_blocks": round(cell.whole_blocks(), 3)},
        )

    def line_head(self, row: Row) -> str:
        return f"{super().line_head(row)}  whole blocks ×{row['whole_blocks']:.3f}"


if __name__ == "__main__":
    sys.exit(Varlen().main())
