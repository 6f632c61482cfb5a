"""Attention as PyTorch operators: even and packed sequences with their gradients, a cache, and what is appended to it.

The public functions take this way by themselves while a graph is traced, where tensors have no memory to point at
(:mod:`warploom.interop.tracing`). The operators allocate through PyTorch, wait for nothing and work on the current
stream, so compiled code may run in CUDA graphs. A ``config`` is in the notation that ``str(config)`` prints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from warploom.core.errors import ProblemError
from warploom.interop.arrays import as_if_compact
from warploom.kernels.attention.choice import PACKED_KINDS
from warploom.kernels.attention.scores import HEAD_ARRAYS
from warploom.operators.graphs import untraced
from warploom.operators.recorded import BackwardPass, Derivative, Place, RecordedCall, Recorder, runs_eagerly
from warploom.operators.registration import (
    arguments_of,
    define_call,
    define_mutating,
    deterministic,
    differentiated,
    if_sizes_are_known,
)
from warploom.operators.schema import Named
from warploom.ops import attention as of_even
from warploom.ops import attention_paged as of_cached
from warploom.ops import attention_varlen as of_packed
from warploom.ops.attention_backward import attention_backward_call, attention_varlen_backward_call
from warploom.ops.calls import Caller
from warploom.ops.declare import Arguments, Option, flag

_DETERMINISTIC = Option("deterministic", "bool", False)
DIFFERENTIATED = *"qkv", *HEAD_ARRAYS
"""The arrays that have gradients, in the order of the operators' results."""
_UNREAD = "check=True reads lengths on the CPU, which a traced graph cannot: check before it"


class Attention:
    """A kind of attention as its operators, of the output and with ``_lse`` behind its name of the log-sum-exps too.

    ``check`` raises for what is wrong with arguments and a configuration beyond their declaration.
    """

    def __init__(
        self, caller: Caller, check: Callable[[Arguments, Any], None], derivative: Derivative | None = None
    ) -> None:
        self.caller, self.derivative, self._name = caller, derivative, caller.name
        more = () if derivative is None else (_DETERMINISTIC,)
        self.schema, self.operator = define_call(caller, fixed={"return_lse": False}, more=more, check=check)
        _, self.lse_operator = define_call(
            caller, name=f"{caller.name}_lse", fixed={"return_lse": True}, more=more, check=check, derivative=derivative
        )

    def traced(self, given: Named, config: Any, **more: Any) -> Any:
        """The results by an operator."""
        operators, arguments = torch.ops.warploom, {**self.schema.arguments(given, config), **more}
        return_lse = given.get("return_lse", False)
        known = self.derivative is not None and differentiated(*[given.get(name) for name in DIFFERENTIATED])
        if not (return_lse or known):
            return getattr(operators, self._name)(**arguments)
        out, lse = getattr(operators, f"{self._name}_lse")(**arguments)  # the backward pass needs both
        return (out, lse) if return_lse else out


class DifferentiableAttention(Attention):
    """A kind of attention as its operators and as an eager operation with a history; ``backward`` has its gradients."""

    def __init__(self, caller: Caller, check: Callable[[Arguments, Any], None], backward: Caller) -> None:
        self._backward = backward
        self._backward_schema, self.backward_operator = define_call(backward, of_gradients=True)
        derivative = Derivative(frozenset(DIFFERENTIATED), self._gradients, needs={"return_lse": True})
        super().__init__(caller, check, derivative)
        self._recorder = Recorder(caller, derivative)

    def __call__(self, given: Named, config: Any, check: Any, deterministic: bool) -> Any:
        """The results of a call; ``deterministic`` is an option of the gradients."""
        more = {"deterministic": True} if deterministic else {}
        if runs_eagerly(given["q"]):
            return self._recorder(*self.caller.positions(given), config, check, **more)
        return self.traced(given, config, **more)

    def _gradients(self, call: RecordedCall, how: BackwardPass) -> dict[str, Place]:
        """The gradients of a node by the arrays of the call, of their types: those of options come in float32."""
        (dout, dlse), given, backward = how.by_results, call.given(how.saved), self._backward
        if dout is None:
            if dlse is None:
                return {}
            dout = Place(torch.zeros_like(how.saved[-2].tensor))
        results = dict(zip(("out", "lse", "dout", "dlse"), (*how.saved[-2:], dout, dlse), strict=True))
        arrays, options = backward.positions(given | results)
        made = how.run(backward, arrays, deterministic(backward, options))
        found = dict(zip([name for name in DIFFERENTIATED if name in call.names], made, strict=True))
        for name in HEAD_ARRAYS:
            if name in found and given[name].tensor.dtype != torch.float32:
                dtype = given[name].tensor.dtype
                found[name] = found[name].then(lambda x, dtype=dtype: x.to(dtype))
        return found

    def traced_gradients(self, *, config: Any = None, **given: Any) -> Any:
        """The gradients by their operator, which has those by absent arrays too, as empty tensors."""
        arguments = self._backward_schema.arguments(given, config)
        found = getattr(torch.ops.warploom, self._backward.name)(**arguments)
        return tuple([x for name, x in zip(DIFFERENTIATED, found, strict=True) if given.get(name) is not None])


