"""Reductions with states of several registers: arg-max, log-sum-exp, moments, and operators a kernel brings itself."""

# pyright: reportInvalidTypeForm=false, reportArgumentType=false
from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.lang.support import mnemonics, run
from warploom.core.errors import TraceError
from warploom.lang import Global, Kernel, bf16, f32, f64, kernel, s32, u32
from warploom.lang.functions import maximum, select
from warploom.lang.reducers import LOG_SUM_EXP, Reducer, log_sum_exp
from warploom.layout.catalogue import mma_fragment
from warploom.layout.fragments import FragmentLayout
from warploom.layout.reduction import reduction_plan

A, C = (mma_fragment("m16n8k16", which) for which in "AC")
LAYOUTS = {"C": C, "C 4x2": C.tile(4, 2), "C 3x1": C.tile(3, 1), "f32 A": mma_fragment("m16n8k8", "A", 32)}
ORIGIN = 1000


def load(k: Kernel, matrix: Any, layout: FragmentLayout) -> Any:
    cols = layout.shape[1]
    values = []
    for element in range(layout.elements_per_thread):
        row, col = layout.coordinates(k.lane, element)
        values.append(matrix.load(row * cols + col))
    return k.fragment(layout, matrix.dtype, values)


@kernel(threads=32)
def reduce_states(
    k: Kernel, matrix: Global[f32], out: Global[u32], *, layout, combine, axis: str, spread: bool, width: int
) -> None:
    """out[lane][result][part]: the bits of every state that a lane ends with."""
    states = load(k, matrix, layout).reduce(combine, axis, spread=spread, origin=ORIGIN)
    for index, state in enumerate(states):
        for part, x in enumerate(state):
            out.store(k.bitcast(x, u32), (k.lane * len(states) + index) * width + part)


def states_of(matrix, combine, layout, axis, spread, width):
    """[surviving coordinate][part] as bits, after checking that all holders of a result have the same."""
    plan = reduction_plan(layout, axis)
    plan = plan.spread() if spread else plan
    out = np.full((32, plan.results, width), 0xDEADBEEF, np.uint32)
    run(reduce_states, matrix, out, layout=layout, combine=combine, axis=axis, spread=spread, width=width)
    kept = layout.shape[0 if axis == "col" else 1]
    found = np.full((kept, width), 0xDEADBEEF, np.uint32)
    for lane in range(32):
        for result in range(plan.results):
            at = plan.result_coordinate(result, lane)
            assert (found[at] == 0xDEADBEEF).all() or (found[at] == out[lane, result]).all()
            found[at] = out[lane, result]
    assert (found != 0xDEADBEEF).all(), "every row has a holder"
    return found


