"""What a call costs the host: from the caller's tensors to the kernel in the stream's queue."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from warploom.bench.baselines import sdpa
from warploom.cuda.device import cuda_core, require_driver
from warploom.measure.pytorch import torch_module
from warploom.measure.timing import Spread

_QUEUE = 128
"""Calls between two synchronisations: fewer than a stream's queue holds, so that no call waits for the GPU."""

WITH_TARGET = {"warploom.attention", "warploom.attention mma.sync", "warploom.matmul"}
"""The calls that have a target: one kernel each, from Python."""


def microseconds(
    calls: Mapping[str, Callable[[], object]], synchronise: Callable[[], object], count: int = 4096
) -> dict[str, Spread]:
    """The host time of each of ``calls`` in µs, every call timed by itself, after 64 of each to warm up.

    They take turns, a block of calls each, in an order that rotates: a host that is slow for a while is slow for all.
    """
    for call in calls.values():
        for _ in range(64):
            call()
        synchronise()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order = deque(calls)
    for done in range(0, count, _QUEUE):
        for name in order:
            call, of_call = calls[name], samples[name]
            for _ in range(min(_QUEUE, count - done)):
                start = time.perf_counter_ns()
                call()
                of_call.append((time.perf_counter_ns() - start) / 1000)
            synchronise()
        order.rotate()
    return {name: Spread.of(of_call) for name, of_call in samples.items()}


def host_cost(device: int = 0) -> dict[str, Any]:
    """µs per call of each operation on small torch tensors on a GPU, and of what PyTorch has for them.

    ``torch.ops`` are the same operations as PyTorch operators, as compiled graphs call them. ``matmul_reduce`` runs two
    kernels. The launches of an empty kernel are what no call can be below on this host.
    """
    torch = torch_module()
    import warploom.operators.attention
    import warploom.operators.matmul
    from warploom.core.dtypes import bf16
    from warploom.kernels.attention.sm80 import ForwardSm80

    where = torch.device("cuda", device)
    q, k, v = (torch.randn(1, 256, 4, 128, device=where, dtype=torch.bfloat16) for _ in range(3))
    a, b = (torch.randn(256, 256, device=where, dtype=torch.bfloat16) for _ in range(2))
    flash, transposed = sdpa("torch_flash"), [x.transpose(1, 2) for x in (q, k, v)]
    mma = ForwardSm80(head_dim=128, dtype=bf16)
    operators = torch.ops.warploom
    calls: dict[str, Callable[[], object]] = {
        "warploom.attention": lambda: warploom.attention(q, k, v),
        "warploom.attention mma.sync": lambda: warploom.attention(q, k, v, config=mma),
        "warploom.matmul": lambda: warploom.matmul(a, b),
        "warploom.matmul_reduce": lambda: warploom.matmul_reduce(a, b, "logsumexp"),
        "torch.ops.warploom.attention": lambda: operators.attention(q, k, v),
        "torch.ops.warploom.matmul": lambda: operators.matmul(a, b),
        "torch_flash": lambda: flash(*transposed),
        "torch.matmul": lambda: torch.matmul(a, b),
        **empty_launches(device, int(torch.cuda.current_stream(device).cuda_stream)),
    }
    return {name: spread.json() for name, spread in microseconds(calls, torch.cuda.synchronize).items()}


def empty_launches(device: int, stream: int) -> dict[str, Callable[[], object]]:
    """Launches of a kernel that has no parameters and does nothing: by the driver's bindings, and by cuda.core."""
    driver, core = require_driver(), cuda_core()
    core.Device(device).set_current()
    options = core.ProgramOptions(arch=f"sm_{core.Device(device).arch}")
    program = core.Program('extern "C" __global__ void empty() {}', "c++", options)
    kernel = program.compile("cubin").get_kernel("empty")
    queue, config = core.Stream.from_handle(stream), core.LaunchConfig(grid=1, block=32)
    function = driver.cuKernelGetFunction(kernel.handle)[1]
    return {
        "cuLaunchKernel, empty": lambda: driver.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0),
        "cuda.core launch, empty": lambda: core.launch(queue, config, kernel),
    }


def missed(found: dict[str, Any], most: float) -> list[str]:
    """Each call whose median is above ``most`` µs although it has a target."""
    return [
        f"{name}: {spread['median']} µs, at most {most}"
        for name, spread in found.items()
        if name in WITH_TARGET and not spread["median"] <= most
    ]