# -- even sequences
def _check(given: Arguments, config: Any) -> None:
    problem = of_even.problem_of(given)
    if config is not None:
        of_even.refuse_config(config, problem)


_attention = DifferentiableAttention(of_even.attention_call, _check, attention_backward_call)
backward_operator, attention_operator = _attention.backward_operator, _attention.operator
attention_lse_operator, attention_backward = _attention.lse_operator, _attention.traced_gradients


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    return_lse: bool = False,
    deterministic: bool = False,
    config: Any = None,
    **options: Any,
) -> Any:
    """:func:`warploom.attention` where PyTorch keeps a history, or inside a traced graph: one node, no graph break.

    ``deterministic`` asks for gradients with equal bits from run to run. Where heads lie within a position, so do those
    of the result and of the gradients: nobody copies them to lie as q, k and v do.
    """
    turned = options.get("layout") == "bhsd" and q.dim() == 4 and q.stride(1) < q.stride(2)
    if turned:
        q, k, v, options["layout"] = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), "bshd"
    given = {"q": q, "k": k, "v": v, "return_lse": return_lse, **options}
    found = _attention(given, config, False, deterministic)
    if not turned:
        return found
    return (found[0].transpose(1, 2), found[1]) if return_lse else found.transpose(1, 2)


# -- packed sequences
def _check_packed(given: Arguments, config: Any) -> None:
    problem = of_packed.packed_problem(given)
    if config is not None:
        of_even.refuse_config(config, problem, PACKED_KINDS)


_CALL = of_packed.attention_varlen_call
_varlen = DifferentiableAttention(_CALL, _check_packed, attention_varlen_backward_call)
attention_varlen_backward = _varlen.traced_gradients


def attention_varlen(
    q: Any, *others: Any, deterministic: bool = False, check: bool = False, config: Any = None, **options: Any
) -> Any:
    """:func:`warploom.attention_varlen` where PyTorch keeps a history, or inside a traced graph: one node.

    With ``out`` or ``check`` a graph breaks: the operator changes nothing and waits for nothing. ``deterministic`` asks
    for gradients with equal bits from run to run.
    """
    given = {"q": q, **dict(zip(_CALL.array_names[1:], others, strict=False)), **options}
    out = given.get("out")
    if (out is not None or check is not False) and not runs_eagerly(q):
        return _checked(deterministic=deterministic, check=check, config=config, **given)
    if out is not None:  # has no history
        return _CALL.computed(*_CALL.positions(given), config, check)
    return _varlen(given, config, check, deterministic)


_checked = untraced(
    attention_varlen,
    "warploom.attention_varlen takes no out or check under torch.compile: leave them away, or compile without "
    "fullgraph=True",
)


# -- a cache
def _check_cached(given: Arguments, config: Any) -> None:
    problem = of_cached.problem_on_cache(given)
    if config is not None:
        lying = given.declaration.bind(given.views, given.options, as_if_compact)
        of_cached.refuse_paged(config, lying, problem)


_paged = Attention(of_cached.attention_paged_call, _check_cached)


def attention_paged(*, out: torch.Tensor | None = None, check: bool = False, config: Any = None, **given: Any) -> Any:
    """:func:`warploom.attention_paged` inside a traced graph: one call of an operator, no graph break."""
    if check:
        raise ProblemError(_UNREAD)
    found = _paged.traced(given, config)
    if out is None:
        return found
    out.copy_(found[0] if given["return_lse"] else found)
    return (out, found[1]) if given["return_lse"] else out


_APPENDED = (
    "(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor kv_lens, Tensor? block_table, Tensor? q, "
    "Tensor? cos, Tensor? sin, Tensor? k_scale, Tensor? v_scale, bool interleaved, Tensor(c!)? turned) -> ()"
)


def _append(*given: Any) -> None:
    *arrays, interleaved, turned = given
    found = of_cached.append_call.computed(tuple(arrays), (interleaved,))
    if turned is not None:
        turned.copy_(found)


def _fake_append(*given: Any) -> None:
    *arrays, interleaved, _ = given
    declaration = of_cached.append_call.declaration
    found = arguments_of(declaration, declaration.named(tuple(arrays)), interleaved=interleaved)
    if_sizes_are_known(lambda: of_cached.append_problem(found))


_APPEND = define_mutating("append_to_cache", _APPENDED, _append, _fake_append)


def append_to_cache(*, check: bool = False, config: None = None, **given: Any) -> torch.Tensor | None:
    """:func:`warploom.append_to_cache` inside a traced graph: one call of an operator, no graph break."""
    if check:
        raise ProblemError(_UNREAD)
    arrays, (interleaved,) = of_cached.append_call.positions(given)
    q = given["q"]
    turned = None if q is None else torch.empty_like(q, memory_format=torch.contiguous_format)
    if not torch.compiler.is_compiling():
        interleaved = flag("interleaved", interleaved)
    _APPEND(*arrays, interleaved, turned)
    return turned
