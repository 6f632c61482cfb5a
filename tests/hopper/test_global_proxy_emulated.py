# pyright: reportInvalidTypeForm=false
"""Global memory through both proxies on the emulator: fences, bulk stores that are still writing, loads that read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulate.findings import every, kinds
from warploom.core.dtypes import f32
from warploom.emulate import TensorMapArgument, emulate
from warploom.lang import Global, Kernel, TensorMap, kernel
from warploom.lang import f32 as F32  # noqa: N812
from warploom.layout.tensor_map import TensorMapSpec

ROWS, COLS = 8, 32
ORDERS = (None, 0, 1, 2, 3)


def tensor_map(array: np.ndarray[Any, Any], box: tuple[int, int] = (COLS, ROWS)) -> TensorMapArgument:
    return TensorMapArgument(array, TensorMapSpec(f32, array.shape[::-1], (array.strides[0],), box, 0))


@kernel(threads=64, requires="sm_90a", cluster=lambda how: 2 if "cluster" in how else 1)
def written_then_loaded(k: Kernel, x: Global[F32], x_map: TensorMap, out: Global[F32], *, how: str) -> None:
    """Ordinary stores to ``x``, which one thread then loads through the TMA; in a cluster, that of the other CTA."""
    tile = k.shared(F32, (ROWS, COLS), name="tile")
    full = k.mbarriers(1, "full")
    leader = k.thread == 0
    with k.when(leader):
        full.init(1)
        k.mbarrier_fence()
    k.cluster_sync()
    at = k.thread * 4
    x.store([k.value(1.0, F32)] * 4, at + k.cluster_rank * 256)
    if "writers fence" in how:
        k.fence_async("all" if "cluster" in how else "global")
    if "shared memory fenced" in how:
        k.fence_async()
    if "cluster" in how:
        k.cluster_sync()
    elif "no barrier" not in how:
        k.syncthreads()
    if "leader fences" in how:
        with k.when(leader):
            k.fence_async("global")
    full.expect(ROWS * COLS * 4, when=leader)
    other = k.cluster_rank ^ 1 if "cluster" in how else k.cluster_rank
    k.tma_load(tile, x_map, (0, other * ROWS), full, when=leader)
    full.wait(0)
    out.store(tile.load(k.thread >> 3, (k.thread & 7) * 4, 4), at + k.cluster_rank * 256)
    k.cluster_sync()


@pytest.mark.parametrize("seed", ORDERS)
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("writers fence", set[str]()),
        ("leader fences", set[str]()),
        ("cluster, writers fence", set[str]()),
        ("no fence", {"proxy"}),
        ("shared memory fenced", {"proxy"}),
        ("cluster, no fence", {"proxy"}),
        ("writers fence, no barrier", {"race", "proxy"}),
    ],
)
def test_what_is_written_must_be_fenced_before_the_tma_reads_it(how: str, expected: set[str], seed: int | None) -> None:
    x, out = np.zeros((2 * ROWS, COLS), np.float32), np.zeros((2 * ROWS, COLS), np.float32)
    grid = 2 if "cluster" in how else 1
    emulation = emulate(written_then_loaded.trace(how=how), grid, [x, tensor_map(x), out], seed=seed)
    assert kinds(emulation) <= expected
    assert bool(emulation.findings) == bool(expected)
    if not expected:
        assert (out[: grid * ROWS] == 1).all()
    elif expected == {"proxy"}:
        report = next(f for f in every(emulation) if f.kind == "proxy")
        assert "of x" in report.message
        assert "k.fence_async('global')" in report.message


@kernel(threads=64, requires="sm_90a")
def stored_then_read(k: Kernel, y: Global[F32], y_map: TensorMap, out: Global[F32], *, how: str) -> None:
    """A bulk store to ``y``, which all threads then read or overwrite."""
    tile = k.shared(F32, (ROWS, COLS), name="tile")
    leader = k.thread == 0
    tile.store([k.value(2.0, F32)] * 4, k.thread >> 3, (k.thread & 7) * 4)
    k.fence_async()
    k.syncthreads()
    k.tma_store(y_map, (0, 0), tile, when=leader)
    k.commit_bulk()
    k.wait_bulk(0, reads_only="reads only" in how)
    if "no barrier" not in how:
        k.syncthreads()
    if "overwritten" in how:
        y.store([k.value(3.0, F32)] * 4, k.thread * 4)
    else:
        out.store(y.load(k.thread * 4, 4), k.thread * 4)


@pytest.mark.parametrize("seed", ORDERS)
@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("", set[str]()),
        ("overwritten", set[str]()),
        ("reads only", {"in_flight"}),
        ("reads only, overwritten", {"in_flight"}),
        ("no barrier", {"race", "in_flight"}),
    ],
)
def test_a_bulk_store_is_waited_for_before_others_touch_it(how: str, expected: set[str], seed: int | None) -> None:
    y, out = np.zeros((ROWS, COLS), np.float32), np.zeros((ROWS, COLS), np.float32)
    found = kinds(emulate(stored_then_read.trace(how=how), 1, [y, tensor_map(y), out], seed=seed))
    assert found <= expected
    assert bool(found) == bool(expected)
    if not expected:
        assert (y == 3).all() if how else (out == 2).all()


@kernel(threads=64, requires="sm_90a")
def in_place(k: Kernel, x: Global[F32], x_map: TensorMap, *, how: str) -> None:
    """Every thread doubles what one has loaded, in the place it came from."""
    tile = k.shared(F32, (ROWS, COLS), name="tile")
    full = k.mbarriers(1, "full")
    leader = k.thread == 0
    with k.when(leader):
        full.init(1)
        k.mbarrier_fence()
    k.syncthreads()
    full.expect(ROWS * COLS * 4, when=leader)
    k.tma_load(tile, x_map, (0, 0), full, when=leader)
    if how == "not waited":
        k.syncthreads()
        x.store([k.value(5.0, F32)] * 4, k.thread * 4)
    full.wait(0)
    if how != "not waited":
        x.store([v + v for v in tile.load(k.thread >> 3, (k.thread & 7) * 4, 4)], k.thread * 4)


@pytest.mark.parametrize("seed", ORDERS)
def test_an_array_may_be_overwritten_once_its_load_has_landed(seed: int | None) -> None:
    x = np.arange(ROWS * COLS, dtype=np.float32).reshape(ROWS, COLS)
    expected = 2 * x
    assert emulate(in_place.trace(how=""), 1, [x, tensor_map(x)], seed=seed).findings == ()
    np.testing.assert_array_equal(x, expected)


@pytest.mark.parametrize("seed", ORDERS)
def test_an_array_overwritten_while_it_is_loaded_is_a_race(seed: int | None) -> None:
    x = np.zeros((ROWS, COLS), np.float32)
    assert "race" in kinds(emulate(in_place.trace(how="not waited"), 1, [x, tensor_map(x)], seed=seed))


COUNT = 100
BOX = (4, 2)  # 32 bytes


@kernel(threads=128, requires="sm_90a")
def many_mbarriers(k: Kernel, source: TensorMap, out: Global[F32], *, wait_for: int) -> None:
    """A box for each of a hundred mbarriers, initialised by as many threads; all read the boxes after some waits."""
    tile = k.shared(F32, (1, 32), name="tile", stages=COUNT)
    full = k.mbarriers(COUNT, "full")
    with k.when(k.thread < COUNT):
        full.init(1, k.thread)
        k.mbarrier_fence()
    k.syncthreads()
    with k.when(k.thread == 0), k.loop(COUNT) as i:
        full.expect(32, i)
        k.tma_load(tile.stage(i), source, (0, i * 2), full, i)
    for i in range(COUNT):
        if i < wait_for:
            full.wait(0, i)
    with k.when(k.thread < COUNT):
        out.store(tile.stage(k.thread).load(0, 0, 4), k.thread * 4)
    for i in range(wait_for, COUNT):
        full.wait(0, i)


@pytest.mark.parametrize("seed", [None, 0])
def test_a_hundred_mbarriers_are_kept_apart(seed: int | None) -> None:
    source = np.arange(COUNT * 8, dtype=np.float32).reshape(2 * COUNT, 4)
    out = np.zeros((COUNT, 4), np.float32)
    arguments = [tensor_map(source, BOX), out]
    assert emulate(many_mbarriers.trace(wait_for=COUNT), 1, arguments, seed=seed).findings == ()
    np.testing.assert_array_equal(out, source[::2])
    for waits in (COUNT - 1, 70):
        assert kinds(emulate(many_mbarriers.trace(wait_for=waits), 1, arguments, seed=seed)) & {"race", "in_flight"}
