"""``warploom::attention`` as a PyTorch operator: what ``torch.compile`` and ``torch.export`` see of a call.

:func:`warploom.attention` takes this way by itself while a graph is traced, where tensors have no memory to point
at (:mod:`warploom.interop.tracing`). The operators allocate through PyTorch, wait for nothing and work on the
current stream, so compiled code may run in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature, unwrap
from typing import Any, Unpack

import torch

from warploom.operators.eager import EagerOperation, Tensors, autocast, runs_eagerly, wants_gradient
from warploom.operators.fakes import for_operator, if_sizes_are_known, options_of, seen
from warploom.operators.registration import EXACT, Derivative, Named, define, differentiated
from warploom.ops import attention as eager
from warploom.ops.attention import refuse_config
from warploom.ops.attention_arrays import AXES, Options, checked
from warploom.ops.attention_backward import attention_backward
from warploom.ops.signatures import AttentionOptions

_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, bool causal=False, float? scale=None, SymInt? window_left=None, "
    "SymInt? window_right=None, float? softcap=None, str layout='bshd', str? config=None, "
    "Tensor? scale_tensor=None, Tensor? softcap_tensor=None, bool deterministic=False, Tensor? sinks=None) -> "
)


_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse=None, Tensor? sinks=None, "
    "bool causal=False, float? scale=None, SymInt? window_left=None, SymInt? window_right=None, float? softcap=None, "
    "str layout='bshd', Tensor? scale_tensor=None, Tensor? softcap_tensor=None, bool deterministic=False) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)


def backward_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """What runs an operator of gradients by q, k, v and sinks."""

    def run(q: torch.Tensor, sinks: Any = None, deterministic: bool = False, **given: Any) -> Any:
        deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
        found = function(q=q, sinks=sinks, deterministic=deterministic, **given)
        return found if sinks is not None else (*found, _of_sinks(q, 0))

    return run


def _of_sinks(q: torch.Tensor, heads: int) -> torch.Tensor:
    """Memory for the gradient of the sinks, of which there may be none."""
    return q.new_empty((heads,), dtype=torch.float32)


def fake_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, **_: Any) -> Any:
    """The shapes of those gradients."""
    heads = 0 if sinks is None else sinks.shape[0]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), _of_sinks(q, heads)


backward_operator = define(
    "attention_backward", _BACKWARD, backward_of(attention_backward), fake_backward, of_gradients=True
)
"""The gradients by q, k, v and sinks, by :func:`warploom.attention_backward`; the last is empty without sinks."""


def gradients(run: Callable[..., Any], names: frozenset[str]) -> Callable[..., Named]:
    """The derivative by q, k, v and sinks, through what computes their gradients of arguments with these names."""

    def backward(given: Named, results: Any, by_results: tuple[torch.Tensor | None, ...], _: frozenset[str]) -> Named:
        (out, lse), (dout, dlse) = results, by_results
        if dout is None and dlse is None:
            return {}
        options = {name: x for name, x in given.items() if name in names}
        dout = torch.zeros_like(out) if dout is None else dout
        found = run(dout=dout, out=out, lse=lse, dlse=dlse, **options)
        of_arrays, sinks = dict(zip("qkv", found[:3], strict=True)), given.get("sinks")
        return of_arrays if sinks is None else {**of_arrays, "sinks": found[3].to(sinks.dtype)}

    return backward


def define_both(
    name: str,
    schema: str,
    function: Callable[..., Any],
    fake: Callable[[Named, Options], Any],
    derivative: Derivative | None = None,
) -> tuple[Any, Any]:
    """The operator of a function's output, and with ``_lse`` behind its name that of output and log-sum-exps.

    ``fake`` gives the shapes of both; ``derivative`` is that of both results by q, k, v and sinks, if there is one.
    """
    compute = unwrap(function)  # PyTorch does not watch what a kernel of its own does

    def one(return_lse: bool) -> Any:
        def run(deterministic: bool = False, **given: Any) -> Any:  # of its gradients alone
            return compute(return_lse=return_lse, **given)

        def shapes(**given: Any) -> Any:
            found = fake(given, options_of(given, return_lse))
            return found if return_lse else found[0]

        results = "(Tensor, Tensor)" if return_lse else "Tensor"
        return define(name + "_lse" * return_lse, schema + results, run, shapes, derivative if return_lse else None)

    return one(False), one(True)


class DifferentiableAttention:
    """A kind of attention as an eager operation, and as its operators.

    ``function`` and ``backward`` are the public ones, ``operator`` is that of the gradients.
    """

    def __init__(self, name: str, function: Callable[..., Any], backward: Callable[..., Any], operator: Any) -> None:
        by, compute = frozenset({*"qkv", "sinks"}), unwrap(function)
        self._name, self._compute, backward = name, compute, unwrap(backward)
        self.derivative = Derivative(by, gradients(operator, frozenset(x.name for x in operator._schema.arguments)))

        def run(deterministic: bool = False, **given: Any) -> Any:  # of the gradients alone
            return compute(return_lse=True, **given)

        taken = frozenset(signature(backward).parameters) - {"config"}
        self._eager = EagerOperation(name, run, self.derivative, gradients(backward_of(backward), taken))

    def __call__(self, tensors: Tensors, return_lse: bool, options: dict[str, Any]) -> Any:
        """The output, with ``return_lse`` also the log-sum-exps; ``deterministic`` is an option of the gradients."""
        if runs_eagerly(tensors["q"]):
            tensors = autocast(tensors, EXACT)
            if not wants_gradient(tensors):
                options.pop("deterministic")
                return self._compute(**tensors, return_lse=return_lse, **options)
            found = self._eager(tensors, options)
            return found if return_lse else found[0]
        operators, given = torch.ops.warploom, for_operator(**options)
        if not (return_lse or differentiated(*[tensors[name] for name in (*"qkv", "sinks")])):
            return getattr(operators, self._name)(**tensors, **given)
        out, lse = getattr(operators, f"{self._name}_lse")(**tensors, **given)  # the backward pass needs both
        return (out, lse) if return_lse else out


def _fake(given: Named, options: Options) -> Any:
    q, v = given["q"], given["v"]
    views = {name: seen(given[name]) for name in (*"qkv", "sinks") if given[name] is not None}
    problem = if_sizes_are_known(lambda: checked(views, options))
    if given["config"] is not None and problem is not None:
        refuse_config(given["config"], problem)
    out = q.new_empty((*q.shape[:3], v.shape[3]))  # row-major, whatever the strides of q
    return out, q.new_empty([q.shape[axis] for axis in AXES[options.layout]], dtype=torch.float32)


_attention = DifferentiableAttention("attention", eager.attention, attention_backward, backward_operator)
attention_operator, attention_lse_operator = define_both(
    "attention", _SCHEMA, eager.attention, _fake, _attention.derivative
)
"""The output of :func:`warploom.attention`, and with the log-sum-exp (float32, (batch, heads, q_len)).

``config`` is in the notation that ``str(config)`` prints.
"""


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool = False,
    deterministic: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """:func:`warploom.attention` where PyTorch keeps a history, or inside a traced graph: one node, no graph break.

    ``deterministic`` asks for gradients with equal bits from run to run. Where heads lie within a position, so do those
    of the result and of the gradients: nobody copies them to lie as q, k and v do.
    """
    turned = options.get("layout") == "bhsd" and q.stride(1) < q.stride(2)
    if turned:
        q, k, v, options["layout"] = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), "bshd"
    tensors = {"q": q, "k": k, "v": v, "sinks": options.pop("sinks", None)}
    found = _attention(tensors, return_lse, {**options, "deterministic": deterministic})
    if not turned:
        return found
    return (found[0].transpose(1, 2), found[1]) if return_lse else found.transpose(1, 2)
