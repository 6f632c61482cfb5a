"""``attention_paged``: attention of a few new queries on a cache of keys and values, in pages or side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from warploom.core.dtypes import f32
from warploom.core.errors import ProblemError
from warploom.interop.arrays import ArrayView, same_device
from warploom.interop.copies import as_if_compact, compact, settled
from warploom.interop.tracing import is_tracing, traced
from warploom.kernels.attention.choice import CACHED_KINDS, CachedConfig, choose_cached, violations_on_cache
from warploom.kernels.attention.problem import AttentionProblem
from warploom.kernels.settings import read, refuse
from warploom.ops.attention_arrays import (
    Options,
    Window,
    aligned,
    check_output,
    refuse_output,
    with_sinks,
    without_keys,
)
from warploom.ops.attention_paged_arrays import CacheInputs, check_entries, given_split, read_cache
from warploom.ops.calls import Caller, Computation, Shapes, Views
from warploom.ops.declare import ArrayArgument, Few, Output, Tensor
from warploom.ops.processors import Processor
from warploom.ops.steps import CallsPlan, Steps

NAMES = {"kv_lens": "lengths", "cu_seqlens_q": "starts", "block_table": "table", "k_cache": "k", "v_cache": "v"}
"""What the kernels call arrays whose public names are others."""
_PUBLIC = {kernels: public for public, kernels in NAMES.items()}
Lengths = Annotated[Any, ArrayArgument("lengths")]
Starts = Annotated[Any, ArrayArgument("starts")]
Table = Annotated[Any, ArrayArgument("table")]
KeyCache = Annotated[Any, ArrayArgument("k")]
ValueCache = Annotated[Any, ArrayArgument("v")]


@dataclass(frozen=True)
class AttentionPagedPlan(CallsPlan):
    """What a call of :func:`attention_paged` would run: nothing has been compiled or launched yet."""

    problem: AttentionProblem
    config: CachedConfig


def attention_paged(
    q: Tensor,
    k_cache: KeyCache,
    v_cache: ValueCache,
    kv_lens: Lengths,
    *,
    block_table: Table = None,
    cu_seqlens_q: Starts = None,
    causal: bool = True,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Few = None,
    k_scale: Few = None,
    v_scale: Few = None,
    fixed_split: int | None = None,
    return_lse: bool = False,
    out: Output = None,
    check: bool = False,
    config: CachedConfig | str | None = None,
) -> Any:
    """Attention of the newest queries of each sequence on the keys and values that a cache has of it.

    Shapes: q (batch, q_len, heads, head_dim), or with ``cu_seqlens_q`` (int32, batch + 1) all queries one sequence
    after another, (queries, heads, head_dim). With ``block_table`` (int32, (batch, entries)) k_cache and v_cache are
    pages (pages, page_size, kv_heads, head_dim), page_size a multiple of 16; without one (batch, capacity, kv_heads,
    head_dim). ``kv_lens`` (int32, (batch,)): keys of each sequence, those of its own queries included; none is allowed.
    dtypes: float16 or bfloat16; the caches may be float8_e4m3fn as well (compute capability 9.0), with arrays
    ``k_scale`` and ``v_scale``, float32 of one element or (batch, kv_heads), that keys and values are times. Queries
    count as float16 then. heads is a multiple of kv_heads, head_dim a multiple of 8 up to 256, with an fp8 cache of 16
    from 48 on.

    Lengths, starts and pages are read on the GPU: nothing waits for it, a CUDA graph may be replayed with others in the
    same arrays, and no kernel is compiled for them. What they say beyond the cache is cut off, so nothing outside of it
    is read; ``check`` looks at them first, waits for the GPU and names the entry that is wrong.

    ``causal`` (here the default), ``window``, ``softcap``, ``scale`` and ``sinks`` as for :func:`attention`, by the
    lengths of each sequence: its last query sees the last key. Keys beyond a length never count, whatever memory holds.
    The work is divided among the GPU's SMs by what all lengths come to, so results may differ in their last bits with
    what else is in the batch; ``fixed_split``, a multiple of 128 keys below 2^30, divides each sequence by itself.

    ``return_lse`` also returns log-sum-exps, float32 (batch, heads, q_len), or (heads, queries) with ``cu_seqlens_q``.
    The result is like q; ``out``, if given, takes it, and may be q itself. Of queries that are enough for all SMs tiles
    are formed, as :func:`attention` does, on compute capability 9.0. An fp8 cache, ``fixed_split``, older GPUs, and
    arrays whose sequences or pages are no whole rows apart, keep the kernels that are made for few queries, which are
    right for more and slower. Arrays as for :func:`attention`; there are no gradients.

    Raises ProblemError for arrays it does not take, ConfigError for a ``config`` that does not fit.
    """
    arrays = q, k_cache, v_cache, kv_lens, block_table, cu_seqlens_q, sinks, k_scale, v_scale, out
    options = causal, window, softcap, scale, fixed_split, return_lse
    return attention_paged_call(arrays, options, config, check)


def checked_attention_paged(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    kv_lens: Any,
    *,
    block_table: Any = None,
    cu_seqlens_q: Any = None,
    causal: bool = True,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Any = None,
    return_lse: bool = False,
    out: Any = None,
) -> Callable[[], Any] | None:
    """Raises ProblemError as :func:`attention_paged` does for these arguments, and runs nothing.

    Where a call like this one was made before, that is what makes it again. Where PyTorch traces a graph nothing is
    refused: the operator does so while tracing, before anything runs.
    """
    if is_tracing():
        return None
    arrays = q, k_cache, v_cache, kv_lens, block_table, cu_seqlens_q, sinks, None, None, out
    options = causal, window, softcap, scale, None, return_lse
    known = attention_paged_call.cache.known(options, None, arrays)
    if known is not None:
        return lambda: attention_paged_call.repeated(*known, arrays, options)
    views, asked = attention_paged_call.planned(arrays, options)
    _refuse_output(views)
    inputs = _inputs(_laid_out(views, as_if_compact), asked)
    if not _is_empty(inputs):
        _plan(inputs, as_if_compact(inputs.views["q"]), None)
    return None


@traced
def plan_attention_paged(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    kv_lens: Any,
    *,
    block_table: Any = None,
    cu_seqlens_q: Any = None,
    causal: bool = True,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    fixed_split: int | None = None,
    return_lse: bool = False,
    config: CachedConfig | str | None = None,
) -> AttentionPagedPlan:
    """What :func:`attention_paged` would run with these arguments. Runs nothing."""
    arrays = q, k_cache, v_cache, kv_lens, block_table, cu_seqlens_q, sinks, k_scale, v_scale, None
    views, asked = attention_paged_call.planned(arrays, (causal, window, softcap, scale, fixed_split, return_lse))
    inputs = _inputs(_laid_out(views, as_if_compact), asked)
    return _plan(inputs, as_if_compact(inputs.views["q"]), config)


def _named(views: Mapping[str, ArrayView]) -> dict[str, ArrayView]:
    """The arrays that the kernels read, by the caller's names."""
    return {_PUBLIC.get(name, name): x for name, x in views.items() if name != "out"}


