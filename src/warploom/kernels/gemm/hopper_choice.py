"""``wgmma`` configurations to choose from, and what a launch of one is expected to take on an H100 or H200."""

from __future__ import annotations

from dataclasses import replace

from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.problem import GemmProblem

SMS = 132
CLOCK = 1.65e9
"""Hz under load."""
FLOPS_PER_CYCLE = 4096
"""Per SM, dense ``wgmma`` of 16-bit inputs."""
LOAD_BYTES_PER_CYCLE = 60
"""Per SM, from the L2."""
BANDWIDTH = 4.3e12
"""DRAM bytes per second."""
MOST_FLOPS = 7.4e14
"""Per second: what the power limit leaves of the tensor cores' rate."""
START_SECONDS = 3.0e-6
EPILOGUE_CYCLES = 0.04
"""Per element of C and SM, where nothing hides it."""
SECOND_KERNEL_SECONDS = 2.5e-6


def hopper_candidates(problem: GemmProblem) -> tuple[HopperGemmConfig, ...]:
    """The tiles to choose from, the largest first."""
    base = HopperGemmConfig(dtype=problem.dtype, block_stride=8, in_flight=True, persistent=True)
    turns = replace(base, pingpong=True)
    tiles = (
        replace(base, tile_m=256, tile_n=192, stages=3),
        base,
        replace(base, tile_m=256, tile_n=128),
        replace(turns, tile_m=128, tile_n=128, stages=6),
        replace(base, tile_m=128, tile_n=128, stages=6),
        replace(base, tile_m=128, tile_n=64, stages=6),
        replace(turns, tile_m=64, tile_n=128, stages=8),
        replace(turns, tile_m=64, tile_n=64, stages=8),
    )
    return tuple(replace(t, split_k=s) for t in tiles for s in (1, 2, 3, 4))


def hopper_seconds(problem: GemmProblem, config: HopperGemmConfig) -> float:
    """What the model expects a launch to take."""
    c = config
    rounds = -(-problem.all_tiles(c) // SMS)
    product = 2 * c.tile_m * c.tile_n * c.tile_k / FLOPS_PER_CYCLE
    cycles = problem.tiles_per_split(c) * max(product, c.stage_bytes / LOAD_BYTES_PER_CYCLE)
    epilogue = EPILOGUE_CYCLES * c.tile_m * c.tile_n
    total = rounds * cycles + (epilogue if c.pingpong and rounds > 1 else rounds * epilogue)
    compute = max(total / CLOCK, problem.flops / MOST_FLOPS)
    extra = 0.0
    if c.split_k > 1:  # the parts are written, and read by a kernel of its own
        parts_bytes = 4 * c.split_k * problem.batch * problem.m * problem.n
        extra = SECOND_KERNEL_SECONDS + 2 * parts_bytes / BANDWIDTH
    return max(compute, problem.bytes / BANDWIDTH) + START_SECONDS + extra
