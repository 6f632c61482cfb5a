"""Top-1 search by inner product: the best of millions of vectors for each query, in blocks that fit the GPU.

    python examples/nearest_neighbours.py --vectors 10000000 --queries 1024

The scores are never written: ``matmul_reduce`` returns the largest of each row and its column. With NumPy arrays and no
GPU it runs on the emulator; keep the sizes small there.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

import warploom


def search(queries: Any, blocks: Iterator[Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(best score, its number) of each row of ``queries`` (q, d) over all vectors of ``blocks``, each (n, d)."""
    best, where = np.full(len(queries), -np.inf, np.float32), np.zeros(len(queries), np.int64)
    seen = 0
    for block in blocks:
        score, index = (_to_numpy(x) for x in warploom.matmul_reduce(queries, block.T, "max", return_index=True))
        better = score > best
        best[better], where[better] = score[better], index[better] + seen
        seen += len(block)
    return best, where


def _to_numpy(x: Any) -> np.ndarray[Any, Any]:
    return x if isinstance(x, np.ndarray) else x.cpu().numpy()


def main() -> None:
    """Random vectors: on the GPU through torch where there is one."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--vectors", type=int, default=4096)
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--dimension", type=int, default=128)
    parser.add_argument("--block", type=int, default=1 << 20, help="vectors per block")
    sizes = parser.parse_args()
    queries, blocks = _random(sizes)
    start = time.perf_counter()
    best, where = search(queries, blocks)
    seconds = time.perf_counter() - start
    print(f"{sizes.queries} queries against {sizes.vectors} vectors in {seconds:.3f} s")
    for i in range(min(4, len(best))):
        print(f"  query {i}: vector {where[i]}, score {best[i]:.3f}")


def _random(sizes: argparse.Namespace) -> tuple[Any, Iterator[Any]]:
    counts = [min(sizes.block, sizes.vectors - i) for i in range(0, sizes.vectors, sizes.block)]
    try:
        import torch
    except ImportError:
        torch = None
    if torch is not None and torch.cuda.is_available():
        options = {"device": "cuda", "dtype": torch.bfloat16}
        return torch.randn(sizes.queries, sizes.dimension, **options), (
            torch.randn(n, sizes.dimension, **options) for n in counts
        )
    import ml_dtypes

    rng = np.random.default_rng(0)

    def draw(n: int) -> np.ndarray[Any, Any]:
        return rng.standard_normal((n, sizes.dimension)).astype(ml_dtypes.bfloat16)

    return draw(sizes.queries), (draw(n) for n in counts)


if __name__ == "__main__":
    main()
