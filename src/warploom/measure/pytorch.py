"""PyTorch with a GPU, imported when it is needed: it is no dependency."""

from __future__ import annotations

import importlib
from typing import Any

from warploom.core.errors import UnsupportedDeviceError


def torch_module() -> Any:
    """PyTorch with a usable GPU. Raises UnsupportedDeviceError that says what is missing."""
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError as error:
        raise UnsupportedDeviceError(
            "timing on a GPU needs PyTorch, for its inputs, its reference and as the baseline: pip install torch"
        ) from error
    if not torch.cuda.is_available():
        raise UnsupportedDeviceError("the installed PyTorch sees no GPU: install its CUDA build to time on the GPU")
    return torch
