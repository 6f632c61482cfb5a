"""``attention_paged`` and ``append_to_cache``: a cache of keys and values, in pages or side by side.

The first is attention of a few new queries on it; the second writes new keys and values, with rotary embedding on the
way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Never, Unpack

import numpy as np

from warploom.core.errors import ProblemError
from warploom.core.targets import Target
from warploom.interop.arrays import ArrayView, as_if_compact
from warploom.interop.tracing import is_tracing, traced
from warploom.kernels.attention.append import AppendProblem
from warploom.kernels.attention.choice import CACHED_KINDS, CachedConfig, choose_cached, violations_on_cache
from warploom.kernels.attention.decode import SPLIT
from warploom.kernels.attention.problem import MOST_HEAD_DIM, MOST_POSITIONS, ArrayStrides, AttentionProblem, Cached
from warploom.kernels.attention.scores import Window
from warploom.kernels.settings import read, refuse
from warploom.kernels.source import KernelCall
from warploom.ops.arrays import (
    CACHE,
    FP8,
    IN_PLACE,
    OUTPUT,
    ROW_MAJOR,
    TABLE,
    WRITTEN_CACHE,
    ArrayArgument,
    ResultArray,
    is_fp8,
)
from warploom.ops.attention import (
    OF_QUERIES,
    OF_SUMS,
    HeadNumbers,
    Queries,
    ScoreArguments,
    of_heads,
    on_host,
    refuse_first,
    refuse_starts,
    without_keys,
)
from warploom.ops.backends import Processor
from warploom.ops.calls import Caller, Computation
from warploom.ops.declare import Arguments, Views
from warploom.ops.steps import Launches, StridedPlan

PAGE_KEYS = 16
_CACHE = "pages page_size kv_heads head_dim if block_table | batch capacity kv_heads head_dim"
_PAGES = "or pages that block_table names"
KeyCache = Annotated[Any, ArrayArgument(_CACHE, f"T {FP8}", CACHE, "k", hint=_PAGES)]
ValueCache = Annotated[Any, ArrayArgument(_CACHE, "k_cache", CACHE, "v", hint=_PAGES)]
Lengths = Annotated[Any, ArrayArgument("batch", "s32", IN_PLACE, "lengths", hint="keys of each sequence")]
Starts = Annotated[Any, ArrayArgument("batch+1", "s32", IN_PLACE, "starts", hint="where sequences begin and end")]
Table = Annotated[Any, ArrayArgument("batch entries", "s32", IN_PLACE, "table", hint="pages of each sequence")]
Scales = Annotated[Any, ArrayArgument(" | 1 | batch kv_heads", "f32", ROW_MAJOR)]
NewOutput = Annotated[Any, ArrayArgument(OF_QUERIES, "q", OUTPUT, written=True, over="q")]
NewOutputs = Annotated[
    Any,
    ResultArray("out", OF_QUERIES, "q", empty=0.0),
    ResultArray("lse", OF_SUMS, "f32", when="return_lse", empty=-math.inf),
]


@dataclass(frozen=True)
class AttentionPagedPlan(StridedPlan):
    """The kernels that a call of :func:`attention_paged` would run: nothing has been compiled or launched yet."""

    problem: AttentionProblem
    config: CachedConfig


class PagedOptions(ScoreArguments, total=False):
    """The options of :func:`attention_paged`, and the arrays that not every call has."""

    block_table: Any
    cu_seqlens_q: Any
    k_scale: Any
    v_scale: Any
    fixed_split: int | None
    return_lse: bool
    out: Any
    config: CachedConfig | str | None


# -- arrays
def cache_sizes(given: Arguments, cache: ArrayView) -> dict[str, Any]:
    """The sizes and the type of a ``cache``, by the names that a problem has; ``kv_len`` is a sequence's room for keys.

    Raises ProblemError for pages and scales that no kernel takes.
    """
    sizes, views, fp8 = given.sizes, given.views, is_fp8(cache)
    scales = [name for name in ("k_scale", "v_scale") if name in views]
    if scales and (len(scales) == 1 or not fp8):
        raise ProblemError(f"k_scale and v_scale belong to a {FP8} cache, both of them")
    found = {"fp8": fp8, "scaled": bool(scales)}
    if "table" not in views:
        return found | {"kv_len": sizes["capacity"]}
    size, entries = sizes["page_size"], sizes["entries"]
    if size % PAGE_KEYS or not size:
        raise ProblemError(f"a page has {size} keys (k_cache); it must be a multiple of {PAGE_KEYS}")
    pages = {"page_size": size, "pages": sizes["pages"], "table_pages": entries}
    return found | pages | {"kv_len": size * entries}


def problem_on_cache(given: Arguments) -> AttentionProblem:
    """The problem of a call on a cache. Raises ProblemError for what no kernel takes."""
    sizes, packed, split = given.sizes, "starts" in given.views, given.options["fixed_split"]
    if split is not None and (split % SPLIT or not 0 < split < MOST_POSITIONS):
        raise ProblemError(f"fixed_split is a multiple of {SPLIT} keys below {MOST_POSITIONS}, not {split}")
    q_len = sizes["total_q"] if packed else sizes["q_len"]
    sequences = Cached(q_len, packed=packed, split=split, **cache_sizes(given, given.views["k"]))
    return AttentionProblem(sizes["batch"], sequences=sequences, **of_heads(given))


def cached_strides(arrays: Views) -> ArrayStrides:
    """The strides of arrays: (sequence or page, head, row), of scales (sequence, key head), of a table (sequence,)."""
    found = dict[str, tuple[int, ...]]()
    for name, view in arrays.items():
        if name == "table":
            found[name] = view.strides[:1]
        elif name.endswith("_scale"):
            found[name] = (view.shape[1], 1) if len(view.shape) == 2 else (0, 0)
        elif len(view.shape) > 2:
            *outer, row, head, _ = view.strides
            found[name] = (outer[0] if outer else 0), head, row
    return ArrayStrides(found)


# -- plan
def _plan(problem: AttentionProblem, arrays: Views, config: Any) -> AttentionPagedPlan:
    """The plan for a problem on these arrays. Raises ConfigError for a ``config`` that does not fit."""
    strides = cached_strides(arrays)

    def violations(found: CachedConfig, _: Any, target: Target) -> list[str]:
        return found.check() or found.check(target) + violations_on_cache(found, problem, strides)

    def choice(on: Processor) -> tuple[CachedConfig, str]:
        found, reason = choose_cached(problem, strides, on.target, on.multiprocessors)
        if wrong := violations(found, problem, on.target):
            raise ProblemError("; ".join(wrong))
        return found, reason

    return AttentionPagedPlan.of(
        problem,
        arrays["q"].device,
        read(config, CACHED_KINDS),
        choice,
        violations=violations,
        requires="sm_90" if problem.cache.fp8 else None,
        strides=strides,
    )


@traced
def plan_attention_paged(
    q: Any, k_cache: Any, v_cache: Any, kv_lens: Any, **options: Unpack[PagedOptions]
) -> AttentionPagedPlan:
    """Plan a call of :func:`attention_paged`: its kernels and the reason for them. Runs nothing."""
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "kv_lens": kv_lens}
    return attention_paged_call.computation({**arrays, **options}).planned()


def refuse_paged(config: Any, given: Arguments, problem: AttentionProblem) -> None:
    """Raises ConfigError for a configuration, or its notation, that does not fit arguments as kernels take them."""
    found = read(config, CACHED_KINDS)
    if found is not None:
        strides = cached_strides(given.views | {"out": as_if_compact(given.views["q"])})
        refuse(f"{found} does not fit", found.check() or violations_on_cache(found, problem, strides))


def checked_attention_paged(
    q: Any, k_cache: Any, v_cache: Any, kv_lens: Any, **options: Unpack[PagedOptions]
) -> Callable[[], Any] | None:
    """Raises ProblemError as :func:`attention_paged` does for these arguments, and runs nothing.

    Where a call like this one was made before, the result is what makes it again. Where PyTorch traces a graph nothing
    is refused: the operator does so while tracing, before anything runs.
    """
    if is_tracing():
        return None
    arrays = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "kv_lens": kv_lens}
    asked = {**arrays, **options}
    lying, plain = attention_paged_call.positions(asked)
    known = attention_paged_call.cache.known(plain, None, lying)
    if known is not None:
        return lambda: attention_paged_call.repeated(*known, lying, plain)
    work = attention_paged_call.computation(asked)
    if not work.nothing:
        work.planned()
    return None


# -- the call
def attention_paged(
    q: Queries,
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
    sinks: HeadNumbers = None,
    k_scale: Scales = None,
    v_scale: Scales = None,
    fixed_split: int | None = None,
    return_lse: bool = False,
    out: NewOutput = None,
    check: bool = False,
    config: CachedConfig | str | None = None,
    **unknown: Never,
) -> NewOutputs:
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
    return attention_paged_call(arrays, options, config, check, unknown)


def _work(given: Arguments, config: Any) -> Computation:
    problem, views = problem_on_cache(given), given.views

    def empty() -> dict[str, Any]:
        if "out" in views:
            views["out"].array[...] = 0.0
        return without_keys(given)

    nothing = 0 in (*views["q"].shape, problem.batch, problem.kv_len, *views["k"].shape)
    return Computation(given, lambda arrays: _plan(problem, arrays, config), filled=True, nothing=nothing, empty=empty)


def check_table(given: Arguments, lengths: Any, first: Any = 0) -> None:
    """Raises ProblemError that names the first entry of a block table that is no page, of keys from ``first`` on."""
    sizes, table = given.sizes, on_host(given.views["table"])
    page = np.arange(sizes["entries"])[None] * sizes["page_size"]
    used = (page < lengths[:, None]) & (page + sizes["page_size"] > np.reshape(first, (-1, 1)))
    wrong = used & ((table < 0) | (table >= sizes["pages"]))
    refuse_first("block_table", wrong, table, f"there are {sizes['pages']} pages")


def _look(given: Arguments) -> None:
    """Raises ProblemError that names the first entry of lengths or tables which points outside. Waits for the GPU."""
    p, views = problem_on_cache(given), given.views
    lens = on_host(views["lengths"])
    refuse_first("kv_lens", (lens < 0) | (lens > p.kv_len), lens, f"a sequence has room for {p.kv_len} keys")
    if p.cache.packed:
        refuse_starts("cu_seqlens_q", on_host(views["starts"]), p.q_len)
    if p.cache.page_size:
        check_table(given, lens)


attention_paged_call = Caller(attention_paged, _work, look=_look)


# -- append
_TURNS = "cos and sin come together, of one shape"
WrittenKeys = Annotated[Any, ArrayArgument(_CACHE, f"T {FP8}", WRITTEN_CACHE, "k_cache", written=True, hint=_PAGES)]
WrittenValues = Annotated[Any, ArrayArgument(_CACHE, "k_cache", WRITTEN_CACHE, "v_cache", written=True, hint=_PAGES)]
NewRows = Annotated[Any, ArrayArgument("batch tokens kv_heads head_dim")]
Rotation = Annotated[Any, ArrayArgument("positions pairs", "f32 bf16 f16", TABLE, hint=_TURNS)]


def append_to_cache(
    k_cache: WrittenKeys,
    v_cache: WrittenValues,
    k: NewRows,
    v: NewRows,
    kv_lens: Lengths,
    *,
    block_table: Table = None,
    q: Queries = None,
    cos: Rotation = None,
    sin: Rotation = None,
    interleaved: bool = False,
    k_scale: Scales = None,
    v_scale: Scales = None,
    check: bool = False,
    **unknown: Never,
) -> Annotated[Any, ResultArray("q_out", "", "q", when="q")]:
    """Write new keys and values of each sequence into its cache, as the last of its ``kv_lens`` keys.

    Shapes: k and v (batch, tokens, kv_heads, head_dim); caches, ``block_table`` and ``kv_lens`` as for
    :func:`attention_paged`, which takes the same lengths: the new tokens count. dtypes: float16 or bfloat16, all alike;
    the caches may be float8_e4m3fn as well (compute capability 9.0), with ``k_scale`` and ``v_scale`` as there: keys
    and values are divided by them, and numbers beyond the largest become the largest.

    ``cos`` and ``sin`` (positions, rotary_dim / 2), of the same type or float32, turn the keys by their positions on
    the way: rotary embedding of the first ``rotary_dim`` elements of each head, a multiple of 16. Elements
    rotary_dim / 2 apart are turned together, or with ``interleaved`` neighbours. ``q`` (batch, q_len, heads, head_dim),
    whose last query has the last key's position, is turned as well and returned in a new array; q itself stays.

    Lengths and pages are read on the GPU, and nothing waits for it. A token that the cache has no place for, by its
    length or its page, is left out, and a position beyond the table of cosines takes its last row; ``check`` looks
    first, waits for the GPU and names the entry that is wrong.

    Returns the turned q, or None without one. Raises ProblemError for arrays it does not take.
    """
    arrays = k_cache, v_cache, k, v, kv_lens, block_table, q, cos, sin, k_scale, v_scale
    return append_call(arrays, (interleaved,), None, check, unknown)


def append_problem(given: Arguments) -> AppendProblem:
    """The problem of a call. Raises ProblemError for what no kernel takes."""
    sizes, views = given.sizes, given.views
    head_dim, q_len = sizes["head_dim"], sizes.get("q_len", 0)
    if head_dim % 8 or not 8 <= head_dim <= MOST_HEAD_DIM:
        raise ProblemError(f"head_dim is {head_dim}; caches have multiples of 8 from 8 to {MOST_HEAD_DIM}")
    rotary, kind, positions = _rotary(given)
    turns = given.options["interleaved"] if rotary else False
    sequences = Cached(q_len, **cache_sizes(given, views["k_cache"]))
    cached = AttentionProblem(
        sizes["batch"], sizes.get("heads", 0), sizes["kv_heads"], sequences, head_dim, views["k"].dtype
    )
    return AppendProblem(cached, sizes["tokens"], "q" in views, rotary, turns, kind, positions)


def _rotary(given: Arguments) -> tuple[int, Any, int]:
    """(rotary_dim, the tables' type, positions); zeros without tables."""
    views, sizes = given.views, given.sizes
    cos, sin = views.get("cos"), views.get("sin")
    if (cos is None) != (sin is None) or (cos and sin and cos.dtype is not sin.dtype):
        raise ProblemError("cos and sin come together, of one shape and type: pass both")
    if cos is None:
        if "q" in views:
            raise ProblemError("q is turned by cos and sin: pass both")
        return 0, None, 0
    rotary = 2 * sizes["pairs"]
    if rotary % 16 or not 0 < rotary <= sizes["head_dim"] or not sizes["positions"]:
        raise ProblemError(
            f"cos has shape {tuple(cos.shape)}: rotary_dim is a multiple of 16 up to {sizes['head_dim']}, of "
            "one position at least"
        )
    return rotary, cos.dtype, sizes["positions"]


@dataclass(frozen=True)
class AppendPlan(Launches):
    """The launch of an append to arrays with these strides."""

    problem: AppendProblem
    strides: ArrayStrides

    @cached_property
    def calls(self) -> tuple[KernelCall, ...]:
        """The launch."""
        return (self.problem.call(self.strides),)


def _append(given: Arguments, _: Any) -> Computation:
    problem = append_problem(given)
    cached = problem.cached
    nothing = 0 in (cached.batch, cached.kv_heads) or not (problem.tokens or cached.q_len)
    if not nothing and 0 in (cached.kv_len, *given.views["k_cache"].shape):
        raise ProblemError("the cache has room for no key: allocate it larger")
    return Computation(given, lambda x: AppendPlan(problem, cached_strides(x)), filled=True, nothing=nothing)


def _look_at_rows(given: Arguments) -> None:
    """Raises ProblemError that names the first entry which points outside. Waits for the GPU."""
    p = append_problem(given)
    capacity, lens = p.cached.kv_len, on_host(given.views["lengths"])
    most, room = capacity, f"there is room for {capacity} keys"
    if p.rotary:
        most, room = min(capacity, p.positions), f"{room}, and cosines for {p.positions}"
    refuse_first("kv_lens", lens > most, lens, room)
    refuse_first("kv_lens", lens < p.tokens, lens, f"the {p.tokens} new keys count")
    if p.cached.cache.page_size:
        check_table(given, lens, lens - p.tokens)


append_call = Caller(append_to_cache, _append, look=_look_at_rows)
