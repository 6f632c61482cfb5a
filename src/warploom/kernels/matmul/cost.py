"""What a launch of a matmul configuration is expected to take: a small model of the GPU, fitted to an H200.

``mma.sync`` kernels are modelled on every architecture, ``wgmma`` ones on an H100 or H200. The constants are fitted to
products measured there; a test holds what the model takes against the fastest in ``benchmarks/results/h200/gemm.json``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from warploom.core.dtypes import DType
from warploom.core.targets import Target
from warploom.kernels.matmul.problem import MatmulProblem, Matrix
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.sm90 import MatmulSm90

OVERLAP = 0.25
"""Share of the smaller of two costs that the larger does not hide."""


def seconds(problem: MatmulProblem, config: MatmulSm80 | MatmulSm90, target: Target) -> float:
    """The expected time of the launches on a target's usual GPU, for ``wgmma`` on an H100 or H200."""
    of: dict[str, Callable[[MatmulProblem, Any, Target], float]] = {"sm_80": _seconds_sm80, "sm_90a": _seconds_sm90}
    return of[config.requires](problem, config, target)


# -- mma.sync
@dataclass(frozen=True)
class Machine:
    """The rates of a GPU that the model uses: per second, and per SM and cycle."""

    sms: int
    clock: float
    """Hz under load."""
    flops_per_cycle: float
    """Per SM, dense ``mma.sync`` of 16-bit inputs."""
    bandwidth: float
    """DRAM bytes per second."""
    kept: float
    """Bytes that the L2 keeps of an operand which CTAs read at different times: about half of it."""


MACHINES = {
    "sm_80": Machine(108, 1.41e9, 2048, 1.55e12, 20e6),
    "sm_86": Machine(84, 1.70e9, 512, 0.76e12, 3e6),
    "sm_89": Machine(128, 2.50e9, 1024, 1.00e12, 36e6),
    "sm_90a": Machine(132, 1.70e9, 2850, 4.30e12, 24e6),
    "sm_100a": Machine(148, 1.80e9, 2850, 7.00e12, 60e6),
    "sm_120a": Machine(170, 2.40e9, 1024, 1.79e12, 48e6),
}
"""Published figures; sm_90a's rate is what ``mma.sync`` reaches there, not ``wgmma``, and what it keeps is fitted."""

SHARED_BYTES_PER_CYCLE = 128
LATENCY_BYTES = 40e3
"""Bytes in flight per SM that keep the DRAM busy (Little's law, about a microsecond of its bandwidth)."""
START_SECONDS = 1.5e-6
"""A CTA's fixed cost: the first tiles' latency and the epilogue."""
SECOND_KERNEL_SECONDS = 2.5e-6
ACROSS_SECTORS = 1.12
"""Cycles of lines that begin within a sector, whose 64 bytes take three."""
STREAMED = 1.03
"""Cycles of stream-K's loop over those of a kernel of one tile, in CTAs that no longer read the same k together."""
ZERO_SECONDS = 2e-6
"""Counts set to 0 before a stream-K kernel."""
PART_SECONDS = 1.5e-6
"""Until a part that another CTA left is added: the way of its count and its words through the L2."""
L2_BYTES_PER_CYCLE = 48
"""Of one SM."""
SECTOR_BYTES = 32
REGISTERS, USUAL_REGISTERS, RESERVED_SHARED_BYTES = 65536, 200, 1024
"""Of an SM; of a thread; of shared memory for each CTA."""
FEW_ROWS, LONG_LINES, ENOUGH_CTAS = 32, 256, 0.7
STREAMING = 0.97
"""Share of the time that memory takes where CTAs with few rows of A, most of the SMs one, stream B in long lines."""
FEW_WARPS = 0.8
"""Share of the tensor cores' rate that four warps per SM reach: one per scheduler hides little latency."""


@dataclass(frozen=True)
class _MostWork:
    """The work of the busiest multiprocessor: CTAs at once, k of their tiles in all, segments begun."""

    ctas: int
    at_once: int
    depth: int
    segments: float
    cut: float = 0.0
    """Share of the tiles that are cut: their CTAs are at different k."""
    last: int = 0
    """CTAs of the last round, where it leaves places empty."""


