# pyright: reportInvalidTypeForm=false
"""``attention_paged`` on a GPU: the emulator's cases, larger ones, and CUDA graphs with other lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import warploom
from tests.ops.paged_cases import Step
from tests.ops.test_attention_paged import STEPS
from warploom.core.dtypes import f16, s32, u32
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.lang import Global, Kernel, kernel

pytestmark = pytest.mark.gpu

LARGE = {
    "many CTAs a sequence": Step((9000, 3, 700), page=64, capacity=9024, kv_heads=2, group=8, head_dim=128),
    "many sequences": Step((5,) * 300 + (2000,), page=16, capacity=2000, group=4, head_dim=64),
    "one long sequence": Step((20000,), page=0, capacity=20000, group=1, head_dim=256, dtype=f16),
    "fp8": Step((5000, 64, 2000), page=64, capacity=5056, kv_heads=2, group=4, head_dim=128, fp8=True),
    "fp8, wide": Step((3000, 200), (2, 2), page=16, capacity=3008, kv_heads=2, group=8, head_dim=256, fp8=True),
    "sixteen queries": Step((3000, 800), (16, 16), page=256, capacity=3072, kv_heads=2, group=4, head_dim=128),
}

MANY = {
    "prompts": Step((700, 64, 300), (600, 64, 300), page=64, capacity=704, head_dim=128),
    "pages of 16, one query among chunks": Step((900, 500, 0), (400, 1, 0), page=16, capacity=960, head_dim=64),
    "pages of 256": Step((900, 500), (200, 200), page=256, capacity=1024, head_dim=128, dtype=f16),
    "side by side": Step((900, 500), (230, 230), page=0, capacity=1024, head_dim=64),
    "head_dim 192, blocks of 96": Step((700, 200), (150, 90), page=64, capacity=704, head_dim=192),
    "head_dim 256, a window": Step((900,), (300,), page=128, capacity=1024, head_dim=256, options={"window": (200, 0)}),
    "not causal": Step((513, 700), (200, 200), page=48, capacity=720, head_dim=64, options={"causal": False}),
}
MANY = {name: replace(step, kv_heads=4, group=4) for name, step in MANY.items()}


def tensors(step: Step) -> tuple[list[Any], dict[str, Any]]:
    """The arguments on the GPU."""
    import torch

    def moved(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        kind = {1: torch.float8_e4m3fn, 2: torch.float16 if step.dtype is f16 else torch.bfloat16}.get(x.itemsize)
        if kind is None:
            return torch.from_numpy(x).cuda()
        return torch.from_numpy(x.view(np.int8 if x.itemsize == 1 else np.int16)).cuda().view(kind)

    arrays, named = step.arguments
    return [moved(x) for x in arrays], {name: moved(x) for name, x in named.items()}


def back(out: Any, step: Step) -> Any:
    """A result as NumPy has it."""
    import torch

    return out.view(torch.int16).cpu().numpy().view(step.arguments[0][0].dtype)


@pytest.mark.parametrize("name", [*STEPS, *LARGE, *MANY])
def test_every_element_is_as_near_float64_as_its_type_allows(name: str) -> None:
    import torch

    step = {**STEPS, **LARGE, **MANY}[name]
    arrays, named = tensors(step)
    out, lse = warploom.attention_paged(*arrays, **named, return_lse=True)
    assert step.problems_of(back(out, step), lse.cpu().numpy()) == []
    if name in MANY and torch.cuda.get_device_capability() == (9, 0):
        assert isinstance(warploom.plan_attention_paged(*arrays, **named).config, ForwardSm90)


def test_a_graph_is_replayed_with_other_lengths() -> None:
    import torch

    step = Step((1500, 1500), page=64, capacity=1536, kv_heads=2, head_dim=128)
    (q, k, v, lens), named = tensors(step)
    warploom.attention_paged(q, k, v, lens, **named)
    coming, graph = lens.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        lens.copy_(coming)  # the launch that follows may begin before this is done
        out = warploom.attention_paged(q, k, v, lens, **named)
    for other in ((1500, 1500), (3, 1400), (0, 64), (777, 1)):
        coming.copy_(torch.tensor(other, dtype=torch.int32))
        graph.replay()
        expected = warploom.attention_paged(q, k, v, coming, **named)
        assert torch.equal(out, expected), other


@kernel(threads=32, requires="sm_90")
def late_lengths(k: Kernel, lengths: Global[s32], coming: Global[s32], batch: u32) -> None:
    """Lets the next launch begin, and writes lengths when that must have read them."""
    k.allow_next_launch()
    now = k.register(u32, 0)
    with k.loop(5000):
        now.set(k.convert(k.clock(), u32))
    with k.when((k.thread < batch) & (now != 0)):
        lengths.store(coming.load(k.thread), k.thread)


def test_lengths_that_are_written_late_are_those_that_count() -> None:
    import torch

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("launches overlap from compute capability 9.0 on")
    step = Step((1500, 1500), page=64, capacity=1536, kv_heads=2, head_dim=128)
    (q, k, v, lens), named = tensors(step)
    warploom.attention_paged(q, k, v, lens, **named)
    for other in ((3, 1400), (1500, 0), (777, 1)):
        coming = torch.tensor(other, dtype=torch.int32, device="cuda")
        expected = warploom.attention_paged(q, k, v, coming, **named)
        torch.cuda.synchronize()
        warploom.launch(late_lengths, 1, [lens, coming, 2])
        assert torch.equal(warploom.attention_paged(q, k, v, lens, **named), expected), other


def test_calls_one_behind_the_other_have_equal_bits() -> None:
    import torch

    step = Step((5000, 3, 64, 900) * 8, page=16, capacity=5008, kv_heads=2, group=4, head_dim=128)
    (q, k, v, lens), named = tensors(step)
    outs = [torch.full_like(q, float("nan")) for _ in range(200)]
    for out in outs:
        warploom.attention_paged(q, k, v, lens, out=out, **named)
    assert sum(not torch.equal(out, outs[0]) for out in outs) == 0


def test_a_given_split_gives_equal_bits() -> None:
    import torch

    step = Step(
        (5000, 700, 64), page=64, capacity=5056, kv_heads=2, group=4, head_dim=128, options={"fixed_split": 512}
    )
    (q, k, v, lens), named = tensors(step)
    together = warploom.attention_paged(q, k, v, lens, **named)
    table = named.pop("block_table")
    for number in range(3):
        own = slice(number, number + 1)
        alone = warploom.attention_paged(q[own], k, v, lens[own], block_table=table[own], **named)
        assert torch.equal(alone[0], together[number])


@pytest.mark.parametrize("interleaved", [False, True])
def test_new_keys_are_turned_and_lie_where_attention_looks(interleaved: bool) -> None:
    import torch

    step = Step((1500, 3, 700), page=64, capacity=1536, kv_heads=2, head_dim=128)
    (_, k, v, lens), named = tensors(step)
    table = named["block_table"]
    new = torch.randn(3, 1, 2, 128, device="cuda", dtype=torch.bfloat16)
    angles = torch.rand(1536, 48, device="cuda")
    before = k.clone()
    tables: dict[str, Any] = {"cos": angles.cos(), "sin": angles.sin()}
    warploom.append_to_cache(k, v, new, new, lens, block_table=table, interleaved=interleaved, **tables)
    for number, length in enumerate(step.lengths):
        page, within = int(table[number, (length - 1) // 64]), (length - 1) % 64
        x, c, s = new[number, 0].double(), angles[length - 1].double().cos(), angles[length - 1].double().sin()
        first, second = (x[:, 0:96:2], x[:, 1:96:2]) if interleaved else (x[:, :48], x[:, 48:96])
        pair = first * c - second * s, second * c + first * s
        turned = torch.stack(pair, -1).flatten(1) if interleaved else torch.cat(pair, -1)
        expected = torch.cat([turned, x[:, 96:]], -1)
        assert (k[page, within].double() - expected).abs().max() <= 0.02
        assert torch.equal(v[page, within], new[number, 0])
        k[page, within] = before[page, within]
    assert torch.equal(k.view(torch.int16), before.view(torch.int16))
