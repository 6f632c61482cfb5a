"""``attention_varlen``: attention of packed sequences, whose lengths only the arrays' device knows."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from warploom.core.dtypes import f32
from warploom.interop.arrays import ArrayView, arrays_of, empty
from warploom.interop.tracing import recorded
from warploom.kernels.attention.choice import PACKED_KINDS, PackedConfig, choose_packed
from warploom.kernels.attention.packed import PackedOperands, PackedProblem, violations
from warploom.kernels.attention.problem import Operands
from warploom.kernels.settings import read, refuse
from warploom.ops.attention_arrays import Options, Window, described, laid_out, looked_up
from warploom.ops.options import flag
from warploom.ops.processors import Processor, decided
from warploom.ops.repeated import Kept, run_and_keep
from warploom.ops.steps import Steps, working_steps
from warploom.ops.varlen_arrays import NAMES, Arrays, check_lengths, read_packed, refuse_out, shape_of_result

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


@recorded
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    seqused_q: Any = None,
    seqused_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Any = None,
    return_lse: bool = False,
    out: Any = None,
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
    given = arrays_of(
        {"q": q, "k": k, "v": v, "q_starts": cu_seqlens_q},
        k_starts=cu_seqlens_k,
        q_used=seqused_q,
        k_used=seqused_k,
        out=out,
        sinks=sinks,
    )
    asked = (causal, scale, window, softcap, return_lse, "bshd")
    found = None if check is not False else _prepared.again(asked, config, given)
    if found is None:
        if flag("check", check):
            check_lengths(described(given, NAMES))
        refused = None if out is None else refuse_out
        found = looked_up(_prepared, given, asked, config, _first_call, _laid_out, refused, NAMES)
    found = found if out is None else [out, *found]
    return tuple(found) if return_lse else found[0]


_prepared = Kept()
_laid_out = partial(laid_out, written="out")


def _first_call(views: Arrays, options: Options, asked: tuple[Any, ...], config: Any) -> list[Any]:
    """Everything that :func:`attention_varlen` need not repeat for arrays of the same shapes, strides and device."""
    problem, inputs = read_packed(views, options)
    q, out = views["q"], views.get("out")
    chosen, on = configured_packed(problem, q, config)
    results = {"out": empty(q.kind, shape_of_result(views), q.dtype, q.device) if out is None else out.array}
    if options.return_lse:
        results["lse"] = empty(q.kind, (q.shape[1], q.shape[0]), f32, q.device)
    if 0 not in (problem.batch, problem.total_q, problem.heads):

        def steps(arrays: Arrays) -> Steps:
            operands = PackedOperands({name: arrays[name].strides[:2] for name in Operands.names})
            return working_steps(chosen.calls_packed(problem, operands, on.multiprocessors), problem.flops)

        refuse = None if out is None else refuse_out
        run_and_keep(_prepared, (asked, config), steps, (views, inputs, results), filled=True, refuse=refuse)
    return [x for name, x in results.items() if name not in views]


def configured_packed(problem: PackedProblem, q: ArrayView, config: Any) -> tuple[PackedConfig, Processor]:
    """The configuration for a problem and where it runs. Raises ConfigError for one asked for that does not fit."""
    asked = read(config, PACKED_KINDS)
    found, _, on = decided(problem, q.device, asked, lambda on: (choose_packed(problem, on.target), ""), violations)
    return found, on


def refuse_packed(config: Any, problem: PackedProblem) -> None:
    """Raises ConfigError for a configuration, or its notation, that does not fit a problem."""
    found = read(config, PACKED_KINDS)
    refuse(f"{found} does not fit", [] if found is None else violations(found, problem))
