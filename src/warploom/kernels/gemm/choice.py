"""Which configuration runs a product when nobody has tuned for it: the least time of a small cost model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from warploom.core.dtypes import DType, f16, f32
from warploom.core.errors import ProblemError
from warploom.core.targets import Target
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.hopper_choice import hopper_candidates, hopper_for_rows, hopper_seconds
from warploom.kernels.gemm.hopper_config import NOTATIONS, HopperGemmConfig
from warploom.kernels.gemm.ladder import BEST16, BEST32
from warploom.kernels.gemm.problem import AnyGemmConfig, GemmProblem


@dataclass(frozen=True)
class Machine:
    """What the model knows of a GPU: per second, and per SM and cycle."""

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
STREAMED = 1.03
"""Cycles of stream-K's loop over those of a kernel of one tile, in CTAs that no longer read the same k together."""
ZERO_SECONDS = 2e-6
"""Counts set to 0 before a stream-K kernel."""
PART_SECONDS = 1.5e-6
"""Until a part that another CTA left is added: the way of its count and its words through the L2."""
L2_BYTES_PER_CYCLE = 48
"""Of one SM."""
REGISTERS, USUAL_REGISTERS, RESERVED_SHARED_BYTES = 65536, 200, 1024
"""Of an SM; of a thread; of shared memory for each CTA."""
FEW_WARPS = 0.8
"""Share of the tensor cores' rate that four warps per SM reach: one per scheduler hides little latency."""
OVERLAP = 0.25
"""Share of the smaller of two costs that the larger does not hide.

Fitted, with FEW_WARPS and START_SECONDS, to products measured on an H200; a test holds what the model takes against the
fastest in ``benchmarks/results/h200/gemm.json``.
"""


def _tile(base: GemmConfig, m: int, n: int, k: int, warp_m: int, warp_n: int, stages: int) -> GemmConfig:
    return replace(base, tile_m=m, tile_n=n, tile_k=k, warp_m=warp_m, warp_n=warp_n, stages=stages,
                   wide_b=warp_n >= 16)  # fmt: skip


def candidates(problem: GemmProblem) -> tuple[GemmConfig, ...]:
    """The tiles to choose from, the largest first."""
    best = replace(BEST16 if problem.accumulate is f16 else BEST32, dtype=problem.dtype)
    base = replace(best, block_stride=8)
    tiles = [
        best,
        *((_tile(base, 128, 256, 32, 64, 64, 4),) if problem.accumulate is f16 else ()),
        _tile(base, 256, 128, 32, 64, 64, 4),
        _tile(base, 128, 128, 32, 64, 64, 4),
        _tile(base, 128, 64, 64, 32, 64, 4),
        _tile(base, 64, 128, 64, 64, 32, 4),
        _tile(base, 64, 64, 64, 32, 32, 4),
        _tile(base, 32, 128, 64, 32, 32, 5),
        _tile(base, 32, 64, 128, 32, 16, 4),
        _tile(base, 16, 128, 64, 16, 32, 6),
        _tile(base, 16, 64, 128, 16, 16, 5),
        _tile(base, 16, 32, 128, 16, 8, 6),
    ]
    if problem.k == 0:
        tiles = [replace(t, pipelined=False) for t in tiles]
    split = (replace(t, split_k=s) for t in tiles for s in (1, 2, 3, 4, 6, 8))
    return *split, *(stream for t in tiles for stream in streamed(t))


def streamed(tile: GemmConfig) -> tuple[GemmConfig, ...]:
    """A tile's stream-K schedule with one CTA per multiprocessor, and with two where their registers have room."""
    room = REGISTERS // (tile.threads * USUAL_REGISTERS)
    return tuple(replace(tile, stream_k=True, min_ctas=ctas) for ctas in (1, 2) if ctas <= max(1, room))


