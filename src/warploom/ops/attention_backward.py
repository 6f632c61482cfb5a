"""The gradients of attention: ``attention_backward`` of even sequences, and that of packed ones.

The latter is for PyTorch's autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, Never, TypedDict, Unpack

from warploom.interop.arrays import Device, Form, filled
from warploom.interop.tracing import traced
from warploom.kernels.attention.backward_choice import KINDS, PACKED_KINDS, BackwardConfig, choose
from warploom.kernels.attention.problem import BACKWARD, ArrayStrides, BackwardProblem
from warploom.kernels.attention.scores import HEAD_ARRAYS, Window
from warploom.kernels.settings import read
from warploom.ops.arrays import FEW, GRADIENT, ArrayArgument, ResultArray
from warploom.ops.attention import (
    OF_RESULTS,
    OF_SUMS,
    HeadNumbers,
    Keys,
    Layout,
    Queries,
    Values,
    problem_of,
    strides_of,
)
from warploom.ops.attention_varlen import (
    KeyCounts,
    KeyStarts,
    QueryCounts,
    QueryStarts,
    packed_problem,
    placed,
)
from warploom.ops.calls import Caller, Computation
from warploom.ops.declare import Arguments, Views
from warploom.ops.steps import StridedPlan

_HINT = "the forward pass returns it with return_lse=True"
_OF_SUMS = "the gradient of lse, in its shape"
Gradient = Annotated[Any, ArrayArgument(OF_RESULTS, memory=GRADIENT, late=True)]
Output = Annotated[Any, ArrayArgument(OF_RESULTS, memory=GRADIENT, hint=_HINT, late=True)]
Sums = Annotated[Any, ArrayArgument(OF_SUMS, "f32", FEW, hint=_HINT, late=True)]
SumsGradient = Annotated[Any, ArrayArgument(OF_SUMS, "f32", FEW, hint=_OF_SUMS, late=True)]
Gradients = Annotated[
    tuple[Any, ...],
    *[ResultArray(f"d{name}", "", name, empty=0.0) for name in "qkv"],
    *[ResultArray(f"d{name}", "heads", "f32", when=name, empty=0.0) for name in HEAD_ARRAYS],
]


@dataclass(frozen=True)
class AttentionBackwardPlan(StridedPlan):
    """The kernels that a call of :func:`attention_backward` would run: nothing has been compiled or launched yet."""

    problem: BackwardProblem
    config: BackwardConfig


class BackwardOptions(TypedDict, total=False):
    """The options of :func:`attention_backward`, and the arrays that not every call has."""

    dlse: Any
    causal: bool
    scale: float | None
    window: Window | None
    softcap: float | None
    sinks: Any
    layout: Layout
    deterministic: bool
    config: BackwardConfig | str | None


def attention_backward(
    dout: Gradient,
    q: Queries,
    k: Keys,
    v: Values,
    out: Output,
    lse: Sums,
    *,
    dlse: SumsGradient = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: HeadNumbers = None,
    layout: Layout = "bshd",
    deterministic: bool = False,
    config: BackwardConfig | str | None = None,
    **unknown: Never,
) -> Gradients:
    """The gradients (dq, dk, dv) of ``attention(q, k, v, …)`` for the gradient ``dout`` of its result.

    ``out`` and ``lse`` are what ``attention(…, return_lse=True)`` returned with the same options: shaped like q, and
    float32 (batch, heads, q_len). ``dlse`` is the gradient of ``lse``, if it has one. ``dout`` is shaped and typed like
    ``out``; the gradients are like q, k and v, row-major. Heads that share keys add to their dk and dv in float32.
    Queries that see no key and keys that no query sees have gradients of zero.

    With ``sinks`` a fourth gradient follows, dsinks: float32 (heads,), summed over the rows of a head in float32 and
    always in the same order.

    ``deterministic`` asks for results with equal bits from run to run. No array grows with q_len · kv_len: beside the
    results a call takes at most one float32 copy of dq and, where CTAs divide the query heads of few key heads, copies
    of dk and dv, at most one for each query head (``plan_attention_backward(…).workspace_bytes``).

    Under ``torch.compile`` a call is one operator, ``warploom::attention_backward``.

    Arrays as for :func:`attention`. Raises ProblemError for arrays it does not take, ConfigError for a ``config`` that
    does not fit, UnsupportedDeviceError for a GPU older than compute capability 8.0.
    """
    options = causal, scale, window, softcap, layout, deterministic
    return attention_backward_call((dout, q, k, v, out, lse, dlse, sinks), options, config, False, unknown)


@traced
def plan_attention_backward(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Unpack[BackwardOptions]
) -> AttentionBackwardPlan:
    """Plan a call of :func:`attention_backward`: its kernels and the memory that they take. Runs nothing."""
    arrays = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
    return attention_backward_call.computation({**arrays, **options}).planned()


def _plan(problem: BackwardProblem, arrays: Views, strides: ArrayStrides, config: Any, kinds: Any) -> StridedPlan:
    kind, asked = AttentionBackwardPlan if kinds is KINDS else StridedPlan, read(config, kinds)
    return kind.of(problem, arrays["q"].device, asked, lambda on: choose(problem, on.target), strides=strides)


def _work(given: Arguments, config: Any) -> Computation:
    p, layout = problem_of(given), given.options["layout"]
    problem = BackwardProblem(p, "dlse" in given.views, given.options["deterministic"])

    def plan(arrays: Views) -> StridedPlan:
        strides = ArrayStrides({name: strides_of(arrays[name], layout) for name in BACKWARD}, layout)
        return _plan(problem, arrays, strides, config, KINDS)

    def zeros() -> dict[str, Any]:
        made = given.made()
        if p.sink and p.kv_len == 0 and "dlse" in given.views:  # the sink is the log-sum-exp
            made[f"d{p.sink}"] = given.views["dlse"].array.sum((0, 2))
        return made

    nothing = 0 in (p.batch, p.heads, p.q_len, p.kv_len)
    return Computation(given, plan, nothing=nothing, empty=zeros)


attention_backward_call = Caller(attention_backward, _work)


# -- of packed sequences
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
    config: BackwardConfig | str | None = None,
) -> Gradients:
    """The gradients (dq, dk, dv) of ``attention_varlen(q, k, v, …)`` for the gradient ``dout`` of its result.

    ``out`` and ``lse`` are what ``attention_varlen(…, return_lse=True)`` returned, ``dlse`` is the gradient of ``lse``.
    With ``sinks`` a fourth follows, dsinks: float32 (heads,). Rows of no sequence have gradients of zero; what lies
    there in the arrays is not read. The lengths are read on the device. Arrays and errors as for
    :func:`warploom.attention_varlen`.
    """
    arrays = dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, dlse, seqused_q, seqused_k, sinks
    return attention_varlen_backward_call.computed(arrays, (causal, window, softcap, scale, deterministic), config)


def _makes_zeros(kind: str, forms: Iterable[Form], device: Device) -> Callable[[], list[Any]]:
    """A maker of gradients where there are no keys: all are zero but those of options."""
    return lambda: [filled(kind, *form, device, 0.0) for form in forms]


def _packed_work(given: Arguments, config: Any) -> Computation:
    p, views = packed_problem(given), given.views
    problem = BackwardProblem(p, "dlse" in views, given.options["deterministic"])
    some = 0 not in (p.batch, p.q_len, p.heads)
    whole = some and p.kv_len > 0  # there are kernels that write every row

    def plan(arrays: Views) -> StridedPlan:
        strides = ArrayStrides({name: arrays[name].strides[:2] for name in BACKWARD})
        return _plan(problem, arrays, strides, config, PACKED_KINDS)

    nothing = not some or (p.kv_len == 0 and not p.head_arrays)
    make = None if whole else _makes_zeros
    return Computation(given, plan, placed(p, views), make=make, filled=not whole, nothing=nothing)


attention_varlen_backward_call = Caller(attention_varlen_backward, _packed_work)
