from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import Traced

from warploom.core.errors import LayoutError
from warploom.layout import NO_SWIZZLE, LinearMap, Swizzle


def test_source_and_target_bits() -> None:
    swizzle = Swizzle(3, 4, 3)
    assert swizzle.source_mask == 0b11_1000_0000  # bits 9 to 7
    assert swizzle.period == 1024
    for bit in range(16):
        moved = {7: 4, 8: 5, 9: 6}.get(bit)
        assert swizzle.apply(1 << bit) == 1 << bit | (0 if moved is None else 1 << moved)
    assert str(swizzle) == "<3,4,3>"


def test_formula_of_the_gemm_series() -> None:
    # Its template parameters come from BK: S = clog2(2·BK) - 4, B = min(S, 3); at BK = 64 that is <3,4,3>.
    assert Swizzle.for_row_bytes(64 * 2) == Swizzle(3, 4, 3)
    offsets = np.arange(1 << 14)
    expected = offsets ^ (((offsets >> (4 + 3)) & 7) << 4)
    assert (Swizzle(3, 4, 3).apply(offsets) == expected).all()


@pytest.mark.parametrize(
    ("row_bytes", "expected"),
    [(16, "<0,4,3>"), (32, "<1,4,3>"), (64, "<2,4,3>"), (128, "<3,4,3>"), (256, "<3,4,4>"), (512, "<3,4,5>")],
)
def test_swizzle_for_a_row(row_bytes: int, expected: str) -> None:
    assert str(Swizzle.for_row_bytes(row_bytes)) == expected


@given(st.integers(0, 4), st.integers(0, 5), st.integers(0, 3), st.integers(0, 2**20))
def test_swizzles_undo_themselves_and_equal_their_map(bits: int, base: int, extra: int, offset: int) -> None:
    swizzle = Swizzle(bits, base, bits + extra)
    assert swizzle.apply(swizzle.apply(offset)) == offset
    assert swizzle.map(21).apply(byte=offset)["byte"] == swizzle.apply(offset)
    assert swizzle.apply(offset + 5 * swizzle.period) == swizzle.apply(offset) + 5 * swizzle.period or bits == 0


def test_traced_offsets_take_three_operations() -> None:
    assert str(Swizzle(3, 4, 3).apply(Traced("x"))) == "(x ^ ((x & 896) >> 3))"
    assert str(NO_SWIZZLE.apply(Traced("x"))) == "x"
    assert NO_SWIZZLE.map(8) == LinearMap.identity({"byte": 256})


def test_wrong_swizzles_are_refused() -> None:
    with pytest.raises(LayoutError, match="overlaps"):
        Swizzle(3, 4, 2)
    with pytest.raises(LayoutError, match="negative"):
        Swizzle(-1, 4, 3)
    with pytest.raises(LayoutError, match="power of two"):
        Swizzle.for_row_bytes(192)
