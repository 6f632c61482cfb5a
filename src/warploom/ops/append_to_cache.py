"""``append_to_cache``: new keys and values into a cache, with rotary embedding on the way."""

from __future__ import annotations

from typing import Annotated, Any

from warploom.core.errors import ProblemError
from warploom.interop.arrays import ArrayView, empty
from warploom.kernels.attention.append import MOVED, AppendProblem
from warploom.kernels.attention.problem import MOST_HEAD_DIM, AttentionProblem, Cached, Operands
from warploom.ops.arrays import CACHE, FP8, TABLE, ArrayArgument, ResultArray
from warploom.ops.attention import on_host, refuse_first
from warploom.ops.attention_paged import Lengths, Scales, Table, cache_sizes, check_table, of_scale
from warploom.ops.calls import Caller, Computation
from warploom.ops.declare import Arguments, Views
from warploom.ops.steps import Step, Steps

_CACHE = "pages page_size kv_heads head_dim if block_table | batch capacity kv_heads head_dim"
_PAGES = "or pages that block_table names"
_TURNS = "cos and sin come together, of one shape"
KeyCache = Annotated[Any, ArrayArgument(_CACHE, f"T {FP8}", CACHE, "k_cache", written=True, hint=_PAGES)]
ValueCache = Annotated[Any, ArrayArgument(_CACHE, "k_cache", CACHE, "v_cache", written=True, hint=_PAGES)]
NewRows = Annotated[Any, ArrayArgument("batch tokens kv_heads head_dim")]
NewQueries = Annotated[Any, ArrayArgument("batch q_len heads head_dim")]
Rotation = Annotated[Any, ArrayArgument("positions pairs", "f32 bf16 f16", TABLE, hint=_TURNS)]


def append_to_cache(
    k_cache: KeyCache,
    v_cache: ValueCache,
    k: NewRows,
    v: NewRows,
    kv_lens: Lengths,
    *,
    block_table: Table = None,
    q: NewQueries = None,
    cos: Rotation = None,
    sin: Rotation = None,
    interleaved: bool = False,
    k_scale: Scales = None,
    v_scale: Scales = None,
    check: bool = False,
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
    return append_call(arrays, (interleaved,), None, check)


def problem_of(given: Arguments) -> AppendProblem:
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


def _work(given: Arguments, _: Any) -> Computation:
    problem, views, made = problem_of(given), given.views, None
    cached = problem.cached
    if 0 in (cached.batch, cached.kv_heads) or not (problem.tokens or cached.q_len):
        made = [empty(views["q"].kind, *form, views["q"].device) for form in given.results.values()]
    elif 0 in (cached.kv_len, *views["k_cache"].shape):
        raise ProblemError("the cache has room for no key: allocate it larger")
    return Computation(given, lambda arrays: _steps(arrays, problem), filled=True, made=made)


def _steps(arrays: Views, problem: AppendProblem) -> Steps:
    strides: dict[str, tuple[int, ...]] = {
        name: of_scale(arrays[name]) if name.endswith("_scale") else _strides(arrays[name])
        for name in MOVED
        if name in arrays
    }
    if "table" in arrays:
        strides["table"] = arrays["table"].strides[:1]
    return Steps((Step(problem.call(Operands(strides)), 0),))


def _strides(view: ArrayView) -> tuple[int, int, int]:
    """(sequence or page, head, token)."""
    outer, row, head, _ = view.strides
    return outer, head, row


def _look(given: Arguments) -> None:
    """Raises ProblemError that names the first entry which points outside. Waits for the GPU."""
    p = problem_of(given)
    capacity, lens = p.cached.kv_len, on_host(given.views["lengths"])
    most, room = capacity, f"there is room for {capacity} keys"
    if p.rotary:
        most, room = min(capacity, p.positions), f"{room}, and cosines for {p.positions}"
    refuse_first("kv_lens", lens > most, lens, room)
    refuse_first("kv_lens", lens < p.tokens, lens, f"the {p.tokens} new keys count")
    if p.cached.cache.page_size:
        check_table(given, lens, lens - p.tokens)


append_call = Caller(append_to_cache, _work, look=_look)
