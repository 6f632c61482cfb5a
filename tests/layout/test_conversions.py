from __future__ import annotations

import numpy as np
import pytest

from warploom.core.errors import LayoutError
from warploom.layout import (
    FragmentLayout,
    LinearMap,
    conversion_plan,
    mma_fragment,
    operand_registers,
    wgmma_accumulator,
    wgmma_operand,
)


def shuffle(source: FragmentLayout, target: FragmentLayout, registers: np.ndarray) -> np.ndarray:
    """Run the conversion plan with whole-warp shuffles on registers [32, elements]."""
    plan = conversion_plan(source, target)
    lane = np.arange(32)
    results: list[np.ndarray] = []
    for element in range(target.elements_per_thread):
        value = np.full(32, -1)
        for candidate in plan.source_registers(element):
            read = registers[plan.source_lane(element, lane), candidate]
            value = np.where(plan.source_register(element, lane) == candidate, read, value)
        results.append(value)
    return np.stack(results, axis=1)


def test_accumulator_atoms_side_by_side_are_an_operand() -> None:
    accumulator, operand = mma_fragment("m16n8k16", "C"), mma_fragment("m16n8k16", "A")
    assert operand_registers(accumulator.tile(1, 2), operand) == tuple(range(8))
    assert operand_registers(wgmma_accumulator(64), wgmma_operand().tile(1, 4)) == tuple(range(32))


@pytest.mark.parametrize("tiles", [(1, 3), (2, 2), (4, 5)])
def test_tiled_accumulators_are_tiled_operands(tiles: tuple[int, int]) -> None:
    accumulator = mma_fragment("m16n8k16", "C").tile(tiles[0], 2 * tiles[1])
    operand = mma_fragment("m16n8k16", "A").tile(*tiles, order="col")
    order = operand_registers(accumulator, operand)
    matrix = np.arange(accumulator.shape[0] * accumulator.shape[1])
    held = matrix[accumulator.gather_index()]
    assert (held[:, list(order)] == matrix[operand.gather_index()]).all()


def test_accumulator_transposed_is_a_b_operand() -> None:
    # C of (m, n) = (16, 8) read as its transpose (k, n) = (8, 16) holds two m16n8k8 B operands.
    accumulator = mma_fragment("m16n8k8", "C").transposed()
    assert operand_registers(accumulator, mma_fragment("m16n8k8", "B").tile(1, 2)) == (0, 1, 2, 3)


def test_other_operands_need_shuffles() -> None:
    accumulator, operand = mma_fragment("m16n8k8", "C"), mma_fragment("m16n8k8", "A", 32)
    with pytest.raises(LayoutError, match="use conversion_plan"):
        operand_registers(accumulator, operand)
    plan = conversion_plan(accumulator, operand)
    assert plan.shuffles == 8
    assert plan.source_registers(0) == (0, 1)
    matrix = np.arange(128)
    held = matrix[accumulator.gather_index()]
    assert (shuffle(accumulator, operand, held) == matrix[operand.gather_index()]).all()
    assert "8 shuffles" in str(plan)


def test_conversion_of_tiles() -> None:
    source = mma_fragment("m16n8k16", "B").tile(1, 2)
    target = mma_fragment("m16n8k16", "A")
    matrix = np.arange(256)
    assert (shuffle(source, target, matrix[source.gather_index()]) == matrix[target.gather_index()]).all()


def test_conversions_between_warps_or_shapes_are_refused() -> None:
    with pytest.raises(LayoutError, match="tile them to one shape"):
        operand_registers(mma_fragment("m16n8k16", "C"), mma_fragment("m16n8k16", "A"))
    atom = wgmma_accumulator(8).atom
    turned = dict(atom.ins) | {"warp": [(32, 0), (16, 0)]}
    sheared = [
        dict(atom.ins)
        | {dim: [*vectors[:-1], (vectors[-1][0] ^ 16, vectors[-1][1])]}  # the last bit: a warp further on
        for dim, vectors in atom.ins
        if dim != "warp"
    ]
    for ins in (turned, *sheared):
        with pytest.raises(LayoutError, match="between warps"):
            conversion_plan(wgmma_accumulator(8), FragmentLayout("turned", LinearMap(ins, dict(atom.outs)), 32))
    assert conversion_plan(wgmma_accumulator(8), wgmma_accumulator(8)).shuffles == 4
