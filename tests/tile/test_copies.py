"""Tiles copied by the threads of a CTA: rings of stages, edges, lines at odd addresses, and back."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.tile.support import SEEDS, clean, escapes, whole
from warploom.core.dtypes import bf16
from warploom.core.errors import ConfigError, TraceError
from warploom.ir.program import Program
from warploom.lang import Global, Kernel, SharedTile, Traced, f32, kernel, u16, u32
from warploom.tile.copies import CopyRing, RowCopy, Rows
from warploom.tile.pipeline import operand_tile
from warploom.tile.planning import CopyPlan, padded_cols, panel_cols

THREADS = 64


def sums_of(k: Kernel, tile: SharedTile, out: Any, first: Traced) -> None:
    """Thread r < rows stores the sum of row r of a tile to out[first + r]."""
    layout = tile.layout
    with k.when(k.thread < layout.rows):
        total = k.register(f32, 0.0, "total")
        for col in range(0, layout.cols, 2):
            pair = tile.load(k.thread, col, dtype=u32)
            for x in k.unpack(pair, tile.dtype):
                total += x
        out.store(total.get(), first + k.thread)


@kernel(threads=THREADS, drop_unused=True)
def ring_sums(
    k: Kernel,
    x: Global[u16],
    out: Global[f32],
    rows: u32,
    cols: u32,
    stride: u32,
    plane: u32,
    *,
    shape: tuple[int, int],
    stages: int,
    known: int | None = None,
    chunk: int = 8,
    partial: bool = False,
    stepped: bool = False,
) -> None:
    """Row sums of the tiles of two matrices, down their rows and along their columns (across, plane by plane).

    ``known``: their columns, while tracing. ``stepped``: addresses are moved on from tile to tile.
    """
    high, wide = shape
    tile = operand_tile(k, bf16, high, wide, name="X", stages=stages)
    matrix = Rows(x, stride, rows, known or cols, chunk=chunk, partial=partial, plane=plane)
    ring = CopyRing(k, (tile, matrix), threads=THREADS)
    across, down = (cols + (wide - 1)) // wide, (rows + (high - 1)) // high
    with k.loop(2) as number, k.loop(down) as i:
        first = ((number * down + i) * across) * high

        def places(j: Traced, i: Traced = i, number: Traced = number) -> list[tuple[Traced, ...]]:
            return [(i * high, j * wide, number)]

        if stepped:
            ring.begin(across, places, [(0, wide)])
            read, write = ring.consumer(), ring.producer()
            with k.loop(across) as j:
                (here,) = read.wait()
                write.put(*places(j + stages - 1), when=j + (stages - 1) < across)
                sums_of(k, here, out, first + j * high)
                read.release()
        else:
            ring.each(across, places, lambda j, here, first=first: sums_of(k, here, out, first + j * high))
        k.syncthreads()  # every warp is done with the last stages


def check_ring(rows: int, cols: int, stride: int, shape: tuple[int, int]) -> Callable[..., bool]:
    """Two matrices, a row beyond the other; what lies between their lines and after them is NaN."""
    high, wide = shape
    plane = rows * stride + (3 if stride % 2 else 8)
    x = whole(2, rows, cols, seed=cols)
    memory = np.full(2 * plane, np.nan, x.dtype)
    for number in range(2):
        lines = memory[number * plane : number * plane + rows * stride].reshape(rows, stride)
        lines[:, :cols] = x[number]
    down, across = -(-rows // high), -(-cols // wide)
    padded = np.zeros((2, down * high, across * wide), np.float32)
    padded[:, :rows, :cols] = x
    expected = padded.reshape(2, down, high, across, wide).sum(-1).swapaxes(2, 3).reshape(-1)
    scalars = {"rows": rows, "cols": cols, "stride": stride, "plane": plane}

    def check(program: Program, seed: int | None) -> bool:
        out = np.full_like(expected, np.nan)
        given = {"x": memory.view(np.uint16), "out": out, **scalars}
        arguments = {p.name: given[p.name] for p in program.parameters}
        return clean(program, 1, arguments, seed) and np.array_equal(out, expected)

    return check


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(
    ("cols", "stride", "options"),
    [
        (128, 128, {}),  # whole tiles
        (136, 144, {}),  # a tile beyond the columns in part, by whole chunks
        (130, 132, {"chunk": 4, "partial": True}),
        (131, 134, {"chunk": 2, "partial": True}),
        (75, 75, {"chunk": 1}),  # lines at odd addresses
        (72, 72, {"known": 72}),
    ],
)
def test_tiles_arrive_in_order_with_zeros_beyond_the_matrix(
    stages: int, cols: int, stride: int, options: dict[str, Any]
) -> None:
    shape = (16, 80) if "known" in options else (16, 32)
    for rows in (32, 19):
        check = check_ring(rows, cols, stride, shape)
        assert check(ring_sums.trace(shape=shape, stages=stages, **options), None)
        if "chunk" not in options:
            assert check(ring_sums.trace(shape=shape, stages=stages, stepped=True, **options), 0)


@pytest.mark.parametrize(("stages", "stepped"), [(2, False), (3, False), (3, True)])
def test_every_step_of_a_ring_of_copies_is_needed(stages: int, stepped: bool) -> None:
    program = ring_sums.trace(shape=(16, 32), stages=stages, stepped=stepped)
    assert escapes(program, check_ring(32, 160, 160, (16, 32))) == Counter()


@kernel(threads=THREADS)
def moved(k: Kernel, x: Global[u16], y: Global[u16], rows: u32, *, cols: int, stride: int) -> None:
    """y = x through a shared tile, at the same place."""
    tile = operand_tile(k, bf16, 32, cols, name="X")
    RowCopy(k, tile, Rows(x, stride, rows, cols), THREADS).load((k.cta_x * 32, 0))
    k.commit_group()
    k.wait_group(0)
    k.syncthreads()
    RowCopy(k, tile, Rows(y, stride, rows, cols), THREADS).store((k.cta_x * 32, 0))


@pytest.mark.parametrize(("cols", "stride"), [(16, 24), (64, 64), (72, 80), (96, 96), (192, 200)])
def test_a_tile_goes_back_as_far_as_the_matrix_reaches(cols: int, stride: int) -> None:
    x, program = whole(45, stride, seed=stride), moved.trace(cols=cols, stride=stride)
    for seed in SEEDS[:2]:
        y = np.full_like(x, np.nan)
        assert clean(program, 2, [x.view(np.uint16), y.view(np.uint16), 45], seed)
        assert np.array_equal(y[:, :cols], x[:, :cols])
        assert np.isnan(y[:, cols:].astype(np.float32)).all()


@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize("cols", [16, 64, 128])
@pytest.mark.parametrize("cooperative", [False, True])
def test_a_plan_covers_its_tile_once_or_says_why_not(rows: int, cols: int, cooperative: bool) -> None:
    plan = CopyPlan(rows, cols, 4, cooperative)
    if plan.problems():
        assert plan.own_rows % plan.rows_per_step
        return
    seen = np.zeros((rows, cols), int)
    for thread in range(128):
        at = plan.threads().apply(lane=thread if cooperative else thread % 32)
        first = 0 if cooperative else thread // 32 * plan.own_rows
        for row, col in plan.steps:
            seen[first + at["row"] + row, at["col"] + col : at["col"] + col + 8] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize(
    ("cols", "tight", "panel", "padded"),
    [
        (8, False, 16, 16),
        (33, False, 64, 64),
        (65, False, 64, 128),
        (64, True, 64, 64),
        (65, True, 32, 96),
        (96, True, 32, 96),
        (97, True, 64, 128),  # no panel of 64 would be half empty
    ],
)
def test_panels_are_as_wide_as_a_swizzle_and_narrower_where_half_of_one_would_be_empty(
    cols: int, tight: bool, panel: int, padded: int
) -> None:
    assert (panel_cols(cols, tight=tight), padded_cols(cols, tight=tight)) == (panel, padded)


def test_a_tile_that_threads_cannot_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^test_copies\.py:\d+: X: 8 rows are no multiple of the 16 rows"):
        ring_sums.trace(shape=(8, 32), stages=2)


@pytest.mark.parametrize("steps", [None, [(0, 32)]])
def test_a_place_for_each_tile_of_a_ring(steps: list[tuple[int, int]] | None) -> None:
    @kernel(threads=THREADS)
    def wrong(k: Kernel, x: Global[u16]) -> None:
        tiles = [operand_tile(k, bf16, 16, 32, name=name, stages=2) for name in "XY"]
        ring = CopyRing(k, *((tile, Rows(x, 32)) for tile in tiles), threads=THREADS)
        ring.begin(k.value(2, u32), lambda j: [(0, 0)], steps)

    with pytest.raises(TraceError, match=r"^test_copies\.py:\d+: .*a place for each of 2 tiles"):
        wrong.trace()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a tile of f32": ({"of_tile": f32}, "16-bit elements are copied: X has f32, its matrix u16"),
    "a matrix of f32": ({"of_matrix": f32}, "16-bit elements are copied: X has bf16, its matrix f32"),
    "one stage": ({"stages": 1}, "2 stages or more: X has 1"),
    "more threads than the kernel": ({"threads": 2 * THREADS}, f"threads={2 * THREADS} in a kernel of {THREADS}"),
    "fewer threads": ({"threads": THREADS // 2}, f"threads={THREADS // 2} in a kernel of {THREADS}"),
    "one of several matrices": ({"place": (0, 0, 1)}, "plane="),
    "no begin": ({"begins": False}, "begin starts the first copies"),
}


@pytest.mark.parametrize(("wrong", "message"), REFUSED.values(), ids=REFUSED)
def test_what_a_ring_of_copies_does_not_do_is_refused(wrong: dict[str, Any], message: str) -> None:
    trace = turning.trace
    assert trace().body
    with pytest.raises(TraceError, match=rf"^test_copies\.py:\d+: .*{message}"):
        trace(**wrong)


@kernel(threads=THREADS)
def turning(
    k: Kernel,
    x: Global[u16],
    y: Global[f32],
    *,
    of_tile: Any = bf16,
    of_matrix: Any = u16,
    stages: int = 2,
    threads: int = THREADS,
    place: tuple[int, ...] = (0, 0),
    begins: bool = True,
) -> None:
    """Some turns of a ring."""
    tile = k.shared(of_tile, (32, 64), name="X", stages=stages)
    ring = CopyRing(k, (tile, Rows(x if of_matrix is u16 else y, 64)), threads=threads)
    if begins:
        ring.begin(k.value(3, u32), lambda _: [place])
    read, write = ring.consumer(), ring.producer()
    with k.loop(3):
        read.wait()
        write.put(place)
        read.release()


def test_tiles_of_a_ring_have_as_many_stages() -> None:
    @kernel(threads=THREADS)
    def uneven(k: Kernel, x: Global[u16]) -> None:
        tiles = [operand_tile(k, bf16, 16, 64, name=f"X{n}", stages=n) for n in (2, 3)]
        CopyRing(k, *((tile, Rows(x, 64)) for tile in tiles), threads=THREADS)

    with pytest.raises(TraceError, match="as many stages each"):
        uneven.trace()
