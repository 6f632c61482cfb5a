"""``attention`` and ``attention_backward``: scaled dot-product attention and its gradients, on arrays of any framework.

What operations of attention share stands here too: arrays, the heads of a problem and the options of its scores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Never, TypedDict, Unpack, overload

import numpy as np

from warploom.core.errors import ProblemError
from warploom.interop.arrays import ArrayView, Device, as_numpy, compact, current_stream
from warploom.interop.tracing import traced
from warploom.kernels.attention import backward_choice
from warploom.kernels.attention.choice import KINDS, choose
from warploom.kernels.attention.decode import Decode
from warploom.kernels.attention.problem import (
    BACKWARD,
    FORWARD,
    MOST_HEAD_DIM,
    ArrayStrides,
    AttentionConfig,
    AttentionProblem,
    BackwardProblem,
    Even,
)
from warploom.kernels.attention.scores import HEAD_ARRAYS, NUMBERS, OPTIONS, ScoreOptions, Window
from warploom.kernels.settings import read, refuse, violations_of
from warploom.ops.arrays import FEW, FLOAT32, GRADIENT, ArrayArgument, ResultArray
from warploom.ops.backends import Processor
from warploom.ops.calls import Caller, Computation
from warploom.ops.declare import Arguments, Array, NumpyArray, Out, Views
from warploom.ops.steps import StridedPlan
from warploom.ops.tuned import tuned

if TYPE_CHECKING:
    from numpy.typing import NDArray


Layout = Literal["bshd", "bhsd"]
AXES: dict[str, tuple[int, int, int]] = {"bshd": (0, 2, 1), "bhsd": (0, 1, 2)}
"""Where (batch, head, sequence) stand among the dimensions."""
_OPEN_SIDE = 2**30
"""Keys on one side of a window from which on it is no window."""

# Sequences lie in a batch, or packed one behind the other where their starts are given.
OF_QUERIES = "total_q heads head_dim if cu_seqlens_q | batch q_len heads head_dim"
_OF_KEYS = "total_k kv_heads head_dim if cu_seqlens_q | batch kv_len kv_heads head_dim"
OF_RESULTS, _OF_VALUES = (x.replace("head_dim", "v_dim") for x in (OF_QUERIES, _OF_KEYS))
OF_SUMS = "heads total_q if cu_seqlens_q | batch heads q_len"
Queries = Annotated[Any, ArrayArgument(OF_QUERIES)]
Keys = Annotated[Any, ArrayArgument(_OF_KEYS)]
Values = Annotated[Any, ArrayArgument(_OF_VALUES)]
HeadNumbers = Annotated[Any, ArrayArgument("heads", "f32 bf16 f16", FLOAT32, hint="one number for each query head")]
Outputs = Annotated[
    Any,
    ResultArray("out", OF_RESULTS, "q", empty=0.0),
    ResultArray("lse", OF_SUMS, "f32", when="return_lse", empty=-math.inf),
]
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


# -- what problems of attention have in common
def of_heads(given: Arguments) -> dict[str, Any]:
    """Heads, type and options of a problem of attention, by name.

    Raises ProblemError for heads that do not share keys evenly, for sizes of heads and for options that no kernel
    takes.
    """
    sizes, q = given.sizes, given.views["q"]
    heads, kv_heads, head_dim = sizes["heads"], sizes["kv_heads"], sizes["head_dim"]
    v_dim = sizes.get("v_dim", head_dim)
    if heads != kv_heads and (kv_heads == 0 or heads % kv_heads):
        raise ProblemError(f"q has {heads} heads, no multiple of the {kv_heads} of k and v: heads share keys in groups")
    own = f", pass scale={head_dim}**-0.5 where you gave none,"  # which goes by what is padded
    for whose, size, scale in (("", head_dim, own), (" of v", v_dim, "")):
        if size % 8 or not 8 <= size <= MOST_HEAD_DIM:
            pad = f": pad it with zeros{scale} and cut the result" if 0 < size < MOST_HEAD_DIM else ""
            raise ProblemError(
                f"head_dim{whose} is {size}; attention takes multiples of 8 from 8 to {MOST_HEAD_DIM}{pad}"
            )
    return {
        "heads": heads,
        "kv_heads": max(1, kv_heads),
        "head_dim": head_dim,
        "dtype": q.dtype,
        "v_dim": 0 if v_dim == head_dim else v_dim,
        "lse": given.options.get("return_lse", False),
        **{name: name in given.views for name in HEAD_ARRAYS},
        **score_options(given.options, head_dim),
    }


def score_options(options: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """The options of a problem's scores, by name. Raises ProblemError for those that no kernel computes with."""
    left, right = options["window"] or (None, None)
    # -1 is FlashAttention's open side; one of so many keys is open too, and sums with it would not fit in 32 bits
    left, right = (None if side is None or side == -1 or side >= _OPEN_SIDE else side for side in (left, right))
    if options["causal"]:
        right = 0 if right is None else min(right, 0)
    found = {**{name: options[name] for name in NUMBERS}, "window": (left, right)}
    ScoreOptions(**found).check()
    scale = options["scale"]
    if scale is not None and math.isclose(scale, head_dim**-0.5):  # the default, whoever says it: no kernel of its own
        found["scale"] = None
    return found


