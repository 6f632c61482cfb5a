from __future__ import annotations

import itertools

import numpy as np
import pytest
from layout_cases import Traced

from warploom.core.errors import LayoutError
from warploom.layout import (
    LinearMap,
    SharedLayout,
    Swizzle,
    copy_positions,
    lane_addresses,
    ldmatrix_plan,
    mma_fragment,
    signed_strides,
    split_displacement,
)

FRAGMENT_LANES = ldmatrix_plan(mma_fragment("m16n8k16", "A"), False).address
LANES = np.arange(32)


@pytest.mark.parametrize(
    "memory",
    [
        SharedLayout(64, 128, 2, Swizzle(3, 4, 4)),
        SharedLayout(48, 64, 2, Swizzle(3, 4, 3)),
        SharedLayout(64, 32, 2, Swizzle(2, 4, 3)),
        SharedLayout(64, 128, 2),
        SharedLayout(80, 192, 2, Swizzle(3, 4, 3)),
    ],
    ids=str,
)
def test_displaced_addresses(memory: SharedLayout) -> None:
    at = FRAGMENT_LANES.apply(lane=LANES)
    base = lane_addresses(memory, FRAGMENT_LANES).apply(lane=LANES)["byte"]
    for row, col in itertools.product(range(0, memory.rows, 16), range(0, memory.cols, 16)):
        immediate, varying = split_displacement(memory, FRAGMENT_LANES, row, col)
        expected = memory.offset(at["row"] + row, at["col"] + col)
        assert ((base ^ varying) + immediate == expected).all()
        strides = signed_strides(varying, base)
        assert (base + sum(stride for _, stride in strides) + immediate == expected).all()
        if not memory.swizzle.bits:
            assert varying == 0


def test_strided_swizzle_of_kernel_8() -> None:
    # 256-byte rows: 128 is a plain immediate; 64 and 32 bytes (32 and 16 elements) are strides of either sign.
    memory = SharedLayout(64, 128, 2, Swizzle(3, 4, 4))
    assert [split_displacement(memory, FRAGMENT_LANES, 16, col) for col in (0, 16, 32, 48, 64, 80)] == [
        (4096, 0),
        (4096, 32),
        (4096, 64),
        (4096, 96),
        (4224, 0),
        (4224, 32),
    ]


def test_cta_wide_copies_need_no_stride() -> None:
    # 128 threads copy 8 rows of 256 bytes at a time: every further pass is one immediate away.
    memory = SharedLayout(64, 128, 2, Swizzle(3, 4, 4))
    threads = copy_positions(128, 128, 8)
    assert [split_displacement(memory, threads, row, 0) for row in (8, 16, 24)] == [(2048, 0), (4096, 0), (6144, 0)]
    # One warp covers 2 rows, so its passes differ by thread.
    lanes = copy_positions(32, 128, 8)
    assert split_displacement(memory, lanes, 2, 0) == (512, 32)


def test_tables_of_the_series() -> None:
    # Threads 0 to 7 read an 8×8 tile of banks column by column, thread t in row t: column i lies at t ^ i.
    table = {
        0: (4, 2, 1),
        1: (4, 2, -1),
        2: (4, -2, 1),
        3: (4, -2, -1),
        4: (-4, 2, 1),
        5: (-4, 2, -1),
        6: (-4, -2, 1),
        7: (-4, -2, -1),
    }
    for thread, strides in table.items():
        found = signed_strides(7, thread)
        assert found == tuple(zip((1, 2, 4), reversed(strides), strict=True))
        columns = [thread + sum(stride for bit, stride in found if i & bit) for i in range(8)]
        assert columns == [thread ^ i for i in range(8)]
    columns = [3 + sum(stride for bit, stride in signed_strides(7, 3) if i & bit) for i in range(8)]
    assert columns == [3, 2, 1, 0, 7, 6, 5, 4]


def test_the_same_tables_from_a_swizzled_tile() -> None:
    memory = SharedLayout(8, 64, 2, Swizzle(3, 4, 3))
    rows = LinearMap({"lane": [(1, 0), (2, 0), (4, 0)]}, {"row": 8, "col": 64})
    base = lane_addresses(memory, rows).apply(lane=np.arange(8))["byte"]
    assert split_displacement(memory, rows, 0, 56) == (0, 112)
    (_, ones), (_, twos), (_, fours) = signed_strides(112, base)
    assert [tuple(int(s) // 16 for s in row) for row in zip(fours, twos, ones, strict=True)] == [
        (4, 2, 1),
        (4, 2, -1),
        (4, -2, 1),
        (4, -2, -1),
        (-4, 2, 1),
        (-4, 2, -1),
        (-4, -2, 1),
        (-4, -2, -1),
    ]


def test_traced_strides_use_the_given_select() -> None:
    strides = signed_strides(96, Traced("base"), lambda bit, a, b: f"{bit} ? {a} : {b}")
    assert strides == ((32, "(base & 32) ? -32 : 32"), (64, "(base & 64) ? -64 : 64"))
    with pytest.raises(LayoutError, match="select="):
        signed_strides(32, Traced("base"))


def test_carrying_displacements_are_refused() -> None:
    memory = SharedLayout(64, 128, 2, Swizzle(3, 4, 4))
    with pytest.raises(LayoutError, match="that one load takes"):
        split_displacement(memory, FRAGMENT_LANES, 8, 0)
    with pytest.raises(LayoutError, match="that one load takes"):
        split_displacement(memory, FRAGMENT_LANES, 0, 8)
    with pytest.raises(LayoutError, match="outside the tile"):
        split_displacement(memory, FRAGMENT_LANES, 64, 0)
    with pytest.raises(LayoutError, match="panel_layout"):
        split_displacement(SharedLayout(64, 96, 2, Swizzle(3, 4, 3)), FRAGMENT_LANES, 0, 64)
    with pytest.raises(LayoutError, match="the lanes reach col 8"):
        lane_addresses(SharedLayout(64, 8, 2), FRAGMENT_LANES)
