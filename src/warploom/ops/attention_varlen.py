"""``attention_varlen``: attention of packed sequences, whose lengths only their device knows, and its gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Never, Unpack, overload

import numpy as np

from warploom.core.errors import ProblemError
from warploom.interop.arrays import describe_new, filled
from warploom.kernels.attention import backward_choice
from warploom.kernels.attention.choice import PACKED_KINDS, PackedConfig, choose_packed
from warploom.kernels.attention.problem import (
    BACKWARD,
    FORWARD,
    ArrayStrides,
    AttentionProblem,
    BackwardProblem,
    Packed,
)
from warploom.kernels.attention.scores import Window
from warploom.kernels.settings import read
from warploom.ops.arrays import FEW, OUTPUT, ArrayArgument
from warploom.ops.attention import (
    OF_RESULTS,
    Gradient,
    Gradients,
    HeadNumbers,
    Keys,
    Output,
    Outputs,
    Queries,
    ScoreArguments,
    Sums,
    SumsGradient,
    Values,
    backward_plan,
    of_heads,
    on_host,
    refuse_first,
    refuse_starts,
)
from warploom.ops.calls import Caller, Computation
from warploom.ops.declare import Arguments, Array, NumpyArray, Out, Views
from warploom.ops.steps import StridedPlan

if TYPE_CHECKING:
    from numpy.typing import NDArray


QueryStarts = Annotated[Any, ArrayArgument("batch+1", "s32", FEW, "q_starts", hint="where sequences begin and end")]
KeyStarts = Annotated[Any, ArrayArgument("batch+1", "s32", FEW, "k_starts", hint="where sequences begin and end")]
QueryCounts = Annotated[Any, ArrayArgument("batch", "s32", FEW, "q_used")]
KeyCounts = Annotated[Any, ArrayArgument("batch", "s32", FEW, "k_used")]
PackedOutput = Annotated[Any, ArrayArgument(OF_RESULTS, "q", OUTPUT, written=True)]


def packed_problem(given: Arguments) -> AttentionProblem:
    """The problem of a call on packed sequences. Raises ProblemError with the first thing that is wrong."""
    sizes, views = given.sizes, given.views
    if "k_starts" not in views and sizes["total_q"] != sizes["total_k"]:
        raise ProblemError(f"q has {sizes['total_q']} rows and k {sizes['total_k']}: give cu_seqlens_k as well")
    sequences = Packed(sizes["total_q"], sizes["total_k"], ("q_used" in views, "k_used" in views))
    return AttentionProblem(sizes["batch"], sequences=sequences, **of_heads(given))


def placed(problem: AttentionProblem, views: Views) -> Views:
    """The arrays that kernels take, in place of those of the caller."""
    found = dict(views)
    found.setdefault("k_starts", views["q_starts"])
    if problem.kv_len == 0 < problem.q_len:  # no tensor map without a row: one that no sequence has
        q = views["q"]
        for name, cols in (("k", problem.head_dim), ("v", problem.value_dim)):
            found[name] = describe_new(filled(q.kind, (1, problem.kv_heads, cols), q.dtype, q.device, 0.0))
    return found


class VarlenOptions(ScoreArguments, total=False):
    """The options of :func:`attention_varlen` beside ``return_lse``, and its optional arrays."""

    seqused_q: Any
    seqused_k: Any
    max_seqlen_q: Any
    max_seqlen_k: Any
    out: Any
    check: bool
    config: PackedConfig | str | None


@overload
def attention_varlen(
    q: Out,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[VarlenOptions],
) -> Out: ...


@overload
def attention_varlen(
    q: Array,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[Array, Array]: ...


@overload
def attention_varlen(
    q: NumpyArray,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenOptions],
) -> tuple[NumpyArray, NDArray[np.float32]]: ...


def attention_varlen(
    q: Queries,
    k: Keys,
    v: Values,
    cu_seqlens_q: QueryStarts,
    cu_seqlens_k: KeyStarts = None,
    *,
    seqused_q: QueryCounts = None,
    seqused_k: KeyCounts = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: HeadNumbers = None,
    return_lse: bool = False,
    out: PackedOutput = None,
    check: bool = False,
    config: PackedConfig | str | None = None,
    **unknown: Never,
) -> Outputs:
    """:func:`attention` of sequences of any lengths, packed one behind the other.

    Shapes: q (total_q, heads, head_dim), k and v (total_k, kv_heads, head_dim); v may have a head_dim of its own, which
    is that of the result. Sequence i has the queries ``cu_seqlens_q[i]`` … ``cu_seqlens_q[i + 1]`` - 1 and the keys
    that ``cu_seqlens_k``, by default the same, says so of: int32 (batch + 1,), ascending, on the arrays' device.
    ``seqused_q`` and ``seqused_k``, int32 (batch,), are how many of its queries and keys count, from the first on. Each
    sequence is a problem of :func:`attention` with the same ``causal``, ``window``, ``softcap``, ``scale``, ``sinks``,
    types and strides; a sequence may be empty.

    The lengths are read on the device: nothing waits for them, a call may be captured into a CUDA graph and replayed
    with others in the same arrays, and no lengths, totals or number of sequences make a kernel that was not there
    before. ``max_seqlen_q`` and ``max_seqlen_k`` are taken for the sake of other libraries' callers and not needed.

    Returns o, (total_q, heads, head_dim of v): ``out`` if it is given, else a new array. With ``return_lse`` also the
    log-sum-exps, float32 (heads, total_q). Rows of no sequence are left as they are: in a new array they hold anything.

    Lengths that cannot be (descending ones, rows beyond the arrays) are cut to what can, on the device: no memory
    outside of the arrays is touched, and the result means nothing. ``check`` looks at them first, which waits for the
    device, and raises a ProblemError that names the entry.

    Beside the result a call takes 32 bytes a head for every tile of 64 to 256 queries. Under ``torch.compile`` it is
    one operator, ``warploom::attention_varlen``. torch tensors that require gradients get them.

    Raises ProblemError for arrays it does not take, ConfigError for a ``config`` that does not fit,
    UnsupportedDeviceError for a GPU older than compute capability 8.0.
    """
    arrays = q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, sinks, out
    return attention_varlen_call(arrays, (causal, window, softcap, scale, return_lse), config, check, unknown)


def _work(given: Arguments, config: Any) -> Computation:
    problem, views = packed_problem(given), given.views

    def plan(arrays: Views) -> StridedPlan:
        strides = ArrayStrides({name: arrays[name].strides[:2] for name in FORWARD})
        asked, device = read(config, PACKED_KINDS), arrays["q"].device
        return StridedPlan.of(
            problem, device, asked, lambda on: (choose_packed(problem, on.target), ""), strides=strides
        )

    nothing = 0 in (problem.batch, problem.q_len, problem.heads)
    return Computation(given, plan, placed(problem, views), filled=True, nothing=nothing)


def _look(given: Arguments) -> None:
    """Wait for the arrays of lengths and look at them. Raises ProblemError that names the first wrong entry."""
    views = given.views
    arrays = dict(zip(views, given.declaration.arguments_of(views), strict=True))
    known = {name: on_host(views[name]) for name, x in arrays.items() if x.types == "s32"}
    for name in ("q_starts", "k_starts"):
        if name in known:
            refuse_starts(arrays[name].name, known[name], views[name[0]].shape[0])
    for name in ("q_used", "k_used"):
        if name in known:
            lengths, used = np.diff(known.get(f"{name[0]}_starts", known["q_starts"])), known[name]
            wrong = (used < 0) | (used > lengths)
            refuse_first(arrays[name].name, wrong, used, "no count of rows that the sequence has")


attention_varlen_call = Caller(attention_varlen, _work, look=_look, recorded=True)


# -- its gradients, for PyTorch's autograd
def attention_varlen_backward(
    dout: Gradient,
    q: Queries,
    k: Keys,
    v: Values,
    out: Output,
    lse: Sums,
    cu_seqlens_q: QueryStarts,
    cu_seqlens_k: KeyStarts = None,
    *,
    dlse: SumsGradient = None,
    seqused_q: QueryCounts = None,
    seqused_k: KeyCounts = None,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: HeadNumbers = None,
    deterministic: bool = False,
    config: backward_choice.BackwardConfig | str | None = None,
) -> Gradients:
    """The gradients (dq, dk, dv) of ``attention_varlen(q, k, v, …)`` for the gradient ``dout`` of its result.

    ``out`` and ``lse`` are what ``attention_varlen(…, return_lse=True)`` returned, ``dlse`` is the gradient of ``lse``.
    With ``sinks`` a fourth follows, dsinks: float32 (heads,). Rows of no sequence have gradients of zero; what lies
    there in the arrays is not read. The lengths are read on the device. Arrays and errors as for
    :func:`warploom.attention_varlen`.
    """
    arrays = dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, dlse, seqused_q, seqused_k, sinks
    return attention_varlen_backward_call.computed(arrays, (causal, window, softcap, scale, deterministic), config)


def _packed_work(given: Arguments, config: Any) -> Computation:
    p, views = packed_problem(given), given.views
    problem = BackwardProblem(p, "dlse" in views, given.options["deterministic"])
    some = 0 not in (p.batch, p.q_len, p.heads)
    whole = some and p.kv_len > 0  # there are kernels that write every row

    def plan(arrays: Views) -> StridedPlan:
        strides = ArrayStrides({name: arrays[name].strides[:2] for name in BACKWARD})
        return backward_plan(problem, arrays["q"].device, strides, read(config, backward_choice.PACKED_KINDS))

    nothing = not some or (p.kv_len == 0 and not p.head_arrays)
    value = None if whole else 0.0  # gradients where there are no keys, but for those of options
    return Computation(given, plan, placed(p, views), value=value, filled=not whole, nothing=nothing)


attention_varlen_backward_call = Caller(attention_varlen_backward, _packed_work)
