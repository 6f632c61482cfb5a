"""Tiles of many queries on a cache, emulated: as float64 has it, whatever lies in pages behind the last key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import warploom
from tests.hopper.mutants import edits, rewritten
from tests.kernels.attention_cases import changed
from tests.kernels.decode_cases import DecodeCase
from tests.ops.paged_cases import Step
from warploom.core.dtypes import bf16, f16
from warploom.core.errors import ConfigError
from warploom.core.targets import target
from warploom.kernels.attention.choice import choose_cached
from warploom.kernels.attention.decode import Decode
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.problem import ArrayStrides, AttentionProblem, Cached

SMALL = ForwardSm90(head_dim=32, tile_n=48, consumers=1, dtype=bf16)
WIDE = ForwardSm90(head_dim=64, tile_n=64, consumers=2, dtype=f16, skip_masked=True, turns=False)
ONCE = ForwardSm90(head_dim=32, tile_n=32, consumers=1, dtype=bf16, persistent=False)
STEPS = {
    "three pages in a block, mixed with single queries and nothing": (SMALL, Step((100, 3, 0, 90), (70, 1, 3, 0))),
    "pages longer than a block": (ONCE, Step((130, 33), (9, 9), 64, 192, group=1)),
    "pages and blocks of which none divides the other, a window": (
        SMALL,
        Step((100, 60), (9, 40), 32, 128, options={"causal": False, "window": (20, 6)}),
    ),
    "side by side": (SMALL, Step((60, 0, 20), (12, 12, 12), 0, 96)),
    "two consumers, sinks": (
        WIDE,
        Step((90,), (80,), 128, group=1, dtype=f16, options={"sinks": np.array([2.5], np.float32)}),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_every_element_is_as_near_float64_as_its_type_allows(name: str) -> None:
    config, step = STEPS[name]
    assert replace(step, head_dim=config.head_dim, options={**step.options, "config": config}).problems() == []


def test_random_steps() -> None:
    numbers = np.random.default_rng(11)
    for seed in range(2):
        batch, page = int(numbers.integers(1, 4)), int(numbers.choice([16, 48, 96]))
        lengths, queries = (tuple(numbers.integers(0, 97, batch).tolist()) for _ in range(2))
        step = Step(lengths, queries, page, 96, 1, 1, 32, seed=seed, options={"config": SMALL})
        assert step.problems() == [], step


@pytest.mark.parametrize("page", [0, 64])
def test_no_queries_are_no_reason_to_refuse_tiles(page: int) -> None:
    """NumPy's strides of an empty array are all 0, which says nothing of how it lies."""
    for packed in (False, True):
        lens, cache = np.array([3, 3], np.int32), np.zeros((2, 64, 1, 32), np.float16)
        named: dict[str, Any] = {"block_table": np.zeros((2, 1), np.int32)} if page else {}
        q = np.zeros((0, 2, 32) if packed else (2, 0, 2, 32), np.float16)
        if packed:
            named["cu_seqlens_q"] = np.zeros(3, np.int32)
        config = replace(SMALL, dtype=f16)
        found = warploom.attention_paged(q, cache, cache, lens, config=config, **named)
        assert found.shape == q.shape
        assert warploom.plan_attention_paged(q, cache, cache, lens, config=config, **named).config == config


def test_entries_that_point_outside_are_cut_off() -> None:
    """The emulator finds any read outside, and that of another sequence's row of the table."""
    step = Step((90, 60), (5, 5), 16, 96, group=1, head_dim=32)
    (q, k, v, lens), named = step.arguments
    for place, value in (((0, 3), 4000), ((1, 0), -1)):
        table = named["block_table"].copy()
        table[place] = value
        warploom.attention_paged(q, k, v, lens, block_table=table, config=SMALL)
    full = np.where(named["block_table"] < 12, named["block_table"], 0)
    for wrong in (1000, -3):
        lens = np.array([90, wrong], np.int32)
        warploom.attention_paged(q, k, v, lens, block_table=full, config=SMALL)


