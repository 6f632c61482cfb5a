"""``linear_cross_entropy`` forward and backward, beside PyTorch's and Liger-Kernel's, on one GPU in one process.

    PYTHONPATH=src python benchmarks/linear_cross_entropy_h200.py [--out FOLDER]

Output layers of 8192 × 128256 × 4096 and 16384 × 151936 × 2048 (tokens × words × width), bf16, mean reduction, with
gradients by the hidden states and the embeddings. Baselines: ``F.linear`` and ``F.cross_entropy`` under
``torch.compile``, and ``LigerFusedLinearCrossEntropyFunction`` where ``liger_kernel`` can be imported. Every candidate
is checked first: its loss, and its gradients for some rows and some words, against float64. Extra memory is what a step
takes beyond inputs and gradients. Ours runs with the usual workspace, and with one of 64 MiB. Writes
linear-cross-entropy.json. Exit code 1 if a result is wrong, if ours takes longer than ``torch.compile``, or more memory
than it was given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from reduce_cells import extra_bytes

import warploom
from warploom.core.targets import Target
from warploom.kernels.source import KernelCall
from warploom.ops.loss import SMALL_WORKSPACE_MIB, WORKSPACE_MIB
from warploom_lab.bench.cells import CellScript, Figure, Load, Row, Run, Trial

SIZES = ((8192, 128256, 4096), (16384, 151936, 2048))
CHECKED = 64
"""Rows and words whose gradients are checked."""
SMALL = f"warploom, {SMALL_WORKSPACE_MIB} MiB"
MOST_MIB = {"warploom": WORKSPACE_MIB, SMALL: SMALL_WORKSPACE_MIB}
TOLERANCE = 2.0**-6
"""Of the largest element of a gradient, for derivatives by the logits in bf16 and results in bf16."""
LOSS_TOLERANCE = 1e-3

Loss = Callable[[Any, Any, Any], Any]
Tensor = torch.Tensor


def ours(workspace_mib: int) -> Loss:
    """The package's own."""
    return lambda *given: warploom.linear_cross_entropy(*given, reduction="mean", workspace_mib=workspace_mib)


