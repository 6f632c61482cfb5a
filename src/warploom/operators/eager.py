"""Eager calls of which PyTorch's autograd keeps a history: one node, past the dispatcher, which costs more than a call.

Calls that PyTorch traces, transforms or watches by a dispatch mode are operators (:mod:`.registration`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import unwrap
from typing import Any

import torch

from warploom.core.errors import ProblemError
from warploom.interop.refusals import NO_BACKWARD, refuse_tangent, refuse_watched
from warploom.interop.tracing import is_tracing
from warploom.operators.fakes import for_operator
from warploom.operators.registration import Derivative, Named

Tensors = Mapping[str, "torch.Tensor | None"]


class EagerOperation:
    """An operation whose eager calls are nodes of autograd's graph.

    ``run`` computes the results, of tensors and options by the names of its parameters. ``backward`` is called as
    ``derivative.backward`` is, with these names, and computes gradients that have no history; for those that shall have
    one (``create_graph=True``) ``derivative`` serves, which is made of operators.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        derivative: Derivative,
        backward: Callable[..., Named] | None = None,
    ) -> None:
        run, by, kept = unwrap(run), derivative.by, derivative.kept
        eagerly = backward or derivative.backward

        class Node(torch.autograd.Function):
            """One call."""

            @staticmethod
            def forward(ctx: Any, names: tuple[str, ...], options: dict[str, Any], *tensors: torch.Tensor) -> Any:
                """The results; whatever requires a gradient has one."""
                given = dict(zip(names, tensors, strict=True))
                for other, needs in zip(names, ctx.needs_input_grad[2:], strict=True):
                    if needs and other not in by:
                        raise ProblemError(f"{other}: {NO_BACKWARD}")
                if derivative.check is not None:
                    derivative.check({**given, **options})
                results = run(**given, **options)
                several = results if isinstance(results, tuple) else (results,)
                ctx.names, ctx.options = names, options
                ctx.save_for_backward(*tensors, *(several if kept else ()))
                ctx.set_materialize_grads(False)
                return results

            @staticmethod
            def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
                """The gradients of the tensors that require them."""
                names, saved = ctx.names, ctx.saved_tensors
                tensors = dict(zip(names, saved, strict=False))
                wanted = frozenset([name for name, needs in zip(names, ctx.needs_input_grad[2:], strict=True) if needs])
                results = saved[len(names) :]
                if torch.is_grad_enabled():
                    found = derivative.backward({**tensors, **for_operator(**ctx.options)}, results, gradients, wanted)
                else:
                    found = eagerly({**tensors, **ctx.options}, results, gradients, wanted)
                return None, None, *[found.get(name) for name in names]

        Node.__name__ = Node.__qualname__ = f"warploom_{name}"
        self._apply = Node.apply

    def __call__(self, tensors: Tensors, options: dict[str, Any]) -> Any:
        """The results of a call, with a history.

        Raises ProblemError for an option by which there is no derivative, and for a tensor with a tangent.
        """
        for name, option in options.items():
            if isinstance(option, torch.Tensor):
                refuse_watched(name, option)
        given = {name: x for name, x in tensors.items() if x is not None}
        for name, x in given.items():
            refuse_tangent(x, name)
        return self._apply(tuple(given), options, *given.values())


def runs_eagerly(first: Any) -> bool:
    """Whether a call whose first array is ``first`` is no operator: PyTorch neither traces nor watches it."""
    return isinstance(first, torch.Tensor) and not is_tracing()


def wants_gradient(tensors: Tensors) -> bool:
    """Whether the history of an eager call of these tensors is recorded."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors.values())


def autocast(tensors: Tensors, exact: frozenset[str]) -> Tensors:
    """Floating-point tensors but the ``exact`` ones in the type of autocast, where that is on for their device."""
    first = next(iter(tensors.values()))
    assert first is not None
    device = first.device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return {
        name: x.to(dtype) if x is not None and name not in exact and x.is_floating_point() else x
        for name, x in tensors.items()
    }
