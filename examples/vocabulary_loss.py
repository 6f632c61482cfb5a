"""The loss of a language model's output layer without its logits: 128k words take no tokens × words matrix.

    python examples/vocabulary_loss.py --tokens 8192 --words 131072 --width 4096

On a GPU (through torch) it compares time and memory with ``torch.nn.functional.cross_entropy``; without one, small
sizes run on the emulator and are checked against NumPy.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import warploom


def main() -> None:
    """Random hidden states, embeddings and targets."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--words", type=int, default=512)
    parser.add_argument("--width", type=int, default=64)
    sizes = parser.parse_args()
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None and torch.cuda.is_available():
        _on_gpu(torch, sizes)
    else:
        _on_cpu(sizes)


def _on_gpu(torch: Any, sizes: argparse.Namespace) -> None:
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(sizes.tokens, sizes.width, **options) / sizes.width**0.5
    w = torch.randn(sizes.words, sizes.width, **options)
    target = torch.randint(sizes.words, (sizes.tokens,), device="cuda")
    ways = {
        "warploom.linear_cross_entropy": lambda: warploom.linear_cross_entropy(x, w, target).mean(),
        "torch cross_entropy(x @ w.T)": lambda: torch.nn.functional.cross_entropy((x @ w.T).float(), target),
    }
    for name, way in ways.items():
        way()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        loss = float(way())
        seconds = time.perf_counter() - start
        extra = (torch.cuda.max_memory_allocated() - before) / 2**20
        print(f"{name:32} loss {loss:.4f}, {seconds * 1e3:8.2f} ms, {extra:9.1f} MiB beyond the inputs")


def _on_cpu(sizes: argparse.Namespace) -> None:
    import ml_dtypes

    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((n, sizes.width)).astype(ml_dtypes.bfloat16) for n in (sizes.tokens, sizes.words))
    target = rng.integers(sizes.words, size=sizes.tokens)
    loss = warploom.linear_cross_entropy(x, w, target)
    logits = x.astype(np.float64) @ w.astype(np.float64).T
    top = logits.max(1)
    expected = top + np.log(np.exp(logits - top[:, None]).sum(1)) - logits[np.arange(sizes.tokens), target]
    print(f"mean loss {loss.mean():.4f}; furthest from float64: {np.abs(loss - expected).max():.1e}")


if __name__ == "__main__":
    main()
