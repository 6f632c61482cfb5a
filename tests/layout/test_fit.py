from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import linear_maps

from warploom.core.errors import LayoutError
from warploom.layout import FRAGMENTS, FragmentLayout, LinearMap, mma_fragment, wmma_accumulator
from warploom.layout.fit import Observation, compare, describe, fit, formulas


def observe(layout: FragmentLayout) -> tuple[np.ndarray, np.ndarray]:
    rows, cols = layout.element_coordinates()
    return rows.copy(), cols.copy()


@pytest.mark.parametrize("name", FRAGMENTS)
def test_every_fragment_is_fitted_from_its_table(name: str) -> None:
    layout = FRAGMENTS[name]
    found = fit(Observation.of(layout))
    assert found.is_linear
    assert found.require() == layout.map


def test_equations_one_and_two_of_the_paper() -> None:
    found = formulas(fit(Observation.of(wmma_accumulator())).require())
    assert found == {"row": "(lane >> 2) + 8*((i >> 1) & 1)", "col": "2*(lane & 3) + (i & 1) + 8*((i >> 2) & 1)"}


@given(linear_maps(ins=("register", "lane", "warp")))
def test_formulas_compute_what_the_map_does(layout: LinearMap) -> None:
    sizes = {dim: layout.in_size(dim) for dim in layout.in_dims}
    texts = formulas(layout)
    for i in range(sizes["register"]):
        for lane in range(sizes["lane"]):
            for warp in range(sizes["warp"]):
                scope = {"i": i, "lane": lane, "warp": warp, "__builtins__": {}}
                expected = layout.apply(register=i, lane=lane, warp=warp)
                assert {out: eval(text, scope) for out, text in texts.items()} == expected


def test_the_formulas_lead_both_ways() -> None:
    layout = mma_fragment("m16n8k16", "A")
    lines = dict(line.split(" = ", 1) for line in describe(layout.map).splitlines())
    assert set(lines) == {"row", "col", "lane", "i"}
    for lane in range(32):
        for i in range(8):
            row, col = (eval(lines[out], {"lane": lane, "i": i}) for out in ("row", "col"))
            assert (row, col) == layout.coordinates(lane, i)
            assert (eval(lines["lane"], {"row": row, "col": col}), eval(lines["i"], {"row": row, "col": col})) == (
                lane,
                i,
            )


@given(st.integers(0, 31), st.integers(0, 7), st.integers(1, 15))
def test_one_wrong_element_is_no_linear_map_and_is_named(lane: int, element: int, flip: int) -> None:
    layout = wmma_accumulator()
    rows, cols = observe(layout)
    cols[lane, element] ^= flip
    observed = Observation("seen", (16, 16), rows, cols)
    difference = compare(observed, layout)
    assert difference is not None
    assert (difference.lane, difference.register, difference.count) == (lane, element, 1)
    assert f"lane {lane}, register {element}" in str(difference)
    found = fit(observed)
    assert not found.is_linear
    with pytest.raises(LayoutError, match="not linear"):
        found.require()


def test_a_shifted_table_is_affine_not_linear() -> None:
    rows, cols = observe(mma_fragment("m16n8k16", "C"))
    found = fit(Observation("shifted", (16, 8), rows ^ 8, cols))
    assert "lane 0, register 0 holds (8, 0)" in found.reason


def test_sizes_that_are_no_powers_of_two_are_not_linear() -> None:
    layout = mma_fragment("m16n8k16", "C").tile(1, 3)
    found = fit(Observation("three", layout.shape, *layout.element_coordinates()))
    assert found.map is None
    assert "12" in found.reason


def test_coordinates_outside_the_matrix_are_named() -> None:
    rows, cols = observe(mma_fragment("m16n8k16", "C"))
    cols[7, 2] = 9
    reason = fit(Observation("outside", (16, 8), rows, cols)).reason
    assert "lane 7, register 2 holds (9, 9), which is outside the 16×8 matrix" in reason
    rows[7, 2], cols[7, 2] = 16, 1
    assert "holds (16, 1), which is outside the 16×8 matrix" in fit(Observation("below", (16, 8), rows, cols)).reason


def test_bits_are_put_together_and_checked() -> None:
    layout = mma_fragment("m16n8k8", "A", 32)
    rows, cols = layout.element_coordinates()
    passes = np.array([*(rows >> b & 1 for b in range(4)), *(cols >> b & 1 for b in range(3))], np.float32)
    observed = Observation.from_bits("a", layout.shape, passes)
    assert compare(observed, layout) is None
    passes[2, 9, 1] = 2.0
    with pytest.raises(LayoutError, match=r"row bit 2 shows 2\.0 in lane 9, register 1"):
        Observation.from_bits("a", layout.shape, passes)


def test_another_fragment_of_the_same_size_differs_where_it_first_does() -> None:
    one, other = mma_fragment("m16n8k16", "C"), mma_fragment("m16n8k8", "A", 32)
    difference = compare(Observation.of(other), one)
    assert difference is not None
    assert (difference.lane, difference.register) == (0, 1)
    assert (difference.observed, difference.expected) == ((8, 0), (0, 1))


def test_sizes_must_agree() -> None:
    with pytest.raises(LayoutError, match="32 threads × 4 elements"):
        compare(Observation.of(mma_fragment("m16n8k16", "C")), mma_fragment("m16n8k16", "A"))
