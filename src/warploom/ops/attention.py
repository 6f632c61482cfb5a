"""``attention`` and ``plan``: scaled dot-product attention on arrays of any framework."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from warploom.core.dtypes import F32_MAX, bf16, f16, f32
from warploom.core.errors import ConfigError, ProblemError, shown
from warploom.core.targets import Target
from warploom.interop import tracing
from warploom.interop.arrays import (
    ArrayView,
    address,
    as_numpy,
    compact,
    describe,
    empty,
    empty_like,
    filled,
    require_dtype,
    same_device,
)
from warploom.interop.tracing import is_tracing
from warploom.kernels.attention.choice import adapted, choose, parse_config
from warploom.kernels.attention.config import AttentionConfig
from warploom.kernels.attention.features import AttentionFeatures
from warploom.kernels.attention.hopper_config import HopperConfig
from warploom.kernels.attention.problem import AnyConfig, AttentionProblem, TensorStrides
from warploom.ops.attention_kernels import mapped, recipe_for
from warploom.ops.backends import GpuCall, Grid, gpu_name, run_on_emulator
from warploom.ops.options import configuration, flag, number, single
from warploom.ops.places import EMULATOR, Place
from warploom.ops.recipes import Recipe
from warploom.winners.classes import attention_class
from warploom.winners.store import find_winner

if TYPE_CHECKING:
    from warploom.ir.program import Program

Layout = Literal["bshd", "bhsd"]
Window = tuple[int | None, int | None]
_AXES: dict[str, tuple[int, int, int]] = {"bshd": (0, 2, 1), "bhsd": (0, 1, 2)}
"""Where (batch, head, sequence) stand among the dimensions."""

_ALIGNED_ELEMENTS = 8  # 16 bytes: what one cp.async moves
_STRIDE_LIMIT = 2**32
_OPEN_SIDE = 2**30
"""Keys on one side of a window from which on it is no window."""


@dataclass(frozen=True)
class Options:
    """The keyword arguments of :func:`attention` that shape its kernel."""

    causal: bool = False
    scale: float | None = None
    window: Window | None = None
    softcap: float | None = None
    return_lse: bool = False
    layout: str = "bshd"

    def plain(self) -> Options:
        """These options as Python's own values: arrays of one number are read. Raises ProblemError for other kinds."""
        if not isinstance(self.layout, str) or self.layout not in _AXES:
            raise ProblemError(
                f"layout is 'bshd' (batch, sequence, heads, head_dim) or 'bhsd', not {shown(self.layout)}"
            )
        return Options(
            flag("causal", self.causal),
            None if self.scale is None else number("scale", self.scale),
            None if self.window is None else _window(self.window),
            None if self.softcap is None else number("softcap", self.softcap),
            flag("return_lse", self.return_lse),
            self.layout,
        )

    def check(self) -> None:
        """Raises ProblemError for values that no kernel computes with."""
        AttentionFeatures(window=self.sides(), softcap=self.softcap)

    def sides(self) -> Window:
        """(left, right) keys a query sees around the one aligned with it; None is unbounded."""
        left, right = self.window or (None, None)
        # -1 is FlashAttention's open side; one of so many keys is open too, and sums with it would not fit in 32 bits
        left, right = (None if side is None or side == -1 or side >= _OPEN_SIDE else side for side in (left, right))
        if self.causal:
            right = 0 if right is None else min(right, 0)
        return left, right


def _window(value: Any) -> Window:
    """(left, right) as ints and None. Raises ProblemError for anything that is no pair of them."""
    sides: Any = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(sides, tuple | list) and len(sides) == 2:  # pyright: ignore[reportUnknownArgumentType]
        found = [single(side) for side in sides]  # pyright: ignore[reportUnknownVariableType]
        if all(side is None or isinstance(side, Integral) for side in found):
            left, right = (None if side is None else int(side) for side in found)
            return left, right
    raise ProblemError(f"window is (left, right) counts of keys, None or -1 for an open side; not {shown(value)}")


