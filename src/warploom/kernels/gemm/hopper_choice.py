"""Configurations fed by the TMA to choose from, and what a launch of one is expected to take on an H100 or H200.

The constants are fitted to products measured on an H200; a test holds what the model takes against the fastest in
``benchmarks/results/h200/gemm.json``. Under load the power limit, not the
tensor cores, decides the clock, so it stands for what the cores sustain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.problem import GemmProblem

SMS = 132


@dataclass(frozen=True)
class Pace:
    """What the consumers take: Hz that the power limit leaves them, and per SM and cycle, dense 16-bit inputs."""

    clock: float
    flops_per_cycle: float
    stage_cycles: int
    """The least that a stage takes, however small: waits and barriers."""
    tile_cycles: int
    epilogue_cycles: float
    """Per tile, and per element of C and SM, where nothing hides them."""


WGMMA = Pace(1.28e9, 4096, 195, 457, 0.079)
MMA_SYNC = Pace(1.78e9, 2307, 510, 133, 0.0098)
LOAD_BYTES_PER_CYCLE = 92
"""Per SM, from the L2."""
BANDWIDTH = 4.4e12
"""DRAM bytes per second."""
START_SECONDS = 1.4e-6
SECOND_KERNEL_SECONDS = 2.3e-6
LEAST_LOADED = 0.0118
"""Bytes loaded per operation by the largest tile: more take power, and with it clock."""
POWER = 0.10
LONG_POWER = 0.5
LONG_SECONDS = 4e-3
"""The exponent of their ratio, and what it is in launches so long that the GPU warms up."""
LEAST_ROWS = 33
"""Of M and N: below, ``mma.sync`` has smaller tiles."""
SHORT_K = 512
_SPLITS = (1, 2, 3, 4, 6, 8)


def hopper_candidates(problem: GemmProblem) -> tuple[HopperGemmConfig, ...]:
    """The tiles to choose from, the largest first; none for products that leave most of every tile empty."""
    if min(problem.m, problem.n) < LEAST_ROWS:
        return ()
    together = HopperGemmConfig(dtype=problem.dtype, block_stride=8, in_flight=True, persistent=True)
    turns = replace(together, pingpong=True)
    alone = replace(together, tile_m=64, consumers=1)
    whole = problem.b.k_contiguous  # else half a panel of B is loaded in vain, which small tiles cannot afford
    tiles = (
        together,
        replace(together, tile_m=256, tile_n=128),
        replace(together, tile_m=128, tile_n=192, stages=5),
        replace(turns, tile_m=128, tile_n=192),
        replace(together, tile_m=128, tile_n=160, stages=5),
        replace(turns, tile_m=128, tile_n=160, stages=5),
        replace(together, tile_m=128, tile_n=128, stages=6),
        replace(turns, tile_m=128, tile_n=128, stages=6),
        replace(alone, tile_n=256, stages=5),
        *((replace(alone, tile_n=160, stages=6), replace(together, tile_n=96, stages=6)) if whole else ()),
        replace(turns, tile_m=64, tile_n=128, stages=8),
        replace(turns, tile_m=64, tile_n=64, stages=8),
    )
    return tuple(replace(t, split_k=s) for t in tiles for s in _SPLITS)


def warp_candidates(problem: GemmProblem) -> tuple[HopperGemmConfig, ...]:
    """Tiles that ``mma.sync`` multiplies, the largest first; none where :func:`hopper_candidates` has none.

    No call chooses them. The f32 parts of a split K leave from the registers, which takes so long that taking turns
    does not hide it.
    """
    if min(problem.m, problem.n) < LEAST_ROWS:
        return ()
    base = HopperGemmConfig(
        dtype=problem.dtype, block_stride=8, persistent=True, mma_sync=True, accumulate=problem.accumulate
    )  # fmt: skip
    turns = replace(base, pingpong=True)
    tiles = (
        base,
        replace(base, tile_m=256, tile_n=128),
        replace(base, tile_m=128, tile_n=128, stages=6),
        replace(turns, tile_m=128, tile_n=128, stages=6),
        replace(base, tile_m=64, tile_n=256),
        replace(turns, tile_m=64, tile_n=256),
        replace(base, tile_m=64, tile_n=128, stages=8),
        replace(turns, tile_m=64, tile_n=128, stages=8),
        replace(base, tile_m=64, tile_n=64, stages=8),
    )
    return tuple(replace(t, split_k=s) for t in tiles for s in _SPLITS if s == 1 or not t.pingpong)


def hopper_for_rows(problem: GemmProblem) -> HopperGemmConfig | None:
    """The configuration for a product whose rows are reduced; None for one that leaves most of every tile empty.

    Tiles of 256 columns leave the fewest states to merge. The reduction of a tile takes as long as a few k-tiles'
    products, so consumers take turns where K is short, and share the larger tile where it is not.
    """
    if min(problem.m, problem.n) < LEAST_ROWS:
        return None
    config = HopperGemmConfig(dtype=problem.dtype, block_stride=8, in_flight=True, persistent=True)
    if problem.k <= SHORT_K or problem.m <= config.tile_m // 2:
        return replace(config, tile_m=64, stages=5, block_stride=16, pingpong=True)
    return config


def hopper_seconds(problem: GemmProblem, config: HopperGemmConfig) -> float:
    """What the model expects a launch to take."""
    c, pace = config, MMA_SYNC if config.mma_sync else WGMMA
    tiles = problem.all_tiles(c)
    rounds = -(-tiles // SMS)
    product = 2 * c.tile_m * c.tile_n * c.tile_k / pace.flops_per_cycle
    cols = c.tile_n if problem.b.k_contiguous else c.loaded_cols
    stage_bytes = (c.tile_m + cols) * c.tile_k * c.dtype.bytes
    loading = stage_bytes / LOAD_BYTES_PER_CYCLE * min(1.0, tiles / SMS)
    epilogue = pace.tile_cycles + pace.epilogue_cycles * c.tile_m * c.tile_n * (
        1 if c.split_k == 1 else 2
    )  # parts are f32
    hidden = c.pingpong and rounds > 1
    stages = rounds * problem.tiles_per_split(c) * max(product, loading, pace.stage_cycles)
    compute = (stages + (epilogue if hidden else rounds * epilogue)) / pace.clock
    loaded = stage_bytes / (2 * c.tile_m * c.tile_n * c.tile_k)
    compute *= max(1.0, loaded / LEAST_LOADED) ** (POWER if compute < LONG_SECONDS else LONG_POWER)
    extra = 0.0
    if c.split_k > 1:  # the parts are written, and read by a kernel of its own
        parts_bytes = 4 * c.split_k * problem.batch * problem.m * problem.n
        extra = SECOND_KERNEL_SECONDS + 2 * parts_bytes / BANDWIDTH
    return max(compute, problem.bytes / BANDWIDTH) + START_SECONDS + extra
