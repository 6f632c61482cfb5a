"""The kernels of other libraries to compare with, run in the same process and imported when they are needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from warploom.cuda.device import installed_version
from warploom.measure.pytorch import torch_module

SDPA_BACKENDS = {"torch_flash": "FLASH_ATTENTION", "torch_cudnn": "CUDNN_ATTENTION", "torch_math": "MATH"}
"""Names in results, and PyTorch's names of the backends of ``scaled_dot_product_attention``."""


def sdpa(name: str, causal: bool = False, **options: Any) -> Callable[[Any, Any, Any], Any]:
    """PyTorch's attention through one backend, on (batch, heads, seq, head_dim) tensors; one of SDPA_BACKENDS.

    ``options`` of the function may follow.
    """
    torch = torch_module()
    attention: Any = importlib.import_module("torch.nn.attention")
    backend = getattr(attention.SDPBackend, SDPA_BACKENDS[name])
    function = torch.nn.functional.scaled_dot_product_attention

    def run(q: Any, k: Any, v: Any) -> Any:
        with attention.sdpa_kernel(backend):
            return function(q, k, v, is_causal=causal, **options)

    return run


def flash_attention_4(name: str = "flash_attn_func") -> tuple[Callable[..., Any] | None, str]:
    """A function of FlashAttention-4 (the CuTe DSL kernels of ``flash_attn.cute``), of its results the first.

    It, and its version; or None, and why it cannot be imported here.
    """
    try:
        function = getattr(importlib.import_module("flash_attn.cute"), name)
    except Exception as error:  # an absent package, or one whose compiler does not fit this driver
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:200]

    def run(*arrays: Any, **options: Any) -> Any:
        found = function(*arrays, **options)
        return found[0] if isinstance(found, tuple) else found

    return run, installed_version("flash-attn-4") or "of unknown version"