def strides_of(view: ArrayView, layout: str) -> tuple[int, int, int]:
    """(batch, head, sequence) strides of a tensor in a layout, in elements."""
    batch, head, seq = AXES[layout]
    return view.strides[batch], view.strides[head], view.strides[seq]


def without_keys(given: Arguments) -> dict[str, Any]:
    """The results where there is nothing to compute: zeros, and for sums over no keys -inf or what joins them."""
    joined = [given.views[name] for name in HEAD_ARRAYS if OPTIONS[name].joins and name in given.views]
    made = given.made(**({"lse": 0.0} if joined else {}))
    if "lse" in made:
        for numbers in joined:
            made["lse"] = made["lse"] + numbers.array[:, None]
    return made


# -- lengths, where somebody asks
def on_host(view: ArrayView) -> np.ndarray[Any, Any]:
    """An array of int32 as int64 of NumPy; waits for what its framework has queued."""
    if view.device[0] == "cpu":
        return np.asarray(as_numpy(view)).astype(np.int64)
    from warploom.cuda.buffers import downloaded

    plain = view if view.contiguous else compact(view)
    stream, count = current_stream(view.kind, view.device[1]), math.prod(plain.shape)
    found = downloaded(plain.pointer, count, np.int32, view.device[1], stream)
    return found.astype(np.int64).reshape(plain.shape)


def refuse_first(name: str, wrong: Any, values: Any, why: str) -> None:
    """Raises ProblemError that names the first entry where ``wrong`` holds."""
    places: Any = np.argwhere(wrong)
    if len(places):
        place = tuple(int(i) for i in places[0])
        raise ProblemError(f"{name}[{', '.join(map(str, place))}] is {values[place]}: {why}")


def refuse_starts(name: str, starts: Any, total: int) -> None:
    """Raises ProblemError that names the first of some ``starts`` of sequences that cannot be."""
    wrong = (starts < 0) | (starts > total) | (np.diff(starts, prepend=0) < 0)
    refuse_first(name, wrong, starts, f"starts ascend from 0 to at most {total}, the rows of the array")


# -- attention
@dataclass(frozen=True)
class AttentionPlan(StridedPlan):
    """The kernels that a call of :func:`attention` would run: nothing has been compiled or launched yet."""

    problem: AttentionProblem
    config: AttentionConfig | Decode


def problem_of(given: Arguments) -> AttentionProblem:
    """The problem of a call on even sequences."""
    sizes = given.sizes
    return AttentionProblem(sizes["batch"], sequences=Even(sizes["q_len"], sizes["kv_len"]), **of_heads(given))


def _plan(problem: AttentionProblem, arrays: Views, layout: str, config: Any) -> AttentionPlan:
    def choice(on: Processor) -> tuple[AttentionConfig | Decode, str]:
        return tuned(problem, on.target, on.gpu, KINDS) or choose(problem, on.target)

    strides = ArrayStrides({name: strides_of(arrays[name], layout) for name in FORWARD}, layout)
    return AttentionPlan.of(problem, arrays["q"].device, read(config, KINDS), choice, strides=strides)


