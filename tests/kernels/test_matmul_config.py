"""Matmul configurations: what fits, notation, what problems they take; what the ladder changes from rung to rung."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import warploom
from tests.kernels.matmul_cases import EVERY_RUNG, RUNGS, STREAMED, TOGETHER, TURNS, Case
from warploom.core.dtypes import bf16, f16, f32
from warploom.core.errors import ConfigError
from warploom.core.targets import TARGETS, target
from warploom.kernels.matmul.choice import KINDS
from warploom.kernels.matmul.problem import MatmulConfig, contiguous_problem
from warploom.kernels.matmul.sm80 import MatmulSm80
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.kernels.settings import read
from warploom.layout.swizzle import Swizzle
from warploom_lab.kernels.matmul.ladder import FULL_LADDER, LADDER, summed_in
from warploom_lab.kernels.matmul.ladder_config import RungGemm
from warploom_lab.kernels.matmul.ladder_sm90 import RungWgmma

CLASSES: tuple[type[Any], ...] = (MatmulSm80, MatmulSm90, RungGemm, RungWgmma)
CONFIGS = st.one_of(
    *(st.builds(kind, **{f.name: st.sampled_from(f.metadata["choices"]) for f in fields(kind)}) for kind in CLASSES)
)
"""Of every kind, each flag at any of its documented choices."""


@settings(deadline=None, max_examples=200)
@given(CONFIGS, st.sampled_from(list(TARGETS.values())))
def test_notation_checks_and_settings(config: Any, arch: Any) -> None:
    assert read(str(config), KINDS) == config
    assert type(config)().with_settings({f.name: str(getattr(config, f.name)) for f in fields(config)}) == config
    reasons = config.check(arch)
    if not reasons:
        config.require(arch)
        assert config.shared_bytes <= arch.shared_per_block
        return
    with pytest.raises(ConfigError) as caught:
        config.require(arch)
    assert all(reason and reason in str(caught.value) for reason in reasons)


def test_the_seeds_notation() -> None:
    config = read("BM=128,BN=128,BK=64,WM=64,WN=64,STAGES=3,BLOCK_STRIDE=8", KINDS)
    assert config == RUNGS["05"], "the words alone mean the seeds' last kernel"
    assert str(config).startswith("BM=128,BN=128,BK=64,WM=64,WN=64,STAGES=3,BLOCK_STRIDE=8,")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("BM=128,XX=3", "'XX' is no flag"),
        ("BM", "integer"),
        ("BM=abc", "integer"),
        ("matmul_sm80(accumulate=f7)", "not a type"),
        ("matmul_sm90(pingpong=maybe)", "true or false"),
        ("1=2,=", "config cannot be"),
        ("tile_m=64", "config cannot be"),
        ("matmul_sm90(warp_m=64)", "'warp_m' is no flag"),
    ],
)
def test_notation_that_is_none_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(text, KINDS)


FOUR, LAST = RUNGS["04"], RUNGS["06"]


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        (FOUR, {"tile_m": 96, "warp_m": 64}, "warp_m"),
        (FOUR, {"warp_n": 12}, "warp_n"),
        (FOUR, {"tile_k": 24}, "tile_k"),
        (FOUR, {"tile_k": 16}, "even number"),
        (FOUR, {"tile_n": 96, "warp_n": 32}, "power of two"),
        (FOUR, {"tile_m": 192, "warp_m": 64}, "6 warps"),
        (FOUR, {"dtype": bf16, "accumulate": f16}, "accumulate"),
        (FOUR, {"stages": 1}, "stages >= 2"),
        (FOUR, {"ldmatrix": False}, "ldmatrix"),
        (FOUR, {"stages": 8}, "shared memory"),
        (FOUR, {"warp_m": 16, "warp_n": 8, "tile_m": 256}, "threads"),
        (FOUR, {"lead": 32}, "less than the 32 mma"),
        (FOUR, {"lead": -1}, "at least 0"),
        (FOUR, {"lead": 8, "pipelined": False}, "needs pipelined"),
        (FOUR, {"wmma": True}, "no ldmatrix, no swizzle"),
        (FOUR, {"padding": 8}, "without swizzle"),
        (FOUR, {"padding": 4, "swizzle": False}, "multiple of 8"),
        (LAST, {"tile_m": 96, "warp_m": 64}, "warp_m"),
        (LAST, {"tile_k": 16}, "two k-steps"),
        (LAST, {"stages": 1}, "at least 2 stages"),
        (LAST, {"stages": 8}, "shared memory"),
        (LAST, {"dtype": bf16, "accumulate": f16}, "does not accumulate"),
        (STREAMED, {"split_k": 2}, "takes no split_k"),
        (TOGETHER, {"tile_n": 80}, "tile_n 80"),
        (TOGETHER, {"tile_m": 64}, "tile_m 64"),
        (TOGETHER, {"tile_m": 256, "tile_n": 256}, "256 accumulators"),
        (TOGETHER, {"stages": 1}, "at least 2 stages"),
        (TOGETHER, {"consumers": 4}, "1 to 3 consumer"),
        (TURNS, {"consumers": 1}, "between two consumers"),
        (RungWgmma(128, 128, pingpong=True), {"persistent": False}, "of a persistent kernel"),
    ],
)
def test_what_does_not_fit_is_said(config: Any, change: dict[str, Any], says: str) -> None:
    arch = target(config.requires)
    assert config.check(arch) == []
    reasons = replace(config, **change).check(arch)
    assert any(says in reason for reason in reasons), reasons


def test_wgmma_is_for_architectures_that_have_it() -> None:
    assert any("needs sm_90a" in reason for reason in TOGETHER.check(target("sm_80")))


PLAIN = contiguous_problem(4096, 4096, 4096, f16)


@pytest.mark.parametrize(
    ("config", "change", "says"),
    [
        (MatmulSm80(), {"dtype": bf16}, "the arrays are bf16, the configuration f16"),
        (MatmulSm80(), {"accumulate": f16}, "sums are wanted in f16"),
        (MatmulSm80(), {"m": 2**31}, "reaches"),
        (MatmulSm80(split_k=8), {"k": 64}, "fewer than 8 parts"),
        (MatmulSm80(split_k=2), {"m": 70000}, "at most 65535 rows"),
        (MatmulSm80(), {"batch": 70000}, "70000 batches"),
        (STREAMED, {"k": 0}, "nothing to share"),
        (STREAMED, {"m": 2**30, "n": 2**30}, "k-tiles of all tiles"),
        (MatmulSm90(), {"k": 0}, "K = 0"),
        (MatmulSm90(), {"accumulate": f16}, "sums are wanted in f16"),
        (FOUR, {"batch": 2}, "two matrices"),
        (FOUR, {"k": 0}, "at least one tile"),
    ],
)
def test_problems_that_a_kernel_does_not_take(config: MatmulConfig, change: dict[str, Any], says: str) -> None:
    fits = replace(PLAIN, accumulate=config.accumulate)
    assert config.violations(fits) == []
    reasons = config.violations(replace(fits, **change))
    assert any(says in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        (np.ones((64, 64), np.float16), np.ones((64, 9), np.float16), "B's lines do not start at multiples of 16"),
        (np.broadcast_to(np.ones(64, np.float16), (64, 64)), np.ones((64, 64), np.float16), "A's lines overlap"),
    ],
)
def test_lines_that_the_tma_does_not_take(a: Any, b: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        warploom.plan_matmul(a, b, config=TURNS)


@pytest.mark.parametrize("out", [None, f32])
@pytest.mark.parametrize("key", [*EVERY_RUNG, "stream_k"])
def test_the_shared_memory_that_a_configuration_states_is_what_its_kernel_has(key: str, out: Any) -> None:
    config: Any = EVERY_RUNG.get(key, STREAMED)
    assert Case.of_tiles(config, 1, 1, 1, out=out).program.shared_bytes <= config.shared_bytes


# -- the ladder
def test_every_rung_fits_the_oldest_architecture_that_it_names() -> None:
    assert [key for key, config in EVERY_RUNG.items() if config.check(target(config.requires))] == []


@pytest.mark.parametrize("key", EVERY_RUNG)
def test_rungs_are_found_by_key_and_name(key: str) -> None:
    rung = FULL_LADDER.rung(key)
    assert FULL_LADDER.rung(rung.name) is rung
    assert read(str(rung.config), KINDS) == rung.config


def test_each_rung_changes_what_it_says() -> None:
    steps = [rung.config for rung in LADDER.rungs if isinstance(rung.config, RungGemm)]
    changed = [{f.name for f in fields(x) if getattr(x, f.name) != getattr(y, f.name)} for x, y in pairwise(steps)]
    assert changed == [
        {"padding"},
        {"wmma", "padding"},
        {"ldmatrix"},
        {"swizzle"},
        {"stages"},
        {"pipelined"},
        {"block_stride"},
    ]
    assert RUNGS["best16"].accumulate is f16
    assert RUNGS["best32"].accumulate is f32


def test_f32_sums_change_only_what_would_spill() -> None:
    """Rungs 04 and 05 keep their fragments' registers low; the others keep all their flags."""
    for key, config in RUNGS.items():
        summed = summed_in(config, f32)
        lead: dict[str, Any] = {"lead": 8} if key in ("04", "05") else {}
        assert summed == replace(config, accumulate=f32, **lead), key  # type: ignore[type-var]
        assert summed_in(config, config.accumulate) is config, key


def test_swizzles_follow_from_the_tile() -> None:
    """BK = 64 gives <3,4,3> as the seeds derive; for BK = 32 the source bits begin at the bank cycle instead."""
    found = {k: str(Swizzle.for_row_bytes(2 * k)) for k in (16, 32, 64, 128, 256)}
    assert found == {16: "<1,4,3>", 32: "<2,4,3>", 64: "<3,4,3>", 128: "<3,4,4>", 256: "<3,4,5>"}
