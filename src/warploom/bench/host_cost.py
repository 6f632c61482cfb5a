"""What a call costs the host: from the caller's tensors to the kernel in the stream's queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from warploom.bench.peers import sdpa, torch_module
from warploom.bench.timing import Spread

_QUEUE = 128
"""Calls between two synchronisations: fewer than a stream's queue holds, so that no call waits for the GPU."""


def microseconds(call: Callable[[], object], synchronise: Callable[[], object], calls: int = 4096) -> Spread:
    """The host time of ``call`` in µs, each call timed by itself, after 64 to warm up."""
    for _ in range(64):
        call()
    synchronise()
    samples: list[float] = []
    while len(samples) < calls:
        for _ in range(min(_QUEUE, calls - len(samples))):
            start = time.perf_counter_ns()
            call()
            samples.append((time.perf_counter_ns() - start) / 1000)
        synchronise()
    return Spread.of(samples)


def attention_host_cost(device: int = 0) -> dict[str, Any]:
    """µs per call of ``warploom.attention`` and of PyTorch's flash backend on small torch tensors on a GPU."""
    import warploom

    torch = torch_module()
    where = torch.device("cuda", device)
    q, k, v = (torch.randn(1, 256, 4, 128, device=where, dtype=torch.bfloat16) for _ in range(3))
    flash, transposed = sdpa("torch_flash"), [x.transpose(1, 2) for x in (q, k, v)]
    calls: dict[str, Callable[[], object]] = {
        "warploom.attention": lambda: warploom.attention(q, k, v),
        "torch_flash": lambda: flash(*transposed),
    }
    return {name: microseconds(call, torch.cuda.synchronize).json() for name, call in calls.items()}
