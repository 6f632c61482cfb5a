"""``warploom.attention`` as users call it, beside the kernels of others, on one GPU in one process.

    PYTHONPATH=src python benchmarks/attention_cells.py --out OUT

Baselines: PyTorch's flash and cuDNN backends, and FlashAttention-4 wherever ``flash_attn.cute`` can be imported. 16384
tokens, heads × head_dim = 2048, bf16; head_dim 64, 128 and 256, full and causal, sequences of 512 to 16384. Every
kernel, baselines included, is checked against float64 first, and timed in company and rested; each is also run alone
without a pause for power (watts, the clock under that load, TFLOP per joule). Writes OUT/attention-cells.json.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any

from attention_others import fresh, of_qkv, plane_error, sdpa

import warploom
from warploom.core.dtypes import bf16
from warploom.core.targets import Target
from warploom.kernels.attention.choice import choose
from warploom.kernels.attention.problem import ArrayStrides, AttentionProblem, Even
from warploom.kernels.source import KernelCall
from warploom.measure.timing import Candidate
from warploom_lab.bench.baselines import flash_attention_4
from warploom_lab.bench.cells import CellScript, Figure, Row, Run, Trial

TOKENS, WIDTH = 16384, 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
CASES = ((128, False), (128, True), (64, False), (64, True), (256, False), (256, True))
METERED = ("warploom", "torch_cudnn", "flash_attention_4")
"""Each costs most of a second a cell."""
ZEROS = "head_dim 128 full 4096"
"""The cell that is run on zeros too."""


def at(head_dim: int, causal: bool, lengths: Collection[int] = LENGTHS) -> dict[str, Collection[Any]]:
    """Cells of a head_dim and mask at some lengths."""
    return {"head_dim": (head_dim,), "causal": (causal,), "seq": lengths}


def problem_of(head_dim: int, causal: bool, seq: int) -> AttentionProblem:
    """A cell's problem."""
    heads = WIDTH // head_dim
    return AttentionProblem(
        TOKENS // seq, heads, heads, Even(seq, seq), head_dim, bf16, window=(None, 0 if causal else None)
    )


def bytes_of(p: AttentionProblem) -> int:
    """The size of q, k and v."""
    return 3 * 2 * TOKENS * p.heads * p.head_dim


def is_causal(p: AttentionProblem) -> bool:
    """Whether later keys are hidden."""
    return p.window[1] == 0


def others_of(causal: bool) -> dict[str, Run]:
    """Every baseline that can be imported here."""
    found = {name: of_qkv(sdpa(name, causal=causal)) for name in ("torch_flash", "torch_cudnn")}
    latest, _ = flash_attention_4()
    return found | ({} if latest is None else {"flash_attention_4": of_qkv(lambda *x: latest(*x, causal=causal))})


def ours(p: AttentionProblem, config: Any = None) -> Run:
    """This package's call."""
    return of_qkv(lambda *x: warploom.attention(*x, causal=is_causal(p), config=config))


class Attention(CellScript[AttentionProblem]):
    """The script."""

    file, rounds, sample = "attention-cells.json", 11, 0.015
    baselines = ("torch_flash", "torch_cudnn", "flash_attention_4")
    figures = (
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

    def cells(self) -> list[AttentionProblem]:
        return [problem_of(*case, n) for n in LENGTHS for case in CASES]

    def name_of(self, cell: AttentionProblem) -> str:
        return f"head_dim {cell.head_dim} {'causal' if is_causal(cell) else 'full'} {cell.q_len}"

    def calls(self, cell: AttentionProblem, goal: Target) -> Iterator[KernelCall]:
        yield from choose(cell, goal)[0].calls(cell, ArrayStrides.contiguous(cell), 132)

    def head(self) -> Row:
        return {"flash_attention_4": flash_attention_4()[1]}

    def trial(self, cell: AttentionProblem) -> Trial:
        sets = [fresh(cell) for _ in range(self.gpu.sets(bytes_of(cell)))]
        others = others_of(is_causal(cell))
        calls = {"warploom": ours(cell)} | {name: others[name] for name in self.given.baselines if name in others}
        size = {"head_dim": cell.head_dim, "causal": is_causal(cell), "seq": cell.q_len}
        config = warploom.plan(*sets[0].values(), causal=is_causal(cell)).config
        facts = size | {"batch": cell.batch, "heads": cell.heads, "config": str(config)}
        if self.name_of(cell) == ZEROS:  # only to show why no figure may come from zeros
            nothing = {name: x.new_zeros(x.shape) for name, x in sets[0].items()}
            zeros = self.gpu.graphed(Candidate("zeros", lambda _: ours(cell)(nothing)), 1)
            facts["zeros"] = self.gpu.power(zeros, cell.flops)
        error = lambda _, out: plane_error(sets[0], out, cell.window, 0, 0)  # noqa: E731
        return Trial(calls, sets, error, cell.flops, metered=METERED, facts=facts)

    def summary(self, rows: list[Row]) -> Row:
        """Baselines of a figure that no row has, with the reason."""
        absent = sorted({f.baseline for f in self.figures} - {name for row in rows for name in row["ratio"]})
        reasons = {name: reason for row in rows for name, reason in row["not_run"].items()}
        return {"unchecked": [f"{name}: {reasons.get(name) or flash_attention_4()[1]}" for name in absent]}


if __name__ == "__main__":
    sys.exit(Attention().main())
