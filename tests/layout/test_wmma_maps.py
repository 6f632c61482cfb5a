"""The ``wmma`` fragments as the H200 showed them: complete, whole matrices, and relatives of ``mma.sync``'s."""

from __future__ import annotations

import pytest

from warploom.core.dtypes import DTYPES, bf16, f32
from warploom.layout import mma_fragment, wmma_accumulator
from warploom.layout.wmma import (
    WMMA_ACCUMULATORS,
    WMMA_SHAPES,
    discovered,
    operand_shape,
    wmma_elements,
    wmma_fragment,
    wmma_name,
)

INPUTS = [
    (s, o, DTYPES[t], order)
    for s, types in WMMA_SHAPES.items()
    for t in types
    for o in "AB"
    for order in ("row", "col")
]
SUMS = sorted({(s, c) for s, types in WMMA_SHAPES.items() for t in types for c in WMMA_ACCUMULATORS[t]})


def test_every_fragment_was_traced_on_a_named_gpu() -> None:
    found = discovered()
    wanted = {wmma_name(s, o, t, order) for s, o, t, order in INPUTS}  # type: ignore[arg-type]
    wanted |= {wmma_name(s, "C", DTYPES[c], "row") for s, c in SUMS}
    assert found["gpu"]
    assert set(found["fragments"]) == wanted


@pytest.mark.parametrize(("shape", "operand", "dtype", "order"), INPUTS)
def test_operands_hold_the_whole_matrix(shape, operand, dtype, order) -> None:
    layout = wmma_fragment(shape, operand, dtype, order)
    assert layout.shape == operand_shape(shape, operand)
    assert layout.elements_per_thread == wmma_elements(shape, operand, dtype)
    assert layout.map.is_surjective
    held_once = layout.elements_per_thread * 32 == layout.shape[0] * layout.shape[1]
    assert (layout.map.rank == layout.map.matrix().shape[1]) == held_once


@pytest.mark.parametrize(("shape", "dtype"), SUMS)
def test_accumulators_hold_each_element_once(shape: str, dtype: str) -> None:
    layout = wmma_fragment(shape, "C", DTYPES[dtype])
    assert layout.map.rank == layout.map.matrix().shape[1] == layout.map.out_bits


def test_equations_one_and_two_hold_on_the_h200() -> None:
    assert wmma_fragment("m16n16k16", "C", f32).map == wmma_accumulator().map


def test_wmma_is_two_mma_side_by_side() -> None:
    assert wmma_fragment("m16n16k16", "A", bf16).map == mma_fragment("m16n8k16", "A").map
    assert wmma_fragment("m16n16k16", "B", bf16, "col").map == mma_fragment("m16n8k16", "B").tile(1, 2).map
    assert wmma_fragment("m32n8k16", "C", f32).map == mma_fragment("m16n8k16", "C").tile(2, 1).map
