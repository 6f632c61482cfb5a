from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warploom.core.errors import LayoutError
from warploom.layout import (
    NO_SWIZZLE,
    LinearMap,
    SharedLayout,
    Swizzle,
    ideal_wavefronts,
    lane_addresses,
    ldmatrix_plan,
    mma_fragment,
    predicted_conflicts,
    predicted_wavefronts,
    wavefronts,
)

LANES = np.arange(32)


def count_by_hand(addresses: list[int], size: int, active: list[bool]) -> int:
    """Word by word, with sets: the model of the module's docstring written out once more."""
    lanes = {1: 32, 2: 32, 4: 32, 8: 16, 16: 8}[size]
    total = 0
    for start in range(0, len(addresses), lanes):
        words: set[int] = set()
        for address, takes_part in list(zip(addresses, active, strict=True))[start : start + lanes]:
            if takes_part:
                words |= set(range(address // 4, (address + max(size, 4)) // 4))
        total += max(sum(1 for word in words if word % 32 == bank) for bank in range(32))
    return total


@given(st.sampled_from([4, 8, 16]), st.sampled_from([8, 16, 32]), st.data())
def test_wavefronts_are_those_counted_by_hand(size: int, lanes: int, data: st.DataObject) -> None:
    units = data.draw(st.lists(st.integers(0, 63), min_size=lanes, max_size=lanes))
    active = data.draw(st.lists(st.booleans(), min_size=lanes, max_size=lanes))
    addresses = np.array(units, dtype=np.uint32) * size
    expected = count_by_hand([unit * size for unit in units], size, active)
    assert wavefronts(addresses, size, np.array(active)) == expected
    assert wavefronts(addresses, size) == count_by_hand([u * size for u in units], size, [True] * lanes)


@given(st.lists(st.integers(0, 255), min_size=5, max_size=5), st.sampled_from([1, 2, 4, 8, 16]))
def test_ranks_predict_what_addresses_show(units: list[int], size: int) -> None:
    lanes = LinearMap({"lane": [(unit * size,) for unit in units]}, {"byte": 256 * size})
    executed = wavefronts(lanes.apply(lane=LANES)["byte"], size)
    assert predicted_wavefronts(lanes, size) == executed
    assert predicted_conflicts(lanes, size) == executed - ideal_wavefronts(np.zeros(32), size)


def test_known_accesses() -> None:
    assert wavefronts(LANES * 4, 4) == 1
    assert wavefronts(LANES * 0, 4) == 1  # broadcast
    assert wavefronts(LANES * 8, 4) == 2
    assert wavefronts(LANES * 128, 4) == 32
    assert wavefronts(LANES * 2, 2) == 1
    assert wavefronts(LANES * 8, 8) == 2
    assert wavefronts(LANES * 16, 16) == 4
    shape = wavefronts(np.tile(LANES * 4, (3, 5, 1)), 4)
    assert shape.shape == (3, 5)
    assert (shape == 1).all()


def test_no_access_takes_no_wavefront() -> None:
    assert wavefronts(np.zeros((0, 32), np.int64), 16).shape == (0,)


def test_lanes_that_take_no_part() -> None:
    one = LANES == 17
    assert wavefronts(LANES * 128, 4, one) == 1
    assert wavefronts(LANES * 16, 16, one) == 1
    assert ideal_wavefronts(LANES * 16, 16, one) == 1
    assert ideal_wavefronts(LANES * 16, 16, LANES < 9) == 2
    assert wavefronts(LANES * 16, 16, LANES < 0) == 0
    assert ideal_wavefronts(LANES[:16] * 16, 16) == 2  # ldmatrix.x2


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("cols", [16, 32, 64, 128, 256])
def test_ldmatrix_is_free_of_conflicts_on_swizzled_tiles(cols: int, transposed: bool) -> None:
    target = mma_fragment("m16n8k16", "B").tile(1, 2) if transposed else mma_fragment("m16n8k16", "A")
    lanes = ldmatrix_plan(target, transposed).address
    memory = SharedLayout(64, cols, 2, Swizzle.for_row_bytes(cols * 2))
    at = lanes.apply(lane=LANES)
    for row in range(0, 64, 16):
        for col in range(0, cols, 16):
            assert wavefronts(memory.offset(at["row"] + row, at["col"] + col), 16) == 4
    assert predicted_wavefronts(lane_addresses(memory, lanes), 16) == 4


@pytest.mark.parametrize(("cols", "factor"), [(16, 2), (32, 4), (64, 8), (128, 8)])
def test_ldmatrix_without_a_swizzle(cols: int, factor: int) -> None:
    lanes = ldmatrix_plan(mma_fragment("m16n8k16", "A"), False).address
    addresses = lane_addresses(SharedLayout(64, cols, 2, NO_SWIZZLE), lanes)
    executed = int(wavefronts(addresses.apply(lane=LANES)["byte"], 16))
    assert executed == factor * 4 == predicted_wavefronts(addresses, 16)


def test_narrow_panels_share_the_swizzle_of_the_wide_one() -> None:
    lanes = ldmatrix_plan(mma_fragment("m16n8k16", "A"), False).address
    memory = SharedLayout(64, 96, 2, Swizzle(3, 4, 3))
    at = lanes.apply(lane=LANES)
    for row in range(0, 64, 16):
        for col in range(0, 96, 16):
            assert wavefronts(memory.offset(at["row"] + row, at["col"] + col), 16) == 4


def test_wrong_accesses_are_refused() -> None:
    with pytest.raises(LayoutError, match="not 3"):
        wavefronts(LANES, 3)
    with pytest.raises(LayoutError, match="not aligned"):
        predicted_wavefronts(LinearMap({"lane": [(4,)] * 5}, {"byte": 8}), 16)
