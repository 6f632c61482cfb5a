"""Fragments: reductions for several layouts, operands by proof, a whole matrix product from the words alone."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.lang.support import mnemonics, run
from warploom.core.errors import LayoutError, TraceError
from warploom.lang import Global, Kernel, bf16, f16, f32, kernel, u32
from warploom.lang.fragments import Arithmetical
from warploom.layout.catalogue import mma_fragment
from warploom.layout.reduction import reduction_plan

A, B, C = (mma_fragment("m16n8k16", which) for which in "ABC")
RNG = np.random.default_rng(21)


@kernel(threads=32)
def reduce_fragment(
    k: Kernel, matrix: Global[f32], out: Global[f32], *, layout, op: Arithmetical, axis: str, quad_mask: bool = False
) -> None:
    """Every lane reduces its fragment and stores each result at [lane][group]."""
    rows, cols = layout.shape
    values = []
    for element in range(layout.elements_per_thread):
        row, col = layout.coordinates(k.lane, element)
        values.append(matrix.load(row * cols + col))
    fragment = k.fragment(layout, f32, values)
    mask = k.value(0xF, u32) << (k.lane & 28) if quad_mask else 0xFFFFFFFF
    results = fragment.reduce(op, axis, member_mask=mask)
    for group, value in enumerate(results):
        out.store(value, k.lane * len(results) + group)
    assert rows


LAYOUTS = {"C": C, "C 2x4": C.tile(2, 4), "C 1x3": C.tile(1, 3), "f32 A": mma_fragment("m16n8k8", "A", 32)}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("axis", ["col", "row"])
@pytest.mark.parametrize(("op", "exact"), [("max", np.max), ("min", np.min), ("add", np.sum)])
def test_reductions_give_every_lane_its_results(name, axis, op, exact):
    layout = LAYOUTS[name]
    matrix = RNG.integers(-100, 100, layout.shape).astype(np.float32)  # sums are exact in any order
    along = 1 if axis == "col" else 0
    plan = reduction_plan(layout, axis)
    out = np.zeros((32, len(plan.groups)), np.float32)
    run(reduce_fragment, matrix, out, layout=layout, op=op, axis=axis)
    expected = exact(matrix, axis=along)
    for lane in range(32):
        for group in range(len(plan.groups)):
            assert out[lane, group] == expected[plan.result_coordinate(group, lane)]


@kernel(threads=32)
def softmax(
    k: Kernel, matrix: Global[f32], out: Global[f32], *, layout, axis: str = "col", short: bool = False
) -> None:
    rows, cols = layout.shape
    places = [layout.coordinates(k.lane, element) for element in range(layout.elements_per_thread)]
    scores = k.fragment(layout, f32, [matrix.load(row * cols + col) for row, col in places])
    tops = scores.reduce("max", axis)
    powers = scores.map_rows(lambda x, top: k.exp2(x - top), tops[1:] if short else tops, axis)
    powers.map_rows(lambda x, total: x / total, powers.reduce("add", axis), axis).store_global(out, cols)
    assert rows


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("axis", ["col", "row"])
def test_values_of_rows_go_back_to_their_rows(name, axis):
    layout, along = LAYOUTS[name], 1 if axis == "col" else 0
    matrix = RNG.standard_normal(layout.shape).astype(np.float32)
    out = np.zeros_like(matrix)
    run(softmax, matrix, out, layout=layout, axis=axis)
    powers = np.exp2(matrix.astype(np.float64))
    assert np.abs(out - powers / powers.sum(along, keepdims=True)).max() < 1e-6
    with pytest.raises(TraceError, match=rf"reduce\(…, '{axis}'\) gives, not"):
        softmax.trace(layout=layout, axis=axis, short=True)


def test_a_quads_own_member_mask_is_enough():
    matrix = RNG.standard_normal(C.shape).astype(np.float32)
    full, quad = np.zeros((32, 2), np.float32), np.zeros((32, 2), np.float32)
    run(reduce_fragment, matrix, full, layout=C, op="max", axis="col")
    run(reduce_fragment, matrix, quad, layout=C, op="max", axis="col", quad_mask=True)
    assert np.array_equal(full, quad)


def test_a_reduction_takes_as_few_shuffles_as_there_are_lane_bits():
    program = reduce_fragment.trace(layout=C.tile(1, 4), op="max", axis="col")
    assert sum(m.startswith("shfl") for m in mnemonics(program)) == 2 * 2
    program = reduce_fragment.trace(layout=C, op="add", axis="row")
    assert sum(m.startswith("shfl") for m in mnemonics(program)) == 2 * 3


def test_any_function_of_two_values_reduces():
    @kernel(threads=32)
    def absolute_maximum(k: Kernel, matrix: Global[f32], out: Global[f32]) -> None:
        values = []
        for element in range(4):
            row, col = C.coordinates(k.lane, element)
            values.append(matrix.load(row * 8 + col))
        tops = k.fragment(C, f32, values).reduce(lambda a, b: k.maximum(k.absolute(a), k.absolute(b)), "col")
        for group, value in enumerate(tops):
            out.store(value, k.lane // 4 + 8 * group)

    matrix = RNG.standard_normal((16, 8)).astype(np.float32)
    out = np.zeros(16, np.float32)
    run(absolute_maximum, matrix, out)
    np.testing.assert_array_equal(out, np.abs(matrix).max(1))


@kernel(threads=32)
def two_products(
    k: Kernel,
    a: Global[u32],
    b: Global[u32],
    out: Global[f32],
    *,
    half,
    scale: float = 1.0,
    swizzle: str | None = "auto",
) -> None:
    """(A·Bᵀ·scale) as the A operand of the next product with B: out[16, 64] = half(A·Bᵀ)·B; A 16×64, B 16×64."""
    a_tile = k.shared(half, (16, 64), name="a_tile", swizzle=swizzle)  # type: ignore[arg-type]
    b_tile = k.shared(half, (16, 64), name="b_tile", swizzle=swizzle)  # type: ignore[arg-type]
    for tile, source in ((a_tile, a), (b_tile, b)):
        for step in range(4):
            row, col = k.lane // 8 + 4 * step, (k.lane % 8) * 8
            tile.store(source.load(row * 32 + (k.lane % 8) * 4, 4), row, col, dtype=u32)
    k.syncwarp()
    scores = k.accumulator(C.tile(1, 2), 0.0)
    for depth in range(0, 64, 16):
        left = k.load_fragment(a_tile, A, 0, depth)
        for n in range(2):
            right = k.load_fragment(b_tile, B, 8 * n, depth, transposed=True)
            atom = scores.mutable_atom(0, n)
            k.mma(left.registers, right.registers, atom, inputs=half, into=atom)
    operand = scores.map(lambda x: x * scale).as_operand(A, half)
    product = k.accumulator(C.tile(1, 8), 0.0)
    for n in range(8):
        right = k.load_fragment(b_tile, B, 0, 8 * n)
        atom = product.mutable_atom(0, n)
        k.mma(operand.registers, right.registers, atom, inputs=half, into=atom)
    product.store_global(out, 64)


@kernel(threads=64)
def parts_of_a_tile(k: Kernel, a: Global[u32], out: Global[u32], *, how: str) -> None:
    """Each warp's A fragment at row 16·warp and column 16·warp, register by register."""
    tile = k.shared(f16, (32, 64), swizzle="auto")
    for step in range(4):
        row, col = k.thread // 8 + 8 * step, k.thread % 8 * 8
        tile.store(a.load(row * 32 + col // 2, 4), row, col, dtype=u32)
    k.syncthreads()
    for warp in range(2):
        with k.when(k.warp == warp):
            row = {"traced": k.warp * 16, "constant": 16 * warp}[how]
            registers = k.load_fragment(tile, A, row, row).registers
            out.store(registers, k.thread * 4)


def test_a_fragment_at_a_traced_place_is_the_one_at_the_constant():
    a = RNG.integers(0, 2**32, (32, 32), dtype=np.uint32)
    found = []
    for how in ("traced", "constant"):
        out = np.zeros(256, np.uint32)
        run(parts_of_a_tile, a, out, how=how)
        found.append(out)
    np.testing.assert_array_equal(*found)
    assert np.unique(found[0]).size > 250


@pytest.mark.parametrize("half", [f16, bf16], ids=repr)
@pytest.mark.parametrize("swizzle", ["auto", None])
def test_an_accumulator_feeds_the_next_product(half, swizzle):
    kind = {f16: np.float16, bf16: ml_dtypes.bfloat16}[half]
    a, b = (RNG.integers(-2, 3, (16, 64)).astype(np.float32).astype(kind) for _ in "ab")
    out = np.zeros((16, 64), np.float32)
    run(two_products, a.view(np.uint32), b.view(np.uint32), out, half=half, swizzle=swizzle)
    a32, b32 = a.astype(np.float32), b.astype(np.float32)
    expected = (a32 @ b32.T).astype(kind).astype(np.float32) @ b32
    np.testing.assert_array_equal(out, expected)


def test_operands_are_proven_equal_or_refused():
    @kernel(threads=32)
    def wrong(k: Kernel, out: Global[f32]) -> None:
        k.accumulator(C.tile(1, 2)).as_operand(B.tile(1, 2), bf16)

    with pytest.raises(LayoutError):
        wrong.trace()


def test_only_accumulators_are_written_in_place():
    @kernel(threads=32)
    def wrong(k: Kernel, out: Global[f32]) -> None:
        k.fragment(C, f32, [k.value(0.0, f32)] * 4).mutable_atom(0, 0)

    with pytest.raises(TraceError, match=r"k\.accumulator"):
        wrong.trace()


def test_register_counts_are_checked():
    @kernel(threads=32)
    def wrong(k: Kernel, out: Global[f32], *, count: int, operands: int) -> None:
        if count:
            k.fragment(C, f32, [k.value(0.0, f32)] * count)
        sums = k.mma([k.value(0, u32)] * operands, [k.value(0, u32)] * 2, [0.0] * 4)
        out.store(sums[0], k.lane)

    with pytest.raises(TraceError, match="4 registers a thread, got 3"):
        wrong.trace(count=3, operands=4)
    wrong.trace(count=4, operands=4)
    with pytest.raises(TraceError, match="takes 4 registers for A, got 3"):
        wrong.trace(count=0, operands=3)


@pytest.mark.parametrize(
    ("layout", "dtype", "items", "says"),
    [
        (C, f32, lambda k: [k.value(0, u32)] * 4, r"expected f32, got u32\(0\).*k\.bitcast"),
        (C, f32, lambda k: ["a"] * 4, "'a' is no number that f32 can hold"),
        (C, f32, lambda k: [None] * 4, "None is no number that f32 can hold"),
        (B, bf16, lambda k: [k.value(0.0, f32)] * 2, "expected u32, got f32"),
        (C, bf16, lambda k: [k.value(0, u32)] * 2, "holds elements of 32 bits, not bf16"),
        ("mma", f32, lambda k: [0.0] * 4, "takes a fragment's layout"),
        (C, np.float32, lambda k: [0.0] * 4, "a type of warploom.core.dtypes"),
    ],
)
def test_items_of_a_fragment_are_checked(layout, dtype, items, says):
    @kernel(threads=32)
    def wrong(k: Kernel, out: Global[f32]) -> None:
        k.fragment(layout, dtype, items(k))

    with pytest.raises(TraceError, match=says) as refused:
        wrong.trace()
    assert "test_fragments.py:" in str(refused.value)


def test_packed_fragments_hold_two_elements_a_register():
    @kernel(threads=32)
    def pack(k: Kernel, out: Global[u32]) -> None:
        values = [k.convert(k.lane * 4 + i, f32) for i in range(4)]
        packed = k.fragment(C, f32, values).packed(bf16)
        assert packed.dtype is bf16
        assert len(packed.registers) == 2
        for i, pair in enumerate(packed.registers):
            out.store(pair, k.lane * 2 + i)

    out = np.zeros(64, np.uint32)
    run(pack, out)
    assert out.view(ml_dtypes.bfloat16).astype(np.float32).tolist() == [float(i) for i in range(128)]