@dataclass(frozen=True)
class AttentionPlan:
    """What a call of :func:`attention` would run: nothing has been compiled or launched yet."""

    problem: AttentionProblem
    config: AnyConfig
    reason: str
    target: str
    device: str
    strides: tuple[TensorStrides, ...]
    scalars: dict[str, int]
    layout: str
    multiprocessors: int

    @property
    def grid(self) -> Grid:
        """CTAs along x, y and z."""
        return self.problem.grid(self.config, self.multiprocessors)

    @property
    def recipe(self) -> Recipe:
        """The kernel by what it is traced from."""
        return recipe_for(self.problem, self.config, self.strides, self.layout)

    @cached_property
    def program(self) -> Program:
        """The traced kernel."""
        return self.recipe.program

    @cached_property
    def cuda(self) -> str:
        """The CUDA C++ that would be compiled."""
        from warploom.cuda.printer import print_cuda

        return print_cuda(self.program)

    def __str__(self) -> str:
        return f"{self.config}\n  on {self.device} ({self.target}), grid {self.grid}: {self.reason}"


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


def _inputs(views: _Views, options: Options) -> _Inputs:
    """Check the arrays. Raises ProblemError with the first thing that is wrong."""
    options.check()
    layout = options.layout
    named = dict(zip("qkv", views, strict=True))
    for name, view in named.items():
        if len(view.shape) != 4:
            raise ProblemError(f"{name} has shape {tuple(view.shape)}; attention takes four dimensions, {layout}")
        require_dtype(view, name, (bf16, f16))
        if view.dtype is not views[0].dtype:
            raise ProblemError(f"q is {views[0].dtype} and {name} is {view.dtype}: convert them to one type")
        if view.strides[3] != 1 and view.shape[3] > 1 and 0 not in view.shape:  # of no elements the strides say nothing
            raise ProblemError(f"the last dimension of {name} is not contiguous (stride {view.strides[3]}): copy it")
    same_device(views, list(named))
    problem = _problem(views, options)
    q_view, k_view, v_view = (_aligned(view) for view in views)
    return _Inputs(q_view, k_view, v_view, problem)


def _problem(views: _Views, options: Options) -> AttentionProblem:
    batch, head, seq = _AXES[options.layout]
    q, k, v = (tuple(view.shape) for view in views)
    if k != v:
        raise ProblemError(f"k has shape {k} and v {v}: they must be equal")
    if (q[batch], q[3]) != (k[batch], k[3]):
        raise ProblemError(f"q has shape {q} and k {k} ({options.layout}): batch and head_dim must be equal")
    if q[head] != k[head] and (k[head] == 0 or q[head] % k[head]):
        raise ProblemError(
            f"q has {q[head]} heads, no multiple of the {k[head]} of k and v: heads share keys in groups"
        )
    if q[3] % 8 or not 8 <= q[3] <= 256:
        raise ProblemError(f"head_dim is {q[3]}; attention takes multiples of 8 from 8 to 256: pad the last dimension")
    if options.scale is not None and not abs(options.scale) <= F32_MAX:
        raise ProblemError(f"scale must be a finite float32, not {options.scale}")
    return AttentionProblem(
        q[batch], q[head], max(1, k[head]), q[seq], k[seq], q[3], views[0].dtype,
        options.sides(), options.scale, options.softcap, options.return_lse,
    )  # fmt: skip


def _aligned(view: ArrayView) -> ArrayView:
    """The view, or a row-major copy where its rows do not start at multiples of 16 bytes or its strides are odd."""
    misaligned = view.pointer % 16 or any(s % _ALIGNED_ELEMENTS or not 0 <= s < _STRIDE_LIMIT for s in view.strides[:3])
    return compact(view) if misaligned and 0 not in view.shape else view


def _strides(view: ArrayView, layout: str) -> TensorStrides:
    batch, head, seq = _AXES[layout]
    return view.strides[batch], view.strides[head], view.strides[seq]


