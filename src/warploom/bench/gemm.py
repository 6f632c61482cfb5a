"""Products to a ladder and to the tuner: inputs, float64 beside them, cuBLAS (through ``torch.mm``) as the baseline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.bench.baselines import torch_module
from warploom.bench.ladder import EmulatorCase, ErrorEntry, GpuCase
from warploom.bench.timing import Candidate
from warploom.bench.workload import OnGpu
from warploom.core.dtypes import DType, f16, f32
from warploom.core.errors import ConfigError, ProblemError
from warploom.interop.arrays import address, describe, torch_element_type
from warploom.kernels.ladder import Rung
from warploom.kernels.matmul.ladder import BEST, summed_in
from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem, contiguous_problem
from warploom.kernels.matmul.reference import GemmError, GemmReference, gemm_error, gemm_reference, largest_error
from warploom.kernels.settings import refuse
from warploom.ops.backends import EMULATION_OVERHEAD, SECONDS_PER_FLOP, emulator_arguments
from warploom.ops.matmul import MatmulPlan, plan_matmul

ACCUMULATORS = {"f16": f16, "f32": f32}
"""What ``--accumulate`` may be."""
_STREAMED_TILES = 12  # along M and N, at most, of a small problem: with tiles that are cut, some are whole
_CHECKED_K_TILES = 8  # at least, of it
_BLOCK_ROWS = 2048  # of the float64 product: 256 MiB at N = 16384
_SHARED_OVERHEAD = 2.0  # of the emulator's estimate: shared-memory traffic per flop is higher than attention's


def settled(
    rungs: Sequence[Rung[MatmulConfig]], accumulate: DType | None, settings: Mapping[str, str]
) -> list[Rung[MatmulConfig]]:
    """The rungs with flags overridden; the best for one accumulator is left out where the other's is meant.

    Beside portable rungs, ones for sm_90a that the flags do not suit are left out too. Raises ConfigError for flags
    that are not valid.
    """
    found: list[Rung[MatmulConfig]] = []
    own = {rung.config for rung in rungs}
    general = any(config.requires == PORTABLE for config in own)
    meant = None if accumulate is None else BEST.get(accumulate)
    for rung in rungs:
        config = rung.config
        if meant in own and config != meant and config in BEST.values():
            continue
        if config.requires != PORTABLE and accumulate not in (None, config.accumulate):
            if not general:
                raise ConfigError(f"rung {rung.key} is wgmma's, which accumulates in f32")
            continue
        try:
            config = config if accumulate is None else summed_in(config, accumulate)
            config = config.with_settings(settings)
            refuse(f"rung {rung.key} with these flags is not valid", config.check())
        except ConfigError:
            if general and config.requires != PORTABLE:
                continue
            raise
        found.append(dataclasses.replace(rung, config=config))
    return found


PORTABLE = "sm_80"
"""What ``mma.sync`` rungs need."""
LOADS = {"rested": 0.02, "sustained": 0.0}
"""Seconds of rest before each sample. Products alone hold a GPU at its power limit, where no two runs have one clock; a
rest as long as two samples spares them that.
"""
DATA = ("normal", "uniform")
"""What a matrix may hold: N(0, 1), or as the seed has it [0, 1), which switches fewer transistors."""


def drawn(torch: Any, shape: tuple[int, ...], data: str, generator: Any, dtype: Any) -> Any:
    """A random matrix of :data:`DATA` on the generator's device, rounded from f32."""
    make = torch.rand if data == "uniform" else torch.randn
    return make(shape, generator=generator, device=generator.device).to(dtype)


@dataclass(frozen=True)
class Square:
    """A size of the bench: (n, n) matrices, what they hold (:data:`DATA`), and under which of :data:`LOADS`.

    ``tuned``: the rungs have the tiles of a search.
    """

    n: int
    data: str = "normal"
    load: str = "rested"
    tuned: bool = False

    @property
    def label(self) -> dict[str, Any]:
        """What a cell says of it."""
        return {"n": self.n, "data": self.data, "load": self.load} | ({"tuned": True} if self.tuned else {})

    def __str__(self) -> str:
        return f"{self.n}, {self.data}, {self.load}"


