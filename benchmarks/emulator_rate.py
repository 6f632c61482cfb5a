"""What the emulator computes in a second, with all checks: ``python benchmarks/emulator_rate.py``. No GPU.

Each rung of attention's and matmul's ladders that has warp roles, at each size, beside rung 1 of attention. The time is
CPU time of one core, the best of the runs. Ends with exit code 1 where a cell is slower than ``targets.json`` asks, or
where the rate falls as the problem grows: the time of a check is linear in the work.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from scripts import targets

import warploom
from warploom_lab.kernels.attention.ladder import FULL_LADDER as ATTENTION
from warploom_lab.kernels.matmul.ladder import HOPPER_LADDER as GEMM

SIZES = (512, 1024, 2048)
HEAD_DIM = 128


def attention(key: str, tokens: int) -> tuple[Callable[[], Any], float]:
    """A call of a rung on one head, and how many operations its products are."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, tokens, 1, HEAD_DIM)).astype(ml_dtypes.bfloat16) for _ in range(3))
    config = ATTENTION.rung(key).config
    return lambda: warploom.attention(q, k, v, config=config), 4.0 * tokens**2 * HEAD_DIM


def gemm(key: str, n: int) -> tuple[Callable[[], Any], float]:
    """A product of two n×n matrices by a rung, and how many operations it is."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((n, n)).astype(np.float16) for _ in range(2))
    config = GEMM.rung(key).config
    return lambda: warploom.matmul(a, b, config=config), 2.0 * n**3


FAMILIES = {
    "attention": (attention, ["1", *(rung.key for rung in ATTENTION.rungs if rung.key.startswith("h"))]),
    "gemm": (gemm, [rung.key for rung in GEMM.rungs]),
}


def rate(make: Callable[[str, int], tuple[Callable[[], Any], float]], key: str, size: int, runs: int) -> float:
    """GFLOP/s of CPU time, the best of the runs."""
    call, operations = make(key, size)
    seconds: list[float] = []
    for _ in range(runs):
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
    return operations / min(seconds) / 1e9


def main() -> None:
    """Print each cell, and what misses its target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="tokens, or rows and columns of a product")
    parser.add_argument("--rungs", nargs="+", help="only these, as attention:h2")
    parser.add_argument("--runs", type=int, default=2)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    least, kept = (targets()["emulator"][name] for name in ("gflops", "kept_at_largest"))
    missed: list[str] = []
    print(f"{'GFLOP/s':14s}" + "".join(f"{size:>8d}" for size in given.sizes))
    for family, (make, keys) in FAMILIES.items():
        for key in keys:
            name = f"{family}:{key}"
            if given.rungs and name not in given.rungs:
                continue
            rate(make, key, 256, 1)  # traces the kernel
            print(f"{name:14s}", end="", flush=True)
            rates: list[float] = []
            for size in given.sizes:
                rates.append(rate(make, key, size, given.runs))
                print(f"{rates[-1]:8.2f}", end="", flush=True)
                if rates[-1] < least:
                    missed.append(f"{name} at {size}: {rates[-1]:.2f} of {least}")
            print(flush=True)
            if rates[-1] < kept * max(rates):
                missed.append(f"{name}: {rates[-1]:.2f} at {given.sizes[-1]}, {max(rates):.2f} at a smaller size")
    for text in missed:
        print(f"too slow: {text}")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
