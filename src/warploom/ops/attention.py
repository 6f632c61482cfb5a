"""``attention`` and ``plan``: scaled dot-product attention on arrays of any framework."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from warploom.core.dtypes import f32
from warploom.interop import tracing
from warploom.interop.arrays import ArrayView, address, as_numpy, describe, describe_new, empty, empty_like, filled
from warploom.interop.copies import as_if_compact
from warploom.interop.tracing import is_tracing, is_watched
from warploom.kernels.attention.problem import AttentionConfig, Operands
from warploom.ops.attention_arrays import (
    AXES,
    Inputs,
    Layout,
    Options,
    Views,
    Window,
    read_inputs,
    result_shape,
    strides_of,
    widened,
)
from warploom.ops.attention_plan import ARRAYS, AttentionPlan, calls_of, configured, plan_for
from warploom.ops.places import EMULATOR
from warploom.ops.steps import Prepared

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from warploom.ops.signatures import Array, AttentionOptions, NumpyArray, Out


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
    if is_tracing():
        return tracing.operator_of("plan")(
            q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, sinks=sinks, return_lse=return_lse,
            layout=layout, config=config,
        )  # fmt: skip
    options = Options(causal, scale, window, softcap, return_lse, layout).plain()
    views = describe(q), describe(k), describe(v)
    inputs = read_inputs(views, options, as_if_compact, None if sinks is None else describe(sinks))
    out = as_if_compact(inputs.q._replace(shape=result_shape(inputs.q, inputs.v)))
    return plan_for(inputs, out, layout, config)


_Key = tuple[Any, ...]
_prepared: dict[_Key, Prepared] = {}
_PREPARED_KEPT = 4096


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
    if is_watched(q, k, v, sinks):
        return tracing.operator_of("attention")(
            q, k, v, causal=causal, scale=scale, window=window, softcap=softcap, sinks=sinks, return_lse=return_lse,
            layout=layout, config=config,
        )  # fmt: skip
    logits = None if sinks is None else widened(describe(sinks))
    views = queries, keys, values = describe(q), describe(k), describe(v)
    # Plain tuples: hashing a dataclass would cost more than all the rest of the look-up.
    asked = (causal, scale, window, softcap, return_lse, layout, config)
    last = () if logits is None else (logits[1:5],)
    key = (asked, queries[1:5], keys[1:5], values[1:5], *last)  # shapes, strides, types, devices
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
            return _first_call(views, logits, options, config, key)
    plain = queries[1][3] == values[1][3]
    result = empty_like(queries) if plain else empty_like(queries, result_shape(queries, values))
    more = () if logits is None else (logits[0],)
    if not return_lse:
        call.run((*pointers, address(result), *more), queries)
        return result
    lse = _empty_lse(queries, layout)
    call.run((*pointers, address(result), address(lse), *more), queries)
    return result, lse


def _known(key: _Key) -> Prepared | None:
    """The call prepared for ``key``; None where there is none, or where the configuration is nothing to look up."""
    try:
        return _prepared.get(key)
    except TypeError:
        return None


def _empty_lse(q: ArrayView, layout: str) -> Any:
    return empty(q.kind, [q.shape[axis] for axis in AXES[layout]], f32, q.device)


def _first_call(
    views: Views, sinks: ArrayView | None, options: Options, config: AttentionConfig | str | None, key: _Key
) -> Any:
    """Everything that :func:`attention` need not repeat for arrays of the same shapes, strides and device."""
    inputs = read_inputs(views, options, sinks=sinks)
    q, problem = inputs.q, inputs.problem
    if 0 in (problem.batch, problem.heads, problem.q_len, problem.kv_len):
        if config is not None:
            configured(inputs, config)  # refuses what does not fit
        return _without_keys(q, inputs.v, sinks, options)
    result = empty_like(q, result_shape(q, inputs.v))
    outputs = [result, _empty_lse(q, options.layout)] if options.return_lse else [result]
    outs = [describe_new(x) for x in outputs]
    arrays, names = (*inputs.all, *outs, *inputs.vectors), (*ARRAYS, *problem.vectors)
    if q.device[0] == "cuda":
        plain = (key[0], *[view[1:5] for view in (*inputs.all, *inputs.vectors)])  # copies lie alike in every call
        call = _known(plain)
        if call is None:
            call = plan_for(inputs, outs[0], options.layout, config).steps.prepare(names, q.device[1])
            if len(_prepared) >= _PREPARED_KEPT:
                _prepared.clear()
            _prepared[plain] = call
        given = [x.pointer for x in (*views, sinks) if x is not None]
        if given == [x.pointer for x in (*inputs.all, *inputs.vectors)]:  # nothing was copied first
            _prepared[key] = call
        call.run([x.pointer for x in arrays], q)
        return (result, outputs[1]) if options.return_lse else result
    made = plan_for(inputs, outs[0], options.layout, config)
    if made.device == EMULATOR:
        made.steps.emulate(dict(zip(names, arrays, strict=True)))
    else:
        _run_from_host(inputs, outs, options.layout, made)
    return (result, outputs[1]) if options.return_lse else result


def _without_keys(q: ArrayView, v: ArrayView, sinks: ArrayView | None, options: Options) -> Any:
    """The result where there is nothing to compute: zeros, and -inf or the sinks for the sums over no keys."""
    zeros = filled(q.kind, result_shape(q, v), q.dtype, q.device, 0.0)
    if not options.return_lse:
        return zeros
    rows = [q.shape[axis] for axis in AXES[options.layout]]
    if sinks is None:
        return zeros, filled(q.kind, rows, f32, q.device, -math.inf)
    return zeros, filled(q.kind, rows, f32, q.device, 0.0) + sinks.array[:, None]


def _run_from_host(inputs: Inputs, outs: list[ArrayView], layout: str, made: AttentionPlan) -> None:
    """CPU arrays on a GPU: row-major copies there and back."""
    hosts = [np.ascontiguousarray(as_numpy(view)) for view in inputs.all]
    views = [*map(describe, hosts), outs[0]]
    q, k, v, out = (strides_of(x, layout) for x in views)
    calls = calls_of(made.config, made.problem, Operands((q, k, v, out), layout), made.multiprocessors)
    given = [*hosts, *[as_numpy(x) for x in (*outs, *inputs.vectors)]]
    named = dict(zip((*ARRAYS, *made.problem.vectors), given, strict=True))
    replace(made, calls=calls).steps.run_from_host(named, ("out", "lse") if made.problem.lse else ("out",))
