"""QuACK's matmul for sm_90a with clusters, compiled by CuTe DSL without a GPU, under all checks of the emulator.

    PYTHONPATH=src python benchmarks/ptx_cluster_gemm.py [--out benchmarks/results/static/ptx-cluster-gemm.json]

It is CUTLASS's persistent warp-specialised kernel for Hopper: multicast copies in a cluster of two CTAs, arrivals at
each other's mbarriers, a tile scheduler that tells its cluster by asynchronous stores, programmatic dependent launch.
Needs Python 3.12 or newer and ``pip install flash-attn-4`` (which brings QuACK, CuTe DSL and PyTorch), but no GPU.
Prints error relative to bf16's rounding, findings, processor seconds, in the emulator's own order and an adversarial
one. Exit status 1 where a result is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(
    CUTE_DSL_ARCH="sm_90a",
    CUTE_DSL_KEEP_PTX="1",
    CUTE_DSL_LINEINFO="1",
    CUTE_DSL_NO_CACHE="1",
    CUTE_DSL_DUMP_DIR=tempfile.gettempdir(),
)

import ml_dtypes
import numpy as np

import warploom
from warploom.core.dtypes import bf16
from warploom.layout.tensor_map import TensorMapSpec
from warploom_lab.bench.evidence import write

M, N, K, TILE, CLUSTER = 256, 256, 192, 128, (2, 1, 1)


def compiled() -> str:
    """The PTX of D (M, N) = A (M, K) times the transpose of B (N, K)."""
    cutlass: Any = importlib.import_module("cutlass")
    cute: Any = importlib.import_module("cutlass.cute")
    runtime: Any = importlib.import_module("cutlass.cute.runtime")
    family: Any = importlib.import_module("quack.gemm_default_epi").GemmDefaultSm90
    scheduler: Any = importlib.import_module("quack.tile_scheduler").TileSchedulerOptions
    gemm = family(cutlass.Float32, cutlass.BFloat16, (TILE, TILE), CLUSTER, pingpong=False, is_persistent=True)

    def tensor(*shape: int) -> Any:
        return runtime.make_fake_compact_tensor(cutlass.BFloat16, shape, stride_order=(2, 1, 0), assumed_align=16)

    given = (tensor(1, M, K), tensor(1, N, K), tensor(1, M, N), None, family.EpilogueArguments())
    return cute.compile(gemm, *given, scheduler(cutlass.Int32(2)), None, runtime.make_fake_stream()).__ptx__


def divisor(n: int) -> list[int]:
    """A number as CUTLASS's FastDivmod passes it: multiplier, shift, the number."""
    bits = 31 + (n - 1).bit_length()
    return [0, 0, 1] if n == 1 else [((1 << bits) + n - 1) // n & 0xFFFFFFFF, bits - 32, n]


def checked(ptx: str, seed: int | None) -> dict[str, Any]:
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
    start = time.process_time()
    found = warploom.check_ptx(
        ptx,
        (2, 1, 1),
        384,
        [[np.uint8(0)], *maps, *schedule],
        shared_bytes=227 * 1024,
        cluster=CLUSTER,
        seed=seed,
        file="gemm_sm90.ptx",
    )
    seconds = time.process_time() - start
    wanted = a.astype(np.float64) @ b.astype(np.float64).T
    error = np.abs(d.astype(np.float64) - wanted).max() / np.abs(wanted).max() * 2**8
    each = [f for cause in found.findings for f in (cause, *cause.follows)]
    findings = [{"kind": f.kind, "where": str(f.where), "message": f.message} for f in each]
    return {
        "seed": seed,
        "error": float(np.nan_to_num(error, nan=np.inf)),
        "findings": findings,
        "seconds": round(seconds, 2),
    }


def main() -> int:
    """Compile, check, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ptx = compiled()
    rows = [checked(ptx, seed) for seed in (None, 3)]
    for row in rows:
        print(row)
    versions = {name: importlib.metadata.version(name) for name in ("quack-kernels", "nvidia-cutlass-dsl")}
    if options.out:
        write(options.out, {"versions": versions, "runs": rows})
    return int(not all(row["error"] <= 2 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
