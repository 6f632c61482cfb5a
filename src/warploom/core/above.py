"""What packages above do for those below, which cannot import them: ``import warploom`` fills in each function."""

from __future__ import annotations

from typing import Any


def launch(kernel: Any, grid: Any, arguments: Any, **configuration: Any) -> None:
    """Run a kernel on arrays; :func:`warploom.launch` takes this place."""
    raise NotImplementedError(kernel)
