"""Attention as the tuner sees it: its two generators' spaces, its inputs on a GPU, and the check of its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from warploom.bench.peers import torch_module
from warploom.bench.timing import input_sets
from warploom.core.dtypes import u32
from warploom.core.targets import Target
from warploom.interop.arrays import ArrayView, describe
from warploom.ir.program import Program
from warploom.kernels.attention.choice import choose, parse_config
from warploom.kernels.attention.hopper_config import HopperConfig
from warploom.kernels.attention.ladder import BEST
from warploom.kernels.attention.problem import AnyConfig, AttentionProblem, TensorStrides
from warploom.kernels.attention.reference import F32_SLACK, UNIT_ROUNDOFF
from warploom.kernels.specialised import WARPGROUP, WARPGROUP_ROWS
from warploom.ops.attention import plan
from warploom.ops.attention_kernels import mapped, trace_for
from warploom.ops.backends import GpuCall
from warploom.tune.built import Built
from warploom.tune.space import Space
from warploom.winners.classes import ProblemClass, attention_class

_LAYOUT = "bshd"
_WORK_REGISTERS = 16  # for addresses and the rows' statistics
_CHECKED_ROWS = 512  # at least, of the problem that results are checked on

_ALWAYS_WON = frozenset(
    {"dtype", "head_dim", "async_copy", "swizzle", "eager", "cooperative", "strided", "folded_scale", "opt_level"}
)
"""Flags of ``mma.sync`` kernels that no search needs to try without: the lower rungs of the ladder."""


@dataclass(frozen=True)
class AttentionFamily:
    """Attention forward on contiguous (batch, sequence, heads, head_dim) tensors."""

    name: str = "attention"

    def problem_class(self, problem: AttentionProblem) -> ProblemClass:
        """Which problems share a winner with this one."""
        return attention_class(problem)

    def default(self, problem: AttentionProblem, goal: Target) -> AnyConfig:
        """What runs untuned. Raises ProblemError where nothing does."""
        return choose(problem, goal)[0]

    def spaces(self, problem: AttentionProblem, goal: Target) -> Sequence[Space[Any]]:
        """``mma.sync`` everywhere; where there is ``wgmma`` that generator first, and of the other the tiles alone."""
        base = replace(BEST, head_dim=problem.head_dim, dtype=problem.dtype)
        tiles = ("tile_m", "tile_n", "num_warps")
        if not goal.has_wgmma:
            return (Space(base, (*tiles, "stages", "lazy_rescale"), _ALWAYS_WON),)
        default = self.default(problem, goal)
        own = HopperConfig(head_dim=problem.head_dim, dtype=problem.dtype)
        hopper = Space(
            default if isinstance(default, HopperConfig) else own,
            ("consumers", "tile_n", "stages", "pingpong", "flat"),
            frozenset({"dtype", "head_dim", "opt_level"}),
        )
        return hopper, Space(base, tiles, _ALWAYS_WON)

    def misfits(self, problem: AttentionProblem, config: AnyConfig, goal: Target) -> list[str]:
        """What ``check`` and the problem say, and accumulators that no register file holds."""
        found = config.check(goal) + problem.misfits(config)
        need, limit = accumulator_registers(config), _register_limit(config, goal)
        if not found and need + _WORK_REGISTERS > limit:
            found.append(f"its fragments alone take {need} of {limit} registers")
        return found

    def kernel_key(self, problem: AttentionProblem, config: AnyConfig) -> Hashable:
        """Equal for problems that run the same kernel."""
        strides = _strides(problem)
        return config, problem.features(config), len(set(strides)), tuple(s[2] for s in strides)

    def program(self, problem: AttentionProblem, config: AnyConfig) -> Program:
        """The traced kernel."""
        return trace_for(problem, config, _strides(problem), _LAYOUT)

    def parse(self, text: str) -> AnyConfig:
        """A configuration from ``str(config)``. Raises ConfigError."""
        return parse_config(text)

    def workload(self, problem: AttentionProblem, device: int) -> AttentionWorkload:
        """The problem on a GPU. Raises UnsupportedDeviceError without PyTorch or a GPU."""
        return AttentionWorkload(problem, device)


def accumulator_registers(config: AnyConfig) -> int:
    """Registers per thread of the fragments that live through the main loop: O, S (32 bits), P and a resident Q."""
    if isinstance(config, HopperConfig):
        rows, threads = WARPGROUP_ROWS, WARPGROUP
        resident_q = config.q_in_registers
    else:
        rows, threads = config.warp_rows, 32
        resident_q = config.load_q == 0
    output, scores = rows * config.head_dim // threads, rows * config.tile_n // threads
    weights = scores // 2 if isinstance(config, HopperConfig) else 0  # mma.sync packs P in place, slice by slice
    return output + scores + weights + (output // 2 if resident_q else 0)


def _register_limit(config: AnyConfig, goal: Target) -> int:
    if isinstance(config, HopperConfig):
        return config.consumer_registers
    return min(goal.registers_per_thread, goal.registers_per_sm // (config.threads * config.min_ctas))


def _strides(problem: AttentionProblem) -> tuple[TensorStrides, ...]:
    """(batch, head, sequence) of Q, K, V and O, contiguous."""
    q, k = (
        (length * heads * problem.head_dim, problem.head_dim, heads * problem.head_dim)
        for length, heads in ((problem.q_len, problem.heads), (problem.kv_len, problem.kv_heads))
    )
    return q, k, k, q


def checked_problem(problem: AttentionProblem, config: AnyConfig) -> AttentionProblem:
    """A small problem that the same kernel runs: lengths with the same remainders of the tiles, one batch."""
    period = math.lcm(config.tile_m, config.tile_n)
    least = period * -(-_CHECKED_ROWS // period)
    q_len, kv_len = (min(n, n % period + least) for n in (problem.q_len, problem.kv_len))
    if q_len == kv_len and problem.q_len != problem.kv_len:  # equal strides would be another kernel
        q_len, kv_len = problem.q_len, problem.kv_len
    return replace(problem, batch=1, q_len=q_len, kv_len=kv_len)


_Tensors = tuple[Any, Any, Any]


class AttentionWorkload:
    """Inputs of one problem on one GPU, held by PyTorch; its current stream is the one timed."""

    def __init__(self, problem: AttentionProblem, device: int) -> None:
        torch = self._torch = torch_module()
        self._problem, self._index = problem, device
        self._device = torch.device("cuda", device)
        self._generator = torch.Generator(self._device).manual_seed(0)
        size = problem.dtype.bytes * problem.batch * problem.head_dim
        per_set = size * (problem.q_len * problem.heads + 2 * problem.kv_len * problem.kv_heads)
        self.sets = input_sets(per_set, int(torch.cuda.get_device_properties(self._device).L2_cache_size))
        self._inputs = [self._fresh(problem) for _ in range(self.sets)]
        self._output = torch.empty_like(self._inputs[0][0])
        self._checks: dict[AttentionProblem, tuple[_Tensors, tuple[Any, Any]]] = {}

    def _fresh(self, problem: AttentionProblem) -> _Tensors:
        kind = {"bf16": self._torch.bfloat16, "f16": self._torch.float16}[problem.dtype.name]

        def one(length: int, heads: int) -> Any:
            shape = problem.batch, length, heads, problem.head_dim
            return self._torch.randn(shape, generator=self._generator, device=self._device, dtype=kind)

        keys = problem.kv_len, problem.kv_heads
        return one(problem.q_len, problem.heads), one(*keys), one(*keys)

    def prepare(self, config: AnyConfig, built: Built) -> Callable[[int], object]:
        """Launches without allocation, on input set i."""
        call = self._call(config, built, self._inputs[0])
        out = self._views(self._output, self._problem)
        views = [(*(describe(x) for x in inputs), *out) for inputs in self._inputs]
        for view in views:
            call.launch(view, "torch")  # packs the arguments of every input set
        return lambda i: call.launch(views[i], "torch")

    def fault(self, config: AnyConfig, built: Built) -> str | None:
        """Compare a small problem with float64; waits for the GPU."""
        problem = checked_problem(self._problem, config)
        if problem not in self._checks:
            fresh = self._fresh(problem)
            self._checks[problem] = fresh, reference(self._torch, *fresh, problem)
        inputs, (expected, magnitude) = self._checks[problem]
        out = self._torch.full_like(inputs[0], math.nan)
        call = self._call(config, built, inputs)
        call.launch((*(describe(x) for x in inputs), *self._views(out, problem)), "torch")
        error = relative_error(self._torch, out, expected, magnitude, problem.dtype.name)
        return None if error <= 1.0 else f"computes wrong results (error {error:.3g} of what the type allows)"

    def answers(self) -> bool:
        """Whether the GPU still runs anything in this process."""
        try:
            self._torch.cuda.synchronize(self._device)
        except RuntimeError:
            return False
        return True

    def _views(self, out: Any, problem: AttentionProblem) -> tuple[ArrayView, ...]:
        if not problem.lse:
            return (describe(out),)
        rows = problem.batch, problem.heads, problem.q_len
        return describe(out), describe(self._torch.empty(rows, device=self._device, dtype=self._torch.float32))

    def _call(self, config: AnyConfig, built: Built, inputs: _Tensors) -> GpuCall:
        """The compiled kernel with the grid and scalars of these inputs; nothing is traced here."""
        from warploom.cuda.launch import load, scalar

        p = self._problem
        made = plan(
            *inputs, scale=p.scale, window=p.window, softcap=p.softcap, return_lse=p.lse, layout=_LAYOUT, config=config
        )
        kernel = load(built.kernel, self._index)
        launch = kernel.configure(made.grid, built.threads, shared_bytes=built.shared_bytes)
        scalars = tuple(scalar(u32, made.scalars[name]) for name in built.scalars)
        views = [*map(describe, inputs), describe(inputs[0])]  # O lies as Q does
        return GpuCall(kernel, launch, scalars, self._index, mapped(config, _LAYOUT, views))


def reference(torch: Any, q: Any, k: Any, v: Any, problem: AttentionProblem) -> tuple[Any, Any]:
    """(O, Σ p·|v|) in float64, of the shape of q; rows that see no key are zero. Head by head, to spare memory."""
    outputs, magnitudes = (torch.zeros(q.shape, dtype=torch.float64, device=q.device) for _ in range(2))
    group = problem.heads // problem.kv_heads
    hidden = _hidden(torch, problem, q.device)
    for b in range(problem.batch):
        for h in range(problem.heads):
            queries, keys, values = q[b, :, h].double(), k[b, :, h // group].double(), v[b, :, h // group].double()
            scale = 1 / math.sqrt(problem.head_dim) if problem.scale is None else problem.scale
            scores = queries @ keys.T * scale
            if problem.softcap is not None:
                scores = problem.softcap * torch.tanh(scores / problem.softcap)
            weights = torch.nan_to_num(torch.softmax(scores.masked_fill(hidden, -math.inf), -1), nan=0.0)
            outputs[b, :, h], magnitudes[b, :, h] = weights @ values, weights @ values.abs()
    return outputs, magnitudes


def _hidden(torch: Any, problem: AttentionProblem, device: Any) -> Any:
    """Which keys (columns) a query (row) does not see."""
    row = torch.arange(problem.q_len, device=device)[:, None] + (problem.kv_len - problem.q_len)
    distance = torch.arange(problem.kv_len, device=device)[None, :] - row
    left, right = problem.window
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden |= distance < -left
    if right is not None:
        hidden |= distance > right
    return hidden


def relative_error(torch: Any, out: Any, expected: Any, magnitude: Any, dtype: str) -> float:
    """The largest |out - expected| over what the type allows at that element (twice, as P is rounded too)."""
    allowed = UNIT_ROUNDOFF[dtype] * (expected.abs() + magnitude) * 2 + F32_SLACK * (magnitude + 1)
    error = torch.nan_to_num((out.double() - expected).abs(), nan=math.inf)
    return float((error / allowed).max())