def refuse_config(config: Any, problem: AttentionProblem, kinds: Any = KINDS) -> None:
    """Raises ConfigError for a configuration, or its notation, that is of other kinds or does not fit the problem."""
    found = read(config, kinds)
    refuse(f"{found} does not fit", violations_of(found, problem, None))


class ScoreArguments(TypedDict, total=False):
    """The options of all operations of attention, and their arrays with a number for each query head."""

    causal: bool
    scale: float | None
    window: Window | None
    softcap: float | None
    sinks: Any


class AttentionOptions(ScoreArguments, total=False):
    """The options of :func:`attention` beside ``return_lse``, and its optional arrays."""

    layout: Layout
    config: AttentionConfig | str | None


@traced
def plan(q: Any, k: Any, v: Any, *, return_lse: bool = False, **options: Unpack[AttentionOptions]) -> AttentionPlan:
    """Plan a call of :func:`attention`: its configuration and the reason for it, Program and CUDA. Runs nothing."""
    return attention_call.computation({"q": q, "k": k, "v": v, "return_lse": return_lse, **options}).planned()


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
    q: Queries,
    k: Keys,
    v: Values,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: HeadNumbers = None,
    return_lse: bool = False,
    layout: Layout = "bshd",
    config: AttentionConfig | str | None = None,
    **unknown: Never,
) -> Outputs:
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
    options = causal, scale, window, softcap, return_lse, layout
    return attention_call((q, k, v, sinks), options, config, False, unknown)


def _work(given: Arguments, config: Any) -> Computation:
    problem, layout = problem_of(given), given.options["layout"]
    nothing = 0 in (problem.batch, problem.heads, problem.q_len, problem.kv_len)
    return Computation(
        given,
        lambda arrays: _plan(problem, arrays, layout, config),
        nothing=nothing,
        empty=partial(without_keys, given),
    )


attention_call = Caller(attention, _work, recorded=True)


# -- its gradients
@dataclass(frozen=True)
class AttentionBackwardPlan(StridedPlan):
    """The kernels that a call of :func:`attention_backward` would run: nothing has been compiled or launched yet."""

    problem: BackwardProblem
    config: backward_choice.BackwardConfig


class BackwardOptions(ScoreArguments, total=False):
    """The options of :func:`attention_backward`, and the arrays that not every call has."""

    dlse: Any
    layout: Layout
    deterministic: bool
    config: backward_choice.BackwardConfig | str | None


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
    config: backward_choice.BackwardConfig | str | None = None,
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


def backward_plan(
    problem: BackwardProblem, device: Device, strides: ArrayStrides, asked: Any, kind: type[StridedPlan] = StridedPlan
) -> StridedPlan:
    """The plan of the launches for a problem on a device, with the configuration asked for or the one to choose."""
    return kind.of(problem, device, asked, lambda on: backward_choice.choose(problem, on.target), strides=strides)


def _backward_work(given: Arguments, config: Any) -> Computation:
    p, layout = problem_of(given), given.options["layout"]
    problem = BackwardProblem(p, "dlse" in given.views, given.options["deterministic"])

    def plan(arrays: Views) -> StridedPlan:
        strides = ArrayStrides({name: strides_of(arrays[name], layout) for name in BACKWARD}, layout)
        asked = read(config, backward_choice.KINDS)
        return backward_plan(problem, arrays["q"].device, strides, asked, AttentionBackwardPlan)

    def zeros() -> dict[str, Any]:
        made = given.made()
        if p.sink and p.kv_len == 0 and "dlse" in given.views:  # the sink is the log-sum-exp
            made[f"d{p.sink}"] = given.views["dlse"].array.sum((0, 2))
        return made

    nothing = 0 in (p.batch, p.heads, p.q_len, p.kv_len)
    return Computation(given, plan, nothing=nothing, empty=zeros)


attention_backward_call = Caller(attention_backward, _backward_work)