@dataclass(frozen=True)
class GemmFamily:
    """C = A·B, all row-major, C of the inputs' type.

    (m, n, k) is the emulator's problem; a GPU's is square, of inputs of type ``dtype``.
    """

    m: int = 256
    n: int = 256
    k: int = 512
    dtype: DType = f16
    name: str = "gemm"

    def emulator_case(self, config: MatmulConfig, seed: int) -> EmulatorCase:
        """a (m, k) and b (k, n) ~ N(0, 1), and an output full of NaN; of a split K the f32 parts."""
        rng = np.random.default_rng(seed)
        a, b = (
            rng.standard_normal(shape, np.float32).astype(config.dtype.numpy)
            for shape in ((self.m, self.k), (self.k, self.n))
        )
        made = plan_matmul(a, b, accumulate=config.accumulate, config=config)
        call = made.calls[0]
        own = {name: np.full(words, np.nan, np.float32) for name, words in call.workspace.items()}
        arrays = {"a": a, "b": b, "out": np.full((self.m, self.n), np.nan, config.dtype.numpy)}
        arrays |= {name: x.view(np.uint32) for name, x in own.items()}
        if call.zeroed:
            arrays[call.zeroed][:] = 0

        def errors() -> ErrorEntry:
            whole = arrays["out"]
            if config.split_k > 1:
                whole = own["parts"].reshape(config.split_k, self.m, self.n).sum(axis=0).astype(config.dtype.numpy)
            return _entry(gemm_error(whole, gemm_reference(a, b), config.dtype, config.accumulate))

        views = [describe(arrays[name]) for name in call.arrays]
        arguments = emulator_arguments(made.program, views, call.scalars, call.maps)
        return EmulatorCase(made.program, made.grid, arguments, errors)

    def expected_seconds(self, config: MatmulConfig) -> float:
        """From the floating-point operations of the tiles, ragged ones whole."""
        rows, cols = (-(-x // tile) * tile for x, tile in ((self.m, config.tile_m), (self.n, config.tile_n)))
        return EMULATION_OVERHEAD + _SHARED_OVERHEAD * SECONDS_PER_FLOP * 2 * rows * cols * self.k

    def gpu_case(self, size: Square, device: int, seed: int) -> GpuCase[MatmulConfig]:
        """The product of two square matrices, beside cuBLAS."""
        problem = contiguous_problem(size.n, size.n, size.n, self.dtype)
        work = MatmulOnGpu(problem, device, size.data, seed)
        mm = torch_module().mm
        baselines = [Candidate("cublas", lambda i: mm(*work.inputs[i], out=work.output))]
        return GpuCase(
            size.label, problem.flops, work, baselines, lambda config: _entry(work.error(config)), LOADS[size.load]
        )


def _entry(found: GemmError) -> ErrorEntry:
    """NaN in the output counts as very far (a finite number: JSON has no infinity)."""
    return ErrorEntry(found.metric, min(found.value, float(np.finfo(np.float64).max)), found.bound)


@dataclass(frozen=True)
class TorchBlock:
    """Rows of a float64 product from row ``start`` on."""

    start: int
    rows: GemmReference

    def error(self, out: Any, accumulate: DType) -> Any:
        """:func:`.largest_error` of these rows of ``out``, as a tensor of one element: nothing waits."""
        got = out[self.start : self.start + self.rows.product.shape[0]].double()
        return largest_error(got, self.rows, torch_element_type(out.dtype), accumulate)


def torch_blocks(a: Any, b: Any) -> Iterator[TorchBlock]:
    """The float64 product of a (m, k) and b (k, n), torch tensors of one device, in blocks of rows."""
    right, magnitudes = b.double(), b.double().abs()
    for start in range(0, a.shape[0], _BLOCK_ROWS):
        left = a[start : start + _BLOCK_ROWS].double()
        yield TorchBlock(start, GemmReference(left @ right, left.abs() @ magnitudes, a.shape[-1]))


def blocks_error(blocks: Iterable[TorchBlock], out: Any, accumulate: DType) -> GemmError:
    """How far ``out`` (m, n) is from a product that lies in blocks, element by element."""
    worst = 0.0
    for block in blocks:
        worst = max(worst, float(block.error(out, accumulate)))
    return GemmError(worst)


def torch_error(out: Any, a: Any, b: Any, accumulate: DType) -> GemmError:
    """How far ``out`` (m, n) is from the float64 product of a (m, k) and b (k, n), all torch tensors of one device."""
    return blocks_error(torch_blocks(a, b), out, accumulate)


class PlannedCall:
    """A plan's launches on one GPU without allocation: the kernels, and the memory between them."""

    def __init__(self, made: MatmulPlan, device: int, torch: Any) -> None:
        steps = made.steps()
        self._prepared = steps.prepare(("a", "b", "out"), device)
        self._memory = torch.empty(steps.words, dtype=torch.float32, device=torch.device("cuda", device))

    def launch(self, a: int, b: int, out: int) -> None:
        """Queue one product; addresses of the arrays."""
        self._prepared.queue((a, b, out), "torch", self._memory.data_ptr())


class MatmulOnGpu(OnGpu):
    """Products of contiguous matrices, whose A is row-major. ``data``: what they hold, one of :data:`DATA`."""

    def __init__(self, problem: MatmulProblem, device: int, data: str = "normal", seed: int = 0) -> None:
        if not problem.a.k_contiguous:
            raise ProblemError("only products with a row-major A are tuned: transpose the product")
        super().__init__(device, problem.dtype.bytes * problem.batch * problem.k * (problem.m + problem.n), seed)
        self._problem, self._data = problem, data
        self.inputs = [self._fresh(problem) for _ in range(self.sets)]
        self.output = self._poisoned(problem)

    def _fresh(self, problem: MatmulProblem) -> tuple[Any, Any]:
        lead, kind = ((problem.batch,) if problem.batch > 1 else ()), self.kind(problem.dtype)

        def one(rows: int, cols: int) -> Any:
            return drawn(self._torch, (*lead, rows, cols), self._data, self._generator, kind)

        if problem.b.k_contiguous:
            return one(problem.m, problem.k), one(problem.n, problem.k).transpose(-1, -2)
        return one(problem.m, problem.k), one(problem.k, problem.n)

    def _poisoned(self, problem: MatmulProblem) -> Any:
        lead, kind = ((problem.batch,) if problem.batch > 1 else ()), self.kind(problem.out_dtype)
        return self._torch.full((*lead, problem.m, problem.n), math.nan, device=self._device, dtype=kind)

    def _call(self, config: MatmulConfig, inputs: tuple[Any, Any], out: Any) -> PlannedCall:
        made = plan_matmul(*inputs, accumulate=config.accumulate, config=config, out=out)
        return PlannedCall(made, self._index, self._torch)

    def prepare(self, config: MatmulConfig) -> Callable[[int], object]:
        """Launches of the kernels, loaded."""
        call = self._call(config, self.inputs[0], self.output)
        pointers = [(address(a), address(b), address(self.output)) for a, b in self.inputs]
        return lambda i: call.launch(*pointers[i])

    def error(self, config: MatmulConfig, problem: MatmulProblem | None = None) -> GemmError:
        """By element, the worst of all products."""
        problem = problem or self._problem
        (a, b), out = self._fresh(problem), self._poisoned(problem)
        self._call(config, (a, b), out).launch(address(a), address(b), address(out))
        products = zip(out, a, b, strict=True) if problem.batch > 1 else ((out, a, b),)
        return max((torch_error(*arrays, config.accumulate) for arrays in products), key=lambda error: error.value)

    def checked(self, config: MatmulConfig) -> MatmulProblem:
        """Extents with the same remainders of the tiles, at most two batches."""
        return checked_problem(self._problem, config)


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
        m,
        n,
        min(problem.k, k_least),
        problem.dtype,
        problem.accumulate,
        out_dtype=problem.out_dtype,
        b_rows=not problem.b.k_contiguous,
        batch=min(problem.batch, 2),
    )