def _seconds_sm80(problem: MatmulProblem, config: MatmulSm80, target: Target) -> float:
    """The expected time of a launch by ``mma.sync`` on a target's usual GPU."""
    machine = MACHINES[target.name]
    resident = _resident_ctas(config, target.shared_per_sm)
    load = _load(problem, config, machine.sms, resident)
    alone = load.last / load.segments if load.last else 0.0
    slow_down = (1.0 - alone) / _busy(config, load.at_once) + (alone / _busy(config, load.last) if alone else 0.0)
    mma = 2 * config.tile_m * config.tile_n * load.depth / machine.flops_per_cycle * slow_down
    fragments = config.num_warps * (config.warp_m + config.warp_n)
    shared = (fragments + config.tile_m + config.tile_n) * load.depth * 2 / SHARED_BYTES_PER_CYCLE
    cycles = (max(mma, shared) + OVERLAP * min(mma, shared)) * (STREAMED if config.stream_k else 1.0)
    cycles *= ACROSS_SECTORS if any(_across_sectors(x, config.dtype) for x in (problem.a, problem.b)) else 1.0
    compute = cycles / machine.clock + START_SECONDS * max(1.0, load.segments / resident)
    stage_bytes = (config.tile_m + config.tile_n) * config.tile_k * 2
    in_flight = load.at_once * (config.stages - 1) * stage_bytes * min(1.0, load.ctas / machine.sms)
    moved = problem.bytes + _read_again(problem, config, machine, load.cut)
    long = config.tile_m <= FEW_ROWS and config.tile_n >= LONG_LINES and not config.cut
    if long and load.ctas >= ENOUGH_CTAS * machine.sms:
        moved *= STREAMING
    memory = moved / (machine.bandwidth * min(1.0, in_flight / LATENCY_BYTES)) + START_SECONDS
    return max(compute, memory) + OVERLAP * min(compute, memory) + _joining(problem, config, machine, load)


