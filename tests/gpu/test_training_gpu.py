"""A step of training on a GPU as PyTorch runs it: in a CUDA graph, compiled into graphs, on sharded weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import warploom

pytestmark = pytest.mark.gpu

LENGTH, HEADS, WIDTH, WORDS = 256, 2, 64, 1000


def parameters(torch: Any) -> list[Any]:
    """Of attention's products and of the output layer."""
    generator = torch.Generator("cuda").manual_seed(0)
    width = HEADS * WIDTH
    return [
        torch.randn(shape, generator=generator, device="cuda").div(8).bfloat16().requires_grad_()
        for shape in ((3 * width, width), (3 * width,), (WORDS, width))
    ]


def batch(torch: Any, seed: int) -> tuple[Any, Any]:
    """Inputs and targets."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(2, LENGTH, HEADS * WIDTH, generator=generator, device="cuda").bfloat16()
    return x, torch.randint(WORDS, (2 * LENGTH,), generator=generator, device="cuda")


def loss(x: Any, target: Any, qkv: Any, bias: Any, words: Any) -> Any:
    """The mean loss of a batch."""
    q, k, v = warploom.matmul(x, qkv.mT, bias=bias).unflatten(2, (3, HEADS, WIDTH)).unbind(2)
    y = warploom.attention(q, k, v, causal=True)
    return warploom.linear_cross_entropy(y.flatten(2).flatten(0, 1), words, target, reduction="mean")


def gradients(torch: Any, function: Any, given: tuple[Any, Any]) -> list[Any]:
    """Of a step that begins without any."""
    own = parameters(torch)
    function(*given, *own).backward()
    return [p.grad for p in own]


def assert_near(torch: Any, found: list[Any], expected: list[Any]) -> None:
    """Within a few roundings of the largest."""
    for x, y in zip(found, expected, strict=True):
        assert torch.isfinite(x).all()
        assert float((x.float() - y.float()).abs().max()) <= 2**-6 * float(y.float().abs().max())


def test_a_step_in_a_cuda_graph_reads_what_is_there_when_it_is_replayed() -> None:
    torch = pytest.importorskip("torch")
    own, (x, target) = parameters(torch), batch(torch, 1)

    def step() -> None:
        for p, gradient in zip(own, torch.autograd.grad(loss(x, target, *own), own), strict=True):
            p.grad.copy_(gradient)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for p in own:
            p.grad = torch.zeros_like(p)
        for _ in range(3):  # what is compiled and planned in a first call is no part of a graph
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    for seed in (2, 3):
        others = batch(torch, seed)
        x.copy_(others[0])
        target.copy_(others[1])
        graph.replay()
        torch.cuda.synchronize()
        assert_near(torch, [p.grad for p in own], gradients(torch, loss, others))


def test_compiled_steps_run_in_cuda_graphs() -> None:
    torch = pytest.importorskip("torch")
    compiled = torch.compile(loss, mode="reduce-overhead", fullgraph=True)
    for seed in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        given = batch(torch, seed)
        assert_near(torch, [g.clone() for g in gradients(torch, compiled, given)], gradients(torch, loss, given))


def test_sharded_weights(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    distributed, nn = torch.distributed, torch.nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList([nn.Parameter(p.detach()) for p in parameters(torch)])

        def forward(self, x: Any, target: Any) -> Any:
            return loss(x, target, *self.weights)

    given = batch(torch, 1)
    expected = gradients(torch, loss, given)
    distributed.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded: Any = fully_shard(Model(), mesh=init_device_mesh("cuda", (1,)))
        for _ in range(2):  # gradients add up
            sharded(*given).backward()
        found = [p.grad.full_tensor() for p in sharded.parameters()]
        assert_near(torch, found, [2 * x for x in expected])
    finally:
        distributed.destroy_process_group()
