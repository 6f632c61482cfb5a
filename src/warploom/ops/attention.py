"""``attention`` and ``plan``: scaled dot-product attention on arrays of any framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from warploom.core.dtypes import f32
from warploom.interop.arrays import ArrayView, Device
from warploom.interop.copies import as_if_compact
from warploom.interop.tracing import traced
from warploom.kernels.attention.choice import KINDS, choose
from warploom.kernels.attention.decode import Decode
from warploom.kernels.attention.problem import FORWARD, AttentionConfig, AttentionProblem, Operands
from warploom.kernels.settings import read, refuse, violations_of
from warploom.ops.attention_arrays import (
    AXES,
    Layout,
    Options,
    Window,
    checked,
    laid_out,
    result_shape,
    strides_of,
    without_keys,
)
from warploom.ops.calls import Caller, Computation, Shapes, Views
from warploom.ops.declare import Few, Tensor
from warploom.ops.processors import Processor, decided
from warploom.ops.steps import CallsPlan
from warploom.ops.tuned import tuned

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from warploom.ops.signatures import Array, AttentionOptions, NumpyArray, Out


@dataclass(frozen=True)
class AttentionPlan(CallsPlan):
    """What a call of :func:`attention` would run: nothing has been compiled or launched yet."""

    problem: AttentionProblem
    config: AttentionConfig | Decode


def plan_for(problem: AttentionProblem, arrays: Mapping[str, ArrayView], layout: str, config: Any) -> AttentionPlan:
    """The plan for a problem on these arrays. Raises ConfigError for a ``config`` that does not fit."""
    config, reason, on = configured(problem, arrays["q"].device, config)
    operands = Operands({name: strides_of(arrays[name], layout) for name in FORWARD}, layout)
    calls = config.calls(problem, operands, on.multiprocessors)
    return AttentionPlan(problem, config, reason, on.target.name, str(on), calls)


def configured(
    problem: AttentionProblem, device: Device, config: Any
) -> tuple[AttentionConfig | Decode, str, Processor]:
    """The configuration, why it runs, and where. Raises ConfigError for one asked for that does not fit."""

    def choice(on: Processor) -> tuple[AttentionConfig | Decode, str]:
        return tuned(problem, on.target, on.gpu, KINDS) or choose(problem, on.target)

    return decided(problem, device, read(config, KINDS), choice)


def refuse_config(config: Any, problem: AttentionProblem) -> None:
    """Raises ConfigError for a configuration, or its notation, that does not fit the problem."""
    found = read(config, KINDS)
    refuse(f"{found} does not fit", violations_of(found, problem, None))


@traced
def plan(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    return_lse: bool = False,
    layout: Layout = "bshd",
    config: AttentionConfig | str | None = None,
) -> AttentionPlan:
    """What :func:`attention` would run with these arguments: configuration, reason, Program, CUDA. Runs nothing."""
    views, options = attention_call.planned((q, k, v, sinks), (causal, scale, window, softcap, return_lse, layout))
    views = laid_out(views, as_if_compact)
    problem = checked(views, Options.of(options))
    out = as_if_compact(views["q"]._replace(shape=result_shape(views["q"], views["v"])))
    return plan_for(problem, {**views, "out": out}, layout, config)


@overload
def attention(
    q: Out, k: Any, v: Any, *, return_lse: Literal[False] = False, **options: Unpack[AttentionOptions]
) -> Out: ...


@overload
def attention(
    q: Array, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[Array, Array]: ...


@overload
def attention(
    q: NumpyArray, k: Any, v: Any, *, return_lse: Literal[True], **options: Unpack[AttentionOptions]
) -> tuple[NumpyArray, NDArray[np.float32]]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Few = None,
    return_lse: bool = False,
    layout: Layout = "bshd",
    config: AttentionConfig | str | None = None,
) -> Any:
    """softmax(scale · q·kᵀ) · v, computed without writing the attention matrix.

    Shapes: q (batch, q_len, heads, head_dim), k and v (batch, kv_len, kv_heads, head_dim) with ``layout="bshd"``; with
    ``"bhsd"`` heads come before the sequence, as in PyTorch's SDPA. heads is a multiple of kv_heads (grouped-query
    attention). dtypes: float16 or bfloat16. head_dim: a multiple of 8 up to 256; v may have another, and so has the
    result. Any lengths, zero included, and any strides with a contiguous last dimension; arrays whose rows do not start
    at multiples of 16 bytes are copied first.

    ``scale`` defaults to 1/√head_dim (each other value compiles a kernel of its own). ``causal`` lets query i see the
    keys up to i + kv_len - q_len (the last query sees all). ``window`` = (left, right) limits it to that many keys on
    either side of that key; None or -1 leaves a side open. ``softcap`` c replaces a score s by c·tanh(s/c). A query
    that sees no key gives zeros. ``return_lse`` also returns the natural log-sum-exp of each row's scores, float32
    (batch, heads, q_len); -inf where there is no key.

    ``sinks`` (heads,), float32 or 16-bit floats, are logits that join the sums of exponentials of their head's rows and
    have no value: each row gives Σ exp(s)·v / (Σ exp(s) + exp(sink)), and its log-sum-exp counts the sink, so that it
    is the sink where there is no key. A sink of -inf is none; one of +inf takes all the weight and leaves zeros.

    Arrays of torch, CuPy and JAX on a GPU are used where they lie, on the caller's current stream; the result is of
    the same kind. Under ``torch.compile`` a call is one operator, ``warploom::attention``. NumPy arrays (and other CPU
    arrays) run on the GPU when there is one, else on the emulator with all its checks.

    NaN and infinity propagate as in PyTorch's math backend, except from keys that a mask hides, which may be skipped: a
    query whose scores are all -inf gives zeros (log-sum-exp -inf), one with a score of +inf NaN (+inf). Scores beyond
    ±9e7 (float16) or ±7e8 (bfloat16) count as infinite.

    Raises ProblemError for arrays it does not take, ConfigError for a ``config`` that does not fit,
    UnsupportedDeviceError for a GPU older than compute capability 8.0.
    """
    return attention_call((q, k, v, sinks), (causal, scale, window, softcap, return_lse, layout), config)


def results(views: Mapping[str, ArrayView], options: Options) -> Shapes:
    """The shapes and types of the output, and of log-sum-exps where they are asked for."""
    q = views["q"]
    found = {"out": (result_shape(q, views["v"]), q.dtype)}
    return found | {"lse": (tuple([q.shape[i] for i in AXES[options.layout]]), f32)} if options.return_lse else found


def _work(views: Views, asked: dict[str, Any], config: Any, copy: Callable[[ArrayView], ArrayView]) -> Computation:
    options, views = Options.of(asked), laid_out(views, copy)
    problem, layout, new = checked(views, options), options.layout, results(views, options)
    made = None
    if 0 in (problem.batch, problem.heads, problem.q_len, problem.kv_len):
        if config is not None:
            configured(problem, views["q"].device, config)  # refuses what does not fit
        made = without_keys(views["q"], new, views.get("sinks"))
    return Computation(views, new, lambda lying: plan_for(problem, lying, layout, config).steps, made=made)


attention_call = Caller(attention, _work, recorded=True)
