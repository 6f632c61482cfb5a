# pyright: reportInvalidTypeForm=false, reportArgumentType=false
"""Bulk tensor copies on the emulator: boxes at the edge of a tensor, stores that read late, proxies, roles."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulate.findings import every, kinds
from tests.hopper.mutants import deleted, named
from warploom.core.dtypes import f32
from warploom.core.errors import ProblemError
from warploom.emulate import Emulation, TensorMapArgument, emulate
from warploom.ir.program import Program
from warploom.isa.barriers import bar_sync, set_max_registers
from warploom.kernels.source import MappedArray
from warploom.lang import Global, Kernel, TensorMap, kernel
from warploom.lang import f32 as F32  # noqa: N812
from warploom.lang import u32 as U32  # noqa: N812
from warploom.layout.tensor_map import RAGGED_ROWS, TensorMapSpec

ROWS, COLS = 8, 32  # a box: rows of 128 bytes
SEEDS = (None, *range(20))


def tensor_map(array: np.ndarray[Any, Any], swizzle: int = 0) -> TensorMapArgument:
    spec = TensorMapSpec(f32, array.shape[::-1], (array.strides[0],), (COLS, ROWS), swizzle)
    return TensorMapArgument(array, spec)


def numbers(rows: int, cols: int) -> np.ndarray[Any, Any]:
    return np.arange(1, rows * cols + 1, dtype=np.float32).reshape(rows, cols)


@kernel(threads=64, requires="sm_90a")
def copy_box(k: Kernel, source: TensorMap, target: TensorMap, *, at: tuple[int, ...], to: tuple[int, ...]) -> None:
    """A box to shared memory, doubled there by all threads, and out again."""
    tile = k.shared(F32, (ROWS, COLS), name="tile")
    full = k.mbarriers(1, "full")
    leader = k.thread == 0
    with k.when(leader):
        full.init(1)
        k.mbarrier_fence()
    k.syncthreads()
    full.expect(ROWS * COLS * 4, when=leader)
    k.tma_load(tile, source, at, full, when=leader)
    full.wait(0)
    row, col = k.thread >> 3, (k.thread & 7) * 4
    tile.store([x + x for x in tile.load(row, col, 4)], row, col)
    k.fence_async()
    k.syncthreads()
    k.tma_store(target, to, tile, when=leader)
    k.commit_bulk()
    k.wait_bulk(0, reads_only=True)
    k.syncthreads()
    tile.store([k.value(0.0, F32)] * 4, row, col)


def run_copy(program: Program, seed: int | None = None) -> tuple[Emulation, np.ndarray[Any, Any]]:
    out = np.full((12, 40), -1, np.float32)
    return emulate(program, 1, [tensor_map(numbers(12, 40)), tensor_map(out)], seed=seed), out


@pytest.mark.parametrize("at", [(0, 0), (4, 2), (24, 8), (-4, -3), (40, 0), (100, 100), (8, -8)])
@pytest.mark.parametrize("to", [(0, 0), (24, 8), (-4, -3)])
def test_boxes_fill_with_zeros_and_are_clipped(at: tuple[int, int], to: tuple[int, int]) -> None:
    emulation, out = run_copy(copy_box.trace(at=at, to=to))
    assert emulation.findings == ()
    source, expected = numbers(12, 40), np.full((12, 40), -1, np.float32)
    for r in range(ROWS):
        for c in range(COLS):
            y, x = r + at[1], c + at[0]
            value = 2 * source[y, x] if 0 <= y < 12 and 0 <= x < 40 else 0
            if 0 <= r + to[1] < 12 and 0 <= c + to[0] < 40:
                expected[r + to[1], c + to[0]] = value
    np.testing.assert_array_equal(out, expected)


PLAIN = {"at": (4, 2), "to": (0, 0)}


def test_late_store_reads_what_was_written_over_it() -> None:
    emulation, out = run_copy(deleted(copy_box.trace(**PLAIN), named("cp.async.bulk.wait_group")))
    assert kinds(emulation) == {"race", "leak"}
    assert (out[:ROWS, :COLS] == 0).all()


@kernel(threads=64, requires="sm_90a")
def store_box(k: Kernel, target: TensorMap, *, fence: bool) -> None:
    """A box written by half a warp, which fences; another warp's thread sends it out."""
    tile = k.shared(F32, (ROWS, COLS), name="tile")
    with k.when(k.thread < 16):
        for piece in range(4):
            tile.store([k.value(1.0, F32)] * 4, k.thread >> 1, (k.thread & 1) * 16 + 4 * piece)
        if fence:
            k.fence_async()
    k.syncthreads()
    k.tma_store(target, (0, 0), tile, when=k.thread == 32)
    k.commit_bulk()
    k.wait_bulk(0)


