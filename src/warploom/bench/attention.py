"""Attention to a ladder and to the tuner: inputs, the float64 reference, PyTorch's backends as baselines."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.bench.attention_reference import torch_error
from warploom.bench.baselines import available_sdpa, flash_attention_4
from warploom.bench.ladder import EmulatorCase, ErrorEntry, GpuCase
from warploom.bench.timing import Candidate
from warploom.bench.workload import OnGpu
from warploom.core.dtypes import DType, bf16
from warploom.interop.arrays import ArrayView, describe
from warploom.kernels.attention.problem import AttentionConfig, AttentionProblem
from warploom.kernels.attention.reference import ErrorReport, attention_error, attention_reference
from warploom.kernels.ladder import Rung
from warploom.kernels.settings import refuse
from warploom.ops.attention import plan
from warploom.ops.backends import EMULATION_OVERHEAD, SECONDS_PER_FLOP, GpuCall, emulator_arguments

GPU_TOKENS = 16384
"""Batch times sequence length of every size on the GPU."""
GPU_WIDTH = 2048
"""Heads times head_dim there."""
_CHECKED_ROWS = 512  # at least, of a small problem that results are checked on
OVER_ROUNDED = "max |o - o64| / (2·max |rounded - o64|), where rounded is float64 that rounds P and O to the type"


def settled(
    rung: Rung[AttentionConfig], head_dim: int, dtype: DType, settings: Mapping[str, str]
) -> Rung[AttentionConfig]:
    """The rung for a head_dim and type, with flags overridden. Raises ConfigError for flags that are not valid."""
    config = dataclasses.replace(rung.config, head_dim=head_dim, dtype=dtype).with_settings(dict(settings))
    refuse(f"rung {rung.key} with these flags is not valid", config.check())
    return dataclasses.replace(rung, config=config)


def has_room(rung: Rung[AttentionConfig], head_dim: int, dtype: DType) -> bool:
    """Whether the rung's row sums can be a column of P·V at this head_dim and type; without such a column, yes."""
    config = dataclasses.replace(rung.config, head_dim=head_dim, dtype=dtype)
    if not getattr(config, "sum_column", False):
        return True
    return not config.check() or bool(dataclasses.replace(config, sum_column=False).check())


@dataclass(frozen=True)
class AttentionFamily:
    """Attention forward, full (no mask), self-attention. ``heads`` and ``seq`` are the emulator's problem."""

    heads: int = 1
    seq: int = 256
    head_dim: int = 128
    dtype: DType = bf16
    name: str = "attention"

    def emulator_case(self, config: AttentionConfig, seed: int) -> EmulatorCase:
        """q, k, v ~ N(0, 1) of shape (1, seq, heads, head_dim), and an output full of NaN."""
        rng = np.random.default_rng(seed)
        shape = (1, self.seq, self.heads, config.head_dim)
        q, k, v = (rng.standard_normal(shape, np.float32).astype(config.dtype.numpy) for _ in range(3))
        out = np.full_like(q, np.nan)
        made = plan(q, k, v, config=config)

        def errors() -> ErrorEntry:
            heads_first = (np.swapaxes(x, 1, 2) for x in (q, k, v))
            reference = attention_reference(*heads_first, dtype=config.dtype)
            return _entry(attention_error(np.swapaxes(out, 1, 2), reference, config.dtype))

        views = [describe(x) for x in (q, k, v, out)]
        arguments = emulator_arguments(made.program, views, made.calls[0].scalars, made.calls[0].maps)
        return EmulatorCase(made.program, made.grid, arguments, errors)

    def expected_seconds(self, config: AttentionConfig) -> float:
        """From the floating-point operations of the two products."""
        return EMULATION_OVERHEAD + SECONDS_PER_FLOP * 4 * self.heads * self.seq**2 * config.head_dim

    def gpu_case(self, size: int, device: int, seed: int) -> GpuCase[AttentionConfig]:
        """16384 tokens of sequences of length ``size``, heads × head_dim = 2048."""
        batch, heads = max(1, GPU_TOKENS // size), max(1, GPU_WIDTH // self.head_dim)
        problem = AttentionProblem(batch, heads, heads, size, size, self.head_dim, self.dtype)
        work, label = AttentionOnGpu(problem, device, seed), {"seq": size, "batch": batch, "heads": heads}
        return GpuCase(label, problem.flops, work, _baselines(work.inputs), lambda config: _entry(work.error(config)))


def _entry(report: ErrorReport) -> ErrorEntry:
    """The error by element; or, where that holds but the worst error is too far from a rounding reference's, that one.

    NaN in the output counts as very far (a finite number: JSON has no infinity).
    """
    metric, value = report.metric, report.value / report.bound
    if value <= 1.0 and report.against_rounded > 2.0:
        metric, value = OVER_ROUNDED, report.against_rounded / 2.0
    return ErrorEntry(metric, value if value < np.inf else float(np.finfo(np.float64).max), 1.0)


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
        """By element, and against a reference that rounds P and O."""
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
        made = plan(*inputs, scale=p.scale, window=p.window, softcap=p.softcap, return_lse=p.lse, config=config)
        return GpuCall.of(made.calls[0], self._index)


def checked_problem(problem: AttentionProblem, config: AttentionConfig) -> AttentionProblem:
    """A small problem that the same kernel runs: lengths with the same remainders of the tiles, one batch."""
    period = math.lcm(config.tile_m, config.tile_n)
    least = period * -(-_CHECKED_ROWS // period)
    q_len, kv_len = (min(n, n % period + least) for n in (problem.q_len, problem.kv_len))
    if q_len == kv_len and problem.q_len != problem.kv_len:  # equal strides would be another kernel
        q_len, kv_len = problem.q_len, problem.kv_len
    return dataclasses.replace(problem, batch=1, q_len=q_len, kv_len=kv_len)


def _baselines(inputs: Sequence[tuple[Any, Any, Any]]) -> list[Candidate]:
    """PyTorch's flash and cuDNN backends, on the same memory seen as (batch, heads, seq, head_dim); and
    FlashAttention-4 where it can be imported and runs."""
    sets = [tuple(x.transpose(1, 2) for x in of) for of in inputs]
    found = [Candidate(name, _on_sets(run, sets)) for name, run in available_sdpa(*sets[0]).items()]
    latest, _ = flash_attention_4()
    if latest is not None:
        with contextlib.suppress(Exception):  # its compiler does not take this GPU or head_dim
            latest(*inputs[0])
            found.append(Candidate("flash_attention_4", _on_sets(latest, inputs)))
    return found


def _on_sets(run: Any, sets: Sequence[tuple[Any, ...]]) -> Any:
    return lambda i: run(*sets[i])
