# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Arrays that are marked as uninitialised: what depends on bytes that nobody has written is found, and nothing else."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import warploom
from tests.emulate.defects.tma import BYTES, COLS, ROWS, mapped
from tests.emulate.findings import every
from warploom.core.uninitialised import unwritten
from warploom.emulate import emulate
from warploom.lang import Global, Kernel, TensorMap, f32, kernel, u32


@kernel(threads=32)
def chosen(k: Kernel, x: Global[f32], y: Global[f32], count: u32) -> None:
    """All elements are read, and those below ``count`` are used."""
    value = x.load(k.thread)
    y.store(k.select(k.thread < count, value, 0.0), k.thread)


@kernel(threads=32)
def by_tile(k: Kernel, x: Global[f32], y: Global[f32], count: u32) -> None:
    tile = k.shared(f32, 32, name="tile")
    tile.store(x.load(k.thread), 0, k.thread)
    k.syncthreads()
    y.store(k.select(k.thread < count, tile.load(0, k.thread), 0.0), k.thread)


@kernel(threads=32, requires="sm_90a")
def by_box(k: Kernel, source: TensorMap, out: Global[f32], count: u32) -> None:
    tile, full = k.shared(f32, (ROWS, COLS), name="tile"), k.mbarriers(1)
    with k.when(k.lane == 0):
        full.init(1)
        k.mbarrier_fence()
    k.syncwarp()
    full.expect(BYTES, when=k.lane == 0)
    k.tma_load(tile, source, (0, 0), full, when=k.lane == 0)
    full.wait(0)
    out.store(k.select(k.lane < count, tile.load(1, k.lane), 0.0), k.lane)


@kernel(threads=32)
def counted(k: Kernel, count: Global[u32], out: Global[u32]) -> None:
    out.store(k.atomic("add", count, 1), k.thread)


def partly(count: int, written: int) -> np.ndarray:
    x = warploom.uninitialised(count, "f32")
    x[:written] = np.arange(written)
    return x


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("program", [chosen.trace(), by_tile.trace()], ids=lambda p: p.name)
def test_what_is_read_and_not_used_is_no_finding(program, seed) -> None:
    y = warploom.uninitialised(32)
    assert emulate(program, 1, [partly(32, 20), y, 20], seed=seed).findings == ()
    assert np.array_equal(y[:20], np.arange(20))
    (finding,) = emulate(program, 1, [partly(32, 20), y, 21], seed=seed).findings
    assert finding.kind == "uninitialised"
    assert "x[20], which nobody has written" in finding.message
    assert (finding.count, finding.lane) == (1, 20)
    assert finding.other is not None


def test_boxes_carry_it_along() -> None:
    for count, found in ((4, False), (5, True)):
        source, out = warploom.uninitialised((ROWS, COLS)), np.zeros(COLS, np.float32)
        source[0], source[1, :4] = 1, 2
        run = emulate(by_box.trace(), 1, [mapped(source), out, count])
        assert [f.kind for f in every(run)] == ["uninitialised"] * found
        assert not found or "copy of source" in run.findings[0].message


def test_updates_need_a_value() -> None:
    (finding,) = emulate(counted.trace(), 1, [warploom.uninitialised(1, "u32"), np.zeros(32, np.uint32)]).findings
    assert (finding.kind, finding.count) == ("uninitialised", 32)
    assert "count[0], which nobody has written" in finding.message
    count = warploom.uninitialised(1, np.uint32)
    count[0] = 0
    assert emulate(counted.trace(), 1, [count, np.zeros(32, np.uint32)]).findings == ()


def test_what_another_launch_has_written_is_written() -> None:
    for apart in (False, True):
        x, y, z = np.ones(32, np.float32), warploom.uninitialised(32), np.zeros(32, np.float32)
        if apart:  # in two runs
            emulate(chosen.trace(), 1, [x, y, 32])
            assert emulate(chosen.trace(), 1, [y, z, 32]).findings == ()
        else:
            with warploom.sequence() as s:
                s.launch(chosen, 1, [x, y, 32])
                s.launch(chosen, 1, [y, z, 32])
            assert s.findings == ()
        assert (z == 1).all()


def test_views_are_known_and_others_are_not() -> None:
    x = warploom.uninitialised((4, 8), "bf16")
    assert x.shape == (4, 8)
    x[0] = 0
    marks = unwritten(x.reshape(-1).view(np.uint8), 2)
    assert marks is not None
    assert marks.reshape(4, 16).all(axis=1).tolist() == [False, True, True, True]
    y = warploom.uninitialised(8)[4:]
    gc.collect()
    assert unwritten(y.view(np.uint8), 4) is not None
    assert unwritten(np.full(8, 0xFD, np.uint8), 4) is None
