"""Stale maxima, sums as a column of P·V, and key blocks that a consumer passes over."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import warploom
from tests.kernels.attention_cases import Case
from warploom.core.dtypes import f16
from warploom.kernels.attention.forward_sm90 import ForwardSm90
from warploom_lab.kernels.attention.ladder_sm90 import RungSm90

STALE = ForwardSm90(head_dim=64, tile_n=64, persistent=False, turns=False)
COLUMN = replace(STALE, sum_column=True)
PERSISTENT = replace(COLUMN, persistent=True, turns=True)
SKIPPING = replace(STALE, skip_masked=True)
LOOKING = RungSm90(head_dim=64, tile_n=64, persistent=False, turns=False)
"""Looks for the maxima of every block."""


@pytest.mark.parametrize(
    "config", [STALE, replace(COLUMN, consumers=1), PERSISTENT, replace(STALE, dtype=f16)], ids=str
)
def test_scores_are_recomputed_only_where_maxima_grew(config: ForwardSm90) -> None:
    """Without growth no warp multiplies by mma.sync; where keys grow in each of five blocks every warp does so once.

    From then on it looks for maxima: four steps of depth and eight key tiles are what one block takes.
    """
    for growth, times in ((1.0, 0), (60.0, 1)):
        outcome = Case.of_blocks(config, 5, growth=growth).run(seed=3)
        assert outcome.fine, outcome
        assert outcome.count("mma.sync") == times * 4 * config.consumers * 4 * config.tile_n // 8


@pytest.mark.parametrize("config", [STALE, COLUMN], ids=str)
def test_one_row_that_outgrows_its_maximum_is_enough(config: ForwardSm90) -> None:
    """Each warp decides for itself: 16 rows of one warp are recomputed, four steps of depth and eight key tiles."""
    case = Case.of_blocks(config, 3)
    q, k, v = case.inputs(5)
    k[0, 70, 0] = 2.5 * q[0, 37, 0].astype(np.float64)  # in the second block visited: 20 for its row, else up to 7
    assert (outcome := case.run(arrays=(q, k, v))).fine, outcome
    assert outcome.count("mma.sync") == 4 * config.tile_n // 8


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("config", [LOOKING, STALE, COLUMN], ids=str)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_is_not_lost(config: ForwardSm90, bad: float) -> None:
    """A key that is NaN makes every row NaN, in whichever block it lies; an infinite one where its score is +inf."""
    case = Case.of_blocks(replace(config, consumers=1), 3)
    for position in (5, 70, 140):
        q, k, v = case.inputs(6)
        k[0, position, 0, 3] = bad
        out = case.run(arrays=(q, k, v)).out[0].astype(np.float64)
        rows = np.isnan(out).all(-1)
        assert (rows == np.isnan(out).any(-1)).all()
        assert (rows == (np.isnan(bad) | (q[0, :, 0, 3].astype(np.float64) > 0))).all()


@pytest.mark.parametrize("config", [STALE, COLUMN], ids=str)
def test_rows_that_have_seen_no_key_yet_take_their_first_block_s_own_maximum(config: ForwardSm90) -> None:
    """The first block visited hides all keys from the first rows, the next none from any: no maximum to go by."""
    n = 2 * config.tile_n
    case = Case(config, n, n, window=(None, config.tile_n - 1))
    q, k, v = case.inputs(7)
    q[0, :, 0] = np.abs(q[0, :, 0])
    k[0, : config.tile_n, 0] = -40 * np.abs(k[0, : config.tile_n, 0])  # far below zero: exp of them would be 0
    assert (outcome := case.run(arrays=(q, k, v))).fine, outcome


def test_sums_of_rounded_weights_divide_exactly() -> None:
    """With V = 1 the output is 1: numerator and denominator are the same sum."""
    case = Case(PERSISTENT, 3 * PERSISTENT.tile_m, 3 * PERSISTENT.tile_n - 8, growth=4.0)
    q, k, v = case.inputs(8)
    assert (case.run(arrays=(q, k, np.ones_like(v))).out.astype(np.float64) == 1.0).all()


def test_log_sum_exp_does_not_come_from_rounded_weights() -> None:
    """A column of P·V holds the sum of bf16 weights, off by up to 2^-9: too far for gradients."""
    q, k, v = Case(PERSISTENT, 100, 200).inputs(9)
    _, lse = warploom.attention(q, k, v, return_lse=True, config=PERSISTENT)
    scores = (q[0, :, 0].astype(np.float64) @ k[0, :, 0].astype(np.float64).T) / 8.0
    assert np.abs(lse[0, 0] - np.log(np.exp(scores).sum(-1))).max() < 1e-5


@pytest.mark.parametrize(
    "config",
    [
        replace(SKIPPING, tile_n=80, q_in_registers=False),
        replace(SKIPPING, persistent=True, turns=True),
        replace(SKIPPING, consumers=3, persistent=True, tile_n=80),
    ],
    ids=str,
)
def test_masked_blocks_are_passed_over(config: ForwardSm90) -> None:
    """Causal and windowed, ragged, with fewer queries than keys and more: right, and fewer products than before."""
    rows = config.tile_m + 64  # two tiles, the second of one consumer
    for q_len, kv_len, window in ((rows - 40, rows + 72, (100, 9)), (rows, 130, (None, 0))):
        assert (outcome := Case(config, q_len, kv_len, window).run(seed=q_len)).fine, outcome
    case = Case(config, rows, rows, (None, 0))
    without = replace(case, config=replace(config, skip_masked=False))
    assert (outcome := case.run()).fine, outcome
    assert outcome.count("wgmma.mma_async") < without.run(checks=False).count("wgmma.mma_async")


def test_only_the_blocks_of_its_own_rows_are_multiplied() -> None:
    """Causal, two tiles of 192 rows and blocks of 64 keys: consumer c of tile t sees 3·t + c + 1 blocks."""
    config = replace(SKIPPING, consumers=3, q_in_registers=False)
    run = Case(config, 2 * config.tile_m, 2 * config.tile_m, (None, 0)).run()
    products = sum(3 * t + c + 1 for t in range(2) for c in range(3)) * (64 // 16 + 64 // 16)
    assert run.count("wgmma.mma_async") in (products, 4 * products), "counted once a warpgroup, or once a warp"
