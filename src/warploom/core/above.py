"""What packages above do for those below, which cannot import them: ``import warploom`` fills in each function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def operator_of(name: str) -> Callable[..., Any]:
    """The function that PyTorch traces in place of a public one; that of ``warploom.operators`` takes this place."""
    raise NotImplementedError(name)


def launch(kernel: Any, grid: Any, arguments: Any, **configuration: Any) -> None:
    """Run a kernel on arrays; :func:`warploom.launch` takes this place."""
    raise NotImplementedError(kernel)
