"""Configurations: what fits, the seeds' notation, and what the ladder changes from rung to rung."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.gemm_cases import RUNGS
from warploom.core.dtypes import bf16, f16, f32
from warploom.core.errors import ConfigError
from warploom.core.targets import target
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.ladder import LADDER, summed_in
from warploom.layout.swizzle import Swizzle


def test_every_rung_fits_an_a100():
    assert {key: config.check(target("sm_80")) for key, config in RUNGS.items()} == {key: [] for key in RUNGS}


def test_an_odd_number_of_k_steps_is_refused():
    """Two fragment buffers alternate over the k-steps and across tiles."""
    (problem,) = replace(RUNGS["04"], tile_k=16).check()
    assert "even number" in problem
    assert replace(RUNGS["03"], tile_k=16).check() == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"tile_m": 96, "warp_m": 64}, "warp_m"),
        ({"warp_n": 12}, "warp_n"),
        ({"tile_k": 24}, "tile_k"),
        ({"tile_n": 96, "warp_n": 32}, "power of two"),
        ({"tile_m": 192, "warp_m": 64}, "6 warps"),
        ({"dtype": bf16, "accumulate": f16}, "accumulate"),
        ({"stages": 1}, "stages >= 2"),
        ({"ldmatrix": False}, "ldmatrix"),
        ({"stages": 8}, "shared memory"),
        ({"warp_m": 16, "warp_n": 8, "wide_b": True}, "threads"),
        ({"lead": 32}, "less than the 32 mma"),
        ({"lead": -1}, "at least 0"),
        ({"lead": 8, "pipelined": False}, "needs pipelined"),
        ({"warp_n": 8, "warp_m": 128, "wide_b": True}, "multiple of 16"),
        ({"wmma": True}, "no ldmatrix, no swizzle"),
        ({"padding": 8}, "without swizzle"),
        ({"padding": 4, "swizzle": False}, "multiple of 8"),
        ({"tile_m": 16, "warp_m": 16, "tile_n": 256, "warp_n": 32}, "copies per step"),
    ],
)
def test_what_does_not_fit_says_why(change, word):
    config = replace(RUNGS["04"], **change)
    assert any(word in problem for problem in config.check(target("sm_80"))), config.check(target("sm_80"))
    with pytest.raises(ConfigError, match="is no GEMM kernel"):
        config.require(target("sm_80"))


def test_the_seeds_notation():
    config = GemmConfig.parse("BM=128,BN=128,BK=64,WM=64,WN=64,STAGES=3,BLOCK_STRIDE=8")
    assert config == RUNGS["05"], "the words alone mean the seeds' last kernel"
    assert str(config).startswith("BM=128,BN=128,BK=64,WM=64,WN=64,STAGES=3,BLOCK_STRIDE=8,")
    for text in ("BM=128,XX=3", "BM", "BM=abc", "accumulate=f7", "swizzle=maybe", "1=2,="):
        with pytest.raises(ConfigError):
            GemmConfig.parse(text)


@given(st.fixed_dictionaries({f.name: st.sampled_from(f.metadata["choices"]) for f in fields(GemmConfig)}))
def test_notation_round_trip(settings):
    config = GemmConfig(**settings)
    assert GemmConfig.parse(str(config)) == config


@pytest.mark.parametrize("key", RUNGS)
def test_rungs_are_found_by_key_and_name(key):
    rung = LADDER.rung(key)
    assert LADDER.rung(rung.name) is rung
    assert GemmConfig.parse(str(rung.config)) == rung.config


def test_each_rung_changes_what_it_says():
    keys = ["00a", "00b", "01a", "01b", "02", "03", "04", "05", "06", "07"]
    changed = [
        {f.name for f in fields(GemmConfig) if getattr(RUNGS[x], f.name) != getattr(RUNGS[y], f.name)}
        for x, y in pairwise(keys)
    ]
    assert changed == [
        {"padding"}, {"wmma", "padding"}, {"ldmatrix"}, {"swizzle"}, {"stages"}, {"pipelined"}, {"block_stride"},
        {"strided", "wide_b"}, {"tile_n", "tile_k", "stages"},
    ]  # fmt: skip
    assert RUNGS["best16"].accumulate is f16
    assert RUNGS["best32"].accumulate is f32


def test_f32_sums_change_only_what_would_spill():
    """Rungs 04 and 05 keep their fragments' registers low; the others keep all their flags."""
    rolling = [key for key, config in RUNGS.items() if summed_in(config, f32).lead]
    assert rolling == ["04", "05"]
    for key, config in RUNGS.items():
        assert replace(summed_in(config, f32), lead=0) == replace(config, accumulate=f32), key
        assert summed_in(config, config.accumulate) == config, key


def test_swizzles_follow_from_the_tile():
    """BK = 64 gives <3,4,3> as the seeds derive; for BK = 32 the source bits begin at the bank cycle instead."""
    found = {k: str(Swizzle.for_row_bytes(2 * k)) for k in (16, 32, 64, 128, 256)}
    assert found == {16: "<1,4,3>", 32: "<2,4,3>", 64: "<3,4,3>", 128: "<3,4,4>", 256: "<3,4,5>"}