def _resident_ctas(config: MatmulSm80, shared_per_sm: int) -> int:
    """CTAs that a multiprocessor holds, as far as is known before ptxas says how many registers they take."""
    by_shared = shared_per_sm // (config.shared_bytes + RESERVED_SHARED_BYTES)
    return max(1, min(by_shared, REGISTERS // (config.threads * USUAL_REGISTERS), 8))


def _load(problem: MatmulProblem, config: MatmulSm80, sms: int, resident: int) -> _MostWork:
    tiling = problem.tiling(config)
    if config.stream_k and tiling.k_tiles:
        shares = config.shares(problem, sms)
        on_one = -(-shares.ctas // sms)
        own = -(-shares.cut * tiling.k_tiles // shares.ctas) + shares.waves * tiling.k_tiles
        segments = shares.waves + (1 + shares.cut / shares.ctas if shares.cut else 0)
        cut = shares.cut / max(1, tiling.count)
        return _MostWork(shares.ctas, min(on_one, resident), on_one * own * config.tile_k, on_one * segments, cut)
    ctas = max(1, tiling.count)
    waves = -(-ctas // sms)
    depth = waves * tiling.per_part * config.tile_k
    return _MostWork(ctas, min(resident, waves), depth, waves, last=waves % resident if waves > resident else 0)


def _busy(config: MatmulSm80, ctas: int) -> float:
    """Share of the four tensor cores' rate that so many CTAs on an SM reach."""
    warps = ctas * config.num_warps
    return min(1.0, 0.25 * warps) * (FEW_WARPS if warps < 8 else 1.0)


def _read_again(problem: MatmulProblem, config: MatmulSm80, machine: Machine, cut: float) -> float:
    """Bytes of A and B that come from memory once more for each tile of those that are cut, as the L2 lets them go."""
    tiling, found = problem.tiling(config), 0.0
    for extent, readers in ((problem.m, tiling.cols), (problem.n, tiling.rows)):
        size = extent * problem.k * problem.dtype.bytes
        found += cut * (readers - 1) * max(0.0, size - machine.kept)
    return found * problem.batch


def _joining(problem: MatmulProblem, config: MatmulSm80, machine: Machine, load: _MostWork) -> float:
    """The time that partial sums cost: to write, to read and to wait for."""
    if config.split_k > 1:  # read by a kernel of its own
        return SECOND_KERNEL_SECONDS + 2 * _part_bytes(problem, config.split_k) / machine.bandwidth
    shares = config.shares(problem, machine.sms) if config.stream_k else None
    if shares is None or not shares.cut:
        return 0.0
    # The last of a tile's CTAs reads the parts of all others, one after another, from the L2.
    others = -(-shares.ctas // shares.cut)
    part = 4 * config.part_words * load.at_once / (L2_BYTES_PER_CYCLE * machine.clock)
    return ZERO_SECONDS + part + others * (part + PART_SECONDS)


def _part_bytes(problem: MatmulProblem, splits: int) -> int:
    return 4 * splits * problem.batch * problem.m * problem.n


# -- wgmma on an H100 or H200: the power limit decides the clock, which stands for what the tensor cores sustain
SMS = 132
WGMMA_CLOCK = 1.28e9
WGMMA_FLOPS_PER_CYCLE = 4096
STAGE_CYCLES = 195
"""The least that a stage takes, however small: waits and barriers."""
TILE_CYCLES, EPILOGUE_CYCLES = 457, 0.079
"""Per tile, and per element of C and SM, where nothing hides them."""
LOAD_BYTES_PER_CYCLE = 92
"""Per SM, from the L2."""
ACROSS_SECTORS_PER_CYCLE = 36
"""The same of lines that begin within a sector, such as those of 1000 elements: the TMA takes each box row apart."""
WGMMA_BANDWIDTH = 4.4e12
"""DRAM bytes per second."""
WGMMA_OVERLAP = 0.05
"""Share of the smaller of both costs that the larger does not hide: of tiles that wait for memory alike, the least."""
WGMMA_START_SECONDS = 1.4e-6
WGMMA_SECOND_KERNEL_SECONDS = 2.3e-6
LEAST_LOADED = 0.0118
"""Bytes loaded per operation by the largest tile: more take power, and with it clock."""
POWER = 0.08
"""The exponent of their ratio: less at the power limit, more where the GPU rests between calls."""


def _load_rate(matrix: Matrix, config: MatmulSm90) -> int:
    """Bytes of A or B that an SM loads per cycle."""
    return ACROSS_SECTORS_PER_CYCLE if _across_sectors(matrix, config.dtype) else LOAD_BYTES_PER_CYCLE


def _across_sectors(matrix: Matrix, dtype: DType) -> bool:
    """Whether lines begin within a sector."""
    return matrix.stride * dtype.bytes % SECTOR_BYTES != 0


def _seconds_sm90(problem: MatmulProblem, config: MatmulSm90, target: Target) -> float:
    """The expected time of a launch by ``wgmma``, whatever the target."""
    c, tiling = config, problem.tiling(config)
    rounds = -(-tiling.count // SMS)
    product = 2 * c.tile_m * c.tile_n * c.tile_k / WGMMA_FLOPS_PER_CYCLE
    cols = c.tile_n if problem.b.k_contiguous else c.loaded_cols
    stage_bytes = (c.tile_m + cols) * c.tile_k * c.dtype.bytes
    loading = c.tile_k * c.dtype.bytes * (c.tile_m / _load_rate(problem.a, c) + cols / _load_rate(problem.b, c))
    loading *= min(1.0, tiling.count / SMS)
    epilogue = TILE_CYCLES + EPILOGUE_CYCLES * c.tile_m * c.tile_n * (1 if c.split_k == 1 else 2)  # parts are f32
    hidden = c.pingpong and rounds > 1
    stages = rounds * tiling.per_part * max(product, loading, STAGE_CYCLES)
    compute = (stages + (epilogue if hidden else rounds * epilogue)) / WGMMA_CLOCK
    loaded = stage_bytes / (2 * c.tile_m * c.tile_n * c.tile_k)
    compute *= max(1.0, loaded / LEAST_LOADED) ** POWER
    extra = 0.0
    if c.split_k > 1:  # the parts are written, and read by a kernel of its own
        extra = WGMMA_SECOND_KERNEL_SECONDS + 2 * _part_bytes(problem, c.split_k) / WGMMA_BANDWIDTH
    memory = problem.bytes / WGMMA_BANDWIDTH
    return max(compute, memory) + WGMMA_OVERLAP * min(compute, memory) + WGMMA_START_SECONDS + extra