@pytest.mark.parametrize("seed", SEEDS[:6])
def test_a_proxy_fence_by_part_of_a_warp_holds_behind_the_barrier(seed: int | None) -> None:
    out = np.zeros((ROWS, COLS), np.float32)
    assert emulate(store_box.trace(fence=True), 1, [tensor_map(out)], seed=seed).findings == ()
    assert (out == 1).all()
    unfenced = emulate(store_box.trace(fence=False), 1, [tensor_map(np.zeros_like(out))], seed=seed)
    assert "proxy" in kinds(unfenced)


@kernel(threads=96, requires="sm_90a")
def send_what_two_stored(k: Kernel, target: TensorMap, *, both: bool) -> None:
    """Two warps store the same values, which is no race; whoever sends them out must know of both."""
    tile, thread = k.shared(F32, (ROWS, COLS), name="tile"), k.thread & 31
    with k.when(k.thread < 64):
        for piece in range(2):
            tile.store([k.value(1.0, F32)] * 4, thread >> 2, (thread & 3) * 8 + 4 * piece)
        k.fence_async()
    if both:
        k.syncthreads()
    else:
        with k.when(k.thread >= 32):
            k.emit(bar_sync(64), (k.value(1, U32),))
    k.tma_store(target, (0, 0), tile, when=k.thread == 64)
    k.commit_bulk()
    k.wait_bulk(0)


@pytest.mark.parametrize("seed", SEEDS[:6])
def test_a_copy_must_know_of_all_who_have_stored_the_same(seed: int | None) -> None:
    out = np.zeros((ROWS, COLS), np.float32)
    assert emulate(send_what_two_stored.trace(both=True), 1, [tensor_map(out)], seed=seed).findings == ()
    assert (out == 1).all()
    found = emulate(send_what_two_stored.trace(both=False), 1, [tensor_map(np.zeros_like(out))], seed=seed)
    assert kinds(found) & {"race", "proxy", "uninitialised"}


@kernel(threads=128, requires="sm_90a")
def who_copies(k: Kernel, source: TensorMap, out: Global[F32], *, how: str) -> None:
    """One elected thread loads inside a divergent branch; the others wait."""
    tile = k.shared(F32, (ROWS, COLS), name="tile", swizzle="auto")
    full = k.mbarriers(1, "full")
    with k.when(k.thread == 0):
        full.init(1)
        k.mbarrier_fence()
    k.syncthreads()
    if how == "elected":
        elected = k.elect()
        with k.when((k.warp == 0) & elected):
            full.expect(ROWS * COLS * 4)
            k.tma_load(tile, source, (0, 0), full)
    else:
        full.expect(ROWS * COLS * 4, when=k.thread == 0)
        k.tma_load(tile, source, (0, 0), full, when=k.thread < 2)
    if how != "unawaited":
        full.wait(0)
        row, col = k.thread >> 4, (k.thread & 7) * 4
        with k.when((k.thread & 8) == 0):
            out.store(tile.load(row, col, 4), row * COLS + col)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_elected_thread_loads_through_the_swizzle(seed: int | None) -> None:
    source, out = numbers(ROWS, COLS), np.zeros((ROWS, COLS), np.float32)
    assert emulate(who_copies.trace(how="elected"), 1, [tensor_map(source, 128), out], seed=seed).findings == ()
    np.testing.assert_array_equal(out, source)


