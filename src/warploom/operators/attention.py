"""``warploom::attention`` as a PyTorch operator: what ``torch.compile`` and ``torch.export`` see of a call.

:func:`warploom.attention` takes this way by itself while a graph is traced, where tensors have no memory to point
at (:mod:`warploom.interop.tracing`). The operators allocate through PyTorch, wait for nothing and work on the
current stream, so compiled code may run in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from warploom.kernels.attention.scores import HEAD_ARRAYS
from warploom.operators.fakes import arguments_of, if_sizes_are_known, made_of
from warploom.operators.recorded import Gradients, RecordedCall, Recorder, Tape, eagerly, runs_eagerly
from warploom.operators.registration import Derivative, define, differentiated
from warploom.operators.schema import Named, Schema
from warploom.ops import attention as eager
from warploom.ops.attention_backward import attention_backward_call
from warploom.ops.calls import Caller
from warploom.ops.declare import Arguments, Option

_DETERMINISTIC = Option("deterministic", "bool", False)
DIFFERENTIATED = *"qkv", *HEAD_ARRAYS
"""The arrays that have gradients, in the order of the operators' results."""


def define_backward(caller: Caller) -> Any:
    """The operator of gradients by q, k, v and arrays of options; those of arrays that are not given are empty."""

    def run(arrays: tuple[Any, ...], options: tuple[Any, ...], _: Any) -> Any:
        found = iter(caller.computed(arrays, _deterministic(caller, options)))
        given = dict(zip(caller.array_names, arrays, strict=True))
        return tuple([next(found) if given[name] is not None else _of_heads(arrays[0], 0) for name in DIFFERENTIATED])

    def fake(given: Named) -> Any:
        whole, of_heads = [given[name] for name in "qkv"], [given[name] for name in HEAD_ARRAYS]
        heads = [_of_heads(whole[0], 0 if x is None else x.shape[0]) for x in of_heads]
        return *[x.new_empty(x.shape) for x in whole], *heads

    results = f"({', '.join(['Tensor'] * len(DIFFERENTIATED))})"
    return define(caller.name, Schema(caller.declaration), results, run, fake, of_gradients=True)


def _of_heads(q: torch.Tensor, heads: int) -> torch.Tensor:
    """Memory for the gradient of an array with a number for each head; without such an array there are no heads."""
    return q.new_empty((heads,), dtype=torch.float32)


def _deterministic(caller: Caller, options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The options of a backward pass, deterministic where PyTorch asks for it."""
    if not torch.are_deterministic_algorithms_enabled():
        return options
    return tuple([True if name == "deterministic" else x for name, x in zip(caller.option_names, options, strict=True)])


def define_both(
    caller: Caller,
    check: Callable[[Arguments, Any], None],
    derivative: Derivative | None = None,
) -> tuple[Any, Any]:
    """The operator of a call's output, and with ``_lse`` behind its name that of output and log-sum-exps.

    ``check`` raises for what is wrong with arguments and a configuration beyond their declaration. ``derivative`` is
    that of both results, if there is one.
    """

    def one(return_lse: bool) -> Any:
        more = (_DETERMINISTIC,) if caller.recorded else ()
        schema = Schema(caller.declaration, {"return_lse": return_lse}, more)

        def run(arrays: tuple[Any, ...], options: tuple[Any, ...], config: Any) -> Any:
            return caller.computed(arrays, options, config)

        def fake(given: Named) -> Any:
            found = arguments_of(caller.declaration, given, return_lse=return_lse)
            if_sizes_are_known(lambda: check(found, given["config"]))
            return made_of(found.results, given)

        forms = "(Tensor, Tensor)" if return_lse else "Tensor"
        name = caller.name + "_lse" * return_lse
        return define(name, schema, forms, run, fake, derivative if return_lse else None)

    return one(False), one(True)


class DifferentiableAttention:
    """A kind of attention as an eager operation with a history, and as its operators.

    ``backward`` computes the gradients, ``operator`` is theirs.
    """

    def __init__(self, caller: Caller, backward: Caller, operator: Any) -> None:
        self.caller, self._backward, self._operator, self._name = caller, backward, operator, caller.name
        self.derivative = Derivative(frozenset(DIFFERENTIATED), self._traced_gradients)
        schema = Schema(caller.declaration, {"return_lse": True}, (_DETERMINISTIC,))
        self._recorder = Recorder(caller, schema, self.derivative, self._gradients, {"return_lse": True})
        self._names = frozenset([x.name for x in operator._schema.arguments])
        self._schema = schema

    def __call__(self, given: Named, config: Any, check: Any, deterministic: bool) -> Any:
        """The results of a call; ``deterministic`` is an option of the gradients."""
        if runs_eagerly(given["q"]):
            more = {"deterministic": True} if deterministic else {}
            return eagerly(self._recorder, *self.caller.positions(given), config, check, **more)
        operators, arguments = torch.ops.warploom, self._schema.arguments(given, config)
        if deterministic:
            arguments["deterministic"] = True
        return_lse = given.get("return_lse", False)
        if not (return_lse or differentiated(*[given.get(name) for name in DIFFERENTIATED])):
            return getattr(operators, self._name)(**arguments)
        out, lse = getattr(operators, f"{self._name}_lse")(**arguments)  # the backward pass needs both
        return (out, lse) if return_lse else out

    def _gradients(self, call: RecordedCall, tape: Tape, by_results: Gradients) -> Named:
        """The gradients of a node."""
        saved, (dout, dlse), backward = tape.saved, by_results, self._backward
        if dout is None:
            if dlse is None:
                return {}
            dout = torch.zeros_like(saved[-2])
        results = dict(zip(("out", "lse", "dout", "dlse"), (*saved[-2:], dout, dlse), strict=True))
        known = {**dict(zip(call.names, saved, strict=False)), **results, **call.of.named_options(call)}
        arrays, options = backward.positions(known)
        found = tape.run(backward, arrays, _deterministic(backward, options))
        return _by_names(found, [name for name in DIFFERENTIATED if known.get(name) is not None], known)

    def _traced_gradients(self, given: Named, results: Any, by_results: tuple[Any, ...], _: frozenset[str]) -> Named:
        """The gradients through their operator."""
        (out, lse), (dout, dlse) = results, by_results
        if dout is None and dlse is None:
            return {}
        options = {name: x for name, x in given.items() if name in self._names and name != "config"}
        dout = torch.zeros_like(out) if dout is None else dout
        found = self._operator(dout=dout, out=out, lse=lse, dlse=dlse, **options)
        return _by_names(found, DIFFERENTIATED, given)


def _by_names(found: Sequence[torch.Tensor], names: Sequence[str], given: Named) -> Named:
    """The gradients of the arrays that are given, of their types: those of options come in float32."""
    known = {name: x for name, x in zip(names, found, strict=True) if given.get(name) is not None}
    return {name: x.to(given[name].dtype) if name in HEAD_ARRAYS else x for name, x in known.items()}


def _check(given: Arguments, config: Any) -> None:
    problem = eager.problem_of(given)
    if config is not None:
        eager.refuse_config(config, problem)


backward_operator = define_backward(attention_backward_call)
_attention = DifferentiableAttention(eager.attention_call, attention_backward_call, backward_operator)
attention_operator, attention_lse_operator = define_both(eager.attention_call, _check, _attention.derivative)
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
