"""``wgmma`` configurations to choose from, and what a launch of one is expected to take on an H100 or H200.

The constants are fitted to the products in ``benchmarks/results/h200/gemm.json``. Under load the power limit, not the
tensor cores, decides the clock, so it stands for what the cores sustain.
"""

from __future__ import annotations

import math
from dataclasses import replace

from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.problem import GemmProblem

SMS = 132
CLOCK = 1.28e9
"""Hz that the power limit leaves under ``wgmma``."""
FLOPS_PER_CYCLE = 4096
"""Per SM, dense ``wgmma`` of 16-bit inputs."""
LOAD_BYTES_PER_CYCLE = 89
"""Per SM, from the L2."""
BANDWIDTH = 4.04e12
"""DRAM bytes per second."""
EPILOGUE_CYCLES = 0.032
"""Per element of C and SM, where nothing hides it."""
START_SECONDS = 2.2e-6
SECOND_KERNEL_SECONDS = 1.8e-6
LONG_SECONDS = 4e-3
"""Launches from here on warm the GPU up: what loads fewer bytes per operation keeps a higher clock."""
WARM_BYTES = 0.0118
"""Bytes loaded per operation above which such a launch slows down, with the root of their ratio."""
LEAST_ROWS = 65
"""Of M and N: below, ``mma.sync`` has smaller tiles."""
_SPLITS = (1, 2, 3, 4, 6)


def hopper_candidates(problem: GemmProblem) -> tuple[HopperGemmConfig, ...]:
    """The tiles to choose from, the largest first; none for products that leave most of every tile empty."""
    if min(problem.m, problem.n) < LEAST_ROWS:
        return ()
    together = HopperGemmConfig(dtype=problem.dtype, block_stride=8, in_flight=True, persistent=True)
    turns = replace(together, pingpong=True)
    tiles = (
        together,
        replace(together, tile_m=256, tile_n=128),
        replace(together, tile_m=128, tile_n=192, stages=5),
        replace(turns, tile_m=128, tile_n=192),
        replace(together, tile_m=128, tile_n=128, stages=6),
        replace(turns, tile_m=128, tile_n=128, stages=6),
        replace(turns, tile_m=64, tile_n=128, stages=8),
        replace(turns, tile_m=64, tile_n=64, stages=8),
    )
    return tuple(replace(t, split_k=s) for t in tiles for s in _SPLITS)


def hopper_seconds(problem: GemmProblem, config: HopperGemmConfig) -> float:
    """What the model expects a launch to take."""
    c = config
    tiles = problem.all_tiles(c)
    rounds = -(-tiles // SMS)
    product = 2 * c.tile_m * c.tile_n * c.tile_k / FLOPS_PER_CYCLE
    loading = c.stage_bytes / LOAD_BYTES_PER_CYCLE * min(1.0, tiles / SMS)
    epilogue = EPILOGUE_CYCLES * c.tile_m * c.tile_n * (1 if c.split_k == 1 else 2)  # parts are f32
    hidden = c.pingpong and rounds > 1
    cycles = rounds * problem.tiles_per_split(c) * max(product, loading) + (epilogue if hidden else rounds * epilogue)
    compute = cycles / CLOCK
    loaded = c.stage_bytes / (2 * c.tile_m * c.tile_n * c.tile_k)
    if compute > LONG_SECONDS:
        compute *= math.sqrt(max(1.0, loaded / WARM_BYTES))
    extra = 0.0
    if c.split_k > 1:  # the parts are written, and read by a kernel of its own
        parts_bytes = 4 * c.split_k * problem.batch * problem.m * problem.n
        extra = SECOND_KERNEL_SECONDS + 2 * parts_bytes / BANDWIDTH
    return max(compute, problem.bytes / BANDWIDTH) + START_SECONDS + extra
