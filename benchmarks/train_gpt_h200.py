"""``examples/train_gpt.py`` with this package's kernels and with PyTorch's, three seeds each, in a process.

    PYTHONPATH=src python benchmarks/train_gpt_h200.py [--dry-run] [--steps 300] [--out FOLDER]

Each choice of kernels is compiled once and trained from every seed: the same first parameters, the same batches. Writes
every step's loss, tokens per second and the peak of memory as train-gpt.json to the folder (by default ``$OUT``, else
out), about two minutes on an H200. Exit code 1 if some last losses lie further from PyTorch's than those of the seeds
from each other.
``--dry-run`` takes two steps of a tiny model on the CPU.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import write

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from train_gpt import TINY, Size, Training  # noqa: E402  # pyright: ignore[reportMissingImports]

KERNELS = ("warploom", "warploom"), ("warploom", "torch"), ("torch", "torch")
"""Whose attention and whose loss."""
LAST = 30
"""Steps at the end whose mean loss is compared: those of one step are of one batch."""


def end(run: dict[str, Any]) -> float:
    """The mean of a run's last losses."""
    last = run["losses"][-LAST:]
    return sum(last) / len(last)


def trained(
    kernels: tuple[str, str], size: Size, device: str, seeds: Sequence[int], steps: int
) -> list[dict[str, Any]]:
    """A run for each seed. What was compiled for it is gone afterwards."""
    training = Training(size, *kernels, device)
    found: list[dict[str, Any]] = []
    for seed in seeds:
        found.append(training.run(seed, steps))
        rate = found[-1]["tokens_per_second"]
        print(f"{' and '.join(kernels)} seed {seed}: loss {end(found[-1]):.4f}, {rate:.0f} tokens/s", flush=True)
    del training
    torch.compiler.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
    return found


def apart(runs: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """(largest distance from PyTorch's from the same seed, of two seeds of one) of the mean of the last losses."""
    ends: dict[tuple[str, str], dict[int, float]] = {}
    for run in runs:
        ends.setdefault((run["attention"], run["loss"]), {})[run["seed"]] = end(run)
    between = max(abs(own[seed] - x) for own in ends.values() for seed, x in ends["torch", "torch"].items())
    return between, max(max(own.values()) - min(own.values()) for own in ends.values())


def main() -> int:
    """Train, compare, write."""
    parser = parser_of(__doc__)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    device, start = "cpu" if given.dry_run else "cuda", time.monotonic()
    size, steps = (TINY, 2) if given.dry_run else (Size(), given.steps)
    runs = [run for kind in KERNELS for run in trained(kind, size, device, given.seeds, steps)]
    between, spread = apart(runs)
    result = {
        "steps": steps,
        "tokens": size.batch * size.length,
        "last": LAST,
        "apart": between,
        "spread": spread,
        "runs": runs,
    }
    file = given.out / "train-gpt.json"
    write(file, result)
    print(f"apart {between:.4f}, seeds {spread:.4f}; {time.monotonic() - start:.0f} s, {file}")
    return int(not between <= spread)


if __name__ == "__main__":
    sys.exit(main())
