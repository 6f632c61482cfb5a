"""``append_to_cache``: new keys and values into a cache, with rotary embedding on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np

from warploom.core.dtypes import bf16, f16, f32
from warploom.core.errors import ProblemError
from warploom.interop.arrays import ArrayView, empty, require_dtype
from warploom.interop.arrays import same_device as on_one_device
from warploom.interop.copies import settled
from warploom.interop.overlap import share_memory
from warploom.kernels.attention.append import MOVED, AppendProblem
from warploom.kernels.attention.problem import AttentionProblem, Cached, Operands
from warploom.ops.attention_arrays import aligned, check_form, on_host, refuse_first
from warploom.ops.attention_paged_arrays import (
    check_cache,
    check_integers,
    check_scales,
    check_table,
    in_pairs,
    is_fp8,
    of_scale,
)
from warploom.ops.calls import Caller, Computation
from warploom.ops.declare import ArrayArgument, Few, Output, Tensor
from warploom.ops.steps import Step, Steps

Arrays = dict[str, ArrayView]
Lengths = Annotated[Any, ArrayArgument("lengths")]
Table = Annotated[Any, ArrayArgument("table")]


def append_to_cache(
    k_cache: Output,
    v_cache: Output,
    k: Tensor,
    v: Tensor,
    kv_lens: Lengths,
    *,
    block_table: Table = None,
    q: Tensor = None,
    cos: Tensor = None,
    sin: Tensor = None,
    interleaved: bool = False,
    k_scale: Few = None,
    v_scale: Few = None,
    check: bool = False,
) -> Any:
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
    return append_call(arrays, (interleaved,), None, check)


def _work(views: Arrays, asked: dict[str, Any], _: Any, copy: Callable[[ArrayView], ArrayView]) -> Computation:
    problem = read_append(views, asked["interleaved"])
    lying = {name: aligned(settled(x), copy) if name in ("k", "v", "q") else x for name, x in views.items()}
    new, made = {"q_out": (tuple(views["q"].shape), views["q"].dtype)} if "q" in views else {}, None
    cached = problem.cached
    if 0 in (cached.batch, cached.kv_heads) or not (problem.tokens or cached.q_len):
        made = [empty(views["q"].kind, *form, views["q"].device) for form in new.values()]
    elif 0 in (cached.kv_len, *views["k_cache"].shape):
        raise ProblemError("the cache has room for no key: allocate it larger")
    taken = {n: in_pairs(x) if n.endswith("_cache") and is_fp8(x) else x for n, x in lying.items()}
    written = "k_cache", "v_cache"
    return Computation(lying, new, lambda arrays: _steps(arrays, problem), taken, written, filled=True, made=made)


def _steps(arrays: Arrays, problem: AppendProblem) -> Steps:
    strides: dict[str, tuple[int, ...]] = {
        name: of_scale(arrays[name]) if name.endswith("_scale") else _strides(settled(arrays[name]))
        for name in MOVED
        if name in arrays
    }
    if "table" in arrays:
        strides["table"] = settled(arrays["table"]).strides[:1]
    return Steps((Step(problem.call(Operands(strides)), 0),))


def _strides(view: ArrayView) -> tuple[int, int, int]:
    """(sequence or page, head, token)."""
    outer, row, head, _ = view.strides
    return outer, head, row


def read_append(views: Arrays, interleaved: bool) -> AppendProblem:
    """Check the arrays. Raises ProblemError with the first thing that is wrong."""
    k, cache, table, q = views["k"], views["k_cache"], views.get("table"), views.get("q")
    named = _named(views)
    on_one_device(list(named.values()), list(named))
    check_cache(named)
    fp8 = is_fp8(cache)
    for name in ("k", "v", *(("q",) if q is not None else ())):
        view = views[name]
        require_dtype(view, name, ((bf16, f16) if name == "k" else (k.dtype,)) if fp8 else (cache.dtype,))
        check_form(name, view, "(batch, tokens, heads, head_dim)")
    batch, tokens, kv_heads, d = k.shape
    if tuple(views["v"].shape) != tuple(k.shape) or (kv_heads, d) != tuple(cache.shape[2:]):
        raise ProblemError(
            f"k has shape {tuple(k.shape)}, v {tuple(views['v'].shape)}, k_cache {tuple(cache.shape)}: "
            "k and v must be equal, and have the cache's heads and head_dim"
        )
    if q is not None and (q.shape[0] != batch or q.shape[3] != d):
        raise ProblemError(f"q has shape {tuple(q.shape)} and k {tuple(k.shape)}: batch and head_dim must be equal")
    if d % 8 or not 8 <= d <= 256:
        raise ProblemError(f"head_dim is {d}; caches have multiples of 8 from 8 to 256")
    check_integers("kv_lens", views["lengths"], (batch,))
    size, pages, entries, capacity = check_table(table, cache, batch)
    rotary, kind, positions = _rotary(views, d)
    scaled = check_scales(named, batch, kv_heads, fp8)
    turns = interleaved if rotary else False
    heads, q_len = (0, 0) if q is None else (q.shape[2], q.shape[1])
    sequences = Cached(q_len, capacity, size, pages, entries, fp8=fp8, scaled=scaled)
    cached = AttentionProblem(batch, heads, kv_heads, sequences, d, k.dtype)
    return AppendProblem(cached, tokens, q is not None, rotary, turns, kind, positions)


_PUBLIC = {"lengths": "kv_lens", "table": "block_table"}


def _named(views: Mapping[str, ArrayView]) -> Arrays:
    """The arrays by the caller's names."""
    return {_PUBLIC.get(name, name): x for name, x in views.items()}


