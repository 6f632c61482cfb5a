"""``attention_backward``: the gradients of attention on arrays of any framework."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from warploom.core.dtypes import f32
from warploom.core.errors import ProblemError
from warploom.interop import tracing
from warploom.interop.arrays import (
    ArrayView,
    address,
    as_numpy,
    describe,
    describe_new,
    empty_like,
    filled,
    same_device,
)
from warploom.interop.copies import as_if_compact, compact, settled
from warploom.interop.tracing import is_tracing
from warploom.kernels.attention.backward import TENSORS, BackwardConfig, BackwardOperands, BackwardProblem
from warploom.kernels.attention.backward_choice import choose, parse_config
from warploom.kernels.settings import refuse
from warploom.kernels.source import KernelCall
from warploom.ops.attention_arrays import AXES, Layout, Options, Window, aligned, read_inputs, strides_of
from warploom.ops.options import configuration, flag
from warploom.ops.places import EMULATOR, Place
from warploom.ops.steps import Prepared, Step, Steps

_GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class AttentionBackwardPlan:
    """What a call of :func:`attention_backward` would run: nothing has been compiled or launched yet."""

    problem: BackwardProblem
    config: BackwardConfig
    reason: str
    target: str
    device: str
    calls: tuple[KernelCall, ...]

    @property
    def workspace_bytes(self) -> int:
        """Memory that a call takes beside its inputs and gradients."""
        return 4 * self.steps.words

    @cached_property
    def steps(self) -> Steps:
        """The launches in order."""
        most = max(self.calls, key=lambda call: len(call.arrays))
        return Steps(tuple(Step(call, self.problem.flops if call is most else 0) for call in self.calls))

    @cached_property
    def cuda(self) -> str:
        """The CUDA C++ of all kernels."""
        from warploom.cuda.printer import print_cuda

        return "\n".join(print_cuda(call.source.program) for call in self.calls)

    def __str__(self) -> str:
        kernels = ", ".join(f"{call.source.name} {call.grid}" for call in self.calls)
        size = self.workspace_bytes / 2**20
        return (
            f"{self.config}\n  on {self.device} ({self.target}): {self.reason}\n  {kernels}; workspace {size:.1f} MiB"
        )


@dataclass(frozen=True)
class _Inputs:
    """Described, checked and aligned inputs by name, in the order of the arguments; ``dlse`` where it is given."""

    views: dict[str, ArrayView]
    problem: BackwardProblem
    layout: str


def attention_backward(
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
    layout: Layout = "bshd",
    deterministic: bool = False,
    config: BackwardConfig | str | None = None,
) -> tuple[Any, Any, Any]:
    """The gradients (dq, dk, dv) of ``attention(q, k, v, …)`` for the gradient ``dout`` of its result.

    ``out`` and ``lse`` are what ``attention(…, return_lse=True)`` returned with the same options: shaped like q, and
    float32 (batch, heads, q_len). ``dlse`` is the gradient of ``lse``, if it has one. ``dout`` is shaped and typed like
    ``out``; the gradients are like q, k and v, row-major. Heads that share keys add to their dk and dv in float32.
    Queries that see no key and keys that no query sees have gradients of zero.

    ``deterministic`` asks for results with equal bits from run to run. No array grows with q_len · kv_len: beside the
    results a call takes at most one float32 copy of dq (``plan_attention_backward(…).workspace_bytes``).

    Arrays as for :func:`attention`. Raises ProblemError for arrays it does not take, ConfigError for a ``config`` that
    does not fit, UnsupportedDeviceError for a GPU older than compute capability 8.0.
    """
    if is_tracing():
        return tracing.operator_of("attention_backward")(
            dout, q, k, v, out, lse, dlse=dlse, causal=causal, scale=scale, window=window, softcap=softcap,
            layout=layout, deterministic=deterministic, config=config,
        )  # fmt: skip
    views = [describe(x) for x in _given(dout, q, k, v, out, lse, dlse)]
    asked = (causal, scale, window, softcap, False, layout, deterministic, config)
    lying = [view[1:5] for view in views]  # shapes, strides, types, devices
    ready = _known((asked, *lying))
    if ready is None or any(view.pointer % 16 for view in views):
        options, same = Options(*asked[:6]).plain(), flag("deterministic", deterministic)
        return _call_anew(views, options, (same, config), ((*astuple(options), same, config), *lying))
    return _run(ready, views)


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
    layout: Layout = "bshd",
    deterministic: bool = False,
    config: BackwardConfig | str | None = None,
) -> AttentionBackwardPlan:
    """What :func:`attention_backward` would run with these arguments, and the memory it takes. Runs nothing."""
    if is_tracing():
        return tracing.operator_of("plan_attention_backward")(
            dout, q, k, v, out, lse, dlse=dlse, causal=causal, scale=scale, window=window, softcap=softcap,
            layout=layout, deterministic=deterministic, config=config,
        )  # fmt: skip
    views = [describe(x) for x in _given(dout, q, k, v, out, lse, dlse)]
    options = Options(causal, scale, window, softcap, False, layout).plain()
    inputs = _read(views, options, flag("deterministic", deterministic), as_if_compact)
    gradients = {name: as_if_compact(inputs.views[name[1:]]) for name in _GRADIENTS}
    return _plan({**inputs.views, **gradients}, inputs, config)


_Key = tuple[Any, ...]
_prepared: dict[_Key, Prepared] = {}
_PREPARED_KEPT = 4096


def _known(key: _Key) -> Prepared | None:
    """The launches prepared for ``key``; None where there are none, or where an option is nothing to look up."""
    try:
        return _prepared.get(key)
    except TypeError:
        return None


def _run(ready: Prepared, views: Sequence[ArrayView]) -> tuple[Any, Any, Any]:
    """New gradients from arrays as they lie."""
    results = [empty_like(view) for view in views[1:4]]
    ready.run([*[view.pointer for view in views], *map(address, results)], views[0])
    return results[0], results[1], results[2]


def _given(*arrays: Any) -> tuple[Any, ...]:
    """The arrays of a call; the last, dlse, may be none."""
    return arrays if arrays[-1] is not None else arrays[:-1]


def _read(
    views: Sequence[ArrayView], options: Options, deterministic: bool, copy: Callable[[ArrayView], ArrayView]
) -> _Inputs:
    """Check the arrays. Raises ProblemError with the first thing that is wrong."""
    dout, q, k, v, out, lse, *more = views
    forward = read_inputs((q, k, v), options, copy)
    rows = [q.shape[axis] for axis in AXES[options.layout]]
    for name, view in (("dout", dout), ("out", out)):
        if tuple(view.shape) != tuple(q.shape) or view.dtype is not q.dtype:
            raise ProblemError(
                f"{name} is {view.dtype} of shape {tuple(view.shape)}; it must be {q.dtype} of q's shape "
                f"{tuple(q.shape)}"
            )
    logarithms = dict(zip(("lse", "dlse"), (lse, *more), strict=False))
    for name, view in logarithms.items():
        if list(view.shape) != rows or view.dtype is not f32:
            raise ProblemError(
                f"{name} is {view.dtype} of shape {tuple(view.shape)}; it must be float32 (batch, heads, q_len) = "
                f"{tuple(rows)}, as attention(…, return_lse=True) returns it"
            )
    same_device(views, ["dout", "q", "k", "v", "out", "lse", "dlse"][: len(views)])
    problem = BackwardProblem(forward.problem, bool(more), deterministic)
    found = {"dout": _rows(dout, copy), **dict(zip("qkv", forward.all, strict=True)), "out": _rows(out, copy)}
    found |= {name: view if view.contiguous else copy(view) for name, view in logarithms.items()}
    return _Inputs(found, problem, options.layout)


def _rows(view: ArrayView, copy: Callable[[ArrayView], ArrayView]) -> ArrayView:
    """The view, or a copy where its rows are none in memory: a gradient may be one number that is shown everywhere."""
    spread = any(stride == 0 < size - 1 for size, stride in zip(view.shape, view.strides, strict=True))
    return copy(view) if view.strides[3] != 1 or spread else aligned(settled(view), copy)


def _plan(views: dict[str, ArrayView], inputs: _Inputs, config: Any) -> AttentionBackwardPlan:
    """The plan for inputs and gradients that lie so. Raises ConfigError for a ``config`` that does not fit."""
    problem, layout = inputs.problem, inputs.layout
    if config is not None:
        config = configuration(config, parse_config)
    place = Place.of(views["q"].device, requires=None if config is None else config.requires)
    if config is None:
        config, reason = choose(problem, place.goal)
    else:
        reason = "asked for by the caller"
        refuse(f"{config} does not fit", list(dict.fromkeys(config.check(place.goal) + config.misfits(problem))))
    operands = BackwardOperands(tuple(strides_of(views[name], layout) for name in TENSORS), layout)
    return AttentionBackwardPlan(problem, config, reason, place.goal.name, str(place), config.calls(problem, operands))


def _call_anew(views: Sequence[ArrayView], options: Options, how: tuple[bool, Any], key: _Key) -> tuple[Any, Any, Any]:
    """Everything that :func:`attention_backward` need not repeat for arrays of the same shapes, strides and device."""
    ready = _known(key)
    if ready is not None and not any(view.pointer % 16 for view in views):
        return _run(ready, views)
    deterministic, config = how
    inputs = _read(views, options, deterministic, compact)
    given, p = inputs.views, inputs.problem.forward
    if 0 in (p.batch, p.heads, p.q_len, p.kv_len):
        if config is not None:
            _plan({**given, **{name: given[name[1:]] for name in _GRADIENTS}}, inputs, config)  # refuses what misfits
        dq, dk, dv = (filled(x.kind, x.shape, x.dtype, x.device, 0.0) for x in (given["q"], given["k"], given["v"]))
        return dq, dk, dv
    results = [empty_like(given[name], given[name].shape) for name in "qkv"]
    arrays = {**given, **dict(zip(_GRADIENTS, map(describe_new, results), strict=True))}
    first = given["q"]
    if first.device[0] == "cuda":
        plain = (key[0], *[view[1:5] for view in given.values()])  # copies lie alike in every call
        ready = _known(plain)
        if ready is None:
            ready = _plan(arrays, inputs, config).steps.prepare(tuple(arrays), first.device[1])
            if len(_prepared) >= _PREPARED_KEPT:
                _prepared.clear()
            _prepared[plain] = ready
        if all(a.pointer == b.pointer for a, b in zip(given.values(), views, strict=True)):
            _prepared[key] = ready
        ready.run([x.pointer for x in arrays.values()], first)
        return results[0], results[1], results[2]
    made = _plan(arrays, inputs, config)
    if made.device == EMULATOR:
        made.steps.emulate(arrays)
    else:  # CPU arrays on a GPU travel as row-major ones
        hosts = {name: np.ascontiguousarray(as_numpy(view)) for name, view in arrays.items()}
        again = _plan({name: describe(x) for name, x in hosts.items()}, inputs, config)
        again.steps.run_from_host(hosts, _GRADIENTS)
    return results[0], results[1], results[2]
