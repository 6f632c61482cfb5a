"""Options of attention: what soft caps, scales and windows of any size compute."""

import warnings

import numpy as np
import pytest

import warploom
from warploom.core.errors import ConfigError


def arrays(seed=0, length=64):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((1, length, 1, 64)).astype(np.float16) for _ in range(3)]


def test_a_configuration_may_be_given_as_text():
    text = "(FP16, 64, 64, 64, 4): async+swizzled+load_0_0_0_fragments"
    assert str(warploom.plan(*arrays(), config=text).config) == text
    with pytest.raises(ConfigError, match="no flag of attention"):
        warploom.plan(*arrays(), config="(FP16, 64, 64, 64, 4): sparkling")


@pytest.mark.parametrize("cap", [0.5, 20.0, 1e4, 1e8])
def test_softcap_is_exact_for_small_and_large_caps(cap):
    q, k, v = arrays(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = warploom.attention(q, k, v, softcap=cap).astype(np.float64)[0, :, 0]
    q64, k64, v64 = (x.astype(np.float64)[0, :, 0] for x in (q, k, v))
    scores = cap * np.tanh(q64 @ k64.T / 8.0 / cap)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    p = weights / weights.sum(-1, keepdims=True)
    allowed = 2.0**-11 * (np.abs(p @ v64) + p @ np.abs(v64)) + 2.0**-16 * (p @ np.abs(v64))
    assert (np.abs(out - p @ v64) <= allowed).all()


def assert_close(out, q, k, v, scale, seen=None):
    q64, k64, v64 = (x.astype(np.float64)[0, :, 0] for x in (q, k, v))
    scores = scale * (q64 @ k64.T)
    scores = scores if seen is None else np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    p = weights / weights.sum(-1, keepdims=True)
    allowed = 2.0**-11 * (np.abs(p @ v64) + p @ np.abs(v64)) + 2.0**-16 * (p @ np.abs(v64))
    assert (np.abs(out.astype(np.float64)[0, :, 0] - p @ v64) <= allowed).all()


@pytest.mark.filterwarnings("ignore:no GPU")
@pytest.mark.parametrize("scale", [-0.5, 0.0])
@pytest.mark.parametrize("config", [None, "attention_sm90(tile_n=64, head_dim=64, dtype=f16)"])
def test_scales_that_are_not_positive_turn_the_order_of_scores(scale, config):
    """With the scale folded into the exponential the largest score would be the smallest."""
    q, k, v = arrays(3, 100)
    assert_close(warploom.attention(q, k, v, scale=scale, config=config), q, k, v, scale)


@pytest.mark.filterwarnings("ignore:no GPU")
@pytest.mark.parametrize("window", [(2**31 - 1, None), (2**40, 0), [2**31 - 101, 5]])
def test_sides_of_a_window_beyond_all_keys_are_open(window):
    (q, *_), (_, k, v) = arrays(4, 150), arrays(5, 40)
    row, key = np.arange(150)[:, None] + 40 - 150, np.arange(40)[None, :]
    right = 10**6 if window[1] is None else window[1]
    seen = key <= row + right
    out = warploom.attention(q, k, v, window=window)
    rows = seen.any(-1)
    assert (out[0, ~rows] == 0).all()
    assert_close(out[:, rows], q[:, rows], k, v, 0.125, seen[rows])