def _refuse_caches(views: Mapping[str, ArrayView]) -> None:
    """Raises ProblemError for caches that new keys and values cannot be written to beside the other arrays."""
    named = _named(views)
    check_cache(named)
    for written in ("k_cache", "v_cache"):
        for name, view in named.items():
            if name != written and share_memory(view, named[written]):
                raise ProblemError(f"{name} shares memory with {written}, which is written to: pass another array")


def _rotary(views: Arrays, head_dim: int) -> tuple[int, Any, int]:
    """(rotary_dim, the tables' type, positions); zeros without tables."""
    cos, sin = views.get("cos"), views.get("sin")
    if cos is None and sin is None:
        if "q" in views:
            raise ProblemError("q is turned by cos and sin: pass both")
        return 0, None, 0
    if cos is None or sin is None or tuple(cos.shape) != tuple(sin.shape) or cos.dtype is not sin.dtype:
        raise ProblemError("cos and sin come together, of one shape and type")
    for name, view in (("cos", cos), ("sin", sin)):
        require_dtype(view, name, (f32, bf16, f16))
        if len(view.shape) != 2 or not view.contiguous or view.pointer % 16:
            raise ProblemError(
                f"{name} has shape {tuple(view.shape)}; it must be row-major (positions, rotary_dim / 2)"
            )
    rotary = 2 * cos.shape[1]
    if rotary % 16 or not 0 < rotary <= head_dim or not cos.shape[0]:
        raise ProblemError(
            f"cos has shape {tuple(cos.shape)}: rotary_dim is a multiple of 16 up to {head_dim}, of one "
            "position at least"
        )
    return rotary, cos.dtype, cos.shape[0]


def _check_entries(views: Arrays, asked: dict[str, Any]) -> None:
    """Raises ProblemError that names the first entry which points outside. Waits for the GPU."""
    p = read_append(views, asked["interleaved"])
    cache, capacity, lens = p.cached.cache, p.cached.kv_len, on_host(views["lengths"])
    most, room = capacity, f"there is room for {capacity} keys"
    if p.rotary:
        most, room = min(capacity, p.positions), f"{room}, and cosines for {p.positions}"
    refuse_first("kv_lens", lens > most, lens, room)
    refuse_first("kv_lens", lens < p.tokens, lens, f"the {p.tokens} new keys count")
    if cache.page_size:
        table = on_host(views["table"])
        entry = np.arange(cache.table_pages)[None] * cache.page_size
        used = (entry < lens[:, None]) & (entry + cache.page_size > (lens - p.tokens)[:, None])
        wrong = used & ((table < 0) | (table >= cache.pages))
        refuse_first("block_table", wrong, table, f"there are {cache.pages} pages")


append_call = Caller(append_to_cache, _work, refuse=_refuse_caches, look=_check_entries)