def resident_ctas(config: GemmConfig, shared_per_sm: int) -> int:
    """CTAs that a multiprocessor holds, as far as is known before ptxas says how many registers they take."""
    by_shared = shared_per_sm // (config.shared_bytes() + RESERVED_SHARED_BYTES)
    return max(1, min(by_shared, REGISTERS // (config.threads * USUAL_REGISTERS), 8))


@dataclass(frozen=True)
class _Load:
    """What the multiprocessor with the most work has: CTAs at once, k of their tiles in all, segments begun."""

    ctas: int
    at_once: int
    depth: int
    segments: float
    cut: float = 0.0
    """Share of the tiles that are cut: their CTAs are at different k."""
    last: int = 0
    """CTAs of the last round, where it leaves places empty."""


def _load(problem: GemmProblem, config: GemmConfig, sms: int, resident: int) -> _Load:
    k_tiles = problem.tiles(config)[2]
    if config.stream_k and k_tiles:
        shares = problem.shares(config, sms)
        on_one = -(-shares.ctas // sms)
        own = -(-shares.cut * k_tiles // shares.ctas) + shares.waves * k_tiles
        segments = shares.waves + (1 + shares.cut / shares.ctas if shares.cut else 0)
        cut = shares.cut / max(1, problem.all_tiles(config))
        return _Load(shares.ctas, min(on_one, resident), on_one * own * config.tile_k, on_one * segments, cut)
    ctas = max(1, problem.all_tiles(config))
    waves = -(-ctas // sms)
    depth = waves * problem.tiles_per_split(config) * config.tile_k
    return _Load(ctas, min(resident, waves), depth, waves, last=waves % resident if waves > resident else 0)


def _busy(config: GemmConfig, ctas: int) -> float:
    """Share of the four tensor cores' rate that so many CTAs on an SM reach."""
    warps = ctas * config.num_warps
    return min(1.0, 0.25 * warps) * (FEW_WARPS if warps < 8 else 1.0)


def seconds(problem: GemmProblem, config: GemmConfig, machine: Machine, shared_per_sm: int) -> float:
    """What the model expects a launch to take."""
    resident = resident_ctas(config, shared_per_sm)
    load = _load(problem, config, machine.sms, resident)
    alone = load.last / load.segments if load.last else 0.0
    slow_down = (1.0 - alone) / _busy(config, load.at_once) + (alone / _busy(config, load.last) if alone else 0.0)
    mma = 2 * config.tile_m * config.tile_n * load.depth / machine.flops_per_cycle * slow_down
    fragments = config.num_warps * (config.warp_m + config.warp_n)
    shared = (fragments + config.tile_m + config.tile_n) * load.depth * 2 / SHARED_BYTES_PER_CYCLE
    cycles = (max(mma, shared) + OVERLAP * min(mma, shared)) * (STREAMED if config.stream_k else 1.0)
    compute = cycles / machine.clock + START_SECONDS * max(1.0, load.segments / resident)
    stage_bytes = (config.tile_m + config.tile_n) * config.tile_k * 2
    in_flight = load.at_once * (config.stages - 1) * stage_bytes * min(1.0, load.ctas / machine.sms)
    moved = problem.bytes + _read_again(problem, config, machine, load.cut)
    memory = moved / (machine.bandwidth * min(1.0, in_flight / LATENCY_BYTES)) + START_SECONDS
    return max(compute, memory) + OVERLAP * min(compute, memory) + _joining(problem, config, machine, load)


def _read_again(problem: GemmProblem, config: GemmConfig, machine: Machine, cut: float) -> float:
    """Bytes of A and B that come from memory once more for each tile of those that are cut, as the L2 lets them go."""
    rows, cols, _ = problem.tiles(config)
    found = 0.0
    for extent, readers in ((problem.m, cols), (problem.n, rows)):
        size = extent * problem.k * problem.dtype.bytes
        found += cut * (readers - 1) * max(0.0, size - machine.kept)
    return found * problem.batch


def _joining(problem: GemmProblem, config: GemmConfig, machine: Machine, load: _Load) -> float:
    """What the parts of sums cost: to write, to read and to wait for."""
    if config.split_k > 1:  # read by a kernel of its own
        parts_bytes = 4 * config.split_k * problem.batch * problem.m * problem.n
        return SECOND_KERNEL_SECONDS + 2 * parts_bytes / machine.bandwidth
    shares = problem.shares(config, machine.sms) if config.stream_k else None
    if shares is None or not shares.cut:
        return 0.0
    # The last of a tile's CTAs reads the parts of all others, one after another, from the L2.
    others = -(-shares.ctas // shares.cut)
    part = 4 * config.part_words * load.at_once / (L2_BYTES_PER_CYCLE * machine.clock)
    return ZERO_SECONDS + part + others * (part + PART_SECONDS)


def expected_seconds(problem: GemmProblem, config: AnyGemmConfig, goal: Target) -> float:
    """What the model expects a launch to take on a target's usual GPU."""
    if isinstance(config, HopperGemmConfig):
        return hopper_seconds(problem, config)
    return seconds(problem, config, MACHINES[goal.name], goal.shared_per_sm)


def fitting(problem: GemmProblem, goal: Target) -> tuple[list[AnyGemmConfig], list[str]]:
    """The candidates of both generators that can run a problem, and why others cannot."""
    found: list[AnyGemmConfig] = []
    reasons: list[str] = []
    bulk = hopper_candidates(problem) if goal.has_wgmma and problem.accumulate is f32 else ()
    operands = {"a_k_contiguous": problem.a.k_contiguous, "b_k_contiguous": problem.b.k_contiguous}
    for config in (*bulk, *candidates(problem)):
        problems = config.check(goal, **operands) + problem.misfits(config)
        if problems:
            reasons.append(problems[0])
        else:
            found.append(config)
    return found, list(dict.fromkeys(reasons))


def choose_for_rows(problem: GemmProblem, goal: Target) -> tuple[AnyGemmConfig, str]:
    """As :func:`choose`, for a product whose rows are reduced and which is not stored: K is never split."""
    bulk = hopper_for_rows(problem) if goal.has_wgmma else None
    refused = [] if bulk is None else bulk.check(goal) + problem.misfits(bulk)
    if bulk is not None and not refused:
        return bulk, "wgmma's tile for reductions of rows; untuned"
    config, why = general_for_rows(problem, goal)
    return config, why + (f"; mma.sync, as {refused[0]}" if refused else "")


def general_for_rows(problem: GemmProblem, goal: Target) -> tuple[GemmConfig, str]:
    """As :func:`choose_for_rows`, of ``mma.sync`` configurations alone."""
    found, reasons = fitting(problem, goal)
    general = [c for c in found if isinstance(c, GemmConfig)]
    if not general:
        raise ProblemError("no GEMM kernel takes this problem: " + "; ".join(reasons))
    config = replace(min(general, key=lambda c: expected_seconds(problem, c, goal)), split_k=1, stream_k=False)
    return config, f"the least of {len(general)} by the cost model; untuned"


def choose(problem: GemmProblem, goal: Target) -> tuple[AnyGemmConfig, str]:
    """The configuration for a problem on a target, and why. Raises ProblemError when none fits."""
    found, reasons = fitting(problem, goal)
    if not found:
        raise ProblemError("no GEMM kernel takes this problem: " + "; ".join(reasons))
    config = min(found, key=lambda c: expected_seconds(problem, c, goal))
    expected = expected_seconds(problem, config, goal)
    reason = f"the least of {len(found)} by the cost model, about {expected * 1e6:.0f} µs; untuned"
    refused = next((r for r in reasons if "the TMA" in r), None)
    if refused is not None and goal.has_wgmma:
        reason += f"; mma.sync, as {refused}"
    return config, reason


def uncut(config: AnyGemmConfig) -> AnyGemmConfig:
    """The configuration with every tile summed by one CTA: no workspace."""
    if isinstance(config, HopperGemmConfig):
        return replace(config, split_k=1)
    return replace(config, split_k=1, stream_k=False)


def parse_config(text: str, **types: DType) -> AnyGemmConfig:
    """A configuration of either generator from its notation. Raises ConfigError for what it does not know.

    ``types`` (dtype, accumulate) hold where the notation leaves them out.
    """
    return HopperGemmConfig.parse(text, **types) if text.startswith(NOTATIONS) else GemmConfig.parse(text, **types)
