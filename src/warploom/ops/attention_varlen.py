"""``attention_varlen``: attention of packed sequences, whose lengths only the arrays' device knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from warploom.core.dtypes import f32
from warploom.interop.arrays import ArrayView, empty
from warploom.kernels.attention.choice import PACKED_KINDS, PackedConfig, choose_packed
from warploom.kernels.attention.problem import FORWARD, AttentionProblem, Operands
from warploom.kernels.settings import read, refuse, violations_of
from warploom.ops.attention_arrays import Options, Window, laid_out
from warploom.ops.calls import Caller, Computation, Shapes, Views
from warploom.ops.declare import Few, Output, Tensor
from warploom.ops.processors import Processor, decided
from warploom.ops.steps import Steps, working_steps
from warploom.ops.varlen_arrays import (
    KeyCounts,
    KeyStarts,
    QueryCounts,
    QueryStarts,
    check_lengths,
    read_packed,
    refuse_out,
    shape_of_result,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from warploom.ops.signatures import Array, NumpyArray, Out, VarlenOptions


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
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    sinks: Few = None,
    return_lse: bool = False,
    out: Output = None,
    check: bool = False,
    config: PackedConfig | str | None = None,
) -> Any:
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
    return attention_varlen_call(arrays, (causal, window, softcap, scale, return_lse), config, check)


def results(views: Mapping[str, ArrayView], options: Options) -> Shapes:
    """The shapes and types of the output, and of log-sum-exps where they are asked for."""
    q = views["q"]
    found = {"out": (shape_of_result(views), q.dtype)}
    return found | {"lse": ((q.shape[1], q.shape[0]), f32)} if options.return_lse else found


def _work(views: Views, asked: dict[str, Any], config: Any, copy: Callable[[ArrayView], ArrayView]) -> Computation:
    options, views = Options.of(asked), laid_out(views, copy, written="out")
    problem, inputs = read_packed(views, options)
    chosen, on = configured_packed(problem, views["q"], config)
    new = {name: x for name, x in results(views, options).items() if name not in views}
    made = None
    if 0 in (problem.batch, problem.q_len, problem.heads):
        made = [empty(views["q"].kind, *form, views["q"].device) for form in new.values()]

    def steps(arrays: Views) -> Steps:
        operands = Operands({name: arrays[name].strides[:2] for name in FORWARD})
        return working_steps(chosen.calls(problem, operands, on.multiprocessors), problem.flops)

    written = ("out",) if "out" in views else ()
    return Computation(views, new, steps, inputs, written, filled=True, made=made)


def _look(views: Views, _: dict[str, Any]) -> None:
    check_lengths(views)


attention_varlen_call = Caller(attention_varlen, _work, refuse=refuse_out, look=_look, recorded=True)


def configured_packed(problem: AttentionProblem, q: ArrayView, config: Any) -> tuple[PackedConfig, Processor]:
    """The configuration for a problem and where it runs. Raises ConfigError for one asked for that does not fit."""
    asked = read(config, PACKED_KINDS)
    found, _, on = decided(problem, q.device, asked, lambda on: (choose_packed(problem, on.target), ""))
    return found, on


def refuse_packed(config: Any, problem: AttentionProblem) -> None:
    """Raises ConfigError for a configuration, or its notation, that does not fit a problem."""
    found = read(config, PACKED_KINDS)
    refuse(f"{found} does not fit", [] if found is None else violations_of(found, problem, None))
