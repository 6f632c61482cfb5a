"""The gradients of :func:`.attention_varlen.attention_varlen`, for PyTorch's autograd and on arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any

from warploom.interop.arrays import ArrayView, Device, Form, filled
from warploom.kernels.attention.backward_choice import PACKED_KINDS, BackwardConfig, choose
from warploom.kernels.attention.problem import BACKWARD, BackwardProblem, Operands
from warploom.kernels.settings import read
from warploom.ops.attention_arrays import OF_FORWARD, Options, Window, check_results, laid_out
from warploom.ops.calls import Caller, Computation, Views
from warploom.ops.declare import ArrayArgument, Few, Tensor
from warploom.ops.processors import decided
from warploom.ops.steps import Steps, working_steps
from warploom.ops.varlen_arrays import KeyCounts, KeyStarts, QueryCounts, QueryStarts, read_packed, shape_of_result


def attention_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Annotated[Any, ArrayArgument("out")],
    lse: Few,
    cu_seqlens_q: QueryStarts,
    cu_seqlens_k: KeyStarts = None,
    *,
    dlse: Few = None,
    seqused_q: QueryCounts = None,
    seqused_k: KeyCounts = None,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks: Few = None,
    deterministic: bool = False,
    config: BackwardConfig | str | None = None,
) -> tuple[Any, ...]:
    """The gradients (dq, dk, dv) of ``attention_varlen(q, k, v, …)`` for the gradient ``dout`` of its result.

    ``out`` and ``lse`` are what ``attention_varlen(…, return_lse=True)`` returned, ``dlse`` is the gradient of ``lse``.
    With ``sinks`` a fourth follows, dsinks: float32 (heads,). Rows of no sequence have gradients of zero; what lies
    there in the arrays is not read. The lengths are read on the device. Arrays and errors as for
    :func:`warploom.attention_varlen`.
    """
    arrays = dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, dlse, seqused_q, seqused_k, sinks
    return attention_varlen_backward_call.computed(arrays, (causal, window, softcap, scale, deterministic), config)


def _zeros(kind: str, forms: Iterable[Form], device: Device) -> Callable[[], list[Any]]:
    """What makes gradients where there are no keys: all are zero but those of sinks."""
    return lambda: [filled(kind, *form, device, 0.0) for form in forms]


def _work(views: Views, asked: dict[str, Any], config: Any, copy: Callable[[ArrayView], ArrayView]) -> Computation:
    views = laid_out(views, copy)
    forward = {name: view for name, view in views.items() if name not in ("out", "dout", "lse", "dlse")}
    problem, inputs = read_packed(forward, Options.of(asked))
    q = views["q"]
    check_results(views, shape_of_result(views), (q.shape[1], q.shape[0]))
    backward = BackwardProblem(problem, "dlse" in views, asked["deterministic"])
    chosen, _, on = decided(backward, q.device, read(config, PACKED_KINDS), lambda on: choose(backward, on.target))
    some = 0 not in (problem.batch, problem.q_len, problem.heads)
    whole = some and problem.kv_len > 0  # there are kernels that write every row
    new = {f"d{name}": (tuple(x.shape), x.dtype) for name, x in views.items() if name in (*"qkv", "sinks")}
    made = None
    if not some or not (problem.kv_len or problem.sinks):
        made = [filled(q.kind, *form, q.device, 0.0) for form in new.values()]
    inputs |= {name: views[name] for name in ("out", "dout", "lse", "dlse") if name in views}

    def steps(arrays: Views) -> Steps:
        operands = Operands({name: arrays[name].strides[:2] for name in BACKWARD})
        return working_steps(chosen.calls(backward, operands, on.multiprocessors), backward.flops)

    return Computation(views, new, steps, inputs, make=None if whole else _zeros, filled=not whole, made=made)


attention_varlen_backward_call = Caller(attention_varlen_backward, _work, said=OF_FORWARD)
