"""Attention as the tuner sees it: its kernels' tiles, its inputs on a GPU, and the check of its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from warploom.bench.attention_reference import torch_error
from warploom.core.errors import ConfigError, ProblemError
from warploom.core.targets import Target
from warploom.interop.arrays import ArrayView, describe
from warploom.kernels.attention.choice import choose, parse_config
from warploom.kernels.attention.decode import Decode
from warploom.kernels.attention.problem import AttentionConfig, AttentionProblem, Operands, TensorStrides
from warploom.kernels.attention.sm80 import ForwardSm80
from warploom.kernels.attention.sm90 import ForwardSm90
from warploom.kernels.source import KernelSource
from warploom.ops.attention import plan
from warploom.ops.backends import GpuCall
from warploom.tune.operation import OnGpu, combinations

_LAYOUT = "bshd"
_CHECKED_ROWS = 512  # at least, of the problem that results are checked on
_MARGIN = 2  # times what the type allows: approximations of the hardware's count


@dataclass(frozen=True)
class AttentionOperation:
    """Attention forward on contiguous (batch, sequence, heads, head_dim) tensors."""

    fixed: frozenset[str] = frozenset({"dtype", "head_dim"})

    def choose(self, problem: AttentionProblem, target: Target) -> tuple[AttentionConfig, str]:
        """The configuration that runs untuned, and why. Raises ProblemError for a problem that is not tuned."""
        config, reason = choose(problem, target)
        if isinstance(config, Decode):
            raise ProblemError(f"nothing to tune: {reason}, by two kernels that are the same for all lengths")
        return config, reason

    def space(self, problem: AttentionProblem, target: Target) -> Iterator[AttentionConfig]:
        """Every tile of the kernels for the architecture, the fastest kernel first."""
        default, _ = self.choose(problem, target)
        general = ForwardSm80(head_dim=problem.head_dim, dtype=problem.dtype)
        if target.has_wgmma:
            base = ForwardSm90(head_dim=problem.head_dim, dtype=problem.dtype)
            base = default if default.requires == base.requires else base
            yield from combinations(base, dict.fromkeys(("consumers", "tile_n", "stages", "turns", "persistent")))
        yield from combinations(general, dict.fromkeys(("tile_m", "tile_n", "num_warps", "stages")))

    def misfits(self, problem: AttentionProblem, config: AttentionConfig, target: Target) -> list[str]:
        """The violated constraints of the configuration and its kernel."""
        return config.check(target) or config.misfits(problem)

    def source(self, problem: AttentionProblem, config: AttentionConfig) -> KernelSource:
        """The kernel of a configuration."""
        return config.call(problem, _operands(problem), 1).source

    def parse(self, text: str) -> AttentionConfig:
        """A configuration from its notation. Raises ConfigError."""
        config = parse_config(text)
        if isinstance(config, Decode):
            raise ConfigError(f"{config} is not tuned: few queries have kernels that are the same for all lengths")
        return config

    def workload(self, problem: AttentionProblem, device: int) -> AttentionWorkload:
        """The problem on a GPU. Raises UnsupportedDeviceError without PyTorch or a GPU."""
        return AttentionWorkload(problem, device)


def _operands(problem: AttentionProblem) -> Operands:
    q, k, v, out = _strides(problem)
    return Operands((q, k, v, out), _LAYOUT)


def _strides(problem: AttentionProblem) -> tuple[TensorStrides, ...]:
    """(batch, head, sequence) of Q, K, V and O, contiguous."""
    q, k = (
        (length * heads * problem.head_dim, problem.head_dim, heads * problem.head_dim)
        for length, heads in ((problem.q_len, problem.heads), (problem.kv_len, problem.kv_heads))
    )
    return q, k, k, q


def checked_problem(problem: AttentionProblem, config: AttentionConfig) -> AttentionProblem:
    """A small problem that the same kernel runs: lengths with the same remainders of the tiles, one batch."""
    period = math.lcm(config.tile_m, config.tile_n)
    least = period * -(-_CHECKED_ROWS // period)
    q_len, kv_len = (min(n, n % period + least) for n in (problem.q_len, problem.kv_len))
    if q_len == kv_len and problem.q_len != problem.kv_len:  # equal strides would be another kernel
        q_len, kv_len = problem.q_len, problem.kv_len
    return replace(problem, batch=1, q_len=q_len, kv_len=kv_len)


_Tensors = tuple[Any, Any, Any]


class AttentionWorkload(OnGpu):
    """Inputs of one problem on one GPU, held by PyTorch; its current stream is the one timed."""

    def __init__(self, problem: AttentionProblem, device: int) -> None:
        size = problem.dtype.bytes * problem.batch * problem.head_dim
        super().__init__(device, size * (problem.q_len * problem.heads + 2 * problem.kv_len * problem.kv_heads))
        self._problem = problem
        self._inputs = [self._fresh(problem) for _ in range(self.sets)]
        self._output = self._torch.empty_like(self._inputs[0][0])
        self._checks: dict[AttentionProblem, _Tensors] = {}

    def _fresh(self, problem: AttentionProblem) -> _Tensors:
        kind = self.kind(problem.dtype)

        def one(length: int, heads: int) -> Any:
            shape = problem.batch, length, heads, problem.head_dim
            return self._torch.randn(shape, generator=self._generator, device=self._device, dtype=kind)

        keys = problem.kv_len, problem.kv_heads
        return one(problem.q_len, problem.heads), one(*keys), one(*keys)

    def prepare(self, config: AttentionConfig) -> Callable[[int], object]:
        """Launches without allocation, on input set i."""
        call = self._call(config, self._inputs[0])
        out = self._views(self._output, self._problem)
        views = [(*(describe(x) for x in inputs), *out) for inputs in self._inputs]
        for view in views:
            call.launch(view, "torch")  # packs the arguments of every input set
        return lambda i: call.launch(views[i], "torch")

    def fault(self, config: AttentionConfig) -> str | None:
        """Compare a small problem with float64; waits for the GPU."""
        problem = checked_problem(self._problem, config)
        if problem not in self._checks:
            self._checks[problem] = self._fresh(problem)
        inputs = self._checks[problem]
        out = self._torch.full_like(inputs[0], math.nan)
        call = self._call(config, inputs)
        call.launch((*(describe(x) for x in inputs), *self._views(out, problem)), "torch")
        error = torch_error(out, *inputs, problem.dtype, problem).value / _MARGIN
        return None if error <= 1.0 else f"computes wrong results (error {error:.3g} of what the type allows)"

    def _views(self, out: Any, problem: AttentionProblem) -> tuple[ArrayView, ...]:
        if not problem.lse:
            return (describe(out),)
        rows = problem.batch, problem.heads, problem.q_len
        return describe(out), describe(self._torch.empty(rows, device=self._device, dtype=self._torch.float32))

    def _call(self, config: AttentionConfig, inputs: _Tensors) -> GpuCall:
        """The kernel with the grid and scalars of these inputs."""
        p = self._problem
        made = plan(
            *inputs, scale=p.scale, window=p.window, softcap=p.softcap, return_lse=p.lse, layout=_LAYOUT, config=config
        )
        return GpuCall.of(made.call, self._index)
