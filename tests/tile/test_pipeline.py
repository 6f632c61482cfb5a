"""Rings of stages: fed by the TMA, written by warps, sent away; and what happens without one of their steps."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.tile.support import SEEDS, as_boxes, clean, escapes, whole
from warploom.core.dtypes import DType, bf16, f16
from warploom.core.errors import LayoutError, TraceError
from warploom.emulate import Emulation, TensorMapArgument, emulate
from warploom.ir.program import Program
from warploom.lang import Global, Kernel, SharedTile, TensorMap, Traced, f32, kernel, u32
from warploom.layout.tensor_map import TensorMapSpec
from warploom.tile.pipeline import Boxes, Cursor, Pipeline, map_of, operand_tile, ready, vector_tile
from warploom.tile.planning import padded_cols

ROWS = 16


def add_columns(k: Kernel, tile: SharedTile, cols: int, totals: list[Any]) -> None:
    """Each of 16 lanes adds up its row of a tile in steps of two elements."""
    for col in range(0, cols, 2):
        pair = tile.load(k.lane & (ROWS - 1), col, dtype=u32)
        for total, x in zip(totals, k.unpack(pair, tile.dtype), strict=True):
            total += x


@kernel(threads=96, requires="sm_90a")
def row_sums(
    k: Kernel,
    a: TensorMap,
    b: TensorMap,
    out: Global[f32],
    tiles: u32,
    *,
    cols: int,
    dtype: DType = bf16,
    stages: int = 2,
    packed: bool = False,
) -> None:
    """Sums of even and odd columns of a, which warp 1 stores, and of b, which warp 2 stores: (4, rows)."""
    of_a = operand_tile(k, dtype, ROWS, cols, name="A", stages=stages)
    of_b = operand_tile(k, dtype, ROWS, cols, name="B", stages=stages)
    ring = Pipeline(k, (of_a, Boxes(a)), (of_b, Boxes(b)), readers=2)
    ready(k, ring)
    with k.warps(0, 1), k.when(k.thread == 0):
        put = ring.producer()
        with k.loop(tiles) as i:
            put.put((i * ROWS,), (i * ROWS,))
    with k.warps(1, 3):
        get = ring.consumer(packed=packed)
        with k.loop(tiles) as i:
            totals = k.registers(f32, 4, 0.0, "totals")
            pair = get.wait_all()
            for number, tile in enumerate(pair):
                add_columns(k, tile, padded_cols(cols), totals[2 * number : 2 * number + 2])
            k.syncwarp()
            get.release()
            for number, total in enumerate(totals):
                with k.when((k.lane < ROWS) & (k.warp == 1 + number // 2)):
                    out.store(total.get(), (number * tiles + i) * ROWS + k.lane)


def check_sums(tiles: int, cols: int, dtype: DType = bf16, rows: int | None = None) -> Callable[..., bool]:
    """Runs :func:`row_sums` on matrices of ``rows`` rows, by default whole tiles."""
    a, b = (whole(rows or tiles * ROWS, cols, dtype=dtype, seed=seed) for seed in (1, 2))
    expected = np.zeros((4, tiles * ROWS), np.float32)
    for number, x in enumerate((a, b)):
        for odd in (0, 1):
            expected[2 * number + odd, : len(x)] = x[:, odd::2].astype(np.float32).sum(1)

    def check(program: Program, seed: int | None) -> bool:
        out = np.full_like(expected, np.nan)
        maps = [as_boxes(x, ROWS, cols, dtype) for x in (a, b)]
        return clean(program, 1, [*maps, out, tiles], seed) and np.array_equal(out, expected)

    return check


@pytest.mark.parametrize("cols", [16, 32, 64, 72, 80, 96, 192])
@pytest.mark.parametrize(("dtype", "stages", "packed"), [(bf16, 2, False), (f16, 3, True)])
def test_tiles_arrive_in_order_and_whole(cols: int, dtype: DType, stages: int, packed: bool) -> None:
    """Five tiles, the last of them beyond the matrix in part: there it is zeros."""
    program = row_sums.trace(cols=cols, dtype=dtype, stages=stages, packed=packed)
    check = check_sums(5, cols, dtype, rows=4 * ROWS + 3)
    assert all(check(program, seed) for seed in (None, 0))


@pytest.mark.parametrize("packed", [False, True])
def test_every_step_of_a_ring_fed_by_the_tma_is_needed(packed: bool) -> None:
    assert escapes(row_sums.trace(cols=16, packed=packed), check_sums(5, 16)) == Counter()


@kernel(threads=96, requires="sm_90a")
def copied(k: Kernel, x: TensorMap, y: TensorMap, tiles: u32, *, cols: int, computed: bool, stages: int = 2) -> None:
    """y = -x: thread 0 loads, warps 1 and 2 write half of the rows each, thread 1 sends away.

    ``computed``: cursors by turns instead of rings of their own. The stage that is sent is the one that was loaded.
    """
    tile = operand_tile(k, bf16, 2 * ROWS, cols, name="X", stages=stages)
    loaded = Pipeline(k, (tile, Boxes(x)), readers=0)
    filled = Pipeline(k, tile, writers=2, readers=0, name="Y")
    ready(k, loaded, filled)

    def cursor(of: Pipeline, turn: Traced, kept: Cursor | None, filling: bool = False) -> Cursor:
        return kept if kept is not None else of.at(turn, filling=filling)

    with k.warps(0, 1), k.when(k.thread == 0):
        get, put = (None, None) if computed else (filled.consumer(), loaded.producer())
        with k.loop(tiles + 1) as i:
            with k.when(i < tiles):
                cursor(loaded, i, put, True).put((i * 2 * ROWS,))
            with k.when(i > 0):
                cursor(filled, i - 1, get).send(Boxes(y), ((i - 1) * 2 * ROWS,))
    with k.warps(1, 3):
        get, put = (None, None) if computed else (loaded.consumer(), filled.consumer(name="fill"))
        with k.loop(tiles) as i:
            here = cursor(loaded, i, get)
            stage, row = here.wait(), (k.warp - 1) * ROWS + k.lane
            for col in range(0, padded_cols(cols), 2):
                with k.when(k.lane < ROWS):
                    pair = stage.load(row, col, dtype=u32)
                    stage.store([pair ^ 0x80008000], row, col, dtype=u32)
            here.advance()
            cursor(filled, i, put).written()


def check_copied(tiles: int, cols: int) -> Callable[..., bool]:
    x = whole(tiles * 2 * ROWS - 5, cols, seed=3)

    def check(program: Program, seed: int | None) -> bool:
        y = np.full_like(x, np.nan)
        maps = [as_boxes(m, 2 * ROWS, cols) for m in (x, y)]
        return clean(program, 1, [*maps, tiles], seed) and np.array_equal(y, -x)

    return check


@pytest.mark.parametrize("cols", [64, 72])
@pytest.mark.parametrize(("computed", "stages"), [(False, 2), (True, 2), (True, 3)])
def test_what_warps_write_is_sent(cols: int, computed: bool, stages: int) -> None:
    check, program = check_copied(5, cols), copied.trace(cols=cols, computed=computed, stages=stages)
    assert all(check(program, seed) for seed in SEEDS)


@pytest.mark.parametrize("computed", [False, True])
def test_every_step_of_a_ring_written_by_warps_is_needed(computed: bool) -> None:
    unused = ("X_put", "X_fill")  # cursors that put and write where nobody says that a stage is empty: no phase
    equivalent = [f"{what} {name}_phase" for name in unused for what in ("parity kept", "the first phase inverted")]
    found = escapes(copied.trace(cols=16, computed=computed), check_copied(5, 16))
    assert found == Counter([] if computed else equivalent)


@kernel(threads=32, requires="sm_90a")
def vectors(k: Kernel, x: TensorMap, out: Global[f32], *, count: int, size: int) -> None:
    """So many rows, behind a tile of 16 bytes, each into a stage of its own."""
    k.shared(f32, 4)
    ring = Pipeline(k, (vector_tile(k, size, name="X", stages=count), Boxes(x)), readers=0)
    ready(k, ring)
    get, put = ring.consumer(), ring.producer()
    for i in range(count):
        with k.when(k.lane == 0):
            put.put((i,))
        row = get.wait()
        get.advance()
        with k.when(k.lane < size):
            out.store(row.load(0, k.lane), i * size + k.lane)


@pytest.mark.parametrize("size", [4, 16, 32])
def test_every_stage_of_a_vector_begins_where_a_box_may(size: int) -> None:
    x = np.arange(3 * size, dtype=np.float32).reshape(3, size)
    out = np.full_like(x, np.nan)
    boxes = TensorMapArgument(x, TensorMapSpec(f32, (size, 3), (4 * size,), (size, 1), 0))
    assert clean(vectors.trace(count=3, size=size), 1, [boxes, out])
    assert np.array_equal(out, x)


@kernel(threads=96, requires="sm_90a")
def two_readers(k: Kernel, x: TensorMap, out: Global[f32], tiles: u32, *, take: int, in_turn: bool = True) -> None:
    """Warp 1 reads ``take`` of every three tiles, warp 2 the others, one after the other."""
    tile = operand_tile(k, bf16, ROWS, 32, name="X", stages=4)
    ring = Pipeline(k, (tile, Boxes(x)), readers=1)
    ready(k, ring)
    with k.warps(0, 1), k.when(k.thread == 0):
        put = ring.producer()
        with k.loop(tiles * 3) as i:
            put.put((i * ROWS,))
    with k.warps(1, 3):
        get, ahead = ring.consumer(), ring.consumer(name="ahead")
        mine = k.select(k.warp == 1, k.value(take, u32), k.value(3 - take, u32))
        with k.when(k.warp == 2):
            ahead.skip(k.value(take, u32))
        get.catch_up(ahead)
        with k.loop(tiles) as i:
            if in_turn:
                with k.when(k.warp == 2, uniform=True):
                    k.bar_sync(1, 64)
            with k.loop(mine) as j:
                totals = k.registers(f32, 2, 0.0, "totals")
                add_columns(k, get.wait(), 32, totals)
                k.syncwarp()
                get.release()
                with k.when(k.lane < ROWS):
                    number = i * 3 + j + k.select(k.warp == 1, k.value(0, u32), k.value(take, u32))
                    out.store(totals[0] + totals[1], number * ROWS + k.lane)
            get.skip(3 - mine)
            if in_turn:
                with k.when(k.warp == 1, uniform=True):
                    k.bar_sync(1, 64)
                k.bar_sync(2, 64)


@pytest.mark.parametrize("take", [1, 2])
def test_stages_that_others_read_are_skipped(take: int) -> None:
    x = whole(7 * 3 * ROWS, 32, seed=4)
    expected = x.astype(np.float32).sum(1)

    def check(program: Program, seed: int | None) -> bool:
        out = np.full_like(expected, np.nan)
        return clean(program, 1, [as_boxes(x, ROWS, 32), out, 7], seed) and np.array_equal(out, expected)

    in_turn, at_will = two_readers.trace(take=take), two_readers.trace(take=take, in_turn=False)
    assert all(check(in_turn, seed) for seed in SEEDS)
    # Who has not waited for what the other reads may wait for a phase before the last one has ended.
    assert not all(check(at_will, seed) for seed in SEEDS)


def tile_of(k: Kernel, stages: int = 2, name: str = "X") -> SharedTile:
    return operand_tile(k, bf16, ROWS, 64, name=name, stages=stages)


MISUSE: dict[str, Callable[[Kernel, Boxes], object]] = {
    "as many stages each": lambda k, x: Pipeline(k, (tile_of(k), x), (tile_of(k, 3, "Y"), x), readers=1),
    "nobody releases": lambda k, x: Pipeline(k, (tile_of(k), x), readers=0).consumer().release(),
    "takes a place for each of 1": lambda k, x: Pipeline(k, (tile_of(k), x), readers=1).producer().put((0,), (0,)),
    "no boxes to load from": lambda k, x: Pipeline(k, tile_of(k), readers=1).producer().put((0,)),
    "in two registers moves so": lambda k, x: Pipeline(k, (tile_of(k), x), readers=1).at(0).skip(k.value(1, u32)),
}


@pytest.mark.parametrize("says", MISUSE)
def test_misuse_is_said(says: str) -> None:
    @kernel(threads=32, requires="sm_90a")
    def wrong(k: Kernel, x: TensorMap) -> None:
        MISUSE[says](k, Boxes(x))

    with pytest.raises(TraceError, match=f"{says}.*test_pipeline.py"):
        wrong.trace()


@kernel(threads=160, requires="sm_90a")
def mistaken(
    k: Kernel,
    x: TensorMap,
    out: Global[f32],
    *,
    readers: int = 4,
    rows: int = ROWS,
    releases: int = 1,
    rounds: int = 8,
    sets_up: bool = True,
    place: int = 1,
) -> None:
    """Warp 4 loads eight tiles for the warps before it, which add up their rows."""
    tile = operand_tile(k, bf16, rows, 64, name="X", stages=3)
    ring = Pipeline(k, (tile, Boxes(x)), readers=readers)
    if sets_up:
        ready(k, ring)
    with k.warps(4, 5), k.when(k.thread == 128):
        put = ring.producer()
        with k.loop(rounds) as i:
            put.put((i * ROWS, 0)[:place] if place else i * ROWS)  # type: ignore[arg-type]
    with k.warps(0, 4):
        get = ring.consumer()
        totals = k.registers(f32, 2, 0.0, "totals")
        with k.loop(8):
            add_columns(k, get.wait(), 64, totals)
            k.fence_async()
            k.syncwarp()
            for _ in range(releases):
                get.release()
        with k.when(k.thread < ROWS):
            out.store(totals[0].get() + totals[1].get(), k.thread)


REFUSED: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "nothing is released": ({"releases": 0}, "get.wait()", ("nothing releases X", "release()")),
    "released twice": ({"releases": 2}, "get.release()", ("X is released twice for one wait", "release once")),
    "fewer readers": ({"readers": 2}, "get.release()", ("4 warps release X", "readers=2", "readers=4")),
    "more readers": ({"readers": 8}, "get.release()", ("4 warps release X", "readers=8", "readers=4")),
    "never set up": ({"sets_up": False}, "ring = Pipeline(", ("never set up", "ready(k")),
    "no place": ({"place": 0}, "put.put(", ("a place is a tuple", "(row,)")),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_with_a_pipeline_is_refused_at_its_line(mistake: str) -> None:
    configuration, line, says = REFUSED[mistake]
    assert mistaken.trace().body
    with pytest.raises(TraceError) as refused:
        mistaken.trace(**configuration)
    assert line in linecache.getline(__file__, refused.value.where.line)
    assert all(part in str(refused.value) for part in says), str(refused.value)


def launched(configuration: dict[str, Any], box: int = ROWS, swizzle: int = 128) -> Emulation:
    x, out = whole(8 * ROWS, 64), np.zeros(ROWS, np.float32)
    spec = TensorMapSpec(bf16, (64, 8 * ROWS), (128,), (64, box), swizzle)
    return emulate(mistaken.trace(**configuration), 1, [TensorMapArgument(x, spec), out])


def test_a_producer_that_is_a_round_short_is_told_how_often_it_came() -> None:
    (found,) = launched({"rounds": 7}).findings
    text, _, line = found.message.partition("after 7 completed phases of X_full, the last from test_pipeline.py:")
    assert "X_full[1] is in phase 2" in text
    assert "put.put(" in linecache.getline(__file__, int(line.partition(" ")[0].strip("),;:")))


MISFITS: dict[str, tuple[dict[str, Any], dict[str, int], tuple[str, ...]]] = {
    "a box too low": ({}, {"box": ROWS // 2}, ("X has 16 rows", "(64, 8)", "make it (64, 16)")),
    "a tile too high": ({"rows": 2 * ROWS}, {}, ("X has 32 rows", "(64, 16)", "make it (64, 32)")),
    "another swizzle": ({}, {"swizzle": 0}, ("'X'", "swizzle_bytes=128")),
    "columns in a place": ({"place": 2}, {}, ("3 coordinates", "2 dimensions", "leaves the columns out")),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_a_map_that_does_not_fit_the_tile_is_told_where_it_is_put(misfit: str) -> None:
    configuration, of_map, says = MISFITS[misfit]
    assert not launched({}).findings
    found = launched(configuration, **of_map).findings[0]
    assert "put.put(" in linecache.getline(__file__, found.where.line)
    assert all(part in found.message for part in says), found.message


@kernel(threads=64, requires="sm_90a")
def sums_of_rows(k: Kernel, x: TensorMap, out: Global[f32], tiles: u32, *, cols: int) -> None:
    """Sums of the even and the odd columns of each row, by a pipeline that takes the tensor map itself."""
    tile = operand_tile(k, bf16, ROWS, cols, name="X", stages=2)
    ring = Pipeline(k, (tile, x), readers=1)
    ready(k, ring)
    with k.warps(0, 1), k.when(k.thread == 0):
        put = ring.producer()
        with k.loop(tiles) as i:
            put.put((i * ROWS,))
    with k.warps(1, 2):
        get = ring.consumer()
        with k.loop(tiles) as i:
            totals = k.registers(f32, 2, 0.0, "totals")
            add_columns(k, get.wait(), padded_cols(cols), totals)
            k.syncwarp()
            get.release()
            with k.when(k.lane < ROWS):
                out.store(totals[0].get() + totals[1].get(), i * ROWS + k.lane)


@pytest.mark.parametrize("cols", [16, 40, 64, 96])
def test_a_map_of_an_array_is_made_for_its_tile(cols: int) -> None:
    x, out = whole(3 * ROWS, cols), np.zeros(3 * ROWS, np.float32)
    array, spec = map_of(x, ROWS, cols)
    assert array is x
    assert spec == as_boxes(x, ROWS, cols).spec
    assert clean(sums_of_rows.trace(cols=cols), 1, [(array, spec), out, 3])
    assert np.allclose(out, x.astype(np.float32).sum(1), atol=1e-3)


def test_maps_of_arrays_of_other_dimensions() -> None:
    batches, row = whole(6 * ROWS, 64).reshape(2, 3 * ROWS, 64), np.zeros(64, np.float32)
    spec = map_of(batches, ROWS, 64)[1]
    assert (spec.shape, spec.box, spec.strides) == ((64, 3 * ROWS, 2), (64, ROWS, 1), (128, 3 * ROWS * 128))
    assert map_of(row, 32)[1] == TensorMapSpec(f32, (64,), (), (32,))
    assert map_of(batches.view(np.uint16), ROWS, 64, dtype=bf16)[1] == spec
    with pytest.raises(LayoutError, match="side by side"):
        map_of(batches[:, :, ::2], ROWS, 32)
    with pytest.raises(LayoutError, match="multiples of 16 bytes"):
        map_of(whole(16, 65)[:, :64], ROWS, 64)


@kernel(threads=96, requires="sm_90a")
def in_turns(k: Kernel, x: TensorMap, out: Global[f32], rounds: u32) -> None:
    """Warps 1 and 2, one role, read every other tile; the barriers are set up by hand."""
    tile = operand_tile(k, bf16, ROWS, 64, name="X", stages=4)
    ring = Pipeline(k, (tile, x), readers=1)
    with k.when(k.thread == 0):
        assert ring.empty is not None
        ring.full.init(1)
        ring.empty.init(1)
        k.mbarrier_fence()
    k.syncthreads()
    with k.warps(0, 1), k.when(k.thread == 0):
        put = ring.producer()
        with k.loop(2 * rounds) as i:
            put.put((i * ROWS,))
    with k.warps(1, 3):
        get = ring.consumer()
        with k.when(k.warp == 2):
            get.advance()
        with k.loop(rounds) as i:
            totals = k.registers(f32, 2, 0.0, "totals")
            add_columns(k, get.wait(), 64, totals)
            k.syncwarp()
            get.release()
            get.advance()
            with k.when(k.lane < ROWS):
                out.store(totals[0].get() + totals[1].get(), (2 * i + k.warp - 1) * ROWS + k.lane)


def test_warps_of_one_role_may_take_turns() -> None:
    x, out = whole(8 * ROWS, 64), np.zeros(8 * ROWS, np.float32)
    assert all(clean(in_turns.trace(), 1, [map_of(x, ROWS, 64), out, 4], seed) for seed in SEEDS)
    assert np.allclose(out, x.astype(np.float32).sum(1), atol=1e-3)