def _refuse_output(views: Mapping[str, ArrayView]) -> None:
    """Raises ProblemError for an ``out`` that the result cannot be written to."""
    if "out" not in views:
        return
    q, out = views["q"], views["out"]
    check_output(out, q, tuple(q.shape))
    same_device((q, out), ("q", "out"))
    refuse_output(out, _named(views), "q")


def _laid_out(views: Mapping[str, ArrayView], copy: Callable[[ArrayView], ArrayView] = compact) -> Views:
    """Queries and sinks as kernels read them, by ``copy`` where they cannot; a cache is never copied."""
    found = with_sinks({**views, "q": aligned(settled(views["q"]), copy)}, copy)
    sinks = found.get("sinks")
    if sinks is not None and len(sinks.shape) == 1 and not sinks.contiguous:
        found["sinks"] = copy(sinks)
    return found


def _inputs(views: Mapping[str, ArrayView], asked: Mapping[str, Any]) -> CacheInputs:
    """The arrays and what is asked of them. Raises ProblemError with the first thing that is wrong."""
    return inputs_of(views, Options.of(asked), asked["fixed_split"])


def inputs_of(views: Mapping[str, ArrayView], options: Options, fixed_split: Any) -> CacheInputs:
    """:func:`read_cache` of arrays by the kernels' names."""
    return read_cache(_named(views), options, given_split(fixed_split))


