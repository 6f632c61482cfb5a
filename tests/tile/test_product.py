"""Products of tiles by ``wgmma`` and ``mma.sync``: any width, either way round, A in registers; waits and sums."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from collections import Counter
from itertools import product as every
from typing import Any

import numpy as np
import pytest

from tests.hopper.mutants import changed, deleted, named
from tests.tile.support import SEEDS, as_boxes, clean, escapes, whole
from warploom.core.dtypes import DType, bf16, f16
from warploom.core.errors import TraceError
from warploom.emulate import emulate
from warploom.ir.program import Program
from warploom.lang import Fragment, Global, Kernel, SharedTile, TensorMap, f32, kernel, s32, u16, u32
from warploom.lang.values import Number
from warploom.tile.copies import CopyRing, RowCopy, Rows, accumulate
from warploom.tile.epilogue import OutputMatrix, Panels, Sums, store_registers
from warploom.tile.pipeline import Boxes, Pipeline, operand_tile, ready
from warploom.tile.product import MmaSync, Wgmma, load_left, zero

Shape = tuple[int, int]


def stored(rows: int, depth: int, transposed: bool) -> Shape:
    """The shape of an operand in memory: ``rows`` outer positions along K, or the other way round."""
    return (depth, rows) if transposed else (rows, depth)


def put_out(k: Kernel, fragment: Fragment, out: Any, row: Number, col: Number, cols: int, warp: Number = 0) -> None:
    """Store sums at their place in a row-major matrix of f32."""
    store_registers(Sums(k, fragment, k.value(row, u32), k.value(col, u32), warp), OutputMatrix(k, out, cols, f32))


def check_product(m: int, n: int, depth: int, transposed: tuple[bool, bool], dtype: DType, factor: int, mapped: bool):
    """Runs a kernel on A and B in memory (as boxes, or pointers): out is ``factor`` times their product."""
    a, b = whole(m, depth, dtype=dtype, seed=1), whole(n, depth, dtype=dtype, seed=2)
    expected = factor * (a.astype(np.float32) @ b.astype(np.float32).T)
    lying = [np.ascontiguousarray(x.T) if t else x for x, t in zip((a, b), transposed, strict=True)]

    def check(program: Program, seed: int | None) -> bool:
        out = np.full((m, n), np.nan, np.float32)
        arrays = [as_boxes(x, x.shape[0], x.shape[1], dtype) if mapped else x.view(np.uint16) for x in lying]
        return clean(program, 1, [*arrays, out], seed) and np.array_equal(out, expected)

    return check


@kernel(threads=256, requires="sm_90a")
def by_wgmma(
    k: Kernel,
    a: TensorMap,
    b: TensorMap,
    out: Global[f32],
    *,
    shape: tuple[int, int, int],
    transposed: tuple[bool, bool] = (False, False),
    dtype: DType = bf16,
    in_registers: bool = False,
    begins: int | None = None,
    until: int | None = None,
    some: int = 16,
) -> None:
    """out = 2·A·B of one tile: two warpgroups, each with half of A's blocks of 64 rows.

    ``begins``: in a loop, whose turn of that number begins the sums anew. ``until``: the depth where A ends, of
    which ``some`` is left out at a time.
    """
    m, n, depth = shape
    of_a = operand_tile(k, dtype, *stored(m, depth, transposed[0]), name="A")
    of_b = operand_tile(k, dtype, *stored(n, depth, transposed[1]), name="B")
    here = Pipeline(k, (of_a, Boxes(a)), (of_b, Boxes(b)), readers=0)
    ready(k, here)
    with k.when(k.thread == 0):
        here.producer().put((0,), (0,))
    left, right = here.consumer().wait_all()
    cores, blocks = Wgmma(k, dtype), m // 128
    first = k.warpgroup * (64 * blocks)
    sums = [cores.accumulator(n, f"sums{i}") for i in range(blocks)]
    flipped = {"transposed_a": transposed[0], "transposed_b": transposed[1]}
    if in_registers:
        rows = cores.left(depth, "rows")
        load_left(k, rows, left, first + (k.warp & 3) * 16)
        product = cores.product(sums, rows, of_b, depth=depth, **flipped)
        product.start(rows, right, zero=True)
        product.start(rows, right).wait()
    elif begins is not None:
        product = cores.product(sums, of_a, of_b, row=first, depth=depth, **flipped)
        with k.loop(k.grid_x + 1) as turn:
            product.start(left, right, zero=turn == begins).wait()
    else:
        product = cores.product(sums, of_a, of_b, row=first, depth=depth, **flipped)
        end = None if until is None else k.bitcast(k.grid_x, s32) + (until - 1)
        limit = None if end is None else (end, some)
        product.start(left, right, zero=True, until=limit)
        product.start(left, right, until=limit).wait()
    for i, fragment in enumerate(sums):
        put_out(k, fragment, out, first + 64 * i, 0, n, k.warp & 3)


@pytest.mark.parametrize("transposed", list(every((False, True), repeat=2)))
@pytest.mark.parametrize(
    ("n", "depth", "dtype"), [(72, 64, bf16), (80, 80, f16), (96, 192, bf16), (192, 96, f16), (8, 48, bf16)]
)
def test_wgmma_of_any_width_either_way_round(transposed: tuple[bool, bool], n: int, depth: int, dtype: DType) -> None:
    """A tile's columns beyond its own are zeros: ``depth`` is rounded up to whole steps."""
    shape = 256, n, depth
    check = check_product(*shape, transposed, dtype, 2, True)
    assert check(by_wgmma.trace(shape=shape, transposed=transposed, dtype=dtype), None)