def plain(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """What one writes in PyTorch."""
    return torch.nn.functional.cross_entropy(torch.nn.functional.linear(x, w), target)


def liger() -> Loss | None:
    """Liger-Kernel's fused loss, if it is there."""
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
            LigerFusedLinearCrossEntropyFunction,
        )
    except ImportError:
        return None

    def loss(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        found = LigerFusedLinearCrossEntropyFunction.apply(x, w, target)
        return found[0] if isinstance(found, tuple) else found

    return loss


def step(loss: Loss) -> Run:
    """Forward and backward: the loss, and the gradients by the hidden states and the embeddings."""

    def run(given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        x, w, target = given
        found = loss(x, w, target)
        return found.detach(), *torch.autograd.grad(found, (x, w))

    return run


class Reference:
    """The mean loss, and the gradients by the first rows of x and the first words of w, by float64 in blocks."""

    def __init__(self, x: Tensor, w: Tensor, target: Tensor, block: int = 512) -> None:
        m, total = x.shape[0], 0.0
        self.by_w = torch.zeros(min(CHECKED, w.shape[0]), x.shape[1], dtype=torch.float64, device=x.device)
        self.by_x = torch.empty(0)
        for start in range(0, m, block):
            rows, own = x[start : start + block].detach(), target[start : start + block]
            logits = (rows.float() @ w.detach().float().T).double()  # 24 bits of f32 sums are far below the tolerance
            lse = torch.logsumexp(logits, 1)
            places = torch.arange(len(own), device=x.device)
            total += float((lse - logits[places, own]).sum())
            logits.sub_(lse[:, None]).exp_()
            logits[places, own] -= 1.0
            self.by_w += logits[:, :CHECKED].T @ rows.double() / m
            if start == 0:
                first = logits[:CHECKED].float() @ w.detach().float()
                self.by_x = first.double() / m
            del logits
        self.loss = total / m

    def error(self, loss: Tensor, by_x: Tensor, by_w: Tensor) -> float:
        """The largest error over what is allowed: of the loss, and of gradients over their largest element."""
        tolerance = LOSS_TOLERANCE if loss.dtype is torch.float32 else self.loss * 2.0**-8  # of bf16: its rounding
        found = [abs(float(loss) - self.loss) / tolerance]
        for gradient, expected in ((by_x, self.by_x), (by_w, self.by_w)):
            largest = float(expected.abs().max())
            off = float((gradient[: len(expected)].double() - expected).abs().max())
            found.append(off / largest / TOLERANCE)
        return float(torch.tensor(found).max())  # NaN where any is


@dataclass(frozen=True)
class Layer:
    """An output layer."""

    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.m} × {self.n} × {self.k}"


class Losses(CellScript[Layer]):
    """The script."""

    file, listed, sample = "linear-cross-entropy.json", "rows", 0.02
    baselines = ("torch.compile", "liger")
    figures = (Figure("torch.compile", 1.0),)

    def cells(self) -> list[Layer]:
        return [Layer(*size) for size in SIZES]

    def calls(self, cell: Layer, goal: Target) -> Iterator[KernelCall]:
        x, w = (torch.empty(rows, cell.k, dtype=torch.bfloat16) for rows in (cell.m, cell.n))
        for mib in MOST_MIB.values():
            for plan in warploom.plan_linear_cross_entropy(x, w, reduction="mean", workspace_mib=mib):
                yield from plan.steps.calls

    def trial(self, cell: Layer) -> Trial:
        torch.manual_seed(0)
        x, w = (
            (torch.randn(rows, cell.k, device="cuda") / cell.k**0.25).to(torch.bfloat16).requires_grad_()
            for rows in (cell.m, cell.n)
        )
        given = x, w, torch.randint(cell.n, (cell.m,), device="cuda")
        reference, extra = Reference(*given), dict[str, int]()
        own: dict[str, Loss | None] = {name: ours(mib) for name, mib in MOST_MIB.items()}
        losses = own | {"torch.compile": torch.compile(plain), "liger": liger()}
        calls = {n: step(of) for n, of in losses.items() if of is not None and n in (*own, *self.given.baselines)}

        def error(name: str, found: tuple[Tensor, ...]) -> float:
            results = sum(x.numel() * x.element_size() for x in found)
            extra[name] = extra_bytes(lambda: calls[name](given)) - results
            return reference.error(*found)

        plans = warploom.plan_linear_cross_entropy(x.detach(), w.detach(), reduction="mean")
        plan = [plan.workspace_bytes for plan in plans]
        size = {"m": cell.m, "n": cell.n, "k": cell.k}
        return Trial(calls, [given], error, graphs=False, facts=size | {"plan": plan, "extra_bytes": extra})

    def rates(self, cell: Layer, load: Load) -> Row:
        """Seconds, and ratios."""
        return {"seconds": {name: m.seconds.json() for name, m in load.found.items()}, "ratio": load.ratio()}

    def missed(self, rows: list[Row]) -> list[str]:
        """Besides, where a call of ours takes too much memory."""
        extra = [(row["cell"], name, row["extra_bytes"][name] / 2**20) for row in rows for name in MOST_MIB]
        large = [f"{cell}: {n:.0f} MiB beyond the gradients by {name}" for cell, name, n in extra if n > MOST_MIB[name]]
        return super().missed(rows) + large

    def line(self, row: Row) -> str:
        steps = (
            f"{name} {seconds['median'] * 1e3:.2f} ms, {row['extra_bytes'][name] / 2**20:.0f} MiB"
            for name, seconds in row["seconds"].items()
        )
        return f"{self.line_head(row)}  {'  '.join(steps)}"


if __name__ == "__main__":
    sys.exit(Losses().main())
