# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Findings between CTAs: the defect planted, and its clean twin."""

from __future__ import annotations

import pytest

from tests.emulate.findings import numbers
from warploom.emulate import emulate
from warploom.lang import Global, Kernel, kernel
from warploom.lang import u32 as U32  # noqa: N812


@kernel(threads=32)
def own_places(k: Kernel, out: Global[U32]) -> None:
    """Each CTA begins to write its own words a turn after the one before it, and goes on."""
    with k.loop(3) as turn, k.when(turn >= k.cta_x, uniform=True):
        out.store(turn, k.cta_x * 32 + k.lane)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_words_that_nobody_wrote_race_with_nobody(seed: int | None) -> None:
    out = numbers(96)
    assert emulate(own_places.trace(), 3, [out], seed=seed).findings == ()
    assert (out == 2).all()