@pytest.mark.parametrize(("depth", "transposed_b"), [(64, False), (72, False), (80, True), (192, True)])
def test_wgmma_with_a_in_registers(depth: int, transposed_b: bool) -> None:
    shape, transposed = (128, 96, depth), (False, transposed_b)
    program = by_wgmma.trace(shape=shape, transposed=transposed, in_registers=True)
    assert all(check_product(*shape, transposed, bf16, 2, True)(program, seed) for seed in SEEDS)


def test_where_sums_begin_may_be_known_at_run_time_alone() -> None:
    shape = 128, 64, 128
    check = check_product(*shape, (False, False), bf16, 2, True)
    assert check(by_wgmma.trace(shape=shape, begins=0), None)
    assert not check(by_wgmma.trace(shape=shape, begins=1), None), "the first turn adds to what nobody has set"


def test_a_depth_that_ends_within_a_step_is_for_tiles_along_k() -> None:
    """There a tile's last panel is zeros; rows beyond a tile are another's."""
    assert check_product(128, 64, 72, (False, False), bf16, 2, True)(by_wgmma.trace(shape=(128, 64, 72)), None)
    with pytest.raises(TraceError, match="multiples of 16 rows, not 72"):
        by_wgmma.trace(shape=(128, 64, 72), transposed=(False, True))


@pytest.mark.parametrize(
    ("until", "some", "end"),
    [(-5, 16, 16), (16, 16, 16), (17, 16, 32), (63, 16, 64), (64, 16, 64), (0, 32, 16), (17, 32, 48), (49, 32, 80)],
)
def test_steps_behind_the_end_of_a_are_left_out(until: int, some: int, end: int) -> None:
    """What B has there is not read, but for the first."""
    m, n, depth = 128, 16, 64 if some == 16 else 80
    a, b = whole(m, depth, seed=1), whole(n, depth, seed=2)
    a[:, end:], b[:, end:] = 0, np.nan
    out = np.full((m, n), np.nan, np.float32)
    boxes = [as_boxes(a, m, depth), as_boxes(b, n, depth)]
    done = emulate(by_wgmma.trace(shape=(m, n, depth), until=until, some=some), 1, [*boxes, out]).raise_if_found()
    assert np.array_equal(out, 2 * (a[:, :end].astype(np.float32) @ b[:, :end].astype(np.float32).T))
    assert sum(count for name, count in done.executed.items() if name.startswith("wgmma.mma")) == 8 * 2 * end // 16


def test_every_step_of_a_product_by_wgmma_is_needed() -> None:
    shape = 128, 64, 64
    found = escapes(by_wgmma.trace(shape=shape), check_product(*shape, (False, False), bf16, 2, True))
    # Two products on the same sums need a fence before the first alone; nobody waits for a stage to be empty.
    assert found == Counter(
        [
            "without wgmma.fence.sync.aligned",
            "without wgmma.commit_group.sync.aligned",
            "parity kept A_put_phase",
            "the first phase inverted A_put_phase",
        ]
    )


@kernel(threads=128, requires="sm_90a")
def two_products(k: Kernel, a: TensorMap, b: TensorMap, out: Global[f32]) -> None:
    """The first of two products is used while the second may still run."""
    of_a = operand_tile(k, bf16, 64, 64, name="A")
    of_b = operand_tile(k, bf16, 16, 64, name="B")
    here = Pipeline(k, (of_a, Boxes(a)), (of_b, Boxes(b)), readers=0)
    ready(k, here)
    with k.when(k.thread == 0):
        here.producer().put((0,), (0,))
    left, right = here.consumer().wait_all()
    cores = Wgmma(k, bf16)
    first, second = cores.accumulator(16, "first"), cores.accumulator(16, "second")
    early = cores.product(first, of_a, of_b).start(left, right, zero=True)
    late = cores.product(second, of_a, of_b).start(left, right, zero=True)
    early.wait()
    put_out(k, first, out, 0, 0, 16, k.warp)
    late.wait()
    put_out(k, second, out, 64, 0, 16, k.warp)


