"""Matrix products on a GPU: random inputs, launches, and the error of results against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from warploom.core.dtypes import DType
from warploom.core.errors import ProblemError
from warploom.interop.arrays import address, current_stream, torch_element_type
from warploom.kernels.matmul.problem import MatmulConfig, MatmulProblem, contiguous_problem
from warploom.kernels.matmul.reference import GemmError, GemmReference, largest_error
from warploom.measure.workload import OnGpu
from warploom.ops.matmul import MatmulPlan, plan_matmul

_STREAMED_TILES = 12  # along M and N, at most, of a small problem: with tiles that are cut, some are whole
_CHECKED_K_TILES = 8  # at least, of it
_BLOCK_ROWS = 2048  # of the float64 product: 256 MiB at N = 16384
DATA = ("normal", "uniform")
"""Distributions of a matrix's elements: N(0, 1), or uniform in [0, 1), which switches fewer transistors."""


def drawn(torch: Any, shape: tuple[int, ...], data: str, generator: Any, dtype: Any) -> Any:
    """A random matrix of :data:`DATA` on the generator's device, rounded from f32."""
    make = torch.rand if data == "uniform" else torch.randn
    return make(shape, generator=generator, device=generator.device).to(dtype)


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
    """Compare each element of ``out`` (m, n) with a product that is stored in blocks."""
    worst = 0.0
    for block in blocks:
        worst = max(worst, float(block.error(out, accumulate)))
    return GemmError(worst)


def torch_error(out: Any, a: Any, b: Any, accumulate: DType) -> GemmError:
    """Compare ``out`` (m, n) with the float64 product of a (m, k) and b (k, n), all torch tensors of one device."""
    return blocks_error(torch_blocks(a, b), out, accumulate)


class PlannedCall:
    """A plan's launches on one GPU without allocation: the kernels, and the memory between them."""

    def __init__(self, made: MatmulPlan, device: int, torch: Any) -> None:
        self._prepared = prepared = made.steps.prepare(("a", "b", "out"), device)
        where = torch.device("cuda", device)
        self._memory = memory = torch.empty(prepared.words, dtype=torch.float32, device=where)
        self._room = lambda _: (memory.data_ptr(), None)

    def launch(self, a: int, b: int, out: int) -> None:
        """Queue one product; addresses of the arrays."""
        stream = current_stream("torch", self._prepared.device)
        self._prepared.queue(self._prepared.queueable((stream, a, b, out), self._room))


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
        """Return the largest error of an element over all products."""
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
