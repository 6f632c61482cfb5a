"""``attention`` and ``plan``: scaled dot-product attention on arrays of any framework."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np

from warploom.core.dtypes import bf16, f16
from warploom.core.errors import ConfigError, ProblemError
from warploom.core.targets import Target, target
from warploom.interop.arrays import ArrayView, as_numpy, compact, describe, empty_like, require_dtype, same_device
from warploom.ir.program import Program
from warploom.kernels.attention.config import AttentionConfig
from warploom.kernels.attention.forward import attention_forward
from warploom.kernels.attention.ladder import BEST
from warploom.kernels.attention.problem import AttentionProblem, TensorStrides
from warploom.ops.backends import GpuCall, Grid, compiled, gpu_present, gpu_target, run_on_emulator

Layout = Literal["bshd", "bhsd"]
_AXES: dict[str, tuple[int, int, int]] = {"bshd": (0, 2, 1), "bhsd": (0, 1, 2)}
"""Where (batch, head, sequence) stand among the dimensions."""

_ALIGNED_ELEMENTS = 8  # 16 bytes: what one cp.async moves
_STRIDE_LIMIT = 2**32

EMULATED_TARGET = "sm_80"
"""The architecture a plan is made for where there is no GPU."""


@dataclass(frozen=True)
class AttentionPlan:
    """What a call of :func:`attention` would run: nothing has been compiled or launched yet."""

    problem: AttentionProblem
    config: AttentionConfig
    reason: str
    target: str
    device: str
    same_strides: bool
    scalars: dict[str, int]

    @property
    def grid(self) -> Grid:
        """CTAs along x, y and z."""
        return self.problem.grid(self.config)

    @cached_property
    def program(self) -> Program:
        """The traced kernel."""
        return trace(self.config, self.same_strides)

    @cached_property
    def cuda(self) -> str:
        """The CUDA C++ that would be compiled."""
        from warploom.cuda.printer import print_cuda

        return print_cuda(self.program)

    def __str__(self) -> str:
        return f"{self.config}\n  on {self.device} ({self.target}), grid {self.grid}: {self.reason}"


@lru_cache(maxsize=256)
def trace(config: AttentionConfig, same_strides: bool = True) -> Program:
    """The Program of a configuration, traced once per process."""
    program = attention_forward.trace(
        config=config, same_strides=same_strides, name=f"attention_{config.tile_m}x{config.tile_n}x{config.head_dim}"
    )
    return replace(program, min_ctas=config.min_ctas, opt_level=config.opt_level)


def candidates(problem: AttentionProblem) -> tuple[AttentionConfig, ...]:
    """Configurations for a problem, the fastest per multiply first."""
    base = replace(BEST, head_dim=problem.head_dim, dtype=problem.dtype)
    one_stage = replace(base, stages=1, double_buffer=True)
    return (
        base,
        replace(base, tile_m=128, num_warps=4),
        replace(one_stage, tile_m=128, num_warps=4),
        replace(base, tile_m=64, num_warps=4),
        replace(one_stage, tile_m=64, num_warps=4),
        replace(one_stage, tile_m=64, tile_n=32, num_warps=4),
        replace(one_stage, tile_m=64, tile_n=16, num_warps=4),
    )


def choose(problem: AttentionProblem, goal: Target) -> tuple[AttentionConfig, str]:
    """The configuration for a problem on a target, and why. Raises ProblemError when none fits."""
    reasons: list[str] = []
    for config in candidates(problem):
        problems = config.check(goal) + problem.misfits(config)
        if not problems:
            skipped = f"; larger tiles do not fit ({reasons[0]})" if reasons else ""
            return config, f"the largest of the default tiles that fits, untuned for this problem{skipped}"
        reasons.append(problems[0])
    raise ProblemError("no attention kernel takes this problem: " + "; ".join(dict.fromkeys(reasons)))


_Views = tuple[ArrayView, ArrayView, ArrayView]


@dataclass(frozen=True)
class _Inputs:
    """Described, checked and 16-byte aligned inputs."""

    q: ArrayView
    k: ArrayView
    v: ArrayView
    problem: AttentionProblem

    @property
    def all(self) -> _Views:
        return self.q, self.k, self.v


def _inputs(views: _Views, layout: str) -> _Inputs:
    """Check the arrays. Raises ProblemError with the first thing that is wrong."""
    if layout not in _AXES:
        raise ProblemError(f"layout is 'bshd' (batch, sequence, heads, head_dim) or 'bhsd', not {layout!r}")
    named = dict(zip("qkv", views, strict=True))
    for name, view in named.items():
        if len(view.shape) != 4:
            raise ProblemError(f"{name} has shape {tuple(view.shape)}; attention takes four dimensions, {layout}")
        require_dtype(view, name, (bf16, f16))
        if view.dtype is not views[0].dtype:
            raise ProblemError(f"q is {views[0].dtype} and {name} is {view.dtype}: convert them to one type")
        if view.strides[3] != 1 and view.shape[3] > 1:
            raise ProblemError(f"the last dimension of {name} is not contiguous (stride {view.strides[3]}): copy it")
    same_device(views, list(named))
    batch, head, seq = _AXES[layout]
    qs, ks, vs = (view.shape for view in views)
    if ks != vs:
        raise ProblemError(f"k has shape {tuple(ks)} and v {tuple(vs)}: they must be equal")
    if (qs[batch], qs[head], qs[3]) != (ks[batch], ks[head], ks[3]):
        raise ProblemError(
            f"q has shape {tuple(qs)} and k {tuple(ks)} ({layout}): batch, heads and head_dim must be equal"
        )
    problem = AttentionProblem(qs[batch], qs[head], qs[seq], ks[seq], qs[3], views[0].dtype)
    q_view, k_view, v_view = (_aligned(view) for view in views)
    return _Inputs(q_view, k_view, v_view, problem)


def _aligned(view: ArrayView) -> ArrayView:
    """The view, or a row-major copy where its rows do not start at multiples of 16 bytes or its strides are odd."""
    misaligned = view.pointer % 16 or any(s % _ALIGNED_ELEMENTS or not 0 <= s < _STRIDE_LIMIT for s in view.strides[:3])
    return compact(view) if misaligned else view


def _strides(view: ArrayView, layout: str) -> TensorStrides:
    batch, head, seq = _AXES[layout]
    return view.strides[batch], view.strides[head], view.strides[seq]


def _plan(inputs: _Inputs, out: ArrayView, layout: str, config: AttentionConfig | None) -> AttentionPlan:
    problem, q = inputs.problem, inputs.q
    on_gpu = q.device[0] == "cuda" or gpu_present()
    device = q.device[1] if q.device[0] == "cuda" else 0
    goal = gpu_target(device) if on_gpu else target(EMULATED_TARGET)
    strides = [_strides(view, layout) for view in (*inputs.all, out)]
    same = len(set(strides)) == 1
    if config is None:
        config, reason = choose(problem, goal)
        if same:  # a model's row stride does not change with its sequences, and as an immediate it saves registers
            config = replace(config, static_stride=strides[0][2])
    else:
        reason = "asked for by the caller"
        problems = config.check(goal) + problem.misfits(config)
        if config.static_stride and any(s[2] != config.static_stride for s in strides):
            problems.append(f"static_stride is {config.static_stride}, but the sequence strides are {strides}")
        if problems:
            raise ConfigError(f"{config} does not fit: " + "; ".join(problems))
    return AttentionPlan(
        problem,
        config,
        reason,
        goal.name,
        f"GPU {device}" if on_gpu else "the emulator",
        same,
        problem.scalars(config, *strides),
    )


def plan(q: Any, k: Any, v: Any, *, layout: Layout = "bshd", config: AttentionConfig | None = None) -> AttentionPlan:
    """What :func:`attention` would run with these arguments: configuration, reason, Program, CUDA. Runs nothing."""
    inputs = _inputs((describe(q), describe(k), describe(v)), layout)
    return _plan(inputs, describe(empty_like(inputs.q)), layout, config)


_Key = tuple[Any, ...]
_prepared: dict[_Key, GpuCall] = {}
_PREPARED_KEPT = 4096


def attention(q: Any, k: Any, v: Any, *, layout: Layout = "bshd", config: AttentionConfig | None = None) -> Any:
    """softmax(q·kᵀ / √head_dim) · v, computed without writing the attention matrix.

    Shapes: q (batch, q_len, heads, head_dim), k and v (batch, kv_len, heads, head_dim) with ``layout="bshd"``; with
    ``"bhsd"`` heads come before the sequence, as in PyTorch's SDPA. dtypes: float16 or bfloat16. head_dim 64 or 128;
    lengths are multiples of 64 (queries) and 16 (keys). Any strides with a contiguous last dimension; rows that do not
    start at multiples of 16 bytes are copied first.

    Arrays of torch, CuPy and JAX on a GPU are used where they lie, on the caller's current stream; the result is of
    the same kind. NumPy arrays (and other CPU arrays) run on the GPU when there is one, else on the emulator with all
    its checks. NaN and infinity propagate as in PyTorch's math backend.

    Raises ProblemError for arrays it does not take, ConfigError for a ``config`` that does not fit,
    UnsupportedDeviceError for a GPU older than compute capability 8.0.
    """
    views = describe(q), describe(k), describe(v)
    key = (layout, config, *[view[1:5] for view in views])  # shapes, strides, types, devices
    call = _prepared.get(key)
    if call is None or (views[0].pointer | views[1].pointer | views[2].pointer) % 16:
        return _first_call(views, layout, config, key)
    result = empty_like(views[0], views[0].shape)
    out = describe(result)
    call.launch((views[0].pointer, views[1].pointer, views[2].pointer, out.pointer), out.kind)
    return result


def _first_call(views: _Views, layout: str, config: AttentionConfig | None, key: _Key) -> Any:
    """Everything that :func:`attention` need not repeat for arrays of the same shapes, strides and device."""
    inputs = _inputs(views, layout)
    result = empty_like(inputs.q, inputs.q.shape)
    out = describe(result)
    made = _plan(inputs, out, layout, config)
    if inputs.q.device[0] == "cuda":
        call = GpuCall.prepare(made.program, made.grid, made.scalars, inputs.q.device[1])
        if all(a is b for a, b in zip(inputs.all, views, strict=True)):  # nothing had to be copied first
            if len(_prepared) >= _PREPARED_KEPT:
                _prepared.clear()
            _prepared[key] = call
        call.launch((*(view.pointer for view in inputs.all), out.pointer), out.kind)
    elif made.device == "the emulator":
        run_on_emulator(made.program, made.grid, (*inputs.all, out), made.scalars, made.problem.flops)
    else:
        _run_from_host(inputs, out, layout, made)
    return result


def _run_from_host(inputs: _Inputs, out: ArrayView, layout: str, made: AttentionPlan) -> None:
    """CPU arrays on a GPU: contiguous copies there and back."""
    hosts = [np.ascontiguousarray(as_numpy(view)) for view in inputs.all]
    strides = [_strides(describe(x), layout) for x in hosts] + [_strides(out, layout)]
    scalars = made.problem.scalars(made.config, *strides)
    same = len(set(strides)) == 1
    program = trace(replace(made.config, static_stride=strides[0][2] if same else 0), same)
    GpuCall.prepare(program, made.grid, scalars, 0).run_from_host(hosts, as_numpy(out))


__all__ = ["AttentionPlan", "attention", "choose", "compiled", "plan", "trace"]