def test_no_kernel_depends_on_lengths_batch_or_pages() -> None:
    numbers, kernels = np.random.default_rng(0), set()
    for _ in range(20):
        batch, pages = int(numbers.integers(1, 300)), int(numbers.integers(1, 5000))
        entries, q_len = int(numbers.integers(1, 200)), int(numbers.integers(64, 500))
        q = np.zeros((batch, q_len, 4, 32), np.float16)
        cache = np.broadcast_to(np.zeros((1, 64, 1, 32), np.float16), (pages, 64, 1, 32))
        cache = np.lib.stride_tricks.as_strided(cache, cache.shape, (4096, 64, 64, 2))
        table, lens = np.zeros((batch, entries), np.int32), np.zeros(batch, np.int32)
        config = replace(SMALL, dtype=f16)
        made = warploom.plan_attention_paged(q, cache, cache, lens, block_table=table, config=config)
        kernels |= {call.source for call in made.calls}
    assert len(kernels) == 2


CASE = DecodeCase(SMALL, Step((130,), (70,), 16, 144, group=1, head_dim=32), 1)


def test_a_missing_wait_or_fence_is_found() -> None:
    """The first of every function that has one; ``tests/hopper`` tries all of the same kernel."""
    program, first = CASE.program, dict[tuple[str, str], tuple[int, Any]]()
    for number, op in enumerate(program.ops()):
        kind = op.instruction.mnemonic
        if kind.startswith(("mbarrier.try_wait", "fence.proxy")):
            first.setdefault((op.where.function, kind), (number, op))
    assert len(first) >= 5
    changed = {
        " ".join(place): rewritten(program, number, next(iter(edits(op)))[1]) for place, (number, op) in first.items()
    }
    assert CASE.escapes(changed) == []


KEYS, QUERIES = (64 * 128, 64, 128), (512 * 256, 64, 256)
PROBLEM = AttentionProblem(
    4, 4, 2, Cached(512, 8192, page_size=64, pages=500, table_pages=128), 64, bf16, window=(None, 0)
)
LYING = {"q": QUERIES, "k": KEYS, "v": KEYS, "out": QUERIES, "table": (128,)}
OPERANDS = ArrayStrides(LYING)


def test_who_takes_what() -> None:
    """Tiles take many queries where there is ``wgmma``; what they cannot is left to the kernels of few queries."""
    packed = changed(PROBLEM, packed=True, q_len=2000)
    assert isinstance(choose_cached(packed, OPERANDS, target("sm_90a"), 132)[0], ForwardSm90)
    assert isinstance(choose_cached(PROBLEM, OPERANDS, target("sm_90a"), 132)[0], ForwardSm90)
    others: list[tuple[AttentionProblem, ArrayStrides, str]] = [
        (PROBLEM, OPERANDS, "sm_80"),
        (changed(PROBLEM, q_len=4), OPERANDS, "sm_90a"),
        (changed(PROBLEM, q_len=128, batch=1), OPERANDS, "sm_90a"),  # four tiles for 132 SMs
        (changed(PROBLEM, packed=True), OPERANDS, "sm_90a"),  # 128 queries of each of four sequences
        (changed(PROBLEM, packed=True, q_len=2000, batch=100), OPERANDS, "sm_90a"),
        (changed(PROBLEM, q_len=1, pages=2**25), OPERANDS, "sm_90a"),  # more rows than tiles reach
        (changed(PROBLEM, fp8=True), OPERANDS, "sm_90a"),
        (changed(PROBLEM, split=128), OPERANDS, "sm_90a"),
        (PROBLEM, ArrayStrides(LYING | {"k": (64 * 128 + 8, 64, 128)}), "sm_90a"),
        (PROBLEM, ArrayStrides(LYING | {"v": (64 * 256, 64, 128)}), "sm_90a"),
        (PROBLEM, ArrayStrides(LYING | {"out": (600 * 256, 64, 256)}), "sm_90a"),
    ]
    kinds = [type(choose_cached(p, o, target(t), 132)[0]) for p, o, t in others]
    assert kinds == [Decode] * len(others)


def test_what_tiles_do_not_take_is_refused() -> None:
    arrays, named = Step((100,), (2,), 16, 112, head_dim=32).arguments
    with pytest.raises(ConfigError, match="fixed_split takes attention_decode"):
        warploom.attention_paged(*arrays, **named, fixed_split=128, config=SMALL)
    with pytest.raises(ConfigError, match="head_dim is 32, the configuration's 64"):
        warploom.attention_paged(*arrays, **named, config="attention_sm90(head_dim=64)")