def test_two_threads_that_start_one_copy_are_reported() -> None:
    source, out = numbers(ROWS, COLS), np.zeros((ROWS, COLS), np.float32)
    emulation = emulate(who_copies.trace(how="two"), 1, [tensor_map(source, 128), out])
    assert any("2 threads" in f.message and "elect one" in f.message for f in every(emulation))


def test_copy_that_nobody_waits_for_is_a_leak() -> None:
    source, out = numbers(ROWS, COLS), np.zeros((ROWS, COLS), np.float32)
    program = who_copies.trace(how="unawaited")
    for seed in SEEDS:
        assert "leak" in kinds(emulate(program, 1, [tensor_map(source, 128), out], seed=seed))


def test_store_to_a_read_only_array_is_reported() -> None:
    out = np.zeros((12, 40), np.float32)
    out.setflags(write=False)
    program = copy_box.trace(**PLAIN)
    emulation = emulate(program, 1, [tensor_map(numbers(12, 40)), tensor_map(out)])
    assert kinds(emulation) == {"bounds"}


def test_arguments_must_fit_the_tensor_map() -> None:
    program, array = copy_box.trace(**PLAIN), numbers(12, 40)
    good = tensor_map(array)
    with pytest.raises(ProblemError, match="TensorMapArgument"):
        emulate(program, 1, [array, good])
    too_large = TensorMapSpec(f32, (40, 13), (160,), (COLS, ROWS))
    with pytest.raises(ProblemError, match="reaches byte"):
        emulate(program, 1, [(array, too_large), good])
    with pytest.raises(ProblemError, match="elements"):
        emulate(program, 1, [(array.astype(np.float64), good.spec), good])


@kernel(threads=128, requires="sm_90a")
def some_warps(k: Kernel, out: Global[F32]) -> None:
    """A register budget that only three of a warpgroup's warps ask for."""
    with k.when(k.warp < 3, uniform=True):
        k.emit(set_max_registers(40, "dec"), ())
    out.store(k.value(0.0, F32), k.thread)


@pytest.mark.parametrize("seed", [None, 0])
def test_register_budget_is_for_whole_warpgroups(seed: int | None) -> None:
    emulation = emulate(some_warps.trace(), 1, [np.zeros(128, np.float32)], seed=seed)
    assert kinds(emulation) == {"divergence"}


@kernel(threads=64, requires="sm_90a")
def initialised_twice(k: Kernel, out: Global[F32]) -> None:
    bar = k.mbarriers(1, "bar")
    with k.when(k.thread == 0):
        bar.init(2)
        k.mbarrier_fence()
    k.syncthreads()
    bar.arrive(when=k.thread == 32)
    k.syncthreads()
    with k.when(k.thread == 0):
        bar.init(2)
    out.store(k.value(0.0, F32), k.thread)


def test_initialising_an_mbarrier_in_use_is_reported() -> None:
    emulation = emulate(initialised_twice.trace(), 1, [np.zeros(64, np.float32)])
    assert any(f.kind == "mbarrier" and "an mbarrier already" in f.message for f in every(emulation))


@kernel(threads=64, requires="sm_90a")
def into_a_tile(k: Kernel, source: TensorMap, out: Global[F32], *, cols: int, rows: int, swizzled: bool) -> None:
    """A box of 8 rows of 128 bytes into a tile that may be laid out otherwise; another tile follows."""
    tile = k.shared(F32, (rows, cols), name="tile", swizzle="auto" if swizzled else None)
    k.shared(F32, (64, 64), name="other")
    full = k.mbarriers(1, "full")
    with k.when(k.thread == 0):
        full.init(1)
        k.mbarrier_fence()
    k.syncthreads()
    full.expect(ROWS * COLS * 4, when=k.thread == 0)
    k.tma_load(tile, source, (0, 0), full, when=k.thread == 0)
    full.wait(0)
    out.store(tile.load(0, k.thread & 31), k.thread)


