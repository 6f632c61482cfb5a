"""``attention_backward``: the gradients of attention on arrays of any framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from warploom.interop.arrays import ArrayView, filled, same_device
from warploom.interop.copies import as_if_compact
from warploom.interop.tracing import traced
from warploom.kernels.attention.backward_choice import KINDS, BackwardConfig, choose
from warploom.kernels.attention.problem import BACKWARD, BackwardProblem, Operands
from warploom.kernels.settings import read
from warploom.ops.attention_arrays import (
    AXES,
    OF_FORWARD,
    Layout,
    Options,
    Window,
    check_results,
    checked,
    laid_out,
    result_shape,
    strides_of,
)
from warploom.ops.calls import Caller, Computation, Views
from warploom.ops.declare import Few, Tensor
from warploom.ops.processors import decided
from warploom.ops.steps import CallsPlan

_GRADIENTS = ("dq", "dk", "dv", "dsinks")


@dataclass(frozen=True)
class AttentionBackwardPlan(CallsPlan):
    """What a call of :func:`attention_backward` would run: nothing has been compiled or launched yet."""

    problem: BackwardProblem
    config: BackwardConfig


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Few,
    *,
    dlse: Few = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Few = None,
    layout: Layout = "bshd",
    deterministic: bool = False,
    config: BackwardConfig | str | None = None,
) -> tuple[Any, ...]:
    """The gradients (dq, dk, dv) of ``attention(q, k, v, …)`` for the gradient ``dout`` of its result.

    ``out`` and ``lse`` are what ``attention(…, return_lse=True)`` returned with the same options: shaped like q, and
    float32 (batch, heads, q_len). ``dlse`` is the gradient of ``lse``, if it has one. ``dout`` is shaped and typed like
    ``out``; the gradients are like q, k and v, row-major. Heads that share keys add to their dk and dv in float32.
    Queries that see no key and keys that no query sees have gradients of zero.

    With ``sinks`` a fourth gradient follows, dsinks: float32 (heads,), summed over the rows of a head in float32 and
    always in the same order.

    ``deterministic`` asks for results with equal bits from run to run. No array grows with q_len · kv_len: beside the
    results a call takes at most one float32 copy of dq (``plan_attention_backward(…).workspace_bytes``).

    Arrays as for :func:`attention`. Raises ProblemError for arrays it does not take, ConfigError for a ``config`` that
    does not fit, UnsupportedDeviceError for a GPU older than compute capability 8.0.
    """
    options = causal, scale, window, softcap, layout, deterministic
    return attention_backward_call((dout, q, k, v, out, lse, dlse, sinks), options, config)


@traced
def plan_attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Any = None,
    layout: Layout = "bshd",
    deterministic: bool = False,
    config: BackwardConfig | str | None = None,
) -> AttentionBackwardPlan:
    """What :func:`attention_backward` would run with these arguments, and the memory it takes. Runs nothing."""
    arrays, options = (dout, q, k, v, out, lse, dlse, sinks), (causal, scale, window, softcap, layout, deterministic)
    views, asked = attention_backward_call.planned(arrays, options)
    views = laid_out(views, as_if_compact)
    problem = _checked(views, asked)
    gradients = {name: as_if_compact(views[name[1:]]) for name in _gradients(views)}
    return _plan({**views, **gradients}, problem, layout, config)


def _gradients(views: Views) -> tuple[str, ...]:
    """The names of the gradients of a call with these arrays."""
    return _GRADIENTS if "sinks" in views else _GRADIENTS[:3]


def _checked(views: Views, asked: dict[str, Any]) -> BackwardProblem:
    """The problem. Raises ProblemError with the first thing that is wrong."""
    options, shape, q = Options.of(asked), result_shape(views["q"], views["v"]), views["q"]
    forward = checked(views, options)
    check_results(views, shape, tuple([q.shape[axis] for axis in AXES[options.layout]]))
    same_device(list(views.values()), list(views))
    return BackwardProblem(forward, "dlse" in views, asked["deterministic"])


def _plan(views: Views, problem: BackwardProblem, layout: str, config: Any) -> AttentionBackwardPlan:
    """The plan for these inputs and gradients. Raises ConfigError for a ``config`` that does not fit."""
    asked, device = read(config, KINDS), views["q"].device
    config, reason, on = decided(problem, device, asked, lambda on: choose(problem, on.target))
    operands = Operands({name: strides_of(views[name], layout) for name in BACKWARD}, layout)
    calls = config.calls(problem, operands, on.multiprocessors)
    return AttentionBackwardPlan(problem, config, reason, on.target.name, str(on), calls)


def _work(views: Views, asked: dict[str, Any], config: Any, copy: Callable[[ArrayView], ArrayView]) -> Computation:
    views, layout = laid_out(views, copy), asked["layout"]
    problem, likes = _checked(views, asked), {name: views[name[1:]] for name in _gradients(views)}
    p, made = problem.forward, None
    if 0 in (p.batch, p.heads, p.q_len, p.kv_len):
        if config is not None:
            _plan({**views, **likes}, problem, layout, config)  # refuses what does not fit
        made = [filled(x.kind, x.shape, x.dtype, x.device, 0.0) for x in likes.values()]
        if p.sinks and p.kv_len == 0 and "dlse" in views:  # the sink is the log-sum-exp
            made[3] = views["dlse"].array.sum((0, 2))
    new = {name: (tuple(x.shape), x.dtype) for name, x in likes.items()}
    return Computation(views, new, lambda lying: _plan(lying, problem, layout, config).steps, made=made)


attention_backward_call = Caller(attention_backward, _work, said=OF_FORWARD)
