"""The gradients of :func:`.attention_varlen.attention_varlen`, for PyTorch's autograd and on arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from warploom.core.dtypes import DType
from warploom.interop.arrays import Device, arrays_of, empty_like, filled
from warploom.kernels.attention.backward import TENSORS
from warploom.kernels.attention.packed import PackedOperands
from warploom.kernels.attention.packed_backward import (
    KINDS,
    PackedBackwardConfig,
    choose_packed_backward,
    packed_backward_calls,
)
from warploom.kernels.attention.packed_backward_problem import PackedBackwardProblem
from warploom.kernels.settings import read
from warploom.ops.attention_arrays import OF_FORWARD, Options, Window, check_results, looked_up
from warploom.ops.options import flag
from warploom.ops.processors import decided
from warploom.ops.repeated import Kept, run_and_keep
from warploom.ops.steps import Steps, working_steps
from warploom.ops.varlen_arrays import NAMES, Arrays, read_packed, shape_of_result

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def attention_varlen_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    dlse: Any = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Any = None,
    deterministic: bool = False,
    config: PackedBackwardConfig | str | None = None,
) -> tuple[Any, ...]:
    """The gradients (dq, dk, dv) of ``attention_varlen(q, k, v, …)`` for the gradient ``dout`` of its result.

    ``out`` and ``lse`` are what ``attention_varlen(…, return_lse=True)`` returned, ``dlse`` is the gradient of ``lse``.
    With ``sinks`` a fourth follows, dsinks: float32 (heads,). Rows of no sequence have gradients of zero; what lies
    there in the arrays is not read. The lengths are read on the device. Arrays and errors as for
    :func:`warploom.attention_varlen`.
    """
    needed = {"q": q, "k": k, "v": v, "q_starts": cu_seqlens_q, "o": out, "dout": dout, "lse": lse}
    given = arrays_of(needed, k_starts=cu_seqlens_k, q_used=seqused_q, k_used=seqused_k, dlse=dlse, sinks=sinks)
    asked = (causal, scale, window, softcap, False, "bshd", flag("deterministic", deterministic))
    found = _prepared.again(asked, config, given)
    return tuple(found or looked_up(_prepared, given, asked, config, _first_call, public=NAMES | OF_FORWARD))


_prepared = Kept()


def _zeros(kind: str, shape: Sequence[int], dtype: DType, device: Device) -> Callable[[], Any]:
    """What makes gradients where there are no keys: all are zero but those of sinks."""
    return lambda: filled(kind, shape, dtype, device, 0.0)


def _first_call(views: Arrays, options: Options, asked: tuple[Any, ...], config: Any) -> list[Any]:
    """Everything that need not be repeated for arrays of the same shapes, strides and device."""
    forward = {name: view for name, view in views.items() if name not in ("o", "dout", "lse", "dlse")}
    problem, inputs = read_packed(forward, options)
    q = views["q"]
    check_results(views, shape_of_result(views), (q.shape[1], q.shape[0]))
    backward = PackedBackwardProblem(problem, "dlse" in views, asked[-1])
    chosen, _, on = decided(
        backward.typical, q.device, read(config, KINDS), lambda on: (choose_packed_backward(backward, on.target), "")
    )
    some = 0 not in (problem.batch, problem.total_q, problem.heads)
    whole = some and problem.total_k > 0  # there are kernels that write every row
    likes = {f"d{name}": x for name, x in views.items() if name in (*"qkv", "sinks")}
    gradients = {
        name: empty_like(x) if whole else filled(x.kind, x.shape, x.dtype, x.device, 0.0) for name, x in likes.items()
    }
    if some and (problem.total_k or problem.sinks):
        inputs |= {name: views[name] for name in ("o", "dout", "lse", "dlse") if name in views}

        def steps(arrays: Mapping[str, Any]) -> Steps:
            lying = {name: arrays["o" if name == "out" else name].strides[:2] for name in TENSORS}
            calls = packed_backward_calls(chosen, backward, PackedOperands(lying), on.multiprocessors)
            return working_steps(calls, backward.flops)

        make = None if whole else _zeros
        run_and_keep(_prepared, (asked, config), steps, (views, inputs, gradients), make=make, filled=not whole)
    return list(gradients.values())
