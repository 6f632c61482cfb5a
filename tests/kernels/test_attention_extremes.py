"""Scores and values at the ends of float32: one answer, whatever the kernel, its tile and the length."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import warploom
from tests.kernels.attention64 import near
from warploom.core.dtypes import DType, bf16, f16
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.attention.problem import AttentionConfig
from warploom.kernels.attention.reference import AttentionReference, attention_reference
from warploom_lab.kernels.attention.ladder import FULL_LADDER
from warploom_lab.kernels.attention.ladder_config import RungSm80

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning")
HEAD_DIM, QUERIES = 64, 16
TILE = 32
WHOLE, RAGGED = (TILE, 3 * TILE), (TILE + 1, 2 * TILE - 5)
"""Counts of keys: whole tiles, and ends within a tile, which the baseline (rung 0) does not take."""
CASES = [
    *((key, bf16) for key in ("0", "1", "10", "best", "h1", "h6", "h8", "h9")),
    *((key, f16) for key in ("1", "h8")),
]
"""Each way through the softmax, of every kernel."""
kernels = pytest.mark.parametrize(("key", "dtype"), CASES, ids=str)


def small(key: str, dtype: DType) -> AttentionConfig:
    """A rung with small tiles, of a type."""
    config: Any = FULL_LADDER.rung(key).config
    config = replace(config, head_dim=HEAD_DIM, dtype=dtype, tile_n=TILE)
    if isinstance(config, RungSm80 | ForwardSm80):
        return replace(config, tile_m=2 * config.warp_rows, num_warps=2)
    return replace(config, consumers=1)


def lengths(key: str, ragged: bool = True) -> tuple[int, ...]:
    return WHOLE + RAGGED if ragged and key != "0" else WHOLE


def numbers(dtype: DType, *shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal((1, *shape, 1, HEAD_DIM), np.float32).astype(dtype.numpy)


def arrays(dtype: DType, keys: int) -> tuple[Any, Any, Any]:
    """Random q, k and v of one head; the first two dimensions of q and k are free: zeros."""
    q, k, v = (numbers(dtype, n, seed=n + i) for i, n in enumerate((QUERIES, keys, keys)))
    q[..., :2], k[..., :2] = 0, 0
    return q, k, v


def run(key: str, dtype: DType, q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """(O, log-sum-exp) in float64, (queries, head_dim) and (queries,); of the ladder's mma.sync no log-sum-exp."""
    config = small(key, dtype)
    with_lse = not isinstance(config, RungSm80)
    if key == "0":
        q = np.concatenate([q] * (config.tile_m // q.shape[1]), 1)
    found: Any = warploom.attention(q, k, v, config=config, return_lse=with_lse, **options)
    out, lse = found if with_lse else (found, None)
    return out[0, :QUERIES, 0].astype(np.float64), None if lse is None else lse[0, 0].astype(np.float64)


def expected(q: Any, k: Any, v: Any, scale: float | None = None) -> AttentionReference:
    """In float64; a row whose scores are all -inf gives 0, one with +inf NaN."""
    return attention_reference(*(x[0, :, 0] for x in (q, k, v)), dtype=bf16, scale=scale)


def check(found: tuple[Any, Any], reference: AttentionReference, dtype: DType, lse_error: float = 1e-5) -> None:
    """Element by element; what is not finite must be so in the reference too."""
    (out, lse), lse64 = found, reference.lse
    np.testing.assert_array_equal(np.isnan(out), np.isnan(reference.output))
    assert near(out, reference, dtype)[~np.isnan(out)].all()
    if lse is not None:
        np.testing.assert_array_equal(lse[~np.isfinite(lse64)], lse64[~np.isfinite(lse64)])
        np.testing.assert_allclose(lse[np.isfinite(lse64)], lse64[np.isfinite(lse64)], rtol=2e-7, atol=lse_error)


LOST, NEVER, ABOVE, BELOW = 5, 6, 2, 9
"""Rows of only +inf, of only -inf, and of scores too far above and below 0."""
FAR = {bf16: 1e30, f16: 60000.0}
"""A number whose product with 60000 is too large a score."""


@kernels
def test_rows_that_are_out_of_the_way(key: str, dtype: DType) -> None:
    """Of -inf, or too far below 0: 0 and -inf. Of +inf, or too large: NaN, and the largest score as the sum."""
    for keys in lengths(key):
        q, k, v = arrays(dtype, keys)
        k[..., 0] = 60000
        q[0, [LOST, NEVER, ABOVE, BELOW], 0, 0] = np.inf, -np.inf, FAR[dtype], -FAR[dtype]
        out, lse = run(key, dtype, q, k, v)
        reference = expected(q, k, v)
        assert (out[NEVER] == 0).all()
        reference.output[ABOVE], reference.lse[BELOW] = np.nan, -np.inf
        reference.output[BELOW] = reference.magnitude[BELOW] = 0
        check((out, lse), reference, dtype)


PLACES = (
    (TILE, slice(0, 1)),
    (3 * TILE, slice(TILE, None)),
    (3 * TILE, slice(0, -TILE)),
    (TILE + 1, slice(-1, None)),
    (2 * TILE - 5, slice(3, None)),
)


@kernels
@pytest.mark.parametrize("infinite", [True, False], ids=["infinite", "far"])
def test_keys_far_away(key: str, dtype: DType, infinite: bool) -> None:
    """Some keys are at +inf (or far) for half the rows: NaN; and at -inf for the others, to whom they do not count."""
    for keys, some in PLACES:
        if keys not in lengths(key):
            continue
        q, k, v = arrays(dtype, keys)
        q[0, :, 0, 0] = np.where(np.arange(QUERIES) % 2, FAR[dtype], -FAR[dtype])
        k[0, some, 0, 0] = np.inf if infinite else 60000
        reference = expected(q, k, v)
        reference.output[1::2] = np.nan
        check(run(key, dtype, q, k, v), reference, dtype)


@kernels
def test_large_values_do_not_overflow(key: str, dtype: DType) -> None:
    most = 3e38 if dtype is bf16 else 6.5e4
    for keys in lengths(key, ragged=False):
        q, k, v = arrays(dtype, keys)
        v[:] = np.sign(v.astype(np.float32)) * most
        v[..., 0] = most
        check(run(key, dtype, q, k, v), expected(q, k, v), dtype)


@kernels
@pytest.mark.parametrize("step", [1, -1])
def test_large_scores_are_exact(key: str, dtype: DType, step: int) -> None:
    """Around 2^22, where a maximum's product with the scale is rounded to whole powers of two: only differences count.

    They grow, or fall, from block to block.
    """
    keys = 3 * TILE
    q, k, v = arrays(dtype, keys)
    q[:], k[:] = 0, 0
    q[0, :, 0, 0], k[..., 0] = 2048, 4096
    q[0, ::5, 0, 0] *= -1
    q[0, :, 0, 1] = np.where(np.arange(QUERIES) % 2, 1, -1) * (1 + np.arange(QUERIES) // 4)
    k[0, :, 0, 1] = np.linspace(0, 12, keys).round()[::step]
    check(run(key, dtype, q, k, v, scale=0.5), expected(q, k, v, 0.5), dtype)


@pytest.mark.parametrize("scale", [1e30, 2e38])
@pytest.mark.parametrize("key", ["1", "best", "h6", "h9"])
def test_a_scale_that_makes_every_score_too_large(key: str, scale: float) -> None:
    for keys in (TILE, TILE + 1):
        q, k, v = arrays(bf16, keys)
        out, lse = run(key, bf16, q, k, v, scale=scale)
        assert np.isnan(out).all()
        most = (q[0, :, 0].astype(np.float64) @ k[0, :, 0].astype(np.float64).T).max(-1) * scale
        if lse is not None:
            np.testing.assert_allclose(lse, most.astype(np.float32), rtol=1e-5)


@pytest.mark.parametrize("window", [(None, 0), (40, None)])
@pytest.mark.parametrize("key", ["1", "best", "h6", "h9"])
def test_masks_beside_rows_of_minus_infinity(key: str, window: tuple[int | None, int | None]) -> None:
    q, k, v = arrays(bf16, QUERIES - 2)  # the first two queries see no key under the causal mask
    k[..., 0] = 1
    q[0, 5, 0, 0] = -np.inf
    nothing = [0, 1, 5] if window[1] == 0 else [5]
    out, lse = run(key, bf16, q, k, v, window=window)
    assert (out[nothing] == 0).all()
    if lse is not None:
        assert np.isneginf(lse[nothing]).all()
        assert np.isfinite(np.delete(lse, nothing)).all()
