# pyright: reportInvalidTypeForm=false
"""Sums of many CTAs in global memory on the emulator: bulk and ordinary reductions, counters that are waited for."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulate.findings import kinds
from warploom.core.errors import TraceError, VerifyError
from warploom.emulate import emulate
from warploom.isa.async_copy import bulk_store
from warploom.lang import Global, Kernel, bf16, f32, kernel, u32

CTAS, COUNT = 3, 128
ORDERS = (None, 0, 1, 2, 3)


@kernel(threads=COUNT, requires="sm_90")
def add_tiles(k: Kernel, x: Global[f32], total: Global[f32], *, how: str) -> None:
    """Each CTA adds its row of ``x`` to ``total`` by one bulk reduction."""
    tile = k.shared(f32, COUNT, name="tile")
    leader = k.thread == 0
    tile.store(x.load(k.cta_x * COUNT + k.thread), 0, k.thread)
    if "no fence" not in how:
        k.fence_async()
    k.syncthreads()
    k.bulk_store(total, tile, adds="stored" not in how, when=True if "all threads" in how else leader)
    k.commit_bulk()
    if "overwritten" in how:
        tile.store(0.0, 0, k.thread)
    k.wait_bulk(0, reads_only=True)
    if "read back" in how:
        k.wait_bulk(0, reads_only="too early" in how)
        k.syncthreads()
        total.load(k.thread)


@pytest.mark.parametrize("seed", ORDERS)
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("", set[str]()),
        ("no fence", {"proxy"}),
        ("stored", {"race", "in_flight"}),
        ("overwritten", {"race", "proxy"}),
        ("all threads", {"race"}),
    ],
)
def test_bulk_reductions_of_several_ctas(how: str, expected: set[str], seed: int | None) -> None:
    x, total = np.arange(CTAS * COUNT, dtype=np.float32), np.ones(COUNT, np.float32)
    found = kinds(emulate(add_tiles.trace(how=how), CTAS, [x, total], seed=seed))
    assert found <= expected
    assert bool(found) == bool(expected)
    if not expected:
        np.testing.assert_array_equal(total, 1 + x.reshape(CTAS, COUNT).sum(0))


@pytest.mark.parametrize("seed", ORDERS)
@pytest.mark.parametrize(("how", "expected"), [("read back", set[str]()), ("read back too early", {"race"})])
def test_a_reduction_is_waited_for_before_its_result_is_read(how: str, expected: set[str], seed: int | None) -> None:
    x, total = np.arange(COUNT, dtype=np.float32), np.ones(COUNT, np.float32)
    assert kinds(emulate(add_tiles.trace(how=how), 1, [x, total], seed=seed)) == expected


@pytest.mark.parametrize("seed", ORDERS)
def test_other_ctas_may_not_read_what_is_being_added(seed: int | None) -> None:
    x, total = np.arange(CTAS * COUNT, dtype=np.float32), np.ones(COUNT, np.float32)
    assert "race" in kinds(emulate(add_tiles.trace(how="read back"), CTAS, [x, total], seed=seed))


@kernel(threads=COUNT, requires="sm_90")
def add_in_turn(k: Kernel, x: Global[f32], total: Global[f32], turn: Global[u32], *, how: str) -> None:
    """The CTAs take turns: the first stores its row to ``total``, the others add theirs, the last doubles the sum."""
    tile = k.shared(f32, COUNT, name="tile")
    tile.store(x.load(k.cta_x * COUNT + k.thread), 0, k.thread)
    k.fence_async()
    k.syncthreads()
    with k.when(k.thread == 0):
        if "no wait" not in how:
            k.wait_at_least(turn, k.grid_x - k.cta_x if "backwards" in how else k.cta_x)
        with k.when(k.cta_x == 0):
            k.bulk_store(total, tile)
        with k.otherwise():
            k.bulk_store(total, tile, adds=True)
        k.commit_bulk()
        k.wait_bulk(0, reads_only="too early" in how)
        if "not released" not in how:
            k.fence("gpu")
        k.atomic("add", turn, 1)
    k.wait_bulk(0)
    k.syncthreads()
    with k.when(k.cta_x == k.grid_x - 1):
        total.store(2.0 * total.load(k.thread), k.thread)


@pytest.mark.parametrize("seed", ORDERS)
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("", set[str]()),
        ("no wait", {"race", "in_flight", "proxy"}),
        ("too early", {"race", "in_flight"}),
        ("not released", {"race"}),
        ("backwards", {"deadlock"}),
    ],
)
def test_ctas_that_take_turns(how: str, expected: set[str], seed: int | None) -> None:
    x, total = np.arange(CTAS * COUNT, dtype=np.float32), np.full(COUNT, np.nan, np.float32)
    found = kinds(emulate(add_in_turn.trace(how=how), CTAS, [x, total, np.zeros(1, np.uint32)], seed=seed))
    assert found <= expected
    assert bool(found) == bool(expected)
    if not expected:
        np.testing.assert_array_equal(total, 2 * x.reshape(CTAS, COUNT).sum(0))


@kernel(threads=COUNT, requires="sm_90")
def add_registers(k: Kernel, x: Global[f32], total: Global[f32], *, count: int, how: str) -> None:
    """Every thread adds ``count`` elements at once; all CTAs to the same ones."""
    at = k.thread * count
    if "stored too" in how:
        total.store(0.0, at)
    k.reduce_add(total, x.load(k.cta_x * (COUNT * count) + at, count), at)


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize(("how", "expected"), [("", set[str]()), ("stored too", {"race"})])
def test_reductions_from_registers(how: str, expected: set[str], count: int) -> None:
    x, total = np.arange(CTAS * COUNT * count, dtype=np.float32), np.ones(COUNT * count, np.float32)
    program = add_registers.trace(count=count, how=how)
    assert kinds(emulate(program, CTAS, [x, total], seed=1)) == expected
    if not expected:
        np.testing.assert_array_equal(total, 1 + x.reshape(CTAS, -1).sum(0))


def test_bounds_of_a_bulk_copy() -> None:
    x, total = np.zeros(COUNT, np.float32), np.zeros(COUNT - 4, np.float32)
    assert kinds(emulate(add_tiles.trace(how=""), 1, [x, total])) == {"bounds"}


@kernel(threads=32, requires="sm_90")
def add_halves(k: Kernel, total: Global[f32]) -> None:
    k.bulk_store(total, k.shared(bf16, 64, name="tile"), adds=True)


def test_what_no_reduction_adds() -> None:
    with pytest.raises(TraceError, match="adds f32"):
        add_halves.trace()
    with pytest.raises(VerifyError, match="multiple of 16"):
        bulk_store(24)
