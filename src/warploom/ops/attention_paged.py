"""``attention_paged``: attention of a few new queries on a cache of keys and values, in pages or side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from warploom.core.dtypes import f32
from warploom.core.errors import ProblemError
from warploom.interop.arrays import ArrayView, arrays_of, empty, empty_like, same_device
from warploom.interop.copies import as_if_compact, compact, settled
from warploom.interop.tracing import is_tracing, traced
from warploom.kernels.attention.decode import DecodeProblem
from warploom.kernels.attention.paged import KINDS, PagedConfig, choose_paged, paged_calls, violations
from warploom.kernels.settings import read, refuse
from warploom.ops.attention_arrays import (
    Options,
    Window,
    aligned,
    check_output,
    described,
    looked_up,
    refuse_output,
    without_keys,
)
from warploom.ops.attention_paged_arrays import CacheInputs, check_entries, given_split, read_cache
from warploom.ops.options import flag
from warploom.ops.processors import Processor
from warploom.ops.repeated import Kept, run_and_keep
from warploom.ops.steps import CallsPlan, Steps

_prepared = Kept()
NAMES = {"kv_lens": "lengths", "cu_seqlens_q": "starts", "block_table": "table", "k_cache": "k", "v_cache": "v"}
"""What the kernels call arrays whose public names are others."""
_PUBLIC = {kernels: public for public, kernels in NAMES.items()}


@dataclass(frozen=True)
class AttentionPagedPlan(CallsPlan):
    """What a call of :func:`attention_paged` would run: nothing has been compiled or launched yet."""

    problem: DecodeProblem
    config: PagedConfig


@traced
def attention_paged(
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
    out: Any = None,
    check: bool = False,
    config: PagedConfig | str | None = None,
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
    given = _given(q, k_cache, v_cache, kv_lens, cu_seqlens_q, block_table, k_scale, v_scale, sinks, out)
    if fixed_split.__class__ is not int:
        fixed_split = given_split(fixed_split)
    asked = (causal, scale, window, softcap, return_lse, "bshd", fixed_split)
    found = None if check is not False else _prepared.again(asked, config, given)
    if found is None:
        if flag("check", check):
            check_entries(_inputs(described(given, _PUBLIC), Options(*asked[:6]).plain(), fixed_split))
        refused = None if out is None else _refuse_output
        found = looked_up(_prepared, given, asked, config, _first_call, _laid_out, refused, _PUBLIC)
    found = found if out is None else [out, *found]
    return tuple(found) if len(found) > 1 else found[0]


def refuse_attention_paged(
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
) -> None:
    """Raises ProblemError as :func:`attention_paged` does for these arguments, and runs nothing.

    Where PyTorch traces a graph nothing is refused: the operator does so while tracing, before anything runs.
    """
    if is_tracing():
        return
    given = _given(q, k_cache, v_cache, kv_lens, cu_seqlens_q, block_table, None, None, sinks, out)
    asked = (causal, scale, window, softcap, return_lse, "bshd", None)
    if _prepared.known(asked, None, given) is not None:
        return
    views = described(given, _PUBLIC)
    if out is not None:
        _refuse_output(views)
    inputs = _inputs(_laid_out(views, as_if_compact), Options(*asked[:6]).plain(), None)
    if not _is_empty(inputs):
        _plan(inputs, as_if_compact(inputs.views["q"]), None)


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
    config: PagedConfig | str | None = None,
) -> AttentionPagedPlan:
    """What :func:`attention_paged` would run with these arguments. Runs nothing."""
    given = _given(q, k_cache, v_cache, kv_lens, cu_seqlens_q, block_table, k_scale, v_scale, sinks, None)
    options = Options(causal, scale, window, softcap, return_lse).plain()
    inputs = _inputs(_laid_out(described(given, _PUBLIC), as_if_compact), options, fixed_split)
    return _plan(inputs, as_if_compact(inputs.views["q"]), config)


def _given(
    q: Any, k: Any, v: Any, lengths: Any, starts: Any, table: Any, k_scale: Any, v_scale: Any, sinks: Any, out: Any
) -> dict[str, Any]:
    """The arrays of a call by the kernels' names."""
    return arrays_of(
        {"q": q, "k": k, "v": v, "lengths": lengths},
        starts=starts,
        table=table,
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
        out=out,
    )


def _named(views: Mapping[str, ArrayView]) -> dict[str, ArrayView]:
    """What is read, by the caller's names."""
    return {_PUBLIC.get(name, name): x for name, x in views.items() if name != "out"}


