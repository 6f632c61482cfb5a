"""QuACK's matmul for sm_90a with clusters, compiled by CuTe DSL without a GPU, under all checks of the emulator.

    PYTHONPATH=src python benchmarks/ptx_cluster_gemm.py [--out DIR]

It is CUTLASS's persistent warp-specialised kernel for Hopper: multicast copies in a cluster of two CTAs, arrivals at
each other's mbarriers, a tile scheduler that tells its cluster by asynchronous stores, programmatic dependent launch.
Needs Python 3.12 or newer and ``pip install flash-attn-4`` (which brings QuACK, CuTe DSL and PyTorch), but no GPU.
Prints, and writes to ptx-cluster-gemm.json, error relative to bf16's rounding, findings, processor seconds, in the
emulator's own order and an adversarial one. Exit status 1 where a result is wrong.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import cute_dsl as dsl
import ml_dtypes
import numpy as np
from cute_dsl import Row

from warploom.core.dtypes import bf16
from warploom.layout.tensor_map import TensorMapSpec

M, N, K, TILE, CLUSTER = 256, 256, 192, 128, (2, 1, 1)


def compiled() -> str:
    """The PTX of D (M, N) = A (M, K) times the transpose of B (N, K)."""
    cutlass = dsl.cutlass()
    family: Any = importlib.import_module("quack.gemm_default_epi").GemmDefaultSm90
    scheduler: Any = importlib.import_module("quack.tile_scheduler").TileSchedulerOptions
    gemm = family(cutlass.Float32, cutlass.BFloat16, (TILE, TILE), CLUSTER, pingpong=False, is_persistent=True)

    a, b, d = (dsl.fake(cutlass.BFloat16, 1, *shape) for shape in ((M, K), (N, K), (M, N)))
    given = (a, b, d, None, family.EpilogueArguments())
    return dsl.compiled(gemm, *given, scheduler(cutlass.Int32(2)), None, dsl.stream())


def divisor(n: int) -> list[int]:
    """A number as CUTLASS's FastDivmod passes it: multiplier, shift, the number."""
    bits = 31 + (n - 1).bit_length()
    return [0, 0, 1] if n == 1 else [((1 << bits) + n - 1) // n & 0xFFFFFFFF, bits - 32, n]


def checked(ptx: str, seed: int | None) -> Row:
    """One run by one cluster, which takes both tiles of 256 x 128 in turn."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((M, K), (N, K)))
    d = np.full((M, N), np.nan, ml_dtypes.bfloat16)

    def copied(x: Any, columns: int, rows: int) -> Any:
        return x, TensorMapSpec(bf16, x.shape[::-1], (2 * x.shape[1],), (columns, rows), 2 * columns)

    # Clusters along M, N and the batch; the raster runs along N; clusters of the problem, of a group, groups.
    clusters = N // TILE
    schedule = [1, clusters, 1, 1, *divisor(clusters), 1, *divisor(clusters), *divisor(1), *divisor(clusters)]
    maps = [copied(a, 64, TILE), copied(b, 64, TILE // 2), copied(d, 32, TILE)]
    given = [[np.uint8(0)], *maps, *schedule]
    _, row = dsl.checked(ptx, (2, 1, 1), given, "gemm_sm90.ptx", cluster=CLUSTER, seed=seed)
    error = dsl.error_of(d.astype(np.float64), a.astype(np.float64) @ b.astype(np.float64).T)
    return {"seed": seed, "error": error, **row}


def runs() -> Iterator[Row]:
    """Both orders."""
    ptx = compiled()
    yield from (checked(ptx, seed) for seed in (None, 3))


if __name__ == "__main__":
    packages = "quack-kernels", "nvidia-cutlass-dsl"
    sys.exit(dsl.main(__doc__, "ptx-cluster-gemm.json", runs(), lambda row: row["error"] <= 2, packages))
