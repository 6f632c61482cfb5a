"""Matrix products as the tuner sees them: tiles that the cost model finds worth a try, inputs, and the check."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from warploom.bench.gemm import PlannedCall, drawn, torch_error
from warploom.core.dtypes import f16
from warploom.core.errors import ProblemError
from warploom.core.targets import Target
from warploom.interop.arrays import address
from warploom.kernels.matmul.choice import (
    BEST16,
    BEST32,
    Production,
    candidates_sm80,
    candidates_sm90,
    choose,
    parse_config,
    streamed,
)
from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem, contiguous_problem
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.kernels.source import KernelSource
from warploom.ops.matmul import plan_matmul
from warploom.tune.operation import OnGpu, combinations

MOST_SM80, MOST_SM90 = 64, 24
"""Configurations of each kernel that are compiled and timed, beside their neighbours."""
_WARP_TILES = ((64, 64), (64, 32), (32, 64), (32, 32), (32, 16), (16, 32), (16, 16), (16, 8), (128, 64), (64, 128))
_SPLITS = (1, 2, 3, 4, 6, 8)
_WARPS = (4, 8)
_MOST_STAGES = 6
_WORK_REGISTERS = 24  # for addresses and loop counters
_STREAMED_TILES = 12  # along M and N, at most: with tiles that are cut, some are whole
_CHECKED_K_TILES = 8  # at least, of the problem that results are checked on


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
                yield from (replace(one, split_k=parts) for parts in _SPLITS)
                yield from streamed(one)


def tiles_sm90(problem: MatmulProblem) -> Iterator[MatmulSm90]:
    """Every tile of ``wgmma`` with as many stages as fit, shared by the consumers or taken in turns."""
    flags = {"tile_m": None, "tile_n": None, "consumers": (1, 2), "pingpong": None, "split_k": _SPLITS}
    for tile in combinations(MatmulSm90(dtype=problem.dtype), flags):
        if not tile.check():
            yield replace(tile, stages=tile.most_stages)


def misfits(problem: MatmulProblem, config: MatmulConfig, target: Target) -> list[str]:
    """The violated constraints of a configuration, and fragments that no register file holds."""
    found = config.check(target) or config.misfits(problem)
    if not found and spare_registers(config, target) < _WORK_REGISTERS:
        found.append("its fragments alone take more registers than a thread has")
    return found


def spare_registers(config: Any, target: Target) -> int:
    """Registers of a thread beside the fragments; of ``wgmma``, whose constraints count accumulators, all."""
    ctas = getattr(config, "min_ctas", 1)
    most = min(target.registers_per_thread, target.registers_per_sm // (config.threads * ctas))
    return most - getattr(config, "fragment_registers", 0)


@dataclass(frozen=True)
class MatmulOperation:
    """Products of contiguous matrices without epilogue: what is combined with a sum changes little.

    ``most``: at most so many configurations of each kernel to begin with.
    """

    most: int = MOST_SM80
    fixed: frozenset[str] = frozenset({"dtype", "accumulate", "opt_level"})

    def choose(self, problem: MatmulProblem, target: Target) -> tuple[Production, str]:
        """The configuration that runs untuned, and why."""
        return choose(problem, target)

    def space(self, problem: MatmulProblem, target: Target) -> Iterator[Production]:
        """The tiles that the cost model expects most of, all of :mod:`warploom.kernels.matmul.choice` among them."""

        def best(configs: Iterator[Production], most: int) -> Iterator[Production]:
            fitting = [c for c in dict.fromkeys(configs) if not misfits(problem, c, target)]
            return islice(sorted(fitting, key=lambda c: c.seconds(problem, target)), most)

        if target.has_wgmma and candidates_sm90(problem):
            yield from best(iter((*candidates_sm90(problem), *tiles_sm90(problem))), min(self.most, MOST_SM90))
        yield from best(iter((*candidates_sm80(problem), *tiles_sm80(problem, target))), self.most)

    def misfits(self, problem: MatmulProblem, config: MatmulConfig, target: Target) -> list[str]:
        """Every reason not to compile a configuration for the problem."""
        return misfits(problem, config, target)

    def source(self, problem: MatmulProblem, config: MatmulConfig) -> KernelSource:
        """The kernel of the product; of a split K, the one that makes the parts."""
        return config.calls(problem, 1)[0].source

    def parse(self, text: str) -> MatmulConfig:
        """A configuration from its notation. Raises ConfigError."""
        return parse_config(text)

    def workload(self, problem: MatmulProblem, device: int) -> MatmulWorkload:
        """The problem on a GPU. Raises UnsupportedDeviceError without PyTorch or a GPU."""
        return MatmulWorkload(problem, device)


def checked_problem(problem: MatmulProblem, config: MatmulConfig) -> MatmulProblem:
    """A small problem that the same kernel runs: extents with the same remainders of the tiles, at most two batches."""
    tiles = config.split_k * max(2, -(-_CHECKED_K_TILES // config.split_k))
    k_least = (tiles - 1) * config.tile_k + (problem.k % config.tile_k or config.tile_k)
    most = _STREAMED_TILES if config.cut and config.split_k == 1 else 2
    m, n = (
        min(extent, extent % tile + most * tile)
        for extent, tile in ((problem.m, config.tile_m), (problem.n, config.tile_n))
    )
    return contiguous_problem(
        m, n, min(problem.k, k_least), problem.dtype, problem.accumulate, out_dtype=problem.out_dtype,
        b_rows=not problem.b.k_contiguous, batch=min(problem.batch, 2),
    )  # fmt: skip


_Pair = tuple[Any, Any]


class MatmulWorkload(OnGpu):
    """Inputs of one problem on one GPU, held by PyTorch; its current stream is the one timed."""

    def __init__(self, problem: MatmulProblem, device: int, data: str = "normal") -> None:
        """``data``: what the matrices hold, one of :data:`warploom.bench.gemm.DATA`."""
        if not problem.a.k_contiguous:
            raise ProblemError("only products with a row-major A are tuned: transpose the product")
        super().__init__(device, problem.dtype.bytes * problem.batch * problem.k * (problem.m + problem.n))
        self._problem, self._data = problem, data
        self._inputs = [self._fresh(problem) for _ in range(self.sets)]
        self._output = self._empty(problem)
        self._checks: dict[MatmulProblem, _Pair] = {}

    def _fresh(self, problem: MatmulProblem) -> _Pair:
        lead, kind = ((problem.batch,) if problem.batch > 1 else ()), self.kind(problem.dtype)

        def one(rows: int, cols: int) -> Any:
            return drawn(self._torch, (*lead, rows, cols), self._data, self._generator, kind)

        if problem.b.k_contiguous:
            return one(problem.m, problem.k), one(problem.n, problem.k).transpose(-1, -2)
        return one(problem.m, problem.k), one(problem.k, problem.n)

    def _empty(self, problem: MatmulProblem) -> Any:
        lead = (problem.batch,) if problem.batch > 1 else ()
        shape = (*lead, problem.m, problem.n)
        return self._torch.full(shape, math.nan, device=self._device, dtype=self.kind(problem.out_dtype))

    def _call(self, config: MatmulConfig, inputs: _Pair, out: Any) -> PlannedCall:
        made = plan_matmul(*inputs, accumulate=self._problem.accumulate, config=config, out=out)
        return PlannedCall(made, self._index, self._torch)

    def prepare(self, config: MatmulConfig) -> Callable[[int], object]:
        """Launches without allocation, on input set i."""
        out = self._output
        call = self._call(config, self._inputs[0], out)
        pointers = [(address(a), address(b), address(out)) for a, b in self._inputs]
        return lambda i: call.launch(*pointers[i])

    def fault(self, config: MatmulConfig) -> str | None:
        """Compare a small problem with float64; waits for the GPU."""
        problem = checked_problem(self._problem, config)
        if problem not in self._checks:
            self._checks[problem] = self._fresh(problem)
        a, b = self._checks[problem]
        out = self._empty(problem)
        self._call(config, (a, b), out).launch(address(a), address(b), address(out))
        batches = zip(out, a, b, strict=True) if problem.batch > 1 else ((out, a, b),)
        error = max(torch_error(*arrays, problem.accumulate).value for arrays in batches)
        return None if error <= 1.0 else f"computes wrong results (error {error:.3g} of what the types allow)"
