"""Stream-K on the GPU: random products of each of its configurations, equal bits, streams, graphs, host arrays."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.gpu

import warploom  # noqa: E402 (after the skip)
from tests.gpu.products import EPILOGUES, Family, assert_products  # noqa: E402
from warploom.core.dtypes import bf16, f16, f32  # noqa: E402
from warploom.kernels.matmul.choice import BEST16, BEST32  # noqa: E402
from warploom.kernels.matmul.sm80 import MatmulSm80  # noqa: E402

WHOLE = replace(BEST32, stream_k=True)
CONFIGS: tuple[MatmulSm80, ...] = (
    WHOLE,
    replace(WHOLE, tile_m=256, tile_n=128, block_stride=0),
    replace(WHOLE, tile_n=128, min_ctas=2),
    replace(WHOLE, tile_m=64, tile_n=64, warp_m=32, warp_n=32, min_ctas=2),
    replace(WHOLE, tile_m=32, tile_n=32, warp_m=16, warp_n=16, tile_k=32, stages=3),
    replace(WHOLE, tile_m=64, tile_n=32, warp_m=32, warp_n=16, tile_k=32, stages=2),
    replace(WHOLE, tile_m=32, tile_n=64, warp_m=16, warp_n=32, tile_k=64, stages=4),
    replace(BEST16, stream_k=True, stages=3),
    replace(BEST16, stream_k=True, tile_m=64, tile_n=64, warp_m=32, warp_n=32),
)
PROBLEMS = 30


def family(number: int) -> Family:
    """Types, layouts, alignment and what is combined change from one configuration to the next."""
    draw = random.Random(number)
    config = CONFIGS[number]
    dtype = f16 if config.accumulate is f16 else (f16, bf16)[number % 2]
    return Family(
        dtype,
        config.accumulate,
        draw.choice([None, f32]),
        draw.random() < 0.5,
        draw.random() < 0.5,
        draw.choice([1, 2, 4, 8]),
        False,
        draw.choice(sorted(EPILOGUES)),
        draw.random() < 0.5,
        draw.choice([1.0, -0.5]),
        True,
        replace(config, dtype=dtype),
    )


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_random_products(number: int) -> None:
    assert assert_products(family(number), PROBLEMS, number) >= PROBLEMS // 2


def products(config: MatmulSm80) -> tuple[Any, Any]:
    """A product of one tile more than a wave."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    m, n = config.tile_m, config.tile_n * (config.min_ctas * sms + 1)
    return torch.randn(m, 1024, device="cuda").half(), torch.randn(1024, n, device="cuda").half()


@pytest.mark.parametrize("config", CONFIGS[:3], ids=str)
def test_equal_calls_give_equal_bits_among_other_work(config: MatmulSm80) -> None:
    """On two streams at once and in a graph, each call with a workspace of its own."""
    a, b = products(config)
    first = warploom.matmul(a, b, config=config)
    exact = a.double() @ b.double()
    assert bool(((first.double() - exact).abs() <= 2.0**-10 * exact.abs() + 1e-2).all())
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for stream in streams * 10:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            results.append(warploom.matmul(a, b, config=config))
    torch.cuda.synchronize()
    assert all(torch.equal(first, other) for other in results)
    out, graph = torch.empty_like(first), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            warploom.matmul(a, b, config=config, out=out)
    for _ in range(3):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(first, out)


def test_host_arrays() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((33, 200)).astype(np.float16), rng.standard_normal((200, 40)).astype(np.float16)
    c = warploom.matmul(a, b, config=CONFIGS[4])
    assert np.abs(c - a.astype(np.float64) @ b.astype(np.float64)).max() < 0.1
