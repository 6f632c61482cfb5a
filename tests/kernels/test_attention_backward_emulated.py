"""The backward kernels of attention on the emulator: every element against float64, and no finding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.kernels.attention_cases import changed
from tests.kernels.gradient_cases import GradientCase
from warploom.core.dtypes import bf16, f16
from warploom.core.targets import target
from warploom.kernels.attention.backward_choice import choose
from warploom.kernels.attention.backward_shares import WGMMA_RATE, HeadShares
from warploom.kernels.attention.backward_sm80 import BackwardSm80
from warploom.kernels.attention.backward_sm90 import BackwardSm90
from warploom.kernels.attention.backward_wide import BackwardWideSm90
from warploom.kernels.attention.problem import AttentionProblem, BackwardProblem, Even

SM80 = BackwardSm80(head_dim=64, num_warps=4)
GROUPS = BackwardSm80()
SM90 = BackwardSm90(head_dim=64)
CAUSAL = (None, 0)

ROLES = BackwardWideSm90(head_dim=136)
CASES = {
    "wide plain": GradientCase(replace(ROLES, tile_n=64, stages=3, held=6), 70, 100),
    "wide causal": GradientCase(ROLES, 150, 130, CAUSAL),
    "wide groups": GradientCase(replace(ROLES, tile_m=32), 100, 90, (40, 20), (2, 1)),
    "wide keys nobody sees": GradientCase(replace(ROLES, stages=3, held=6), 40, 200, (10, 0)),
    "wide soft cap": GradientCase(
        replace(ROLES, head_dim=192, dtype=f16), 70, 90, CAUSAL, softcap=3.0, lse_gradient=True, layout="bhsd"
    ),
    "wide 256": GradientCase(replace(ROLES, head_dim=256, held_queries=6), 70, 70, scale=-0.1),
    "sm_90 scale": GradientCase(SM90, 150, 200, scale=-0.3),
    "sm_90 wide blocks": GradientCase(replace(SM90, tile_m=128), 300, 200),
    "sm_90 in turn": GradientCase(replace(SM90, tile_m=128, in_turn=True), 200, 200),
    "sm_90 causal": GradientCase(SM90, 150, 150, CAUSAL, (2, 2)),
    "sm_90 more queries than keys": GradientCase(SM90, 300, 140, CAUSAL),
    "sm_90 fewer queries than keys": GradientCase(SM90, 70, 300, CAUSAL),
    "sm_90 window": GradientCase(SM90, 260, 300, (40, 20)),
    "sm_90 keys nobody sees": GradientCase(SM90, 64, 400, (10, 0)),
    "sm_90 left side alone": GradientCase(SM90, 130, 300, (10, None)),
    "sm_90 groups": GradientCase(replace(SM90, dtype=f16), 60, 100, CAUSAL, (4, 2), batch=2, layout="bhsd"),
    "sm_90 heads in turn": GradientCase(replace(SM90, by_heads=True, side_by_side=1), 70, 150, CAUSAL, (2, 1), batch=2),
    "sm_90 tile after tile": GradientCase(
        replace(SM90, head_dim=88, persistent=True, alternating=True, rising=True), 70, 300, CAUSAL, (2, 1), batch=2
    ),
    "sm_90 tiles nobody sees": GradientCase(replace(SM90, head_dim=8, persistent=True), 40, 400, (10, 0), batch=2),
    "sm_90 soft cap": GradientCase(SM90, 130, 130, CAUSAL, softcap=3.0, lse_gradient=True),
    "wide 192 and 128": GradientCase(replace(ROLES, head_dim=192, v_dim=128, tile_n=64, stages=3), 200, 90),
    "wide 136 and 40": GradientCase(replace(ROLES, v_dim=40, held=6), 70, 70, lse_gradient=True, heads=(2, 1)),
    "wide 24 and 136": GradientCase(replace(ROLES, head_dim=24, v_dim=136, held_queries=6), 70, 70),
    "sm_90 128 and 64": GradientCase(BackwardSm90(head_dim=128, v_dim=64), 130, 150, CAUSAL),
    "sm_90 40 and 128": GradientCase(replace(SM90, head_dim=40, v_dim=128), 70, 130, heads=(2, 1)),
    "sm_90 sinks": GradientCase(SM90, 100, 90, CAUSAL, (2, 1), batch=2, softcap=3.0, lse_gradient=True, sinks=True),
    "sm_90 128": GradientCase(BackwardSm90(), 130, 200),
    "sm_90 80 rows": GradientCase(BackwardSm90(tile_m=80), 170, 130, CAUSAL),
    "sm_90 96": GradientCase(BackwardSm90(tile_m=96, head_dim=96, rising=True), 150, 130, CAUSAL),
    "sm_90 72 and 120": GradientCase(BackwardSm90(head_dim=72, v_dim=120, alternating=True), 130, 130, (40, 20)),
    "sm_90 40": GradientCase(replace(SM90, head_dim=40), 70, 130),
    "sm_90 8": GradientCase(replace(SM90, head_dim=8), 70, 130),
    "sm_80 scale": GradientCase(SM80, 150, 200, heads=(2, 2), scale=-0.3),
    "sm_80 16 keys a warp": GradientCase(BackwardSm80(head_dim=64, warp_keys=16), 100, 150, CAUSAL),
    "sm_80 in turn": GradientCase(replace(SM80, in_turn=True), 150, 130, CAUSAL),
    "sm_80 more queries than keys": GradientCase(SM80, 300, 140, CAUSAL),
    "sm_80 window": GradientCase(SM80, 260, 300, (40, 20)),
    "sm_80 keys nobody sees": GradientCase(SM80, 64, 400, (10, 0)),
    "sm_80 groups": GradientCase(replace(SM80, dtype=f16), 60, 100, CAUSAL, (4, 2), batch=2, layout="bhsd"),
    "sm_80 soft cap": GradientCase(SM80, 130, 130, CAUSAL, softcap=3.0, lse_gradient=True),
    "sm_80 192 and 128": GradientCase(replace(GROUPS, head_dim=192, v_dim=128, in_turn=True), 40, 100, CAUSAL),
    "sm_80 16 and 136": GradientCase(replace(GROUPS, head_dim=16, v_dim=136), 40, 70),
    "sm_80 96 and 40": GradientCase(replace(GROUPS, head_dim=96, v_dim=40), 70, 130, heads=(2, 1)),
    "sm_80 sinks": GradientCase(replace(SM80, dtype=f16), 100, 100, (40, 20), (4, 2), layout="bhsd", sinks=True),
    "sm_80 8": GradientCase(replace(SM80, head_dim=8), 70, 130),
    "sm_80 96": GradientCase(replace(GROUPS, head_dim=96), 130, 130),
    "sm_80 128": GradientCase(GROUPS, 130, 200),
    "sm_80 136": GradientCase(replace(GROUPS, head_dim=136, in_turn=True), 40, 100),
    "sm_80 192": GradientCase(replace(GROUPS, head_dim=192, held=3), 70, 130),
    "sm_80 256": GradientCase(replace(GROUPS, head_dim=256), 40, 100, CAUSAL),
    "sm_80 256 in 163 KiB": GradientCase(replace(GROUPS, head_dim=256, warp_keys=16, tile_m=32), 40, 70),
    "sm_80 256 in 99 KiB": GradientCase(
        replace(GROUPS, head_dim=256, warp_keys=16, tile_m=16, num_warps=4), 40, 70, CAUSAL
    ),
}


SHARED = {
    "sm_90": GradientCase(SM90, 150, 200, CAUSAL, (4, 2), batch=2, layout="bhsd"),
    "sm_90 of two heads": GradientCase(replace(SM90, tile_m=128, side_by_side=1), 150, 260, (40, 20), (6, 1)),
    "sm_90 heads in turn": GradientCase(replace(SM90, by_heads=True, dtype=f16), 250, 150, CAUSAL, (4, 1), batch=2),
    "sm_90 in turn": GradientCase(replace(SM90, in_turn=True), 100, 150, CAUSAL, (3, 1), sinks=True),
    "sm_90 keys nobody sees": GradientCase(replace(SM90, head_dim=40, v_dim=88), 64, 400, (10, 0), (4, 1)),
    "sm_90 96": GradientCase(BackwardSm90(tile_m=96, head_dim=96), 200, 130, (None, None), (2, 1)),
    "sm_90 128": GradientCase(BackwardSm90(dtype=f16), 130, 200, CAUSAL, (2, 1), softcap=3.0),
    "sm_80": GradientCase(SM80, 150, 200, CAUSAL, (4, 2), batch=2, layout="bhsd"),
    "sm_80 of two heads": GradientCase(replace(SM80, in_turn=True), 100, 130, (40, 20), (4, 1), sinks=True),
    "sm_80 136 and 40": GradientCase(replace(GROUPS, head_dim=136, v_dim=40, dtype=f16), 60, 100, CAUSAL, (2, 1)),
    "wide 192 and 128": GradientCase(replace(ROLES, head_dim=192, v_dim=128), 150, 90, CAUSAL, (4, 1), batch=2),
    "wide 256": GradientCase(replace(ROLES, head_dim=256, dtype=f16), 130, 70, (40, 20), (2, 1), lse_gradient=True),
}
"""CTAs share the query heads of a key head."""


@pytest.mark.parametrize("name", SHARED)
def test_shares_of_query_heads_add_up(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, heads = SHARED[name], 2 if name.endswith("two heads") else 1
    monkeypatch.setattr(
        HeadShares, "of", lambda problem, tile, *_, **__: HeadShares(problem.forward.group, heads, tile)
    )
    assert any({"dk", "dv", "shares"} == {*call.arrays} for call in case.calls)
    first, second = case.run(), case.run(seed=1)
    for outcome in (first, second):
        assert outcome.findings == ()
        assert max(outcome.excess.values()) <= 1.0, outcome.excess
    for a, b in zip(first.gradients[1:3], second.gradients[1:3], strict=True):
        np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


MANY = AttentionProblem(2, 48, 1, Even(4096, 4096), 128, bf16, window=CAUSAL)


@pytest.mark.parametrize(
    ("change", "heads"),
    [
        ({}, 4),
        ({"kv_heads": 48}, 1),
        ({"heads": 8}, 2),
        ({"heads": 8, "batch": 1}, 1),
        ({"heads": 64, "kv_heads": 8, "batch": 4}, 8),
        ({"heads": 64, "kv_heads": 8, "batch": 4, "window": (None, None)}, 8),
        ({"heads": 28, "kv_heads": 4, "batch": 1}, 1),
        ({"q_len": 8, "heads": 8}, 8),
    ],
    ids=str,
)
def test_heads_are_shared_where_tiles_of_keys_do_not_fill_the_gpu(change: dict[str, Any], heads: int) -> None:
    problem = BackwardProblem(changed(MANY, **change))
    assert HeadShares.of(problem, (64, 128), 132, rate=WGMMA_RATE).heads == heads
    group = problem.forward.group
    assert HeadShares.of(problem, (64, 128), 132, rate=WGMMA_RATE, whole=True).heads == group
    assert HeadShares.of(problem, (64, 128), 1, rate=WGMMA_RATE).heads == group


@pytest.mark.parametrize("name", CASES)
def test_every_element_is_right(name: str) -> None:
    """The causal ones in an adversarial order of the warps."""
    outcome = CASES[name].run(seed=0 if CASES[name].window == CAUSAL else None)
    assert outcome.findings == ()
    assert max(outcome.excess.values()) <= 1.0, outcome.excess


IN_TURN = {
    "sm_80": GradientCase(replace(SM80, in_turn=True, warp_keys=16, tile_m=32), 40, 150),
    "sm_90": GradientCase(replace(SM90, in_turn=True), 70, 300),
    "sm_90 tile after tile": GradientCase(
        replace(SM90, head_dim=8, tile_m=32, in_turn=True, persistent=True, alternating=True), 40, 500
    ),
}
"""Three CTAs or more add to each block of two or more."""


@pytest.mark.parametrize("name", IN_TURN)
@pytest.mark.parametrize("window", [CAUSAL, (70, 30)], ids=str)
def test_sums_in_turn_have_equal_bits_in_any_order(name: str, window: tuple[int | None, int | None]) -> None:
    case = replace(IN_TURN[name], window=window)
    first, *others = [case.run(seed) for seed in (None, 1, 2)]
    for other in others:
        assert other.fine
        for a, b in zip(first.gradients, other.gradients, strict=True):
            np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


@pytest.mark.parametrize("config", [SM80, SM90], ids=["sm_80", "sm_90"])
def test_rows_without_keys_and_keys_without_rows_have_zeros(config: BackwardSm80 | BackwardSm90) -> None:
    case = GradientCase(config, 200, 60, CAUSAL)
    outcome = case.run()
    assert outcome.fine
    dq, _, _ = outcome.gradients
    assert not dq[..., :140, :].any()
    assert dq[..., 140:, :].all(axis=-1).any()
    unseen = GradientCase(config, 10, 200, (3, 0)).run()
    assert unseen.fine
    for x in unseen.gradients[1:]:
        assert not x[..., :187, :].any()
        assert x[..., 187:, :].any(axis=-1).all()


SHORT = AttentionProblem(32, 32, 32, Even(512, 512), 64, bf16, window=CAUSAL)


@pytest.mark.parametrize(
    ("change", "persistent"),
    [
        ({}, True),
        ({"batch": 1}, False),
        ({"q_len": 16384, "kv_len": 16384}, False),
        ({"kv_heads": 2}, False),
        ({"head_dim": 96}, True),
        ({"head_dim": 96, "q_len": 4096, "kv_len": 4096}, False),
        ({"head_dim": 128}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_many_short_tiles_of_narrow_heads_share_ctas(
    change: dict[str, Any], persistent: bool, deterministic: bool
) -> None:
    config, _ = choose(BackwardProblem(changed(SHORT, **change), False, deterministic), target("sm_90a"))
    assert isinstance(config, BackwardSm90)
    assert config.persistent == persistent


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("in_turn", [False, True])
def test_ctas_that_wait_for_those_behind_them_run_at_one_time(persistent: bool, in_turn: bool) -> None:
    case = GradientCase(replace(SM90, persistent=persistent, in_turn=in_turn), 70, 300)
    products = next(call for call in case.calls if {"q", "dk"} <= {*call.arrays})
    assert products.at_once == (persistent and in_turn)


FEATURES: dict[str, list[Any]] = {
    "window": [(None, None), CAUSAL, (None, 3), (50, None), (20, 40)],
    "softcap": [None, None, 2.0],
}


@pytest.mark.parametrize("seed", range(6))
def test_random_problems(seed: int) -> None:
    draw = np.random.default_rng(seed)
    kind = ("sm_80", "sm_90", "wide")[seed % 3]
    head_dim = 8 * int(draw.integers(1, {"sm_80": 33, "sm_90": 17, "wide": 25}[kind]))
    dtype = f16 if draw.random() < 0.5 else SM80.dtype
    in_turn = bool(draw.random() < 0.5)
    tile_m = 32 if head_dim > 128 else int(draw.choice([32, 64]))
    keys = int(draw.choice([16, 32]))
    config = {
        "sm_80": BackwardSm80(head_dim=head_dim, dtype=dtype, in_turn=in_turn, tile_m=tile_m, warp_keys=keys),
        "sm_90": BackwardSm90(head_dim=min(head_dim, 128), dtype=dtype, in_turn=in_turn),
        "wide": BackwardWideSm90(
            head_dim=head_dim, dtype=dtype, tile_m=tile_m, stages=2 + seed // 3, held=seed // 3, side_by_side=1
        ),
    }[kind]
    kv_heads, group = int(draw.integers(1, 3)), int(draw.integers(1, 3))
    q_len, kv_len = (int(n) for n in draw.integers(1, 110, 2))
    window, softcap = FEATURES["window"][draw.integers(5)], FEATURES["softcap"][draw.integers(3)]
    case = GradientCase(
        config,
        q_len,
        kv_len,
        window,
        (kv_heads * group, kv_heads),
        softcap=softcap,
        lse_gradient=bool(draw.random() < 0.5),
        layout=str(draw.choice(["bshd", "bhsd"])),
        sinks=bool(seed % 2),
    )
    outcome = case.run(seed)
    assert outcome.findings == (), case
    assert max(outcome.excess.values()) <= 1.0, (case, outcome.excess)


@pytest.mark.parametrize("name", ["sm_80", "sm_86", "sm_100a"])
def test_every_head_dim_fits_without_wgmma(name: str) -> None:
    for head_dim in range(8, 257, 8):
        for v_dim in (8, 72, 128, 192, 256):
            config, _ = choose(BackwardProblem(replace(SHORT, head_dim=head_dim, v_dim=v_dim)), target(name))
            assert isinstance(config, BackwardSm80)


def test_wide_heads_run_on_wgmma_whatever_the_head_dim_of_v() -> None:
    for head_dim in range(8, 257, 8):
        for v_dim in (8, 64, 128, 136, 192, 200, 256):
            forward = replace(SHORT, head_dim=head_dim, v_dim=v_dim, softcap=3.0)
            config, _ = choose(BackwardProblem(forward, deterministic=True), target("sm_90a"))
            assert isinstance(config, BackwardWideSm90 if max(head_dim, v_dim) > 128 else BackwardSm90)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"stages": 1}, "at least 2"),
        ({"held": 12}, "registers"),
        ({"held_queries": 8}, "registers"),
        ({"stages": 3}, "shared memory"),
    ],
    ids=str,
)
def test_what_a_wide_configuration_cannot_hold_is_said(change: dict[str, Any], says: str) -> None:
    found = replace(BackwardWideSm90(), **change).check(target("sm_90a"))
    assert found
    assert says in found[0]
