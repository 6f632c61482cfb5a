"""``wmma`` by its words: from a place within a tile, and in place."""

# pyright: reportInvalidTypeForm=false

from __future__ import annotations

import numpy as np
import pytest

from warploom.core.errors import TraceError
from warploom.emulate import emulate
from warploom.lang import Global, Kernel, bf16, f32, kernel, u32


@kernel(threads=32)
def power_sum(k: Kernel, a: Global[bf16], out: Global[f32], *, times: int) -> None:
    """out = times · a², summed in place, of a 16×16 matrix at (16, 8) of a padded tile."""
    tile = k.shared(bf16, (32, 32), padding=8)
    row, half = k.lane >> 1, (k.lane & 1) * 8
    tile.store((a + row * 16 + half).load(0, 4, dtype=u32), 16 + row, 8 + half, dtype=u32)
    k.syncwarp()
    at = tile.address(16, 8)
    left, right = k.wmma_load("A", at, 40), k.wmma_load("B", at, 40)
    total = k.registers(f32, 8, 0.0)
    for _ in range(times):
        k.wmma_mma(left, right, total, orders=("row", "row"), into=total)
    k.wmma_store(out, 16, total)


def test_sums_in_place_from_a_place_within_a_padded_tile() -> None:
    a = np.random.default_rng(0).integers(-4, 5, (16, 16)).astype(bf16.numpy)
    out = np.zeros((16, 16), np.float32)
    assert emulate(power_sum.trace(times=3), 1, [a, out]).findings == ()
    assert (out == 3 * (a.astype(np.float32) @ a.astype(np.float32))).all()


def test_results_go_to_as_many_registers_as_there_are() -> None:
    @kernel(threads=32)
    def short(k: Kernel, a: Global[bf16]) -> None:
        left, right = k.wmma_load("A", a, 16), k.wmma_load("B", a, 16)
        k.wmma_mma(left, right, [0.0] * 8, orders=("row", "row"), into=k.registers(f32, 4))

    with pytest.raises(TraceError, match="takes 8 registers for D, got 4"):
        short.trace()
