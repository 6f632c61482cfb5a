"""What a call costs the host: from the caller's tensors to the kernel in the stream's queue."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from warploom.cuda.device import cuda_core, require_driver
from warploom.measure.pytorch import torch_module
from warploom.measure.timing import Spread
from warploom_lab.bench.baselines import sdpa

_QUEUE = 128
"""Calls between two synchronisations: fewer than a stream's queue holds, so that no call waits for the GPU."""


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
    kernels, a backward pass of attention three. The launches of an empty kernel are what no call can be below on this
    host, nodes of autograd that compute nothing what no backward pass can.
    """
    torch = torch_module()
    torch.cuda.set_device(device)
    with torch.device("cuda", device):  # for the inputs alone: it slows whatever is called within
        calls = {**plain_calls(torch), **gradient_calls(torch), **empty_nodes(torch)}
    calls |= empty_launches(device, int(torch.cuda.current_stream(device).cuda_stream))
    return {name: spread.json() for name, spread in microseconds(calls, torch.cuda.synchronize).items()}


def halves(torch: Any, *shape: int, history: bool = False) -> Any:
    """Random bf16 numbers; with ``history`` a leaf of autograd's graph."""
    return torch.randn(*shape, dtype=torch.bfloat16).requires_grad_(history)


def plain_calls(torch: Any) -> dict[str, Callable[[], object]]:
    """Calls without gradients."""
    import warploom
    import warploom.operators.attention
    import warploom.operators.matmul
    from warploom import flash_attn
    from warploom.core.dtypes import bf16
    from warploom.kernels.attention.forward_sm80 import ForwardSm80
    from warploom.lang.functions import gelu

    q, k, v = (halves(torch, 1, 256, 4, 128) for _ in range(3))
    (pq, pk, pv), starts = [x[0] for x in (q, k, v)], torch.tensor([0, 100, 256], dtype=torch.int32)
    a, b, wide = (halves(torch, 256, n) for n in (256, 256, 4096))
    rows, columns = wide[:16], wide.T
    few, keys, values = halves(torch, 2, 1, 4, 128), halves(torch, 8, 64, 2, 128), halves(torch, 8, 64, 2, 128)
    lengths, table = torch.tensor([200, 90], dtype=torch.int32), torch.arange(8, dtype=torch.int32).reshape(2, 4)
    flash, transposed = sdpa("torch_flash"), [x.transpose(1, 2) for x in (q, k, v)]
    mma, operators = ForwardSm80(head_dim=128, dtype=bf16), torch.ops.warploom
    bias, target, new = halves(torch, 256), torch.randint(256, (256,)), halves(torch, 2, 1, 2, 128)
    key_cache, value_cache = (halves(torch, 2, 256, 2, 128) for _ in range(2))
    cached = few, key_cache, value_cache, new, new
    return {
        "attention": lambda: warploom.attention(q, k, v),
        "attention mma.sync": lambda: warploom.attention(q, k, v, config=mma),
        "attention_varlen": lambda: warploom.attention_varlen(pq, pk, pv, starts),
        "attention_paged": lambda: warploom.attention_paged(few, keys, values, lengths, block_table=table),
        "matmul": lambda: warploom.matmul(a, b),
        "flash_attn_func": lambda: flash_attn.flash_attn_func(q, k, v, causal=True),
        "flash_attn_varlen_func": lambda: flash_attn.flash_attn_varlen_func(pq, pk, pv, starts, starts, 156, 156),
        "flash_attn_with_kvcache, append": lambda: flash_attn.flash_attn_with_kvcache(*cached, cache_seqlens=lengths),
        "matmul, bias and gelu": lambda: warploom.matmul(a, b, bias=bias, epilogue=gelu),
        "linear_cross_entropy": lambda: warploom.linear_cross_entropy(a, b, target),
        "torch addmm and gelu": lambda: torch.nn.functional.gelu(torch.addmm(bias, a, b), approximate="tanh"),
        "matmul split K": lambda: warploom.matmul(rows, columns),
        "matmul_reduce": lambda: warploom.matmul_reduce(a, b, "logsumexp"),
        "torch.ops.warploom.attention": lambda: operators.attention(q, k, v),
        "torch.ops.warploom.matmul": lambda: operators.matmul(a, b),
        "torch flash": lambda: flash(*transposed),
        "torch.matmul": lambda: torch.matmul(a, b),
    }


