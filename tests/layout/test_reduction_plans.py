from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from layout_cases import Traced, bijections

from warploom.core.errors import LayoutError
from warploom.layout import (
    FRAGMENTS,
    FragmentLayout,
    LinearMap,
    ReductionPlan,
    mma_fragment,
    reduction_plan,
    wgmma_accumulator,
    wmma_accumulator,
)


def run(plan: ReductionPlan, registers: np.ndarray) -> np.ndarray:
    """Sum as the plan says: registers [threads, elements] → [threads, groups]."""
    values = np.stack([registers[:, list(group)].sum(axis=1) for group in plan.groups], axis=1)
    thread = np.arange(registers.shape[0])
    for mask in plan.lane_masks:
        values = values + values[thread ^ mask]
    for mask in plan.warp_masks:
        values = values + values[thread ^ (32 * mask)]
    return values


def check(layout: FragmentLayout, axis: str) -> None:
    plan = reduction_plan(layout, axis)
    rows, cols = layout.shape
    matrix = np.random.default_rng(0).integers(0, 1 << 30, (rows, cols))
    expected = matrix.sum(axis=1 if axis == "col" else 0)
    values = run(plan, matrix.reshape(-1)[layout.gather_index()])
    thread = np.arange(layout.threads)
    for group in range(len(plan.groups)):
        where = plan.result_coordinate(group, thread % 32, thread // 32)
        assert (values[:, group] == expected[where]).all()


@pytest.mark.parametrize("axis", ["row", "col"])
@pytest.mark.parametrize("name", FRAGMENTS)
def test_plans_sum_what_they_should(name: str, axis: str) -> None:
    check(FRAGMENTS[name], axis)


@pytest.mark.parametrize("axis", ["row", "col"])
@pytest.mark.parametrize("order", ["row", "col"])
def test_plans_fold_over_tiles(axis: str, order: str) -> None:
    check(mma_fragment("m16n8k16", "C").tile(2, 3, order="row" if order == "row" else "col"), axis)
    check(wgmma_accumulator(24), axis)


def test_the_papers_reduction() -> None:
    # Algorithm 3 after the permutation of Figure 2: x[0,1,4,5] are row 0, x[2,3,6,7] row 8; quads exchange over 1, 2.
    plan = reduction_plan(wmma_accumulator(), "col")
    assert plan.groups == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert plan.permutation == (0, 1, 4, 5, 2, 3, 6, 7)
    assert plan.lane_masks == (1, 2)
    assert plan.shuffles == 4
    for lane in range(32):
        assert plan.member_mask(lane) == 0xF << (lane // 4 * 4)
    assert (plan.member_mask(np.arange(32)) == [0xF << (lane // 4 * 4) for lane in range(32)]).all()
    assert str(plan.member_mask(Traced("lane"))) == "(15 << (lane & 28))"
    assert plan.result.bases("lane")[:2] == ((0,), (0,))
    assert [plan.result_coordinate(group, 5) for group in (0, 1)] == [1, 9]
    assert str(plan) == (
        "reduce over col: 2 results per thread, 4 shuffles\n"
        "  r0 = x0 ⊕ x1 ⊕ x4 ⊕ x5\n"
        "  r1 = x2 ⊕ x3 ⊕ x6 ⊕ x7\n"
        "  r  = r ⊕ shfl.xor(r, 1)\n"
        "  r  = r ⊕ shfl.xor(r, 2)"
    )


def test_reduction_over_rows_and_warps() -> None:
    plan = reduction_plan(mma_fragment("m16n8k16", "C"), 0)
    assert (plan.lane_masks, plan.warp_masks) == ((4, 8, 16), ())
    assert plan.member_mask(6) == 0x11111111 << 2
    assert reduction_plan(wgmma_accumulator(8), "row").warp_masks == (1, 2)
    assert reduction_plan(wgmma_accumulator(8), "col").warp_masks == ()


def test_replicated_elements_are_combined_once() -> None:
    atom = LinearMap(
        {"register": [(0, 1), (0, 0)], "lane": [(0, 2), (0, 2), (1, 0), (0, 0), (0, 1)]}, {"row": 2, "col": 4}
    )
    plan = reduction_plan(atom, "col")
    assert plan.groups == ((0, 1),)
    assert plan.lane_masks == (1,)  # lane bit 1 repeats bit 0, bit 4 a register, bit 3 nothing


def test_lanes_moved_by_an_xor_of_bits() -> None:
    atom = LinearMap({"register": [], "lane": [(1, 0), (1, 1), (2, 0), (4, 0), (8, 0)]}, {"row": 16, "col": 2})
    plan = reduction_plan(atom, "col")
    assert plan.lane_masks == (3,)
    assert plan.member_mask(5) == 1 << 5 | 1 << 6
    check(FragmentLayout("sheared", atom, 32), "col")
    with pytest.raises(LayoutError, match="FULL_MASK"):
        plan.member_mask(Traced("lane"))


def is_reducible(layout: LinearMap) -> bool:
    """Whether the positions of row 0 are a full rectangle of registers and lanes (so then is every other row)."""
    register, lane = np.ix_(np.arange(layout.in_size("register")), np.arange(layout.in_size("lane")))
    held = layout.apply(register=register, lane=lane)["row"] == 0
    return bool((held == np.outer(held[:, 0], held[0])).all())


@given(bijections())
def test_any_plan_is_right_or_refused(layout: LinearMap) -> None:
    registers, lanes = layout.in_size("register"), layout.in_size("lane")
    if not is_reducible(layout):
        with pytest.raises(LayoutError, match="not reducible"):
            reduction_plan(layout, "col")
        return
    plan = reduction_plan(layout, "col")
    at = layout.apply(register=np.arange(registers)[None, :], lane=np.arange(lanes)[:, None])
    matrix = np.arange(layout.out_size("row") * layout.out_size("col")).reshape(layout.out_size("row"), -1) ** 2
    values = run(plan, matrix[at["row"], at["col"]])
    for group in range(len(plan.groups)):
        assert (values[:, group] == matrix.sum(axis=1)[plan.result_coordinate(group, np.arange(lanes))]).all()
    # One shuffle per factor of two by which the axis is spread over lanes.
    assert len(plan.groups[0]) << len(plan.lane_masks) == layout.out_size("col")


def test_elements_in_other_registers_of_other_lanes_are_refused() -> None:
    mixed = LinearMap({"register": [(1, 0)], "lane": [(1, 1), (2, 0), (4, 0), (8, 0), (16, 0)]}, {"row": 32, "col": 2})
    with pytest.raises(LayoutError, match="differ in register and lane"):
        reduction_plan(mixed, "col")
    with pytest.raises(LayoutError, match="axis is"):
        reduction_plan(wmma_accumulator(), "column")


@pytest.mark.parametrize("axis", ["row", "col"])
@pytest.mark.parametrize("name", FRAGMENTS)
def test_spread_results_are_held_by_the_lanes_the_plan_says(name: str, axis: str) -> None:
    """Every result once for each replicated lane, and never more shuffles than the plain plan."""
    for layout in (FRAGMENTS[name], FRAGMENTS[name].tile(2, 3), FRAGMENTS[name].tile(3, 2)):
        plain = reduction_plan(layout, axis)
        plan = plain.spread()
        lane, warp = np.arange(layout.threads) % 32, np.arange(layout.threads) // 32
        held = np.concatenate([plan.result_coordinate(i, lane, warp) for i in range(plan.results)])
        copies = np.bincount(held, minlength=layout.shape[0 if axis == "col" else 1])
        assert (copies > 0).all()
        assert (
            copies << len(plan.halved)
            == np.bincount(np.concatenate([plain.result_coordinate(i, lane, warp) for i in range(plain.results)]))
        ).all()
        assert plan.shuffles <= plain.shuffles
        assert (plan.shuffles < plain.shuffles) == bool(plan.halved)


def test_the_papers_reduction_with_shared_work() -> None:
    plan = reduction_plan(wmma_accumulator(), "col").spread()
    assert (plan.halved, plan.shuffles, plan.results, plan.replicated) == ((1,), 2, 1, 2)
    assert [plan.result_coordinate(0, lane) for lane in (0, 1, 2, 3, 4)] == [0, 8, 0, 8, 1]
    assert "own half" in str(plan)