@pytest.fixture
def rng():
    return np.random.default_rng(3)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("axis", ["col", "row"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_first_of_equal_maxima_and_its_position(name, axis, spread, rng):
    layout = LAYOUTS[name]
    matrix = rng.integers(-2, 3, layout.shape).astype(np.float32)  # ties everywhere
    matrix[0, :] = -np.inf
    matrix[:, 1] = np.nan
    found = states_of(matrix, "argmax", layout, axis, spread, 2)
    along = 1 if axis == "col" else 0
    numbers = np.where(np.isnan(matrix), -np.inf, matrix)
    assert (found[:, 0].view(np.float32) == numbers.max(along)).all()
    assert (found[:, 1] == numbers.argmax(along) + ORIGIN).all()


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("axis", ["col", "row"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_log_sum_exp_pairs(name, axis, spread, rng):
    layout = LAYOUTS[name]
    matrix = (rng.standard_normal(layout.shape) * 30).astype(np.float32)
    matrix[0, 0] = -np.inf
    found = states_of(matrix, "logsumexp", layout, axis, spread, 2).view(np.float32)
    along = 1 if axis == "col" else 0
    top = matrix.astype(np.float64).max(along, keepdims=True)
    total = np.exp(matrix.astype(np.float64) - top).sum(along)
    assert (found[:, 0] == top.reshape(-1)).all()
    assert np.abs(found[:, 1] / total - 1).max() < 1e-5


def test_a_row_of_nothing_is_no_nan():
    found = states_of(np.full(C.shape, -np.inf, np.float32), "logsumexp", C, "col", False, 2).view(np.float32)
    assert (found == [-np.inf, 0.0]).all()


@kernel(threads=32)
def reduce_to_number(k: Kernel, matrix: Global[f32], out: Global[f32], *, combine) -> None:
    """out[lane][result]: what each log-sum-exp state of a lane stands for."""
    states = load(k, matrix, C).reduce(combine, "col")
    for index, state in enumerate(states):
        out.store(log_sum_exp(state), k.lane * len(states) + index)


ONE_BY_ONE = Reducer(LOG_SUM_EXP.start, LOG_SUM_EXP.merge, placed=False)
SPECIAL = (np.inf, -np.inf, np.nan, 3.3e38, -3.3e38, 2.0**31, -(2.0**31), 2.0**28, 1e10, 0.0)


@pytest.mark.parametrize("combine", [LOG_SUM_EXP, ONE_BY_ONE], ids=["own", "merged"])
@pytest.mark.parametrize("among", [0.0, -np.inf, np.inf, 1e9, np.nan, -1e38])
def test_log_sum_exp_of_infinities_and_of_numbers_beyond_what_its_sum_resolves(combine, among, rng):
    """Each row: a special value at one column, another kind of value at all others, or at all but two of those."""
    for special in SPECIAL:
        matrix = np.full((16, 8), among, np.float32) + rng.standard_normal((16, 8)).astype(np.float32)
        matrix[np.arange(16), np.arange(16) % 8] = special
        matrix[8:, [2, 5]] = special
        out = np.zeros((32, 2), np.float32)
        run(reduce_to_number, matrix, out, combine=combine)
        plan = reduction_plan(C, "col")
        with np.errstate(invalid="ignore"):
            expected = np.logaddexp.reduce(matrix.astype(np.float64), axis=1)
        for lane in range(32):
            for result in range(2):
                want = expected[plan.result_coordinate(result, lane)]
                np.testing.assert_allclose(out[lane, result], want, rtol=4e-7, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_moments_do_not_cancel(name, spread, rng):
    layout = LAYOUTS[name]
    matrix = (rng.standard_normal(layout.shape) + 4000).astype(np.float32)  # Σx² - (Σx)² would lose it all
    count, mean, squares = states_of(matrix, "moments", layout, "col", spread, 3).view(np.float32).T
    exact = matrix.astype(np.float64)
    assert (count == layout.shape[1]).all()
    assert np.abs(mean / exact.mean(1) - 1).max() < 1e-6
    assert np.abs(squares / layout.shape[1] / exact.var(1) - 1).max() < 2e-3


TWO_LARGEST = Reducer(
    start=lambda x, _: (x, -float("inf")),
    merge=lambda a, b: (maximum(a[0], b[0]), select(a[0] > b[0], maximum(a[1], b[0]), maximum(a[0], b[1]))),
)


@pytest.mark.parametrize("spread", [False, True])
def test_a_users_own_pair(spread, rng):
    matrix = rng.permutation(16 * 64).reshape(16, 64).astype(np.float32)
    layout = C.tile(1, 8)
    found = states_of(matrix, TWO_LARGEST, layout, "col", spread, 2).view(np.float32)
    assert (found == np.sort(matrix, 1)[:, :-3:-1]).all()


@pytest.mark.parametrize(
    ("name", "axis", "shuffles"),
    [
        ("C", "col", 1 + 1),
        ("C 4x2", "col", 4 + 2),
        ("C 3x1", "col", 3 + 3),
        ("C", "row", 1 + 1 + 1),
    ],
)
def test_shared_exchanges_take_fewer_shuffles(name, axis, shuffles):
    layout = LAYOUTS[name]
    plan = reduction_plan(layout, axis).spread()
    program = reduce_states.trace(layout=layout, combine="argmax", axis=axis, spread=True, width=2)
    assert sum(m.startswith("shfl") for m in mnemonics(program)) == 2 * shuffles == 2 * plan.shuffles


def test_integers_and_packed_halves_reduce(rng):
    @kernel(threads=32)
    def integers(k: Kernel, matrix: Global[s32], out: Global[s32]) -> None:
        for group, total in enumerate(load(k, matrix, C).reduce("add", "col")):
            out.store(total, k.lane // 4 + 8 * group)

    @kernel(threads=32)
    def halves(k: Kernel, matrix: Global[u32], out: Global[f32]) -> None:
        pairs = []
        for register in range(A.registers):
            row, col = A.coordinates(k.lane, 2 * register)
            pairs.append(matrix.load(row * 8 + col // 2))
        for group, top in enumerate(k.fragment(A, bf16, pairs).reduce("max", "col")):
            out.store(top, k.lane // 4 + 8 * group)

    matrix, sums = rng.integers(-(1 << 28), 1 << 28, (16, 8)).astype(np.int32), np.zeros(16, np.int32)
    run(integers, matrix, sums)
    assert (sums == matrix.sum(1)).all()
    matrix, tops = rng.standard_normal((16, 16)).astype(ml_dtypes.bfloat16), np.zeros(16, np.float32)
    run(halves, matrix.view(np.uint32), tops)
    assert (tops == matrix.astype(np.float32).max(1)).all()


def test_log_sum_exp_gives_its_number(rng):
    @kernel(threads=32)
    def losses(k: Kernel, matrix: Global[f32], out: Global[f32]) -> None:
        for group, state in enumerate(load(k, matrix, C).reduce("logsumexp", "col")):
            out.store(log_sum_exp(state), k.lane // 4 + 8 * group)

    matrix, out = (rng.standard_normal((16, 8)) * 50).astype(np.float32), np.zeros(16, np.float32)
    run(losses, matrix, out)
    assert np.abs(out - np.logaddexp.reduce(matrix.astype(np.float64), 1)).max() < 1e-4


@pytest.mark.parametrize(
    ("reducer", "says"),
    [
        (Reducer(lambda x, _: (x, 1.0), lambda a, b: (a[0] + b[0],)), r"of \(f32, f32\) and .* makes \(f32\)"),
        (Reducer(lambda x, _: (x,), lambda a, b: (a[0], b[0])), r"makes \(f32, f32\)"),
        (Reducer(lambda x, at: (x, at), lambda a, b: (a[0], b[0])), r"of \(f32, u32\).*makes \(f32, f32\)"),
        (Reducer(lambda x, _: x, lambda a, b: a), r"start returns a tuple .* write \(value,\)"),
        (Reducer(lambda x, _: (x,), lambda a, b: a[0] + b[0]), "merge returns a tuple"),
        (Reducer(lambda x, _: (x,), lambda a, b: None), "merge returns a tuple of one or more values, not None"),
        (Reducer(lambda x, _: (), lambda a, b: ()), "start returns a tuple of one or more"),
        (Reducer(lambda x, _: (x,), lambda a, b: (a[0],), own=lambda v, _: v[0]), "own returns a tuple"),
    ],
)
def test_a_reducer_keeps_the_form_of_its_states(reducer, says):
    """A state that lost a value was accepted: results were of the merged states, not of the rows."""

    @kernel(threads=32)
    def reduced(k: Kernel, matrix: Global[f32]) -> None:
        load(k, matrix, C).reduce(reducer, "col")

    with pytest.raises(TraceError, match=says) as refused:
        reduced.trace()
    assert "test_reducers.py:" in str(refused.value)


def test_what_does_not_reduce_says_so():
    @kernel(threads=32)
    def doubles(k: Kernel, out: Global[f64]) -> None:
        layout = mma_fragment("m8n8k4", "C", 64)
        k.fragment(layout, f64, [k.value(0.0, f64)] * 4).reduce("add", "col")

    @kernel(threads=32)
    def medians(k: Kernel, out: Global[f32]) -> None:
        k.accumulator(C).reduce("median", "col")  # type: ignore[arg-type]

    with pytest.raises(TraceError, match="32 bits or 16-bit floats"):
        doubles.trace()
    with pytest.raises(TraceError, match="'median' is no reduction"):
        medians.trace()
