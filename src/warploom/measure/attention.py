"""Attention forward on a GPU: random inputs, launches, and the error of results against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

from warploom.core.dtypes import DType
from warploom.interop.arrays import ArrayView, describe
from warploom.kernels.attention.problem import AttentionConfig, AttentionProblem
from warploom.kernels.attention.reference import ErrorReport, attention_reference, largest_errors
from warploom.kernels.attention.scores import seen_of
from warploom.measure.pytorch import torch_module
from warploom.measure.workload import OnGpu
from warploom.ops.attention import plan
from warploom.ops.backends import GpuCall

_BLOCK_ELEMENTS = 1 << 27  # of a block of scores: 1 GiB in float64
_CHECKED_ROWS = 512  # at least, of a small problem that results are checked on


def torch_error(out: Any, q: Any, k: Any, v: Any, dtype: DType, problem: AttentionProblem | None = None) -> ErrorReport:
    """Compare ``out`` with float64 attention of q, k, v, all torch tensors (batch, seq, heads, head_dim).

    ``problem``: the options of its scores; without one, every query sees every key. The same bounds, element by
    element, as :func:`warploom.kernels.attention.reference.attention_error`.
    """
    torch = torch_module() if out.is_cuda else __import__("torch")
    worst = (torch.zeros((), dtype=torch.float64, device=out.device),) * 3
    batch, q_len, heads, _ = q.shape
    kv_len, how = k.shape[1], {} if problem is None else problem.numbers
    sides = how.pop("window", (None, None))
    block, group = max(1, min(q_len, _BLOCK_ELEMENTS // kv_len)), heads // k.shape[2]
    for b, h, start in product(range(batch), range(heads), range(0, q_len, block)):
        rows = slice(start, start + block)
        seen = seen_of(q_len, kv_len, sides, rows=rows, device=q.device)
        given = q[b, rows, h], k[b, :, h // group], v[b, :, h // group]
        found = largest_errors(out[b, rows, h], attention_reference(*given, dtype, seen=seen, **how), dtype)
        worst = tuple(map(torch.maximum, worst, found))
    return ErrorReport.of(*map(float, worst))


class AttentionOnGpu(OnGpu):
    """Attention forward on contiguous (batch, sequence, heads, head_dim) tensors."""

    margin = 2.0  # approximations of the hardware's count

    def __init__(self, problem: AttentionProblem, device: int, seed: int = 0) -> None:
        size = problem.dtype.bytes * problem.batch * problem.head_dim
        super().__init__(device, size * (problem.q_len * problem.heads + 2 * problem.kv_len * problem.kv_heads), seed)
        self._problem = problem
        self.inputs = [self._fresh(problem) for _ in range(self.sets)]
        self._output = self._torch.empty_like(self.inputs[0][0])

    def _fresh(self, problem: AttentionProblem) -> tuple[Any, Any, Any]:
        def one(length: int, heads: int) -> Any:
            shape, kind = (problem.batch, length, heads, problem.head_dim), self.kind(problem.dtype)
            return self._torch.randn(shape, generator=self._generator, device=self._device, dtype=kind)

        keys = problem.kv_len, problem.kv_heads
        return one(problem.q_len, problem.heads), one(*keys), one(*keys)

    def prepare(self, config: AttentionConfig) -> Callable[[int], object]:
        """Launches of the kernel, loaded."""
        call, results = self._call(config, self.inputs[0]), self._results(self._output, self._problem)
        arrays = [(*(describe(x) for x in inputs), *results) for inputs in self.inputs]
        for one in arrays:
            call.launch(one, "torch")  # packs the arguments of every input set
        return lambda i: call.launch(arrays[i], "torch")

    def error(self, config: AttentionConfig, problem: AttentionProblem | None = None) -> ErrorReport:
        """Compare every element with a reference that rounds P and O."""
        problem = problem or self._problem
        inputs = self._fresh(problem)
        out = self._torch.full_like(inputs[0], math.nan)
        arrays = *(describe(x) for x in inputs), *self._results(out, problem)
        self._call(config, inputs).launch(arrays, "torch")
        return torch_error(out, *inputs, problem.dtype, problem)

    def checked(self, config: AttentionConfig) -> AttentionProblem:
        """Lengths with the same remainders of the tiles, one batch."""
        return checked_problem(self._problem, config)

    def _results(self, out: Any, problem: AttentionProblem) -> tuple[ArrayView, ...]:
        if not problem.lse:
            return (describe(out),)
        rows = problem.batch, problem.heads, problem.q_len
        return describe(out), describe(self._torch.empty(rows, device=self._device, dtype=self._torch.float32))

    def _call(self, config: AttentionConfig, inputs: tuple[Any, Any, Any]) -> GpuCall:
        """The kernel with the grid and scalars of these inputs."""
        p = self._problem
        made = plan(*inputs, **p.numbers, return_lse=p.lse, config=config)
        return GpuCall.of(made.calls[0], self._index)


def checked_problem(problem: AttentionProblem, config: AttentionConfig) -> AttentionProblem:
    """A small problem that the same kernel runs: lengths with the same remainders of the tiles, one batch."""
    period = math.lcm(config.tile_m, config.tile_n)
    least = period * -(-_CHECKED_ROWS // period)
    q_len, kv_len = (min(n, n % period + least) for n in (problem.q_len, problem.kv_len))
    if q_len == kv_len and problem.q_len != problem.kv_len:  # equal strides would be another kernel
        q_len, kv_len = problem.q_len, problem.kv_len
    return problem.of_lengths(q_len, kv_len, batch=1)