def gradient_calls(torch: Any) -> dict[str, Callable[[], object]]:
    """Calls of which autograd keeps a history, backward passes alone, and a loss forward and backward."""
    import warploom

    q, k, v = (halves(torch, 1, 256, 4, 128, history=True) for _ in range(3))
    pq, pk, pv = (halves(torch, 256, 4, 128, history=True) for _ in range(3))
    starts = torch.tensor([0, 100, 256], dtype=torch.int32)
    a, b = (halves(torch, 256, 256, history=True) for _ in range(2))
    target = torch.randint(256, (256,))
    flash, cudnn = sdpa("torch_flash"), sdpa("torch_cudnn")
    turned = tuple(x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v))
    recorded: dict[str, tuple[Callable[[], Any], tuple[Any, ...]]] = {
        "attention": (lambda: warploom.attention(q, k, v, causal=True), (q, k, v)),
        "attention_varlen": (lambda: warploom.attention_varlen(pq, pk, pv, starts, causal=True), (pq, pk, pv)),
        "matmul": (lambda: warploom.matmul(a, b), (a, b)),
        "linear_cross_entropy": (lambda: warploom.linear_cross_entropy(a, b, target, reduction="mean"), (a, b)),
        "torch flash": (lambda: flash(*turned), turned),
        "torch cuDNN": (lambda: cudnn(*turned), turned),
        "torch.matmul": (lambda: torch.matmul(a, b), (a, b)),
        "torch cross_entropy": (lambda: torch.nn.functional.cross_entropy((a @ b.T).float(), target), (a, b)),
    }

    def backward(call: Callable[[], Any], by: tuple[Any, ...]) -> Callable[[], object]:
        out = call()
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, by, gradient, retain_graph=True)

    def both(call: Callable[[], Any], by: tuple[Any, ...]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(call(), by)

    def in_this_thread(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            with torch.autograd.set_multithreading_enabled(False):
                return call()

        return run

    alone = {name: backward(*of) for name, of in recorded.items() if "cross_entropy" not in name}
    return {
        **{f"{name}, recorded": call for name, (call, _) in recorded.items() if name != "torch cross_entropy"},
        **{f"{name}, backward": call for name, call in alone.items()},
        **{f"{name}, backward in the caller's thread": in_this_thread(call) for name, call in alone.items()},
        **{f"{name}, forward and backward": both(*of) for name, of in recorded.items() if "cross_entropy" in name},
    }


def empty_nodes(torch: Any) -> dict[str, Callable[[], object]]:
    """Backward passes that compute nothing: what PyTorch takes to run them in autograd's own thread."""

    def gives_back(_: Any, gradient: Any) -> Any:
        return gradient, gradient, gradient

    def allocates(ctx: Any, gradient: Any) -> Any:
        return tuple([torch.empty_like(x) for x in ctx.saved_tensors])

    def forward(ctx: Any, *tensors: Any) -> Any:
        ctx.save_for_backward(*tensors)
        return tensors[0].detach().clone()

    def backward(function: Callable[..., Any]) -> Callable[[], object]:
        by = tuple(halves(torch, 1, 256, 4, 128, history=True) for _ in range(3))
        out = function(*by)
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, by, gradient, retain_graph=True, allow_unused=True)

    def node(run: Callable[..., Any]) -> Callable[..., Any]:
        members = {"forward": staticmethod(forward), "backward": staticmethod(run)}
        return type("Node", (torch.autograd.Function,), members).apply  # pyright: ignore[reportAttributeAccessIssue]

    return {
        "backward of a view": backward(lambda q, *_: q.view(-1)),
        "backward of an empty node in Python": backward(node(gives_back)),
        "the same with three new tensors": backward(node(allocates)),
    }


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


def missed(found: dict[str, Any], most: Mapping[str, float]) -> list[str]:
    """Each call whose median is above its target, or that was not measured."""
    return [
        f"{name}: {found[name]['median'] if name in found else 'not measured'} µs, at most {target}"
        for name, target in most.items()
        if name not in found or not found[name]["median"] <= target
    ]
