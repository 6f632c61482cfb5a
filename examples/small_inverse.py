"""Inverses of many 16×16 matrices by Gauss-Jordan elimination, one warp each: warploom check small_inverse.py"""

import numpy as np

from warploom.lang import Global, Kernel, Launch, f32, kernel

N = 16


@kernel(threads=2 * N, outputs=["inverse"])
def small_inverse(k: Kernel, a: Global[f32], inverse: Global[f32]) -> None:
    """[A | I] in shared memory, a column a lane; without pivoting, for matrices whose diagonal dominates."""
    both = k.shared(f32, (N, 2 * N))
    matrix = k.cta_x * (N * N)
    for row in range(N):
        value = k.register(f32, 0.0)
        with k.when(k.lane < N):
            value.set(a.load(matrix + row * N + k.lane))
        with k.when(k.lane == N + row):
            value.set(1.0)
        both.store(value, row, k.lane)
    k.syncwarp()
    with k.loop(N) as p:
        pivot = both.load(p, k.lane) / both.load(p, p)
        column = [both.load(row, p) for row in range(N)]
        k.syncwarp()  # every lane has read column p before one writes it
        for row in range(N):
            both.store(k.select(p == row, pivot, both.load(row, k.lane) - column[row] * pivot), row, k.lane)
        k.syncwarp()
    with k.when(k.lane >= N):
        for row in range(N):
            inverse.store(both.load(row, k.lane), matrix + row * N + (k.lane - N))


@small_inverse.example
def diagonally_dominant(rng: np.random.Generator) -> Launch:
    a = (rng.standard_normal((3, N, N)) + 8 * np.eye(N)).astype(np.float32)
    return Launch(len(a), [a, np.full_like(a, np.nan)], {"inverse": (np.linalg.inv(a.astype(np.float64)), 1e-4)})
