"""Launches of Triton kernels in a package's own Python code become checks on the CPU, with torch tensors on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

from .trial import launch

MULTIPROCESSORS = 4
"""Of the GPU that packages think is there: few, so that persistent kernels give each CTA several tiles."""
_PROPERTIES = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=MULTIPROCESSORS,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    regs_per_multiprocessor=65536,
    warp_size=32,
    total_memory=1 << 36,
    L2_cache_size=50 << 20,
    gcnArchName="",
)


@contextmanager
def triton_launches_checked(target: str, gpu: bool) -> Iterator[None]:
    """``kernel[grid](…)`` checks the kernel for ``target``; with ``gpu`` torch says that a GPU is there."""
    import torch
    from triton.runtime.jit import KernelInterface

    import warploom

    def launched(kernel: Any, grid: Any) -> Any:
        def run(*arguments: Any, **meta: Any) -> None:
            function = kernel
            while not hasattr(function, "params"):
                function = function.fn
            given = dict(zip(function.arg_names, arguments, strict=False))
            if not callable(grid) and 0 in grid:
                return  # as Triton does
            name, file = function.fn.__name__, function.fn.__code__.co_filename
            launch(name, file, lambda: warploom.check_triton(kernel, grid, given, target=target, **meta))

        return run

    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    capability = int(target[3:-1]), int(target[-1])
    with (
        mock.patch.object(KernelInterface, "__getitem__", launched),
        mock.patch.multiple(
            torch.cuda,
            device=lambda *_: nullcontext(),
            get_device_properties=lambda *_: _PROPERTIES,
            get_device_capability=lambda *_: capability,
            current_device=lambda: 0,
            **({"is_available": lambda: True, "device_count": lambda: 1} if gpu else {}),
        ),
    ):
        yield
