"""Attention on the emulator: every rung is right and clean, and its traffic is what the hardware counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels.attention_cases import RUNGS, Case, Outcome
from warploom.core.dtypes import f16
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom.kernels.attention.problem import AttentionConfig
from warploom_lab.kernels.attention.ladder_config import RungSm80

KEYS = list(RUNGS)


def _fine(config: AttentionConfig, count: int) -> Outcome:
    """The outcome of so many blocks of keys for a tile of queries, or of one block for two tiles."""
    assert config.check() == []
    outcome = Case.of_blocks(config, count, q_blocks=2 if count == 1 else 1).run()
    assert outcome.fine, f"{config}, {count} blocks: {outcome}"
    return outcome


@pytest.mark.parametrize("key", KEYS)
def test_one_and_three_blocks(key: str) -> None:
    for count in (1, 3):
        _fine(replace(RUNGS[key], head_dim=64, dtype=f16), count)  # type: ignore[type-var]


@pytest.mark.parametrize("key", KEYS)
def test_two_blocks_and_no_conflicts_where_tiles_are_swizzled(key: str) -> None:
    shared = _fine(RUNGS[key], 2).emulation.traffic.shared
    excess = {kind: w.actual / w.ideal for kind, w in shared.items() if w.ideal}
    if getattr(RUNGS[key], "swizzle", True):
        assert max(excess.values()) == 1.0, excess
    else:
        assert excess["ldmatrix"] == 8.0


@pytest.mark.parametrize("key", KEYS)
def test_other_tiles(key: str) -> None:
    for tile_n in (16, 128):
        config: Any = replace(RUNGS[key], tile_m=64, num_warps=4, tile_n=tile_n, head_dim=64)  # type: ignore[type-var]
        if not config.check():
            _fine(config, 2)
    if RUNGS[key].tile_m != 128:
        _fine(replace(RUNGS[key], tile_m=128, num_warps=4, head_dim=64), 2)  # type: ignore[type-var]


@pytest.mark.parametrize("key", ["1", "16"])
def test_heads_may_come_first_in_the_grid(key: str) -> None:
    base = replace(RUNGS[key], tile_m=64, num_warps=4, head_dim=64)  # type: ignore[type-var]
    first, second = (Case(c, 150, 130, heads=3) for c in (base, replace(base, heads_first=True)))  # type: ignore[type-var]
    assert (first.call.grid, second.call.grid) == ((3, 3, 1), (3, 3, 1))
    assert second.run().fine
    wide = Case(second.config, 300, 130, heads=2)
    assert wide.call.grid == (2, 5, 1)
    assert wide.run().fine
    assert any("heads_first" in text for text in second.config.violations(replace(first.problem, window=(None, 0))))


FLAGS = [
    {"async_copy": False},
    {"backward": True},
    {"block_index": True},
    {"peel": True},
    {"cooperative": True},
    {"head_dim_panels": True},
    {"static_strides": True},
    {"output_hint": True},
    {"folded_scale": True},
    {"load_q": 2, "load_k": 2, "load_v": 2, "double_buffer": True},
    {"strided": True, "strided_epilogue": True, "k_row_major": True},
    {"eager": True, "cooperative": True, "peel": True, "backward": True},
]


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags))
@pytest.mark.parametrize("swizzle", [False, True])
def test_each_flag_alone(flags: dict[str, Any], swizzle: bool) -> None:
    """On the base and on the swizzled kernel, whether or not a rung combines them so."""
    head_dim = 128 if "head_dim_panels" in flags else 64
    for count in (1, 3):
        _fine(replace(RungSm80(head_dim=head_dim), swizzle=swizzle, **flags), count)


@pytest.mark.parametrize(("head_dim", "stages"), [(8, 2), (72, 3), (80, 2), (96, 3), (192, 2), (256, 3)])
def test_every_width_of_the_production_kernel(head_dim: int, stages: int) -> None:
    """Causal, with ragged ends, and keys that grow from block to block."""
    tile_n = 64 if head_dim == 8 else 32  # the rows of 16 columns that 128 threads copy at once
    config = ForwardSm80(tile_m=64, tile_n=tile_n, num_warps=4, stages=stages, head_dim=head_dim)
    assert config.check() == []
    assert (outcome := Case(config, 72, 136, (None, 0), growth=8.0).run()).fine, outcome


APART = [
    ForwardSm90(head_dim=192, v_dim=128, tile_n=128, persistent=False, q_in_registers=False),
    ForwardSm90(head_dim=128, v_dim=64, tile_n=64, sum_column=True),
    ForwardSm90(head_dim=16, v_dim=72, tile_n=64),
    ForwardSm80(tile_m=64, num_warps=4, tile_n=32, head_dim=192, v_dim=128),
    ForwardSm80(tile_m=64, num_warps=4, tile_n=64, head_dim=8, v_dim=136),
    ForwardSm80(tile_m=64, num_warps=4, tile_n=16, head_dim=160, v_dim=80),
]


@pytest.mark.parametrize("config", APART, ids=str)
def test_values_with_a_head_dim_of_their_own(config: AttentionConfig) -> None:
    assert config.check() == []
    assert (outcome := Case(config, 72, 136, (None, 0), growth=8.0, ctas=1).run()).fine, outcome
    assert type(config).parse(str(config)) == config  # type: ignore[attr-defined]


TRAFFIC = {
    # Nsight Compute's counters at (64, 64, 4 warps), head_dim 128, 256 queries and keys, one head, four CTAs.
    "1": {"ldmatrix": (135168, 16896), "st.shared": (4096, 512), "ld.shared": (512, 512), "cp.async": (4608, 4608)},
    "2": {"ldmatrix": (16896, 16896), "st.shared": (512, 512), "ld.shared": (512, 512), "cp.async": (4608, 4608)},
}


@pytest.mark.parametrize("key", TRAFFIC)
def test_wavefronts_equal_the_hardware_counters(key: str) -> None:
    outcome = Case.of_blocks(RUNGS[key], 4, q_blocks=4).run()
    traffic = outcome.emulation.traffic
    counted = {kind: (w.actual, w.ideal) for kind, w in traffic.shared.items()}
    assert {kind: counted[kind] for kind in TRAFFIC[key]} == TRAFFIC[key]
    assert outcome.count("mma.sync") == 8192
    by_line = sum(w.actual for (_, name), w in traffic.lines.items() if name == "ldmatrix")
    assert by_line == TRAFFIC[key]["ldmatrix"][0]


@pytest.mark.parametrize("key", ["1", "best"])
def test_any_order_of_warps_and_no_checks_give_the_same_bits(key: str) -> None:
    case = Case.of_blocks(RUNGS[key], 3)
    arrays = case.inputs(0)
    expected = case.run(arrays=arrays).out.view(np.uint16)
    ways: list[dict[str, Any]] = [{"seed": 0}, {"seed": 1}, {"checks": False}]
    for how in ways:
        outcome = case.run(arrays=arrays, **how)
        assert outcome.fine, outcome
        assert np.array_equal(outcome.out.view(np.uint16), expected)


@pytest.mark.parametrize("key", ["2", "best"])
def test_a_nan_in_v_reaches_its_column_alone(key: str) -> None:
    case = Case.of_blocks(replace(RUNGS[key], head_dim=64), 1)  # type: ignore[type-var]
    q, k, v = case.inputs(0)
    v[0, 3, 0, 5] = np.nan
    out = case.run(arrays=(q, k, v)).out[0].astype(np.float32)
    assert np.isnan(out[:, 5]).all()
    assert np.isfinite(np.delete(out, 5, axis=1)).all()
