"""What a call costs the host: from the caller's tensors to the kernel in the stream's queue."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from warploom.bench.peers import sdpa, torch_module
from warploom.bench.timing import Spread
from warploom.cuda.device import cuda_core, require_driver

_QUEUE = 128
"""Calls between two synchronisations: fewer than a stream's queue holds, so that no call waits for the GPU."""

WITH_TARGET = {"warploom.attention", "warploom.attention mma.sync", "warploom.matmul"}
"""The calls that have a target: one kernel each, from Python."""


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
    return {name: microseconds(call, torch.cuda.synchronize).json() for name, call in calls.items()}


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
