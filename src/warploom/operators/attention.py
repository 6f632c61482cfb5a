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
    define_gradients,
    define_mutating,
    differentiated,
    if_sizes_are_known,
)
from warploom.operators.schema import Named
from warploom.ops import attention as of_even
from warploom.ops import attention_paged as of_cached
from warploom.ops import attention_varlen as of_packed
from warploom.ops.calls import Caller
from warploom.ops.declare import Arguments, Option, flag
from warploom.ops.steps import Launches

_DETERMINISTIC = Option("deterministic", "bool", False)
DIFFERENTIATED = *"qkv", *HEAD_ARRAYS
"""The arrays that have gradients, in the order of the operators' results."""
_UNREAD = "check=True reads lengths on the CPU, which a traced graph cannot: check before it"


class Attention:
    """A kind of attention as its operators, of the output and with ``_lse`` behind its name of the log-sum-exps too.

    ``check`` raises for what is wrong with arguments and a configuration beyond their declaration. Where there is a
    ``backward`` operation, it has the gradients of both, and of eager calls.
    """

    def __init__(self, caller: Caller, check: Callable[[Arguments, Any], None], backward: Caller | None = None) -> None:
        self.caller, self._name, self._backward = caller, caller.name, backward
        derivative = self._recorder = None
        if backward is not None:
            derivative = Derivative(
                frozenset(DIFFERENTIATED), self._gradients, needs={"return_lse": True}, ahead=self._planned
            )
            self._recorder = Recorder(caller, derivative)
        more = () if derivative is None else (_DETERMINISTIC,)
        self.schema, self.operator = define_call(caller, fixed={"return_lse": False}, more=more, check=check)
        _, self.lse_operator = define_call(
            caller, name=f"{caller.name}_lse", fixed={"return_lse": True}, more=more, check=check, derivative=derivative
        )

    def __call__(self, given: Named, config: Any, check: Any = False, **more: Any) -> Any:
        """The results of a call; ``more`` are options of the gradients."""
        recorder = self._recorder
        if recorder is not None and runs_eagerly(given["q"]):
            return recorder(*self.caller.positions(given), config, check, **more)
        operators, arguments = torch.ops.warploom, {**self.schema.arguments(given, config), **more}
        return_lse = given.get("return_lse", False)
        known = recorder is not None and differentiated(*[given.get(name) for name in DIFFERENTIATED])
        if not (return_lse or known):
            return getattr(operators, self._name)(**arguments)
        out, lse = getattr(operators, f"{self._name}_lse")(**arguments)  # the backward pass needs both
        return (out, lse) if return_lse else out

    def _planned(self, given: Named) -> Launches:
        """The plan of the backward pass of a call, for a gradient that lies as the output."""
        backward, made = (
            self._backward,
            self.caller.computation({**self._own(self.caller, given), "return_lse": True}).new,
        )
        assert backward is not None
        return backward.computation(self._own(backward, {**given, **made, "dout": made["out"]})).planned()

    @staticmethod
    def _own(caller: Caller, given: Named) -> dict[str, Any]:
        """The arguments that an operation has."""
        return {name: given[name] for name in (*caller.array_names, *caller.option_names) if name in given}

    def _gradients(self, call: RecordedCall, how: BackwardPass) -> dict[str, Place]:
        """The gradients of a node by the arrays of the call, of their types: those of options come in float32."""
        (dout, dlse), given, backward = how.by_results, call.given(how.saved), self._backward
        assert backward is not None
        if dout is None:
            if dlse is None:
                return {}
            dout = Place(torch.zeros_like(how.saved[-2].tensor))
        results = dict(zip(("out", "lse", "dout", "dlse"), (*how.saved[-2:], dout, dlse), strict=True))
        arrays, options = backward.positions(given | results)
        made = how.run(backward, arrays, options)
        found = dict(zip([name for name in DIFFERENTIATED if name in call.names], made, strict=True))
        for name in HEAD_ARRAYS:
            if name in found and given[name].tensor.dtype != torch.float32:
                dtype = given[name].tensor.dtype
                found[name] = found[name].then(lambda x, dtype=dtype: x.to(dtype))
        return found


def _of_gradients(deterministic: bool) -> dict[str, bool]:
    """The options of gradients that are asked for."""
    return {"deterministic": True} if deterministic else {}


# -- even sequences
def _checking(problem_of: Callable[[Arguments], Any], *kinds: Any) -> Callable[[Arguments, Any], None]:
    """A check of arguments that are a problem, and of a configuration, which is of these kinds where they are given."""

    def check(given: Arguments, config: Any) -> None:
        problem = problem_of(given)
        if config is not None:
            of_even.refuse_config(config, problem, *kinds)

    return check


_attention = Attention(of_even.attention_call, _checking(of_even.problem_of), of_even.attention_backward_call)
attention_operator, attention_lse_operator = _attention.operator, _attention.lse_operator
backward_operator, attention_backward = define_gradients(of_even.attention_backward_call)


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
    found = _attention(given, config, **_of_gradients(deterministic))
    if not turned:
        return found
    return (found[0].transpose(1, 2), found[1]) if return_lse else found.transpose(1, 2)


# -- packed sequences
_CALL = of_packed.attention_varlen_call
_varlen = Attention(_CALL, _checking(of_packed.packed_problem, PACKED_KINDS), of_packed.attention_varlen_backward_call)
_, attention_varlen_backward = define_gradients(of_packed.attention_varlen_backward_call)


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
    return _varlen(given, config, check, **_of_gradients(deterministic))


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
    found = _paged(given, config)
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
    found = arguments_of(of_cached.append_call.declaration, tuple(arrays), (interleaved,))
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