LAYOUTS = {
    "as it is": (0, {}, "", ""),
    "swizzled": (128, {"swizzled": True}, "", ""),
    "the tile is swizzled": (0, {"swizzled": True}, "layout", "swizzled rows of 128 bytes, its tensor map does not"),
    "the map is swizzled": (128, {}, "layout", "'tile' has no swizzle, its tensor map swizzles 128 bytes"),
    "wider rows": (0, {"cols": 64}, "layout", "rows of the tile 'tile' are 256 bytes apart, those of the box 128"),
    "fewer rows": (0, {"rows": 4}, "bounds", "a box of 1024 bytes to where the tile 'tile' has 512"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_tile_and_its_tensor_map_must_agree(name: str) -> None:
    swizzle, shape, kind, message = LAYOUTS[name]
    program = into_a_tile.trace(**{"cols": COLS, "rows": ROWS, "swizzled": False, **shape})
    emulation = emulate(program, 1, [tensor_map(numbers(12, 40), swizzle), np.zeros(64, np.float32)])
    found = [f for f in every(emulation) if f.kind == kind and message in f.message]
    assert bool(found) == bool(kind)
    assert bool(emulation.findings) == bool(kind)


@kernel(threads=128, requires="sm_90a")
def bytes_expected(k: Kernel, source: TensorMap, *, count: int) -> None:
    tile = k.shared(F32, (ROWS, COLS), name="tile")
    full = k.mbarriers(1, "full")
    with k.when(k.thread == 0):
        full.init(1)
        k.mbarrier_fence()
    k.syncthreads()
    full.expect(count, when=k.thread == 0)
    k.tma_load(tile, source, (0, 0), full, when=k.thread == 0)
    full.wait(0)


@pytest.mark.parametrize(
    ("count", "message"),
    [(256, "768 more than 256 expected bytes have come"), (2048, "1024 of 2048 expected bytes missing")],
)
def test_wrong_bytes_say_by_how_much(count: int, message: str) -> None:
    emulation = emulate(bytes_expected.trace(count=count), 1, [tensor_map(numbers(12, 40))])
    assert any(f.kind == "deadlock" and message in f.message for f in every(emulation))


def ragged(array: np.ndarray[Any, Any]) -> TensorMapArgument:
    """An array of sequences' rows, for boxes that see one of them."""
    spec = MappedArray(F32, array.shape, (array.shape[1], 1), (ROWS, COLS), swizzled=False, ragged=True).spec
    return TensorMapArgument(array, spec)


@pytest.mark.parametrize(("begin", "count", "row"), [(0, 12, 0), (3, 5, 0), (0, 6, 4), (2, 9, 8), (5, 3, 3), (7, 0, 0)])
def test_a_box_ends_where_its_sequence_ends(begin: int, count: int, row: int) -> None:
    out, at = np.full((12, 40), -1, np.float32), (0, RAGGED_ROWS - count + row, RAGGED_ROWS, begin + count)
    found = emulate(copy_box.trace(at=at, to=at), 1, [ragged(numbers(12, 40)), ragged(out)])
    assert found.findings == ()
    expected, rows = np.full((12, 40), -1, np.float32), slice(begin + row, min(begin + row + ROWS, begin + count))
    expected[rows, :COLS] = 2 * numbers(12, 40)[rows, :COLS]
    np.testing.assert_array_equal(out, expected)


def test_a_sequence_beyond_the_array_is_found() -> None:
    """12 rows that end before row 8: the coordinates say that the first begins before the array."""
    program = copy_box.trace(at=(0, RAGGED_ROWS - 8, RAGGED_ROWS, 8), to=(0, RAGGED_ROWS - 12, RAGGED_ROWS, 8))
    assert "bounds" in kinds(emulate(program, 1, [ragged(numbers(12, 40)), ragged(np.zeros((12, 40), np.float32))]))