def test_a_product_is_waited_for_while_later_ones_run() -> None:
    a, b = whole(64, 64, seed=1), whole(16, 64, seed=2)
    expected = np.tile(a.astype(np.float32) @ b.astype(np.float32).T, (2, 1))

    def run(program: Program) -> list[str]:
        out = np.full((128, 16), np.nan, np.float32)
        found = emulate(program, 1, [as_boxes(a, 64, 64), as_boxes(b, 16, 64), out]).findings
        assert found or np.array_equal(out, expected)
        return [f.kind for f in found]

    program, wait = two_products.trace(), named("wgmma.wait_group")
    assert [op.instruction.pending for op in program.ops() if wait(op)] == [1, 0]  # type: ignore[attr-defined]
    assert run(program) == []
    for mutant in (deleted(program, wait), changed(program, wait, 0, pending=2), deleted(program, wait, 1)):
        assert "in_flight" in run(mutant)


@kernel(threads=128)
def by_mma_sync(
    k: Kernel,
    a: Global[u16],
    b: Global[u16],
    out: Global[f32],
    *,
    shape: tuple[int, int, int],
    warps: tuple[int, int] = (2, 2),
    transposed: tuple[bool, bool] = (False, False),
    dtype: DType = bf16,
    ahead: bool = False,
    a_as: str = "tile",
) -> None:
    """out = 2·A·B of one tile by four warps, ``warps`` of them along its rows and columns."""
    m, n, depth = shape
    tiles: list[SharedTile] = []
    for name, matrix, lying in (("A", a, stored(m, depth, transposed[0])), ("B", b, stored(n, depth, transposed[1]))):
        tiles.append(operand_tile(k, dtype, -(-lying[0] // 16) * 16, lying[1], name=name))
        RowCopy(k, tiles[-1], Rows(matrix, lying[1], k.value(lying[0], u32), lying[1]), 128).load((0, 0))
    k.commit_group()
    k.wait_group(0)
    k.syncthreads()
    cores = MmaSync(k, dtype, ahead=ahead)
    at = k.warp // warps[1], k.warp % warps[1]
    rows, cols = m // warps[0], n // warps[1]
    sums = cores.accumulator(rows, cols, "sums")
    left: Any = tiles[0]
    if a_as == "registers":
        left = Wgmma(k, dtype).left(depth, "rows")
        load_left(k, left, tiles[0], at[0] * rows)
    elif a_as == "fragment":  # a product's values as the next one's operand: A·1
        one = operand_tile(k, dtype, depth, depth, name="one")
        with k.when(k.thread < depth):
            for col in range(depth):
                one.store(k.select(k.thread == col, k.pack(1.0, 0.0, dtype), k.pack(0.0, 0.0, dtype)), k.thread, col)
        k.syncthreads()
        values = cores.accumulator(rows, depth, "values")
        cores.product(values, tiles[0], one, warp=(at[0], 0), transposed_a=transposed[0]).start(
            tiles[0], one, zero=True
        )
        left = cores.left(values)
    product = cores.product(
        sums, left, tiles[1], warp=at, depth=depth, transposed_a=transposed[0], transposed_b=transposed[1]
    )
    product.start(left, tiles[1], zero=True)
    product.start(left, tiles[1]).wait()
    put_out(k, sums, out, at[0] * rows, at[1] * cols, n)


@pytest.mark.parametrize("transposed", list(every((False, True), repeat=2)))
@pytest.mark.parametrize(
    ("shape", "warps", "dtype", "ahead"),
    [
        ((64, 64, 64), (2, 2), bf16, False),
        ((128, 64, 80), (4, 1), f16, True),
        ((64, 96, 192), (4, 1), bf16, True),
        ((32, 64, 96), (2, 2), f16, False),
        ((16, 128, 64), (1, 4), bf16, True),
        ((64, 72, 64), (4, 1), bf16, False),
        ((64, 24, 64), (4, 1), f16, True),
    ],
)
def test_mma_sync_of_any_width_either_way_round(
    transposed: tuple[bool, bool], shape: tuple[int, int, int], warps: Shape, dtype: DType, ahead: bool
) -> None:
    program = by_mma_sync.trace(shape=shape, warps=warps, transposed=transposed, dtype=dtype, ahead=ahead)
    assert check_product(*shape, transposed, dtype, 2, False)(program, None)


@pytest.mark.parametrize("a_as", ["registers", "fragment"])
@pytest.mark.parametrize("transposed_b", [False, True])
def test_mma_sync_with_a_in_registers(a_as: str, transposed_b: bool) -> None:
    shape, transposed = (64, 48, 64), (False, transposed_b)
    program = by_mma_sync.trace(shape=shape, warps=(4, 1), transposed=transposed, a_as=a_as)
    assert check_product(*shape, transposed, bf16, 2, False)(program, 0)


@kernel(threads=128)
def matmul(
    k: Kernel, a: Global[u16], b: Global[u16], out: Global[f32], *, tiles: int, stages: int, sums: DType = f32
) -> None:
    """out = A·B over k-tiles of 32, a 64×32 tile by four warps: copies, fragments and products one over the other."""
    of_a, of_b = (operand_tile(k, f16, rows, 32, name=name, stages=stages) for name, rows in (("A", 64), ("B", 32)))
    ring = CopyRing(k, (of_a, Rows(a, 32 * tiles)), (of_b, Rows(b, 32 * tiles)), threads=128)
    cores = MmaSync(k, f16, sums=sums)
    accumulator = cores.accumulator(16, 32, "sums")
    product = cores.product(accumulator, of_a, of_b, warp=(k.warp, 0))
    count = k.value(tiles, u32)

    def places(j: Any) -> list[tuple[Number, ...]]:
        return 2 * [(0, j * 32)]

    ring.begin(count, places, 2 * [(0, 32)])
    accumulate(k, ring, product, count, places)
    put_out(k, accumulator, out, k.warp * 16, 0, 32)


@pytest.mark.parametrize("tiles", [1, 2, 5])
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("sums", [f32, f16])
def test_a_sum_over_a_ring_of_tiles(tiles: int, stages: int, sums: DType) -> None:
    check = check_product(64, 32, 32 * tiles, (False, False), f16, 1, False)
    program = matmul.trace(tiles=tiles, stages=stages, sums=sums)
    assert all(check(program, seed) for seed in SEEDS)


@pytest.mark.parametrize("stages", [2, 3])
def test_every_step_of_a_sum_over_a_ring_is_needed(stages: int) -> None:
    check = check_product(64, 32, 160, (False, False), f16, 1, False)
    assert escapes(matmul.trace(tiles=5, stages=stages), check) == Counter()


def test_what_a_product_was_made_for_is_what_it_takes() -> None:
    @kernel(threads=128, requires="sm_90a")
    def wrong(k: Kernel, *, mma: bool) -> None:
        tile = operand_tile(k, bf16, 64, 64, name="A")
        if mma:
            cores = MmaSync(k, bf16)
            held = k.registers(u32, 16, 0)
            cores.product(cores.accumulator(16, 64, "sums"), held, tile).start(tile, tile)
        else:
            fragment = Fragment(k, Wgmma(k, bf16).accumulator(64, "sums").layout, f32, tuple(k.registers(f32, 32, 0.0)))
            values = fragment.map(lambda x: x + 1.0)
            zero(values)

    with pytest.raises(TraceError, match="made for A in registers, not for A"):
        wrong.trace(mma=True)
    with pytest.raises(TraceError, match="only an accumulator"):
        wrong.trace(mma=False)


def test_a_target_is_of_its_pointers_type_and_panels_take_whole_ones() -> None:
    @kernel(threads=128, requires="sm_90a")
    def wrong(k: Kernel, y: Global[f32], bits: Global[u16], *, of_bits: bool, cols: int = 64) -> None:
        panels = Panels(k, bf16, 64, 1, 1, None)
        panels.prepare(k.value(0, u32))
        sums = Wgmma(k, bf16).accumulator(cols, "c")
        zero(sums)
        panels.store(
            Sums(k, sums, k.value(0, u32), k.value(0, u32)), 0, OutputMatrix(k, bits if of_bits else y, 64, bf16)
        )

    assert wrong.trace(of_bits=True).body
    with pytest.raises(TraceError, match=r"^test_product\.py:\d+: .*target of bf16 .*pointer to f32"):
        wrong.trace(of_bits=False)
    for cols in (32, 96):
        with pytest.raises(
            TraceError, match=rf"^test_product\.py:\d+: {cols} columns of sums are no whole panels of 64"
        ):
            wrong.trace(of_bits=True, cols=cols)
