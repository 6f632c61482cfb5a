"""``attention`` with few queries on many keys: the kernels of decode, where the chooser takes them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import warploom
from tests.kernels.attention64 import is_right
from warploom.core.errors import ConfigError
from warploom.kernels.attention.decode import Decode


@pytest.mark.parametrize(("q_len", "kv_len", "layout"), [(1, 700, "bshd"), (3, 513, "bhsd")])
def test_few_queries_are_right(q_len: int, kv_len: int, layout: str) -> None:
    numbers = np.random.default_rng(q_len)
    q, k, v = (
        numbers.standard_normal((2, n, heads, 64)).astype(ml_dtypes.bfloat16)
        for n, heads in ((q_len, 4), (kv_len, 2), (kv_len, 2))
    )
    given = [x if layout == "bshd" else x.swapaxes(1, 2) for x in (q, k, v)]
    options = {"window": (600, 0), "layout": layout, "return_lse": True}
    plan = warploom.plan(*given, **options)
    assert isinstance(plan.config, Decode)
    assert warploom.plan(*given, **options, config=str(plan.config)).calls == plan.calls
    out, lse = warploom.attention(*given, **options)
    _, logs = warploom.attention(*given, **options, config="attention_sm80(head_dim=64)")
    assert np.abs(lse - logs).max() <= 1e-4
    out = out if layout == "bshd" else out.swapaxes(1, 2)
    assert all(is_right(out[i], q[i], k[i], v[i], window=(600, 0)) for i in range(2))


def test_lengths_and_batches_share_kernels() -> None:
    sources = set()
    for batch, kv_len in ((1, 512), (3, 1000), (70, 8191)):
        q, k = np.zeros((batch, 1, 4, 64), np.float16), np.zeros((1, 1, 1, 64), np.float16)
        k = np.lib.stride_tricks.as_strided(k, (batch, kv_len, 1, 64), (0, 128, 128, 2))
        sources |= {call.source for call in warploom.plan(q, k, k).calls}
    assert len(sources) == 2


def test_another_head_dim_of_values_has_another_kernel() -> None:
    q, k, v = (np.ones((1, n, 2, d), np.float16) for n, d in ((1, 64), (600, 64), (600, 32)))
    plan = warploom.plan(q, k, v)
    assert not isinstance(plan.config, Decode)
    assert np.array_equal(warploom.attention(q, k, v), np.ones((1, 1, 2, 32)))
    with pytest.raises(ConfigError, match="v has head_dim 32"):
        warploom.attention(q, k, v, config="attention_decode(head_dim=64, dtype=f16)")
