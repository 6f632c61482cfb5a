"""Attention on the emulator: every rung is right and clean, and its traffic is what the hardware counts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.attention_cases import RUNGS, inputs, run
from warploom.core.dtypes import bf16, f16
from warploom.kernels.attention.config import AttentionConfig

KEYS = list(RUNGS)


def _assert_fine(config: AttentionConfig, kv_blocks: int, **options) -> None:
    outcome = run(config, kv_blocks, **options)
    assert outcome.emulation.findings == (), "\n".join(map(str, outcome.emulation.findings))
    assert outcome.error.ok, outcome.error


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_one_two_and_three_blocks(key, head_dim, dtype):
    config = replace(RUNGS[key], head_dim=head_dim, dtype=dtype)
    for kv_blocks in (1, 2, 3):
        _assert_fine(config, kv_blocks, q_blocks=1 + kv_blocks % 2)


@pytest.mark.parametrize("key", KEYS)
def test_other_tiles(key):
    for tile_n in (16, 32, 128):
        config = replace(RUNGS[key], tile_m=64, num_warps=4, tile_n=tile_n, head_dim=64)
        if not config.check():
            _assert_fine(config, 2)
    _assert_fine(replace(RUNGS[key], tile_m=128, num_warps=4, head_dim=64), 2)


FLAGS = [
    {"async_copy": False},
    {"backward": True},
    {"block_index": True},
    {"peel": True},
    {"cooperative": True},
    {"head_dim_panels": True},
    {"static_strides": True},
    {"output_hint": True},
    {"folded_scale": True, "lazy_rescale": True},
    {"load_q": 2, "load_k": 2, "load_v": 2, "double_buffer": True},
    {"strided": True, "strided_epilogue": True, "k_row_major": True},
    {"eager": True, "cooperative": True, "peel": True, "backward": True},
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags))
@pytest.mark.parametrize("swizzle", [False, True])
def test_each_flag_alone(flags, swizzle):
    """On the base and on the swizzled kernel, whether or not a rung combines them so."""
    config = replace(AttentionConfig(), swizzle=swizzle, **flags)
    assert config.check() == []
    for kv_blocks in (1, 3):
        _assert_fine(config, kv_blocks)


TRAFFIC = {
    # Nsight Compute's counters at (64, 64, 4 warps), head_dim 128, 256 queries and keys, one head, four CTAs.
    "1": {"ldmatrix": (135168, 16896), "st.shared": (4096, 512), "ld.shared": (512, 512), "cp.async": (4608, 4608)},
    "2": {"ldmatrix": (16896, 16896), "st.shared": (512, 512), "ld.shared": (512, 512), "cp.async": (4608, 4608)},
}


@pytest.mark.parametrize("key", TRAFFIC)
def test_wavefronts_equal_the_hardware_counters(key):
    outcome = run(RUNGS[key], 4, q_blocks=4)
    counted = {kind: (w.actual, w.ideal) for kind, w in outcome.emulation.traffic.shared.items()}
    assert {kind: counted[kind] for kind in TRAFFIC[key]} == TRAFFIC[key]
    executed = outcome.emulation.executed
    assert sum(n for name, n in executed.items() if name.startswith("mma.sync")) == 8192


@pytest.mark.parametrize("key", KEYS)
def test_swizzled_rungs_have_no_conflicts(key):
    outcome = run(RUNGS[key], 2)
    excess = {kind: w.actual / w.ideal for kind, w in outcome.emulation.traffic.shared.items() if w.ideal}
    if RUNGS[key].swizzle:
        assert max(excess.values()) == 1.0, excess
    else:
        assert excess["ldmatrix"] == 8.0


@pytest.mark.parametrize("key", ["1", "best"])
def test_warps_in_any_order_give_the_same_bits(key):
    expected = run(RUNGS[key], 3).output.view(np.uint16)
    for seed in range(3):
        outcome = run(RUNGS[key], 3, seed=seed)
        assert outcome.emulation.findings == ()
        assert np.array_equal(outcome.output.view(np.uint16), expected)


def test_a_nan_in_v_reaches_its_column_alone():
    config = replace(RUNGS["2"], head_dim=64)
    v = inputs(64, 64, 64, bf16)[2]
    saved = v[3, 5]
    try:
        v[3, 5] = np.float32(np.nan)
        out = run(config, 1).output.astype(np.float32)
    finally:
        v[3, 5] = saved
    assert np.isnan(out[:, 5]).all()
    assert np.isfinite(np.delete(out, 5, axis=1)).all()