def _plan(inputs: _Inputs, out: ArrayView, layout: str, config: Any) -> AttentionPlan:
    problem, q = inputs.problem, inputs.q
    if config is not None:
        config = configuration(config, (AttentionConfig, HopperConfig), parse_config)
    place = Place.of(q.device, wgmma=isinstance(config, HopperConfig))
    goal = place.goal
    q_strides, k_strides, v_strides = (_strides(view, layout) for view in inputs.all)
    strides = q_strides, k_strides, v_strides, _strides(out, layout)
    if config is None:
        won = None if place.gpu is None else tuned(problem, goal, place.gpu)
        config, reason = won or choose(problem, goal)
    else:
        reason = "asked for by the caller"
        problems = list(dict.fromkeys(config.check(goal) + problem.misfits(config)))
        if problems:
            raise ConfigError(f"{config} does not fit: " + "; ".join(problems))
    scalars = problem.scalars(config, *strides, multiprocessors=place.multiprocessors)
    return AttentionPlan(
        problem, config, reason, goal.name, str(place), strides, scalars, layout, place.multiprocessors
    )


def tuned(problem: AttentionProblem, goal: Target, device: int) -> tuple[AnyConfig, str] | None:
    """The configuration that won on this GPU for such problems, and why; None where nobody has tuned for them."""
    found = find_winner(gpu_name(device), attention_class(problem))
    if found is None:
        return None
    try:
        config = parse_config(found.winner.config)
    except ConfigError:  # flags that this version does not know
        return None
    config = adapted(config, problem)
    return None if config.check(goal) or problem.misfits(config) else (config, found.reason)


def plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    layout: Layout = "bshd",
    config: AnyConfig | str | None = None,
) -> AttentionPlan:
    """What :func:`attention` would run with these arguments: configuration, reason, Program, CUDA. Runs nothing."""
    options = Options(causal, scale, window, softcap, return_lse, layout).plain()
    inputs = _inputs((describe(q), describe(k), describe(v)), options)
    return _plan(inputs, describe(empty_like(inputs.q, inputs.q.shape)), layout, config)


_Key = tuple[Any, ...]
_prepared: dict[_Key, GpuCall] = {}
_PREPARED_KEPT = 4096


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    layout: Layout = "bshd",
    config: AnyConfig | str | None = None,
) -> Any:
    """softmax(scale · q·kᵀ) · v, computed without writing the attention matrix.

    Shapes: q (batch, q_len, heads, head_dim), k and v (batch, kv_len, kv_heads, head_dim) with ``layout="bshd"``; with
    ``"bhsd"`` heads come before the sequence, as in PyTorch's SDPA. heads is a multiple of kv_heads (grouped-query
    attention). dtypes: float16 or bfloat16. head_dim: a multiple of 8 up to 256. Any lengths, zero included, and any
    strides with a contiguous last dimension; arrays whose rows do not start at multiples of 16 bytes are copied first.

    ``scale`` defaults to 1/√head_dim (each other value compiles a kernel of its own). ``causal`` lets query i see the
    keys up to i + kv_len - q_len (the last query sees all). ``window`` = (left, right) limits it to that many keys on
    either side of that key; None or -1 leaves a side open. ``softcap`` c replaces a score s by c·tanh(s/c). A query
    that sees no key gives zeros. ``return_lse`` also returns the natural log-sum-exp of each row's scores, float32
    (batch, heads, q_len); -inf where there is no key.

    Arrays of torch, CuPy and JAX on a GPU are used where they lie, on the caller's current stream; the result is of
    the same kind. Under ``torch.compile`` a call is one operator, ``warploom::attention``. NumPy arrays (and other CPU
    arrays) run on the GPU when there is one, else on the emulator with all its checks. NaN and infinity propagate as in
    PyTorch's math backend, except from keys that a mask hides, which may be skipped.

    Raises ProblemError for arrays it does not take, ConfigError for a ``config`` that does not fit,
    UnsupportedDeviceError for a GPU older than compute capability 8.0.
    """
    if is_tracing():
        return tracing.operator_of("attention")(
            q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, return_lse=return_lse,
            layout=layout, config=config,
        )  # fmt: skip
    views = queries, keys, values = describe(q), describe(k), describe(v)
    # Plain tuples: hashing a dataclass would cost more than all the rest of the look-up.
    asked = (causal, scale, window, softcap, return_lse, layout, config)
    key = (asked, queries[1:5], keys[1:5], values[1:5])  # shapes, strides, types, devices
    try:
        call = _prepared.get(key)
    except TypeError:  # an array among the options, which no key can hold
        call = None
    pointers = queries[0], keys[0], values[0]
    if call is None or (pointers[0] | pointers[1] | pointers[2]) % 16:
        options = Options(*asked[:6]).plain()
        key = ((*astuple(options), config), *key[1:])
        call = _known(key)
        if call is None or (pointers[0] | pointers[1] | pointers[2]) % 16:
            return _first_call(views, options, config, key)
    result = empty_like(queries)
    if not return_lse:
        call.launch_again((*pointers, address(result)), queries.kind)
        return result
    lse = _empty_lse(queries, layout)
    call.launch_again((*pointers, address(result), address(lse)), queries.kind)
    return result, lse


