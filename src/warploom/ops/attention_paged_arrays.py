"""The arrays and options of attention on a cache: checked, and read as a problem."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from warploom.core.arguments import MOST_STRIDE
from warploom.core.dtypes import bf16, f16, f32, s32, u16
from warploom.core.errors import ProblemError
from warploom.interop.arrays import ArrayView, require_dtype, same_device
from warploom.interop.copies import settled
from warploom.kernels.attention.decode import SPLIT
from warploom.kernels.attention.problem import MOST_POSITIONS, AttentionProblem, Cached, Operands
from warploom.ops.attention_arrays import (
    Options,
    check_form,
    check_heads,
    check_last,
    check_sinks,
    check_types,
    misaligned,
    on_host,
    refuse_first,
    refuse_starts,
)
from warploom.ops.options import whole

PAGE_KEYS = 16
_CACHE = "(pages or batch, keys, kv_heads, head_dim)"
FP8 = "float8_e4m3fn"


@dataclass(frozen=True)
class CacheInputs:
    """Described and checked arrays by their names, in the order of the arguments, and what is asked of them."""

    views: dict[str, ArrayView]
    problem: AttentionProblem

    def operands(self, out: ArrayView) -> Operands:
        """The strides of the arrays and of the output."""
        table = self.views.get("block_table")
        k, v = (settled(self.views[name]).strides for name in ("k_cache", "v_cache"))
        lying = {
            "q": _of_queries(settled(self.views["q"])),
            "k": (k[0], k[2], k[1]),
            "v": (v[0], v[2], v[1]),
            "out": _of_queries(settled(out)),
            "table": (0 if table is None else settled(table).strides[0],),
        }
        return Operands(lying | {name: of_scale(self.views.get(name)) for name in ("k_scale", "v_scale")})


def of_scale(view: ArrayView | None) -> tuple[int, int]:
    """(sequence, key head) strides of scales."""
    return (0, 0) if view is None or len(view.shape) < 2 else (view.shape[1], 1)


def _of_queries(view: ArrayView) -> tuple[int, int, int]:
    """(batch, head, query) strides of q or out."""
    *outer, query, head, _ = view.strides
    return (outer[0] if outer else 0), head, query


def read_cache(given: dict[str, ArrayView], options: Options, split: int | None) -> CacheInputs:
    """Check the arrays of a call by their names. Raises ProblemError with the first thing that is wrong."""
    options.check()
    problem = _problem(given, options, split)
    same_device(list(given.values()), list(given))
    if problem.cache.fp8:
        given = {**given, **{name: in_pairs(given[name]) for name in ("k_cache", "v_cache")}}
    _check_rows(given)
    return CacheInputs(given, problem)


def given_split(fixed_split: Any) -> int | None:
    """The argument, a count of keys that the blocks of every chosen configuration divide. Raises ProblemError."""
    split = None if fixed_split is None else whole("fixed_split", fixed_split)
    if split is not None and (split % SPLIT or not 0 < split < MOST_POSITIONS):
        raise ProblemError(f"fixed_split is a multiple of {SPLIT} keys below {MOST_POSITIONS}, not {split}")
    return split


def is_fp8(view: ArrayView) -> bool:
    """Whether elements are ``float8_e4m3fn``."""
    return view.dtype.name == FP8


def in_pairs(view: ArrayView) -> ArrayView:
    """An fp8 cache as the kernels see it: pairs of elements. Raises ProblemError where rows hold none."""
    view = settled(view)
    if any(stride % 2 for stride in view.strides[:3]) or view.shape[3] % 2:
        raise ProblemError("the rows of an fp8 cache do not start at multiples of 16 bytes: allocate it so")
    owner = view.owner.view(np.uint16) if view.kind == "numpy" else view.owner
    shape, strides = (*view.shape[:3], view.shape[3] // 2), (*(s // 2 for s in view.strides[:3]), 1)
    return view._replace(shape=shape, strides=strides, dtype=u16, owner=owner)


def check_scales(given: dict[str, ArrayView], batch: int, kv_heads: int, fp8: bool) -> bool:
    """Whether there are scales, one number each or (batch, kv_heads). Raises ProblemError for others."""
    named = {name: given[name] for name in ("k_scale", "v_scale") if name in given}
    if not named:
        return False
    if len(named) == 1 or not fp8:
        raise ProblemError("k_scale and v_scale belong to a float8_e4m3fn cache, both of them")
    for name, view in named.items():
        require_dtype(view, name, (f32,))
        if tuple(view.shape) not in ((), (1,), (batch, kv_heads)) or not view.contiguous:
            raise ProblemError(
                f"{name} has shape {tuple(view.shape)}; it must be one number or a row-major (batch, "
                f"kv_heads) = ({batch}, {kv_heads})"
            )
    return True


def _check_rows(given: dict[str, ArrayView]) -> None:
    """Raises ProblemError for a cache whose rows no copy of 16 bytes takes."""
    for name in ("k_cache", "v_cache"):
        if why := misaligned(settled(given[name])):
            raise ProblemError(f"{name} {why}: a cache is never copied, allocate it otherwise")


def _check_alike(k: ArrayView, v: ArrayView) -> None:
    """Raises ProblemError for caches of different types or shapes."""
    if tuple(k.shape) != tuple(v.shape) or k.dtype is not v.dtype:
        raise ProblemError(
            f"k_cache is {k.dtype.array_name} {tuple(k.shape)} and v_cache {v.dtype.array_name} "
            f"{tuple(v.shape)}: they must be alike"
        )


def check_cache(given: dict[str, ArrayView]) -> None:
    """Raises ProblemError for caches that new keys and values cannot be written to."""
    k, v = given["k_cache"], given["v_cache"]
    for name, view in (("k_cache", k), ("v_cache", v)):
        if not is_fp8(view):
            require_dtype(view, name, (bf16, f16))
        check_form(name, view, _CACHE)
        if view.readonly:
            raise ProblemError(f"{name} cannot be written to: pass an array that can")
    _check_alike(k, v)
    _check_rows({name: in_pairs(x) if is_fp8(x) else x for name, x in (("k_cache", k), ("v_cache", v))})


def check_table(table: ArrayView | None, cache: ArrayView, batch: int) -> tuple[int, int, int, int]:
    """(keys of a page, pages, entries of a sequence, keys that a sequence has room for); without a table zeros first.

    Raises ProblemError for a table or a cache that is none of ``batch`` sequences.
    """
    if table is None:
        if cache.shape[0] != batch:
            raise ProblemError(
                f"k_cache has shape {tuple(cache.shape)}: its first dimension must be the batch, {batch}"
                ", or pages named by block_table"
            )
        return 0, 0, 0, cache.shape[1]
    if len(table.shape) != 2:
        raise ProblemError(f"block_table has shape {tuple(table.shape)}; it must be (batch, pages of a sequence)")
    check_integers("block_table", table, (batch, table.shape[1]))
    pages, size, entries = cache.shape[0], cache.shape[1], table.shape[1]
    if size % PAGE_KEYS or not size:
        raise ProblemError(f"a page has {size} keys (k_cache is {tuple(cache.shape)}); it must be a multiple of 16")
    return size, pages, entries, size * entries


def _problem(given: dict[str, ArrayView], options: Options, split: int | None) -> AttentionProblem:
    q, k, v, lens = (given[name] for name in ("q", "k_cache", "v_cache", "kv_lens"))
    table, starts = given.get("block_table"), given.get("cu_seqlens_q")
    _check_values(q, k, v, packed=starts is not None)
    batch = lens.shape[0] if len(lens.shape) == 1 else -1
    if batch < 0 or (starts is None and batch != q.shape[0]):
        expected = "(batch,)" if starts is not None else f"({q.shape[0]},), a length for each sequence of q"
        raise ProblemError(f"kv_lens has shape {tuple(lens.shape)}; it must be {expected}")
    check_integers("kv_lens", lens, (batch,))
    if starts is not None:
        check_integers("cu_seqlens_q", starts, (batch + 1,))
    size, pages, entries, capacity = check_table(table, k, batch)
    sinks = given.get("sinks")
    check_sinks(sinks, q.shape[-2])
    fp8, heads = is_fp8(k), (q.shape[-2], max(1, k.shape[2]))
    sequences = Cached(
        q.shape[-3],
        capacity,
        size,
        pages,
        entries,
        packed=starts is not None,
        split=split,
        fp8=fp8,
        scaled=check_scales(given, batch, heads[1], fp8),
    )
    asked = {"sinks": sinks is not None, **options.asked(q.shape[-1])}
    return AttentionProblem(batch, *heads, sequences, q.shape[-1], q.dtype, **asked)


def _check_values(q: ArrayView, k: ArrayView, v: ArrayView, *, packed: bool) -> None:
    """Types and shapes of queries and caches."""
    check_form("q", q, "(queries, heads, head_dim) with cu_seqlens_q" if packed else "(batch, q_len, heads, head_dim)")
    caches = {"k_cache": k, "v_cache": v}
    for name, view in caches.items():
        check_form(name, view, _CACHE)
    _check_alike(k, v)
    check_types({"q": q} if is_fp8(k) else {"q": q, **caches})
    if k.shape[3] != q.shape[-1]:
        raise ProblemError(f"q has head_dim {q.shape[-1]} and k_cache {k.shape[3]}: they must be equal")
    check_heads(q.shape[-2], k.shape[2], q.shape[-1], k.shape[3])


def check_integers(name: str, view: ArrayView, shape: tuple[int, ...]) -> None:
    """Raises ProblemError for an array that is none of int32 of this shape."""
    if tuple(view.shape) != shape:
        raise ProblemError(f"{name} has shape {tuple(view.shape)}; it must be {shape}")
    require_dtype(view, name, (s32,))
    check_last(name, view)
    if len(shape) == 2 and not 0 <= view.strides[0] <= MOST_STRIDE:
        raise ProblemError(f"the rows of {name} are {view.strides[0]} elements apart: copy it")


def check_entries(inputs: CacheInputs) -> None:
    """Raises ProblemError that names the first entry of lengths or tables which points outside. Waits for the GPU."""
    p, views = inputs.problem, inputs.views
    lens = on_host(views["kv_lens"])
    refuse_first("kv_lens", (lens < 0) | (lens > p.kv_len), lens, f"a sequence has room for {p.kv_len} keys")
    if p.cache.packed:
        refuse_starts("cu_seqlens_q", on_host(views["cu_seqlens_q"]), p.q_len)
    if p.cache.page_size:
        table = on_host(views["block_table"])
        used = np.arange(p.cache.table_pages)[None] * p.cache.page_size < lens[:, None]
        wrong = used & ((table < 0) | (table >= p.cache.pages))
        refuse_first("block_table", wrong, table, f"there are {p.cache.pages} pages")
