"""What a 16×16 product becomes without leaving the registers of a warp. Check it: warploom check reductions.py

Each kernel multiplies two matrices and goes on with the accumulator fragment: scaled and stored through its forward
map, reduced along columns or rows, with the position of the maximum, with mean and variance, with a pair of its own,
and as the operand of a second product. No kernel uses shared memory.
"""

# pyright: reportInvalidTypeForm=false

from typing import Any

import numpy as np

from warploom.lang import Fragment, Global, GlobalPointer, Kernel, Launch, Traced, bf16, f32, kernel, u32
from warploom.lang.functions import maximum, select
from warploom.lang.reducers import Reducer, State
from warploom.layout import FragmentLayout, mma_fragment, reduction_plan

A, B, C = (mma_fragment("m16n8k16", operand) for operand in "ABC")
PRODUCT = C.tile(1, 2)  # two m16n8 accumulators side by side: 16×16
ROWS, COLUMNS = reduction_plan(PRODUCT, "col"), reduction_plan(PRODUCT, "row")
WIDE = 40  # elements from one row of a stored matrix to the next


def product(k: Kernel, a: GlobalPointer, b: GlobalPointer) -> Fragment:
    """A·Bᵀ of two 16×16 matrices."""
    left = read(k, a, A)
    registers: list[Traced] = []
    for n in range(2):
        right = read(k, b + 128 * n, B.transposed())
        registers += k.mma(left, right, [0.0] * 4)
    return k.fragment(PRODUCT, f32, registers)


def read(k: Kernel, matrix: GlobalPointer, layout: FragmentLayout) -> list[Traced]:
    """An operand from a row-major matrix of 16 columns, two neighbouring elements to a register."""
    pairs: list[Traced] = []
    for register in range(layout.registers):
        row, col = layout.coordinates(k.lane, 2 * register)
        pairs.append(matrix.load(row * 16 + col, dtype=u32))
    return pairs


def first_of_row(k: Kernel) -> Traced:
    """Whether a lane is the first of those that hold the same rows' results."""
    return (k.lane & ROWS.replicated) == 0


@kernel(threads=32)
def scaled(k: Kernel, a: Global[bf16], b: Global[bf16], out: Global[f32]) -> None:
    """Algorithm 2 of the paper: element i of a lane belongs at (row, col) = map(lane, i)."""
    product(k, a, b).map(lambda x: x * 0.25).store_global(out, WIDE)


@kernel(threads=32)
def nearest(k: Kernel, a: Global[bf16], b: Global[bf16], best: Global[f32], where: Global[u32]) -> None:
    """The largest element of each row, and its column."""
    found = product(k, a, b).reduce("argmax", "col")
    with k.when(first_of_row(k)):
        for group, (value, column) in enumerate(found):
            row = ROWS.result_coordinate(group, k.lane)
            best.store(value, row)
            where.store(column, row)


@kernel(threads=32)
def normalised(k: Kernel, a: Global[bf16], b: Global[bf16], out: Global[f32]) -> None:
    """Rows of mean 0 and variance 1: every lane of a row has the row's statistics, and applies them to its elements."""
    fragment = product(k, a, b)
    values = list(fragment.registers)
    for group, (count, mean, squares) in enumerate(fragment.reduce("moments", "col")):
        scale = k.rsqrt(squares / count)
        for element in ROWS.groups[group]:
            values[element] = (values[element] - mean) * scale
    k.fragment(PRODUCT, f32, values).store_global(out, 16)


def merge(a: State, b: State) -> State:
    """The two largest of two pairs (largest, second)."""
    return maximum(a[0], b[0]), select(a[0] > b[0], maximum(a[1], b[0]), maximum(a[0], b[1]))


TWO_LARGEST = Reducer(start=lambda x, _: (x, -float("inf")), merge=merge, placed=False)


@kernel(threads=32)
def margins(k: Kernel, a: Global[bf16], b: Global[bf16], out: Global[f32]) -> None:
    """How far the largest element of a row is ahead of the second: a reduction with a pair of its own.

    The lanes of a row share the exchange, so each ends with one row instead of two.
    """
    plan = ROWS.spread()
    found = product(k, a, b).reduce(TWO_LARGEST, "col", spread=True)
    with k.when((k.lane & plan.replicated) == 0):
        for result, (first, second) in enumerate(found):
            out.store(first - second, plan.result_coordinate(result, k.lane))


@kernel(threads=32)
def column_sums(k: Kernel, a: Global[bf16], b: Global[bf16], out: Global[f32]) -> None:
    """The same along the other axis: three exchanges, over the lane bits that move the row."""
    sums = product(k, a, b).reduce("add", "row")
    with k.when((k.lane & COLUMNS.replicated) == 0):
        for group, total in enumerate(sums):
            out.store(total, COLUMNS.result_coordinate(group, k.lane))


@kernel(threads=32)
def twice(k: Kernel, a: Global[bf16], b: Global[bf16], out: Global[f32]) -> None:
    """(A·Bᵀ)·Bᵀ: the accumulator is the A operand of the next product, by proof and without moving an element."""
    again = product(k, a, b).as_operand(A, bf16)
    registers: list[Traced] = []
    for n in range(2):
        registers += k.mma(again.registers, read(k, b + 128 * n, B.transposed()), [0.0] * 4)
    k.fragment(PRODUCT, f32, registers).store_global(out, 16)


def matrices(rng: np.random.Generator) -> tuple[Any, Any, Any]:
    """A, B and A·Bᵀ; small integers, so that every sum is exact."""
    a, b = (rng.integers(-3, 4, (16, 16)).astype(bf16.numpy) for _ in range(2))
    return a, b, a.astype(np.float64) @ b.astype(np.float64).T


@scaled.example
def scaled_launch(rng: np.random.Generator) -> Launch:
    a, b, c = matrices(rng)
    out = np.zeros((16, WIDE), np.float32)
    expected = np.zeros((16, WIDE))
    expected[:, :16] = c / 4
    return Launch(1, [a, b, out], {"out": (expected, 0.0)})


@nearest.example
def nearest_launch(rng: np.random.Generator) -> Launch:
    a, b, c = matrices(rng)
    best, where = np.full(16, np.nan, np.float32), np.zeros(16, np.uint32)
    return Launch(1, [a, b, best, where], {"best": (c.max(1), 0.0), "where": (c.argmax(1), 0.0)})


@normalised.example
def normalised_launch(rng: np.random.Generator) -> Launch:
    a, b, c = matrices(rng)
    expected = (c - c.mean(1, keepdims=True)) / c.std(1, keepdims=True)
    return Launch(1, [a, b, np.full((16, 16), np.nan, np.float32)], {"out": (expected, 1e-5)})


@margins.example
def margins_launch(rng: np.random.Generator) -> Launch:
    a, b, c = matrices(rng)
    ordered = np.sort(c, 1)
    return Launch(1, [a, b, np.full(16, np.nan, np.float32)], {"out": (ordered[:, -1] - ordered[:, -2], 0.0)})


@column_sums.example
def column_sums_launch(rng: np.random.Generator) -> Launch:
    a, b, c = matrices(rng)
    return Launch(1, [a, b, np.full(16, np.nan, np.float32)], {"out": (c.sum(0), 0.0)})


@twice.example
def twice_launch(rng: np.random.Generator) -> Launch:
    a, b, c = matrices(rng)
    expected = c.astype(bf16.numpy).astype(np.float64) @ b.astype(np.float64).T
    return Launch(1, [a, b, np.full((16, 16), np.nan, np.float32)], {"out": (expected, 1e-3)})
