"""``benchmarks/mma_rate.py``: the kernel that says what ``mma.sync`` alone takes does that work, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from tests.project import load
from warploom.core.dtypes import f16, f32
from warploom.emulate import emulate

M, N, ROUNDS, WARPS = 32, 16, 2, 2


@pytest.mark.parametrize(
    "feeds", [{}, {"loads": True}, {"loads": True, "barriers": True}, {"loads": True, "copies": 3, "barriers": True}]
)
@pytest.mark.parametrize("accumulate", [f32, f16])
def test_every_warp_multiplies_the_tile_in_every_round(accumulate, feeds):
    rate, ctas = load("mma_rate"), 2
    rng = np.random.default_rng(1)
    a, b = (rng.integers(-2, 3, (rows, rate.DEPTH)).astype(np.float16) for rows in (M, N))
    out = np.full(ctas * 32 * WARPS, np.nan, np.float32)
    of = rate.Feeds(**feeds)
    program = rate.mma_rate.trace(warps=WARPS, warp_m=M, warp_n=N, accumulate=accumulate, feeds=of)
    words, source = np.concatenate([a, b]).view(np.uint16).ravel(), np.zeros(ctas * rate.copied(WARPS, 3), np.uint16)
    found = emulate(program, ctas, {"words": words, "source": source, "out": out, "rounds": ROUNDS})
    assert not found.findings
    steps = range(rate.STEPS) if of.loads else [rate.HELD[step % 2] for step in range(rate.STEPS)]
    columns = [slice(16 * step, 16 * step + 16) for step in steps]
    exact = ROUNDS * sum(float((a[:, c].astype(float) @ b[:, c].astype(float).T).sum()) for c in columns)
    assert out.reshape(-1, 32).sum(axis=1) == pytest.approx([exact] * ctas * WARPS)
    warps = ctas * WARPS
    mma = sum(count for name, count in found.executed.items() if name.startswith("mma."))
    assert mma == ROUNDS * warps * rate.STEPS * (M // 16) * (N // 8), found.executed
    assert ROUNDS * rate.flops(warps, M, N) == mma * 2 * 16 * 8 * 16
    fragments = found.traffic["ldmatrix"]
    assert fragments.actual == fragments.ideal > 0
    tile, stages = (M + N) * rate.DEPTH // 8 // 32, ROUNDS * rate.STEPS * of.copies * WARPS
    copies = found.traffic["cp.async"]
    assert copies.accesses == ctas * (tile + stages)
    assert copies.actual == copies.ideal
