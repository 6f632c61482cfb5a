"""Matrix products as the tuner sees them: tiles that the cost model finds worth a try, inputs, and the check."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from warploom.bench.gemm import PlannedCall, drawn, torch_error
from warploom.bench.peers import torch_module
from warploom.bench.timing import input_sets
from warploom.core.dtypes import DType, f16, f32, u32
from warploom.core.errors import ProblemError
from warploom.core.targets import Target
from warploom.interop.arrays import address
from warploom.ir.program import Program
from warploom.kernels.gemm.choice import candidates, choose, expected_seconds, parse_config, streamed
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.hopper_choice import hopper_candidates, warp_candidates
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.ladder import BEST16, BEST32
from warploom.kernels.gemm.problem import AnyGemmConfig, GemmProblem, contiguous_problem
from warploom.ops.backends import GpuCall
from warploom.ops.gemm_kernels import trace_for
from warploom.ops.matmul import plan_matmul
from warploom.ops.matmul_plan import MatmulPlan
from warploom.tune.built import Built
from warploom.tune.space import Space, distinct
from warploom.winners.classes import ProblemClass, gemm_class

MOST_CANDIDATES = 64
MOST_HOPPER_CANDIDATES = 24
_TILES_M, _TILES_N, _TILES_K = (16, 32, 64, 128, 256), (32, 64, 128, 256), (32, 64, 128)
_WARP_TILES = ((64, 64), (64, 32), (32, 64), (32, 32), (32, 16), (16, 32), (16, 16), (16, 8), (128, 64), (64, 128))
_SPLITS = (1, 2, 3, 4, 6, 8)
_WARPS = (4, 8)
_MOST_STAGES = 6
_WORK_REGISTERS = 24  # for addresses and loop counters
_STREAMED_TILES = 12  # along M and N, at most: with tiles that are cut, some are whole
_CHECKED_K_TILES = 8  # at least, of the problem that results are checked on

_ALWAYS_WON = frozenset(
    {
        "dtype", "accumulate", "wmma", "padding", "ldmatrix", "swizzle", "strided", "static_strides", "lead",
        "opt_level",
    }
)  # fmt: skip
"""Flags that no search needs to try without: the ladder's lower rungs; strides, which would be a kernel each; and
fragments that roll, which pays only where whole sets of them spill, and such tiles are not searched.
"""


@dataclass(frozen=True, kw_only=True)
class GemmSpace(Space[GemmConfig]):
    """The ``most`` tiles, warps and splits of K that the cost model expects most of, with as many stages as fit."""

    problem: GemmProblem
    goal: Target
    most: int = MOST_CANDIDATES

    def combinations(self) -> Iterator[GemmConfig]:
        """The best by the model, best first; all that :func:`warploom.kernels.gemm.choice.candidates` has before."""
        fitting = [c for c in distinct((*candidates(self.problem), *self.tiles())) if not self._misfits(c)]
        fitting.sort(key=lambda c: expected_seconds(self.problem, c, self.goal))
        yield from fitting[: self.most]

    def _misfits(self, config: GemmConfig) -> list[str]:
        return misfits(self.problem, config, self.goal)

    def tiles(self) -> Iterator[GemmConfig]:
        """Every tile of the space, whether it fits the problem or not."""
        for m in _TILES_M:
            for n in _TILES_N:
                for warp_m, warp_n in _WARP_TILES:
                    if m % warp_m or n % warp_n or (m // warp_m) * (n // warp_n) not in _WARPS:
                        continue
                    for k in _TILES_K:
                        yield from self._of_tile(m, n, k, warp_m, warp_n)

    def _of_tile(self, m: int, n: int, k: int, warp_m: int, warp_n: int) -> Iterator[GemmConfig]:
        stages = min(_MOST_STAGES, self.goal.shared_per_block // ((m + n) * k * self.base.dtype.bytes))
        if stages < 2:
            return
        tile = replace(
            self.base, tile_m=m, tile_n=n, tile_k=k, warp_m=warp_m, warp_n=warp_n, stages=stages, wide_b=warp_n >= 16
        )
        yield from (replace(tile, split_k=split_k) for split_k in _SPLITS)
        yield from streamed(tile)


@dataclass(frozen=True, kw_only=True)
class HopperGemmSpace(Space[HopperGemmConfig]):
    """The ``most`` tiles fed by the TMA, shared by the consumers or taken in turns, that the model expects most of."""

    problem: GemmProblem
    goal: Target
    most: int = MOST_HOPPER_CANDIDATES

    def combinations(self) -> Iterator[HopperGemmConfig]:
        """The best by the model, best first."""
        fitting = [
            c for c in distinct((*_fed_by_tma(self.problem), *self._tiles())) if not misfits(self.problem, c, self.goal)
        ]
        fitting.sort(key=lambda c: expected_seconds(self.problem, c, self.goal))
        yield from fitting[: self.most]

    def _tiles(self) -> Iterator[HopperGemmConfig]:
        for m, n, consumers, turns in itertools.product(
            _TILES_M[2:], (64, 96, 128, 160, 192, 256), (1, 2), (False, True)
        ):
            config = replace(self.base, tile_m=m, tile_n=n, consumers=consumers, pingpong=turns)
            if not config.check():
                stages = config.most_stages(self.goal.shared_per_block)
                yield from (replace(config, stages=stages, split_k=s) for s in _SPLITS)


def _fed_by_tma(problem: GemmProblem) -> tuple[HopperGemmConfig, ...]:
    """Of ``wgmma``, whose sums are f32; for others of ``mma.sync``."""
    return hopper_candidates(problem) if problem.accumulate is f32 else warp_candidates(problem)


def misfits(problem: GemmProblem, config: AnyGemmConfig, goal: Target) -> list[str]:
    """What ``check`` and the problem say, and fragments that no register file holds."""
    operands = {"a_k_contiguous": problem.a.k_contiguous, "b_k_contiguous": problem.b.k_contiguous}
    found = list(dict.fromkeys(config.check(goal, **operands) + problem.misfits(config)))
    if isinstance(config, HopperGemmConfig):
        return found  # its check counts accumulators
    if not found and fragment_registers(config) + _WORK_REGISTERS > _register_limit(config, goal):
        found.append("its fragments alone take more registers than a thread has")
    return found


def fragment_registers(config: GemmConfig) -> int:
    """Registers per thread of the accumulators and of A's and B's fragments of one k-step, or of two.

    Two if pipelined, unless fragments roll: those of a step then come and go one by one.
    """
    accumulators = config.warp_m * config.warp_n // 32 // (2 if config.accumulate is f16 else 1)
    return accumulators + (config.warp_m + config.warp_n) // 4 * (2 if config.pipelined and not config.lead else 1)


def _register_limit(config: GemmConfig, goal: Target) -> int:
    return min(goal.registers_per_thread, goal.registers_per_sm // (config.threads * config.min_ctas))


@dataclass(frozen=True)
class GemmFamily:
    """Products of contiguous matrices without epilogue: what is combined with a sum changes little.

    ``most``: at most so many configurations of each generator are compiled and timed, beside their variants.
    """

    name: str = "gemm"
    most: int = MOST_CANDIDATES

    def problem_class(self, problem: GemmProblem) -> ProblemClass:
        """Which problems share a winner with this one."""
        return gemm_class(problem)

    def default(self, problem: GemmProblem, goal: Target) -> AnyGemmConfig:
        """What runs untuned. Raises ProblemError where nothing does."""
        return choose(problem, goal)[0]

    def spaces(self, problem: GemmProblem, goal: Target) -> Sequence[Space[Any]]:
        """Tiles fed by the TMA where there is some, and others: tiles together; stages, order … one at a time."""
        base = replace(BEST16 if problem.accumulate is f16 else BEST32, dtype=problem.dtype)
        together = ("tile_m", "tile_n", "tile_k", "warp_m", "warp_n", "split_k", "stream_k")
        general = GemmSpace(base, together, _ALWAYS_WON, problem=problem, goal=goal, most=self.most)
        own = next(iter(_fed_by_tma(problem)), None)
        if own is None or not goal.has_wgmma:
            return (general,)
        tiles = ("tile_m", "tile_n", "consumers", "pingpong", "split_k")
        most = min(self.most, MOST_HOPPER_CANDIDATES)
        pinned = frozenset({"dtype", "opt_level", "mma_sync", "accumulate"})
        return HopperGemmSpace(own, tiles, pinned, problem=problem, goal=goal, most=most), general

    def misfits(self, problem: GemmProblem, config: AnyGemmConfig, goal: Target) -> list[str]:
        """Every reason not to compile a configuration for the problem."""
        return misfits(problem, config, goal)

    def kernel_key(self, problem: GemmProblem, config: AnyGemmConfig) -> Hashable:
        """Equal for problems that run the same kernel."""
        return config, problem.features(config)

    def program(self, problem: GemmProblem, config: AnyGemmConfig) -> Program:
        """The traced kernel; of a split K, the one that makes the parts."""
        return trace_for(config, problem.features(config))

    def parse(self, text: str) -> AnyGemmConfig:
        """A configuration from ``str(config)``. Raises ConfigError."""
        return parse_config(text)

    def workload(self, problem: GemmProblem, device: int) -> GemmWorkload:
        """The problem on a GPU. Raises UnsupportedDeviceError without PyTorch or a GPU."""
        return GemmWorkload(problem, device)


def checked_problem(problem: GemmProblem, config: AnyGemmConfig) -> GemmProblem:
    """A small problem that the same kernel runs: extents with the same remainders of the tiles, at most two batches."""
    tiles = config.split_k * max(2, -(-_CHECKED_K_TILES // config.split_k))
    k_least = (tiles - 1) * config.tile_k + (problem.k % config.tile_k or config.tile_k)
    most = _STREAMED_TILES if isinstance(config, GemmConfig) and config.stream_k else 2
    m, n = (
        min(extent, extent % tile + most * tile)
        for extent, tile in ((problem.m, config.tile_m), (problem.n, config.tile_n))
    )
    return contiguous_problem(
        m, n, min(problem.k, k_least), problem.dtype, problem.accumulate, out_dtype=problem.out_dtype,
        b_rows=not problem.b.k_contiguous, batch=min(problem.batch, 2),
    )  # fmt: skip


_Pair = tuple[Any, Any]


class GemmWorkload:
    """Inputs of one problem on one GPU, held by PyTorch; its current stream is the one timed."""

    def __init__(self, problem: GemmProblem, device: int, data: str = "normal") -> None:
        """``data``: what the matrices hold, one of :data:`warploom.bench.gemm.DATA`."""
        if not problem.a.k_contiguous:
            raise ProblemError("only products with a row-major A are tuned: transpose the product")
        torch = self._torch = torch_module()
        self._problem, self._index, self._data = problem, device, data
        self._device = torch.device("cuda", device)
        self._generator = torch.Generator(self._device).manual_seed(0)
        per_set = problem.dtype.bytes * problem.batch * problem.k * (problem.m + problem.n)
        self.sets = input_sets(per_set, int(torch.cuda.get_device_properties(self._device).L2_cache_size))
        self._inputs = [self._fresh(problem) for _ in range(self.sets)]
        self._output = self._empty(problem)
        self._checks: dict[GemmProblem, _Pair] = {}

    def _kind(self, dtype: DType) -> Any:
        return {"bf16": self._torch.bfloat16, "f16": self._torch.float16, "f32": self._torch.float32}[dtype.name]

    def _fresh(self, problem: GemmProblem) -> _Pair:
        lead, kind = ((problem.batch,) if problem.batch > 1 else ()), self._kind(problem.dtype)

        def one(rows: int, cols: int) -> Any:
            return drawn(self._torch, (*lead, rows, cols), self._data, self._generator, kind)

        if problem.b.k_contiguous:
            return one(problem.m, problem.k), one(problem.n, problem.k).transpose(-1, -2)
        return one(problem.m, problem.k), one(problem.k, problem.n)

    def _empty(self, problem: GemmProblem) -> Any:
        lead = (problem.batch,) if problem.batch > 1 else ()
        shape = (*lead, problem.m, problem.n)
        return self._torch.full(shape, math.nan, device=self._device, dtype=self._kind(problem.out_dtype))

    def prepare(self, config: AnyGemmConfig, built: Built) -> Callable[[int], object]:
        """Launches without allocation, on input set i."""
        out = self._output
        call = self._call(config, built, self._inputs[0], out)
        pointers = [(address(a), address(b), address(out)) for a, b in self._inputs]
        return lambda i: call.launch(*pointers[i])

    def fault(self, config: AnyGemmConfig, built: Built) -> str | None:
        """Compare a small problem with float64; waits for the GPU."""
        problem = checked_problem(self._problem, config)
        if problem not in self._checks:
            self._checks[problem] = self._fresh(problem)
        a, b = self._checks[problem]
        out = self._empty(problem)
        self._call(config, built, (a, b), out).launch(address(a), address(b), address(out))
        batches = zip(out, a, b, strict=True) if problem.batch > 1 else ((out, a, b),)
        error = max(torch_error(*arrays, problem.accumulate).value for arrays in batches)
        return None if error <= 1.0 else f"computes wrong results (error {error:.3g} of what the types allow)"

    def answers(self) -> bool:
        """Whether the GPU still runs anything in this process."""
        try:
            self._torch.cuda.synchronize(self._device)
        except RuntimeError:
            return False
        return True

    def _call(self, config: AnyGemmConfig, built: Built, inputs: _Pair, out: Any) -> PlannedCall:
        """The compiled kernel with the grid and scalars of these inputs; only a sum of parts is traced here."""
        made = plan_matmul(*inputs, accumulate=self._problem.accumulate, config=config, out=out)
        return PlannedCall(made, self._index, self._torch, self._loaded(made, built))

    def _loaded(self, made: MatmulPlan, built: Built) -> GpuCall:
        from warploom.cuda.launch import load, scalar

        kernel = load(built.kernel, self._index)
        launch = kernel.configure(made.grid, built.threads, shared_bytes=built.shared_bytes)
        scalars = tuple(scalar(u32, made.scalars[name]) for name in built.scalars)
        return GpuCall(kernel, launch, scalars, self._index, mapped=made.mapped)