def _refuse_output(views: Mapping[str, ArrayView]) -> None:
    """Raises ProblemError for an ``out`` that the result cannot be written to."""
    q, out = views["q"], views["out"]
    check_output(out, q, tuple(q.shape))
    same_device((q, out), ("q", "out"))
    refuse_output(out, _named(views), "q")


def _laid_out(views: Mapping[str, ArrayView], copy: Callable[[ArrayView], ArrayView] = compact) -> dict[str, ArrayView]:
    """Queries as kernels read them, by ``copy`` where they cannot; a cache is never copied."""
    return {**views, "q": aligned(settled(views["q"]), copy)}


def _inputs(views: Mapping[str, ArrayView], options: Options, fixed_split: Any) -> CacheInputs:
    """The arrays and what is asked of them. Raises ProblemError with the first thing that is wrong."""
    return read_cache(_named(views), options, given_split(fixed_split))


def _plan(inputs: CacheInputs, out: ArrayView, config: Any) -> AttentionPagedPlan:
    """The plan for checked inputs and an output. Raises ConfigError for a ``config`` that does not fit."""
    problem, config = inputs.problem, read(config, KINDS)
    operands = inputs.operands(out)
    requires = config.requires if config is not None else "sm_90" if problem.fp8 else None
    on = Processor.of(inputs.views["q"].device, requires=requires)
    chosen, reason = config, "asked for by the caller"
    if chosen is None:
        chosen, reason = choose_paged(problem, operands, on.target, on.multiprocessors)
    found = chosen.check() or chosen.check(on.target) + violations(chosen, problem, operands)
    if config is not None:
        refuse(f"{config} does not fit", found)
    elif found:
        raise ProblemError("; ".join(found))
    calls = paged_calls(chosen, problem, operands, on.multiprocessors)
    return AttentionPagedPlan(problem, chosen, reason, on.target.name, str(on), calls)


def refuse_paged(config: Any, inputs: CacheInputs) -> None:
    """Raises ConfigError for a configuration, or its notation, that does not fit checked inputs."""
    found = read(config, KINDS)
    if found is not None:
        operands = inputs.operands(as_if_compact(inputs.views["q"]))
        refuse(f"{found} does not fit", found.check() or violations(found, inputs.problem, operands))


def _is_empty(inputs: CacheInputs) -> bool:
    """Whether there is nothing to compute."""
    problem, views = inputs.problem, inputs.views
    return 0 in (*views["q"].shape, problem.batch, problem.capacity, *views["k_cache"].shape)


def _lse_shape(q: ArrayView) -> tuple[int, ...]:
    """(batch, heads, q_len), of packed queries (heads, queries)."""
    *outer, queries, heads, _ = q.shape
    return (*outer, heads, queries)


def _first_call(views: dict[str, ArrayView], options: Options, asked: tuple[Any, ...], config: Any) -> list[Any]:
    """Everything that :func:`attention_paged` need not repeat for arrays of the same shapes, strides and device."""
    inputs = _inputs(views, options, asked[6])
    q, out, problem = views["q"], views.get("out"), inputs.problem
    if _is_empty(inputs):
        return _without_keys(inputs, None if out is None else out.array, config)
    results = {"out": empty_like(q, q.shape) if out is None else out.array}
    if options.return_lse:
        results["lse"] = empty(q.kind, _lse_shape(q), f32, q.device)

    def steps(arrays: dict[str, ArrayView]) -> Steps:
        again = CacheInputs({name: arrays[NAMES.get(name, name)] for name in inputs.views}, problem)
        return _plan(again, arrays["out"], config).steps

    taken = {NAMES.get(name, name): view for name, view in inputs.views.items()}
    refuse = None if out is None else _refuse_output
    run_and_keep(_prepared, (asked, config), steps, (views, taken, results), filled=True, refuse=refuse)
    return [x for name, x in results.items() if name not in views]


def _without_keys(inputs: CacheInputs, out: Any, config: Any) -> list[Any]:
    """The new results where there is nothing to compute."""
    q = inputs.views["q"]
    if config is not None:
        _plan(inputs, q, config)  # refuses what does not fit
    zeros, *sums = without_keys(q, q.shape, _lse_shape(q) if inputs.problem.lse else None, inputs.views.get("sinks"))
    if out is None:
        return [zeros, *sums]
    out[...] = zeros
    return sums
