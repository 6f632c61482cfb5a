"""Matrix products as the tuner sees them: the tiles that the cost model finds worth a try."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from warploom.core.dtypes import f16
from warploom.core.targets import Target
from warploom.kernels.matmul.choice import (
    BEST16,
    BEST32,
    KINDS,
    Production,
    candidates_sm80,
    candidates_sm90,
    choose,
    streamed,
)
from warploom.kernels.matmul.cost import seconds
from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.kernels.settings import violations_of
from warploom.kernels.source import KernelSource
from warploom.measure.matmul import MatmulOnGpu
from warploom.tune.operation import TunableOperation, combinations

MOST_SM80, MOST_SM90 = 64, 24
"""Configurations of each kernel that are compiled and timed, beside their neighbours."""
_WARP_TILES = ((64, 64), (64, 32), (32, 64), (32, 32), (32, 16), (16, 32), (16, 16), (16, 8), (128, 64), (64, 128))
_WARPS = (4, 8)
_MOST_STAGES = 6
_WORK_REGISTERS = 24  # for addresses and loop counters


def tiles_sm80(problem: MatmulProblem, target: Target) -> Iterator[MatmulSm80]:
    """Every tile of ``mma.sync`` with as many stages as fit: whole, with K split, and shared by stream-K."""
    best = replace(BEST16 if problem.accumulate is f16 else BEST32, dtype=problem.dtype)
    for tile in combinations(best, {"tile_m": None, "tile_n": None, "tile_k": None}):
        for warp_m, warp_n in _WARP_TILES:
            if tile.tile_m % warp_m or tile.tile_n % warp_n:
                continue
            stage = (tile.tile_m + tile.tile_n) * tile.tile_k * tile.dtype.bytes
            stages = min(_MOST_STAGES, target.shared_per_block // stage)
            one: MatmulSm80 = replace(tile, warp_m=warp_m, warp_n=warp_n, stages=stages)
            if one.num_warps in _WARPS and stages >= 2:
                yield from combinations(one, {"split_k": None})
                yield from streamed(one)


def tiles_sm90(problem: MatmulProblem) -> Iterator[MatmulSm90]:
    """Every tile of ``wgmma`` with as many stages as fit, shared by the consumers or taken in turns."""
    flags = {"tile_m": None, "tile_n": None, "consumers": (1, 2), "pingpong": None, "split_k": None}
    for tile in combinations(MatmulSm90(dtype=problem.dtype), flags):
        if not tile.check():
            yield replace(tile, stages=tile.most_stages)


def violations(config: MatmulConfig, problem: MatmulProblem, target: Target) -> list[str]:
    """The violated constraints of a configuration, and fragments that no register file holds."""
    found = violations_of(config, problem, target)
    if not found and spare_registers(config, target) < _WORK_REGISTERS:
        found.append("its fragments alone take more registers than a thread has")
    return found


def spare_registers(config: Any, target: Target) -> int:
    """Registers of a thread beside the fragments; of ``wgmma``, whose constraints count accumulators, all."""
    ctas = getattr(config, "min_ctas", 1)
    most = min(target.registers_per_thread, target.registers_per_sm // (config.threads * ctas))
    return most - getattr(config, "fragment_registers", 0)


def space(problem: MatmulProblem, target: Target, most: int = MOST_SM80) -> Iterator[Production]:
    """The tiles that the cost model expects most of, all of :mod:`warploom.kernels.matmul.choice` among them.

    ``most``: at most so many of each kernel.
    """

    def best(configs: Iterator[Production], most: int) -> Iterator[Production]:
        fitting = [c for c in dict.fromkeys(configs) if not violations(c, problem, target)]
        return islice(sorted(fitting, key=lambda c: seconds(problem, c, target)), most)

    if target.has_wgmma and candidates_sm90(problem):
        yield from best(iter((*candidates_sm90(problem), *tiles_sm90(problem))), min(most, MOST_SM90))
    yield from best(iter((*candidates_sm80(problem), *tiles_sm80(problem, target))), most)


def _source(problem: MatmulProblem, config: MatmulConfig) -> KernelSource:
    return config.calls(problem, 1)[0].source


MATMUL = TunableOperation(
    frozenset({"dtype", "accumulate", "opt_level"}), choose, space, violations, _source, KINDS, MatmulOnGpu
)
"""Products of contiguous matrices without epilogue: what is combined with a sum changes little."""
