"""``attention_backward``: the gradients of attention on arrays of any framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cached_property
from typing import Any

from warploom.core.dtypes import f32
from warploom.core.errors import ProblemError
from warploom.interop.arrays import (
    ArrayView,
    address,
    describe,
    describe_new,
    empty_like,
    filled,
    same_device,
)
from warploom.interop.copies import as_if_compact, compact, settled
from warploom.interop.tracing import traced
from warploom.kernels.attention.backward import TENSORS, BackwardConfig, BackwardOperands, BackwardProblem
from warploom.kernels.attention.backward_choice import choose, parse_config
from warploom.kernels.settings import refuse
from warploom.kernels.source import KernelCall
from warploom.ops.attention_arrays import (
    AXES,
    Layout,
    Options,
    Window,
    aligned,
    read_inputs,
    result_shape,
    strides_of,
    widened,
)
from warploom.ops.options import configuration, flag
from warploom.ops.places import Place
from warploom.ops.steps import Kept, Launches, Prepared, Step, Steps, run_anew

_GRADIENTS = ("dq", "dk", "dv", "dsinks")
_Views = dict[str, ArrayView]


@dataclass(frozen=True)
class AttentionBackwardPlan(Launches):
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

    def __str__(self) -> str:
        kernels = ", ".join(f"{call.source.name} {call.grid}" for call in self.calls)
        size = self.workspace_bytes / 2**20
        return (
            f"{self.config}\n  on {self.device} ({self.target}): {self.reason}\n  {kernels}; workspace {size:.1f} MiB"
        )


@dataclass(frozen=True)
class _Inputs:
    """Described, checked and aligned inputs by name, as the call has them."""

    views: _Views
    problem: BackwardProblem
    layout: str


@traced
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
    sinks: Any = None,
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
    views = _described(dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=dlse)
    if sinks is not None:
        views["sinks"] = widened(describe(sinks))
    asked = (causal, scale, window, softcap, False, layout, deterministic, config)
    lying = [view[1:6] for view in views.values()]  # shapes, strides, types, devices
    ready = _prepared.find((asked, *lying))
    if ready is None or any(view.pointer % 16 for view in views.values()):
        options, same = Options(*asked[:6]).plain(), flag("deterministic", deterministic)
        return _call_anew(views, options, (same, config), ((*astuple(options), same, config), *lying))
    return _run(ready, views)


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
    views = _described(dout=dout, q=q, k=k, v=v, out=out, lse=lse, dlse=dlse, sinks=sinks)
    options = Options(causal, scale, window, softcap, False, layout).plain()
    inputs = _read(views, options, flag("deterministic", deterministic), as_if_compact)
    gradients = {name: as_if_compact(inputs.views[name[1:]]) for name in _gradients(inputs.views)}
    return _plan({**inputs.views, **gradients}, inputs, config)


_prepared: Kept[Prepared] = Kept()


def _run(ready: Prepared, views: _Views) -> tuple[Any, ...]:
    """New gradients from arrays as they lie."""
    results = [empty_like(views[name[1:]]) for name in _gradients(views)]
    ready.run([*[view.pointer for view in views.values()], *map(address, results)], views["q"].kind)
    return tuple(results)


def _described(**arrays: Any) -> _Views:
    """The arrays that a call has, by name."""
    return {name: describe(x) for name, x in arrays.items() if x is not None}


def _gradients(views: _Views) -> tuple[str, ...]:
    """The names of the gradients of a call with these arrays."""
    return _GRADIENTS if "sinks" in views else _GRADIENTS[:3]


def _read(views: _Views, options: Options, deterministic: bool, copy: Callable[[ArrayView], ArrayView]) -> _Inputs:
    """Check the arrays. Raises ProblemError with the first thing that is wrong."""
    q, shape = views["q"], result_shape(views["q"], views["v"])
    forward = read_inputs((q, views["k"], views["v"]), options, copy, views.get("sinks"))
    rows = [q.shape[axis] for axis in AXES[options.layout]]
    for name in ("dout", "out"):
        view = views[name]
        if tuple(view.shape) != shape or view.dtype is not q.dtype:
            raise ProblemError(
                f"{name} is {view.dtype} of shape {tuple(view.shape)}; it must be {q.dtype} of the result's "
                f"shape {shape}"
            )
    logarithms = {name: views[name] for name in ("lse", "dlse") if name in views}
    for name, view in logarithms.items():
        if list(view.shape) != rows or view.dtype is not f32:
            raise ProblemError(
                f"{name} is {view.dtype} of shape {tuple(view.shape)}; it must be float32 (batch, heads, q_len) = "
                f"{tuple(rows)}, as attention(…, return_lse=True) returns it"
            )
    same_device(list(views.values()), list(views))
    problem = BackwardProblem(forward.problem, "dlse" in views, deterministic)
    found = {name: view if view.contiguous else copy(view) for name, view in logarithms.items()}
    found |= {**dict(zip("qkv", forward.all, strict=True)), **dict(zip(("sinks",), forward.vectors, strict=False))}
    found |= {name: _rows(views[name], copy) for name in ("dout", "out")}
    return _Inputs({name: found[name] for name in views}, problem, options.layout)


def _rows(view: ArrayView, copy: Callable[[ArrayView], ArrayView]) -> ArrayView:
    """The view, or a copy where its rows are none in memory: a gradient may be one number that is shown everywhere."""
    spread = any(stride == 0 < size - 1 for size, stride in zip(view.shape, view.strides, strict=True))
    return copy(view) if view.strides[3] != 1 or spread else aligned(settled(view), copy)


def _plan(views: _Views, inputs: _Inputs, config: Any) -> AttentionBackwardPlan:
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


def _call_anew(views: _Views, options: Options, how: tuple[bool, Any], key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Everything that :func:`attention_backward` need not repeat for arrays of the same shapes, strides and device."""
    ready = _prepared.find(key)
    if ready is not None and not any(view.pointer % 16 for view in views.values()):
        return _run(ready, views)
    deterministic, config = how
    inputs = _read(views, options, deterministic, compact)
    given, p, names = inputs.views, inputs.problem.forward, _gradients(views)
    if 0 in (p.batch, p.heads, p.q_len, p.kv_len):
        if config is not None:
            _plan({**given, **{name: given[name[1:]] for name in names}}, inputs, config)  # refuses what misfits
        zeros = [filled(x.kind, x.shape, x.dtype, x.device, 0.0) for x in (given[name[1:]] for name in names)]
        if p.sinks and p.kv_len == 0 and "dlse" in given:  # the sink is the log-sum-exp
            zeros[3] = given["dlse"].array.sum((0, 2))
        return tuple(zeros)
    results = [empty_like(given[name[1:]], given[name[1:]].shape) for name in names]
    arrays = {**given, **dict(zip(names, map(describe_new, results), strict=True))}
    plain = (key[0], *[view[1:6] for view in given.values()])  # copies lie alike in every call
    ready = _prepared.find(plain)
    if ready is not None:
        ready.run([x.pointer for x in arrays.values()], given["q"].kind)
    else:
        ready = run_anew(lambda lying: _plan(lying, inputs, config).steps, arrays, names)
    if ready is not None:
        _prepared.keep(plain, ready)
        if all(a.pointer == b.pointer for a, b in zip(given.values(), views.values(), strict=True)):
            _prepared.keep(key, ready)
    return tuple(results)
