"""``linear_cross_entropy`` forward and backward, beside PyTorch's and Liger-Kernel's, on one GPU in one process.

    PYTHONPATH=src python benchmarks/linear_cross_entropy_h200.py [--dry-run] [--out FOLDER]

Output layers of 8192 × 128256 × 4096 and 16384 × 151936 × 2048 (tokens × words × width), bf16, mean reduction, with
gradients by the hidden states and the embeddings. Baselines: ``F.linear`` and ``F.cross_entropy`` under
``torch.compile``, and ``LigerFusedLinearCrossEntropyFunction`` where ``liger_kernel`` can be imported. Every candidate
is checked first: its loss, and its gradients for some rows and some words, against float64. Then all are timed
interleaved; peak memory is what a step takes beyond inputs and gradients. Writes linear-cross-entropy.json to the
folder (by default ``$OUT``, else out), about two minutes on an H200. Exit code 1 if a result of ours is wrong or takes
more than 64 MiB. ``--dry-run`` does the same at a small size on the CPU, without times.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from reduce_baselines import extra_bytes

import warploom
from warploom.measure.timing import Candidate, EventClock, measure, paired_ratio
from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.environment import environment
from warploom_lab.bench.evidence import write

SIZES = ((8192, 128256, 4096), (16384, 151936, 2048))
DRY = ((96, 200, 32),)
CHECKED = 64
"""Rows and words whose gradients are checked."""
MOST_EXTRA = 64 << 20
TOLERANCE = 2.0**-6
"""Of the largest element of a gradient, for derivatives by the logits in bf16 and results in bf16."""

Loss = Callable[[Any, Any, Any], Any]
Tensor = torch.Tensor


def ours(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """The package's own."""
    return warploom.linear_cross_entropy(x, w, target, reduction="mean")


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


def candidates(device: str) -> dict[str, Loss]:
    """By name, ours first."""
    found: dict[str, Loss] = {"warploom": ours, "torch.compile": torch.compile(plain) if device == "cuda" else plain}
    if device == "cuda" and (other := liger()) is not None:
        found["liger"] = other
    return found


def step(loss: Loss, x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    """Forward and backward into fresh gradients."""
    x.grad = w.grad = None
    found = loss(x, w, target)
    found.backward()
    return found.detach()


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

    def errors(self, loss: Tensor, x: Tensor, w: Tensor) -> dict[str, float]:
        """Of the loss, absolute; of the gradients, over their largest element."""
        pairs = {"dx": (x.grad, self.by_x), "dw": (w.grad, self.by_w)}
        found = {"loss": abs(float(loss) - self.loss)}
        for name, (gradient, expected) in pairs.items():
            assert gradient is not None
            largest = float(expected.abs().max())
            found[name] = float((gradient[: len(expected)].double() - expected).abs().max()) / largest
        return found


def compared(size: tuple[int, int, int], device: str, rounds: int) -> dict[str, Any]:
    """All candidates at a size: errors, memory, seconds and how many times as fast ours is."""
    m, n, k = size
    torch.manual_seed(0)
    x = (torch.randn(m, k, device=device) / k**0.25).to(torch.bfloat16).requires_grad_()
    w = (torch.randn(n, k, device=device) / k**0.25).to(torch.bfloat16).requires_grad_()
    target = torch.randint(n, (m,), device=device)
    reference = Reference(x, w, target)
    row: dict[str, Any] = {"m": m, "n": n, "k": k, "errors": {}, "extra_bytes": {}, "failed": {}}
    row["plan"] = [plan.workspace_bytes for plan in warploom.plan_linear_cross_entropy(x.detach(), w.detach())]
    usable: dict[str, Callable[[], Any]] = {}
    for name, loss in candidates(device).items():
        try:
            row["errors"][name] = reference.errors(step(loss, x, w, target), x, w)
        except Exception as error:  # PyTorch's errors have no common base: out of memory, a failed compilation
            row["failed"][name] = str(error).splitlines()[0][:200]
            continue
        usable[name] = lambda loss=loss: step(loss, x, w, target)
    if device != "cuda":
        return row
    for name, call in usable.items():
        row["extra_bytes"][name] = extra_bytes(torch, call)  # the last step's gradients are there before it
    clock = EventClock(int(torch.cuda.current_stream(0).cuda_stream))
    timed = [Candidate(name, lambda _, call=call: call()) for name, call in usable.items()]
    found = measure(timed, 1, clock, rounds=rounds, sample_seconds=0.02)
    row["seconds"] = {name: measured.seconds.json() for name, measured in found.items()}
    row["over"] = {name: paired_ratio(found["warploom"], one) for name, one in found.items() if name != "warploom"}
    return row


def wrong(row: dict[str, Any]) -> list[str]:
    """What of ours is wrong or takes too much memory."""
    name = f"{row['m']} × {row['n']} × {row['k']}"
    if "warploom" in row["failed"]:
        return [f"{name}: {row['failed']['warploom']}"]
    errors = row["errors"]["warploom"]
    found = [f"{name}: {key} is off by {errors[key]:.2g}" for key in ("dx", "dw") if not errors[key] <= TOLERANCE]
    if not errors["loss"] <= 1e-3:
        found.append(f"{name}: the loss is off by {errors['loss']:.2g}")
    extra = row["extra_bytes"].get("warploom", 0)
    return [*found, *([f"{name}: {extra / 2**20:.0f} MiB beyond the gradients"] if extra > MOST_EXTRA else [])]


def main() -> int:
    """Measure, write, print."""
    parser = parser_of(__doc__)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    device, start = "cpu" if given.dry_run else "cuda", time.monotonic()
    rows = [compared(size, device, given.rounds) for size in (DRY if given.dry_run else SIZES)]
    file = given.out / "linear-cross-entropy.json"
    write(file, {"environment": environment(None if given.dry_run else 0), "rows": rows})
    for row in rows:
        print(row["m"], row["n"], row["k"], "errors", row["errors"], row["failed"])
        for name, seconds in row.get("seconds", {}).items():
            extra, over = row["extra_bytes"][name] / 2**20, row["over"].get(name)
            beside = "" if over is None else f"{over:.3f}×"
            print(f"  {name}: {seconds['median'] * 1e3:.2f} ms, {extra:.0f} MiB", beside)
    failures = [line for row in rows for line in wrong(row)]
    print(*failures, f"{time.monotonic() - start:.0f} s, {file}", sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