def _known(key: _Key) -> GpuCall | None:
    """The call prepared for ``key``; None where there is none, or where the configuration is nothing to look up."""
    try:
        return _prepared.get(key)
    except TypeError:
        return None


def _empty_lse(q: ArrayView, layout: str) -> Any:
    return empty(q.kind, [q.shape[axis] for axis in _AXES[layout]], f32, q.device)


def _first_call(views: _Views, options: Options, config: AnyConfig | str | None, key: _Key) -> Any:
    """Everything that :func:`attention` need not repeat for arrays of the same shapes, strides and device."""
    inputs = _inputs(views, options)
    q, problem = inputs.q, inputs.problem
    if 0 in (problem.batch, problem.heads, problem.q_len, problem.kv_len):
        return _without_keys(q, options)
    result = empty_like(q, q.shape)
    outputs = [result, _empty_lse(q, options.layout)] if options.return_lse else [result]
    outs = [describe(x) for x in outputs]
    made = _plan(inputs, outs[0], options.layout, config)
    arrays = (*inputs.all, *outs)
    mapped_arrays = mapped(made.config, made.layout, arrays)
    if q.device[0] == "cuda":
        call = GpuCall.prepare(made.recipe, made.grid, made.scalars, q.device[1], mapped_arrays)
        if all(a is b for a, b in zip(inputs.all, views, strict=True)):  # nothing had to be copied first
            if len(_prepared) >= _PREPARED_KEPT:
                _prepared.clear()
            _prepared[key] = call
        call.launch(arrays, outs[0].kind)
    elif made.device == EMULATOR:
        run_on_emulator(made.program, made.grid, arrays, made.scalars, problem.flops, mapped_arrays)
    else:
        _run_from_host(inputs, outs, options.layout, made)
    return (result, outputs[1]) if options.return_lse else result


def _without_keys(q: ArrayView, options: Options) -> Any:
    """The result where there is nothing to compute: zeros, and -inf for the sums over no keys."""
    zeros = filled(q.kind, q.shape, q.dtype, q.device, 0.0)
    if not options.return_lse:
        return zeros
    return zeros, filled(q.kind, [q.shape[axis] for axis in _AXES[options.layout]], f32, q.device, -math.inf)


def _run_from_host(inputs: _Inputs, outs: list[ArrayView], layout: str, made: AttentionPlan) -> None:
    """CPU arrays on a GPU: row-major copies there and back."""
    hosts = [np.ascontiguousarray(as_numpy(view)) for view in inputs.all]
    views = [*map(describe, hosts), outs[0]]
    q, k, v, out = (_strides(x, layout) for x in views)
    strides = q, k, v, out
    recipe = recipe_for(made.problem, made.config, strides, layout)
    scalars = made.problem.scalars(made.config, *strides, multiprocessors=made.multiprocessors)
    call = GpuCall.prepare(recipe, made.grid, scalars, 0, mapped(made.config, layout, views))
    call.run_from_host(hosts, [as_numpy(out) for out in outs])
