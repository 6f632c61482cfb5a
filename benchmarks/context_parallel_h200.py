"""PyTorch's ``context_parallel`` on warploom's kernels: one long sequence on several GPUs, forward and backward.

    PYTHONPATH=src python benchmarks/context_parallel_h200.py [--gpus 2] [--tokens 131072] [--out FOLDER]

Causal attention of 16 heads of 128, bf16, by ``scaled_dot_product_attention`` after ``warploom.torch.activate()``. One
GPU computes the whole sequence; then all of them together, by ring ("alltoall") and by "allgather", each rank holding
its part of the sequence. Checked first: one GPU against PyTorch's own FlashAttention, several against one, result and
gradients, within a few roundings of bf16. Then times are medians of the slowest rank, step after step and ``rested``,
each after a pause; efficiency is one GPU's time over that of n times n. PyTorch's own FlashAttention is timed in the
same ways. Writes context-parallel.json to the folder
(by default ``$OUT``, else out), a minute on two H200. Exit code 1 if a result is wrong.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

import warploom.torch
from warploom_lab.bench.cells import parser_of
from warploom_lab.bench.evidence import write

HEADS, HEAD_DIM = 16, 128
TOLERANCE = 2.0**-5
"""Of the largest element of a result: blocks are merged in 16 bits, gradients of blocks are added."""
ROUNDS = 5
PAUSE_SECONDS = 0.3
"""Before a rested step: longer than the longest."""
NAMES = ("out", "dq", "dk", "dv")
Tensors = list[torch.Tensor]


def inputs(tokens: int) -> Tensors:
    """q, k, v and the gradient of the result, the same on every rank."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = 1, HEADS, tokens, HEAD_DIM
    return [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, by: torch.Tensor) -> Tensors:
    """Result and gradients. ``context_parallel`` replaces the function in its module."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=True)
    return [out.detach(), *torch.autograd.grad(out, leaves, by)]


def milliseconds(call: Callable[[], Any], pause: float = 0.0) -> float:
    """Median of some calls, of the slowest rank, each after a pause in seconds."""
    call()
    found: list[float] = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        time.sleep(pause)
        dist.barrier()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        slowest = torch.tensor(start.elapsed_time(end), device="cuda")
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        found.append(slowest.item())
    return statistics.median(found)


def errors(found: Tensors, expected: Tensors) -> dict[str, float]:
    """The largest difference of each over the largest element expected."""
    pairs = zip(NAMES, found, expected, strict=True)
    return {name: ((a - b).abs().max() / b.abs().max()).item() for name, a, b in pairs}


@contextmanager
def implementation(name: str) -> Any:
    """FlashAttention as warploom's kernels, or PyTorch's own, and no other backend."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if name == "warploom":
        warploom.torch.activate()
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        warploom.torch.deactivate()


def both_loads(call: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of a call, one after another and rested."""
    return milliseconds(call), milliseconds(call, PAUSE_SECONDS)


def parallel(mesh: Any, method: str, tensors: Tensors) -> tuple[Tensors, tuple[float, float]]:
    """Result and gradients of the whole sequence, and the milliseconds of a step, by context parallelism."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method

    set_rotate_method(method)
    parts = [x.clone() for x in tensors]
    with context_parallel(mesh, buffers=parts, buffer_seq_dims=[2] * 4):
        found = step(*parts)
        times = both_loads(lambda: step(*parts))
        whole = context_parallel_unshard(mesh, found, [2] * 4)
    return whole, times


def measured(rank: int, gpus: int, tokens: int) -> list[dict[str, Any]]:
    """A row for each implementation and way."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda", (gpus,))
    tensors, rows, alone = inputs(tokens), list[dict[str, Any]](), dict[str, Tensors]()
    flops = 3.5 * 4 * HEADS * HEAD_DIM * tokens * (tokens + 1) / 2

    def row(times: tuple[float, float], alone: tuple[float, float] | None = None) -> dict[str, Any]:
        """Rates of a step, and its efficiency beside one GPU ``alone``."""
        company, rested = (
            {"ms": ms, "tflops": flops / ms / 1e9} | ({"efficiency": one / ms / gpus} if alone else {})
            for ms, one in zip(times, alone or times, strict=True)
        )
        return company | {"rested": rested}

    for name in ("pytorch", "warploom"):
        with implementation(name):
            alone[name] = step(*tensors)
            one = both_loads(lambda: step(*tensors))
            rows.append({"by": name, "way": "one GPU", **row(one)})
            if name == "warploom":
                rows[-1]["error"] = errors(alone[name], alone["pytorch"])
            for method in ("alltoall", "allgather"):
                whole, times = parallel(mesh, method, tensors)
                error = errors(whole, alone[name])
                rows.append({"by": name, "way": method, "gpus": gpus, **row(times, one), "error": error})
        if rank == 0:
            print(*map(json.dumps, rows[-3:]), sep="\n", flush=True)
    return rows


def run(rank: int, gpus: int, tokens: int, out: Path) -> None:
    """One rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=gpus, device_id=torch.device("cuda", rank))
    try:
        rows = measured(rank, gpus, tokens)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        found = {"tokens": tokens, "heads": HEADS, "head_dim": HEAD_DIM, "rows": rows}
        write(out / "context-parallel.json", found)


def wrong(rows: list[dict[str, Any]]) -> list[str]:
    """What is further off than the tolerance, as lines."""
    return [
        f"{row['by']}, {row['way']}: {name} is off by {error:.3g}"
        for row in rows
        for name, error in row.get("error", {}).items()
        if not error <= TOLERANCE
    ]


def main() -> int:
    """Start a process for each GPU, and judge what they found."""
    parser = parser_of(__doc__)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=131072)
    given = parser.parse_args()
    if torch.cuda.device_count() < given.gpus:
        sys.exit(f"there are {torch.cuda.device_count()} GPUs, not {given.gpus}: run on such a machine, or pass --gpus")
    from torch.multiprocessing.spawn import spawn

    spawn(run, (given.gpus, given.tokens, given.out), nprocs=given.gpus)
    failures = wrong(json.loads((given.out / "context-parallel.json").read_text())["rows"])
    print(*failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