def _plan(inputs: CacheInputs, out: ArrayView, config: Any) -> AttentionPagedPlan:
    """The plan for checked inputs and an output. Raises ConfigError for a ``config`` that does not fit."""
    problem, config = inputs.problem, read(config, CACHED_KINDS)
    operands = inputs.operands(out)
    requires = config.requires if config is not None else "sm_90" if problem.cache.fp8 else None
    on = Processor.of(inputs.views["q"].device, requires=requires)
    chosen, reason = config, "asked for by the caller"
    if chosen is None:
        chosen, reason = choose_cached(problem, operands, on.target, on.multiprocessors)
    found = chosen.check() or chosen.check(on.target) + violations_on_cache(chosen, problem, operands)
    if config is not None:
        refuse(f"{config} does not fit", found)
    elif found:
        raise ProblemError("; ".join(found))
    calls = chosen.calls(problem, operands, on.multiprocessors)
    return AttentionPagedPlan(problem, chosen, reason, on.target.name, str(on), calls)


def refuse_paged(config: Any, inputs: CacheInputs) -> None:
    """Raises ConfigError for a configuration, or its notation, that does not fit checked inputs."""
    found = read(config, CACHED_KINDS)
    if found is not None:
        operands = inputs.operands(as_if_compact(inputs.views["q"]))
        refuse(f"{found} does not fit", found.check() or violations_on_cache(found, inputs.problem, operands))


def _is_empty(inputs: CacheInputs) -> bool:
    """Whether there is nothing to compute."""
    problem, views = inputs.problem, inputs.views
    return 0 in (*views["q"].shape, problem.batch, problem.kv_len, *views["k_cache"].shape)


def _lse_shape(q: ArrayView) -> tuple[int, ...]:
    """(batch, heads, q_len), of packed queries (heads, queries)."""
    *outer, queries, heads, _ = q.shape
    return (*outer, heads, queries)


def results(views: Mapping[str, ArrayView], options: Options) -> Shapes:
    """The shapes and types of the output, and of log-sum-exps where they are asked for."""
    q = views["q"]
    found = {"out": (tuple(q.shape), q.dtype)}
    return found | {"lse": (_lse_shape(q), f32)} if options.return_lse else found


def _work(views: Views, asked: dict[str, Any], config: Any, copy: Callable[[ArrayView], ArrayView]) -> Computation:
    views = _laid_out(views, copy)
    inputs, q, out = _inputs(views, asked), views["q"], views.get("out")
    new, made = results(views, Options.of(asked)), None
    if _is_empty(inputs):
        if config is not None:
            _plan(inputs, q, config)  # refuses what does not fit
        made = without_keys(q, new, inputs.views.get("sinks"))
    if out is not None:
        new = {name: x for name, x in new.items() if name != "out"}
        if made is not None:
            out.array[...] = made.pop(0)

    def steps(arrays: Views) -> Steps:
        again = CacheInputs({name: arrays[NAMES.get(name, name)] for name in inputs.views}, inputs.problem)
        return _plan(again, arrays["out"], config).steps

    taken = {NAMES.get(name, name): view for name, view in inputs.views.items()}
    return Computation(views, new, steps, taken, () if out is None else ("out",), filled=True, made=made)


def _look(views: Views, asked: dict[str, Any]) -> None:
    check_entries(_inputs(_laid_out(views, as_if_compact), asked))


attention_paged_call = Caller(attention_paged, _work, refuse=_refuse_output, look=_look)
