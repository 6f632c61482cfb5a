"""What a call becomes while PyTorch watches operators: one operator, or a break of the graph. Imports no framework.

Traced tensors have no memory to point at, and what is read past PyTorch it does not record. Other eager calls do not
take the way through an operator: PyTorch's dispatcher costs more than the rest of a call. The operators stand on the
functions that they call, which reach them by :mod:`warploom.core.above`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from warploom.core import above
from warploom.interop.torch_internals import watches

Public = TypeVar("Public", bound=Callable[..., Any])


def traced(function: Public) -> Public:
    """A public function that is the operator of its name while PyTorch :func:`is_tracing`."""

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return above.operator_of(function.__name__)(*given, **named) if is_tracing() else function(*given, **named)

    return cast(Public, call)


def is_tracing() -> bool:
    """Whether PyTorch watches the operators of this thread.

    It traces a graph (``torch.compile``, ``torch.export``, ``make_fx``, ``torch.jit.trace``), a dispatch mode is
    active, or ``torch.func`` transforms a function.
    """
    torch: Any = sys.modules.get("torch")
    # Dynamo looks no further than at its own question
    return torch is not None and (torch.compiler.is_dynamo_compiling() or watches())
