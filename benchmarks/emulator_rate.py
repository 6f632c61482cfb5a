"""What the emulator computes with all checks: ``python benchmarks/emulator_rate.py``. CPU time of one core, no GPU."""

from __future__ import annotations

import time
import warnings

import ml_dtypes
import numpy as np

import warploom
from warploom_lab.kernels.attention.ladder import LADDER

SEQUENCE, HEAD_DIM = 2048, 128


def main() -> None:
    """Rung 1 of attention on one head, the better of two runs."""
    warnings.simplefilter("ignore")
    config = next(rung.config for rung in LADDER.rungs if rung.key == "1")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, SEQUENCE, 1, HEAD_DIM)).astype(ml_dtypes.bfloat16) for _ in range(3))
    seconds: list[float] = []
    for _ in range(2):
        start = time.process_time()
        warploom.attention(q, k, v, config=config)
        seconds.append(time.process_time() - start)
    rate = 4 * SEQUENCE**2 * HEAD_DIM / min(seconds) / 1e9
    print(f"attention 1x{SEQUENCE}x1x{HEAD_DIM}, rung 1: {rate:.2f} GFLOP/s, {min(seconds):.2f} s of CPU time")


if __name__ == "__main__":
    main()
