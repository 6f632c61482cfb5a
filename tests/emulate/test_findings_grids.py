# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Findings between CTAs: the defect planted, and its clean twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulate.findings import kinds, numbers
from warploom.emulate import Emulation, emulate
from warploom.lang import Global, Kernel, kernel
from warploom.lang import f32 as F32  # noqa: N812
from warploom.lang import u32 as U32  # noqa: N812


@kernel(threads=32)
def grid_store(k: Kernel, out: Global[U32], *, own: bool) -> None:
    index = k.cta_x * 32 + k.thread if own else k.thread
    out.store([k.cta_x], index)


@kernel(threads=32)
def grid_sum(k: Kernel, out: Global[F32], *, atomic: bool) -> None:
    if atomic:
        k.atomic("add", out, k.value(1.0, F32))
    else:
        with k.when(k.thread == 0):
            out.store([out.load(0) + 1.0], 0)


def test_races_between_ctas() -> None:
    assert emulate(grid_store.trace(own=True), 4, [numbers(128)]).findings == ()
    (race,) = emulate(grid_store.trace(own=False), 4, [numbers(128)]).findings
    assert race.kind == "race"
    total = np.zeros(1, np.float32)
    assert emulate(grid_sum.trace(atomic=True), 4, [total]).findings == ()
    assert total[0] == 128
    assert kinds(emulate(grid_sum.trace(atomic=False), 4, [total])) == {"race"}


@kernel(threads=64)
def last_cta_sums(
    k: Kernel, parts: Global[U32], count: Global[U32], out: Global[U32], *, fence: bool, barrier: bool
) -> None:
    """Every CTA leaves its part; the last one to arrive adds them up."""
    flag = k.shared(U32, 1)
    parts.store([k.thread + 100 * k.cta_x], k.cta_x * 64 + k.thread)
    if barrier:
        k.syncthreads()
    with k.when(k.thread == 0):
        if fence:
            k.fence("gpu")
        before = k.atomic("add", count, k.value(1, U32))
        if fence:
            k.fence("gpu")
        flag.store([before], 0, 0)
    k.syncthreads()
    with k.when(flag.load(0, 0) == k.grid_x - 1):
        total = k.register(U32, 0)
        with k.loop(k.grid_x) as i:
            total.set(total.get() + parts.load(i * 64 + k.thread))
        out.store([total.get()], k.thread)


@pytest.mark.parametrize("seed", [None, 4])
def test_order_across_ctas_by_fences_and_atomics(seed: int | None) -> None:
    def run(**how: bool) -> tuple[Emulation, np.ndarray[Any, Any]]:
        out = np.zeros(64, np.uint32)
        arrays = [np.zeros(192, np.uint32), np.zeros(1, np.uint32), out]
        return emulate(last_cta_sums.trace(**how), 3, arrays, seed=seed), out

    result, out = run(fence=True, barrier=True)
    assert result.findings == ()
    assert (out == 3 * numbers(64) + 300).all()
    assert kinds(run(fence=False, barrier=True)[0]) == {"race"}
    assert kinds(run(fence=True, barrier=False)[0]) == {"race"}


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
