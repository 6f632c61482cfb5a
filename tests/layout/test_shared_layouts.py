from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layout_cases import Traced

from warploom.core.dtypes import bf16, f32
from warploom.core.errors import LayoutError
from warploom.layout import NO_SWIZZLE, LinearMap, Panel, SharedLayout, Swizzle, copy_positions
from warploom.layout.banks import wavefronts
from warploom.layout.wgmma import element_addresses

SWIZZLES = [NO_SWIZZLE, Swizzle(1, 4, 3), Swizzle(2, 4, 3), Swizzle(3, 4, 3), Swizzle(3, 4, 4)]


@given(st.integers(1, 70), st.integers(1, 200), st.sampled_from([1, 2, 4]), st.sampled_from(SWIZZLES), st.booleans())
def test_every_element_has_bytes_of_its_own(
    rows: int, cols: int, element_bytes: int, swizzle: Swizzle, narrow: bool
) -> None:
    memory = SharedLayout(rows, cols * 8, element_bytes, swizzle, 32 if narrow else None)
    row, col = np.ix_(np.arange(rows), np.arange(cols * 8))
    offsets = memory.offset(row, col)
    assert offsets.shape == (rows, cols * 8)
    assert (offsets % element_bytes == 0).all()
    assert np.unique(offsets).size == offsets.size
    assert offsets.min() >= 0
    assert offsets.max() + element_bytes <= memory.bytes
    assert memory.offset(rows - 1, cols * 8 - 1) == offsets[-1, -1]
    for at in ((0, 0), (rows // 2, cols * 4), (rows - 1, cols * 8 - 1)):
        assert memory.element_at(int(offsets[at]) + element_bytes - 1) == at


@given(st.integers(1, 70), st.sampled_from([8, 64, 128]), st.sampled_from([1, 2, 4]), st.integers(1, 16))
def test_padding_lies_behind_each_row(rows: int, cols: int, element_bytes: int, padding: int) -> None:
    memory = SharedLayout(rows, cols, element_bytes, padding=padding)
    row, col = np.ix_(np.arange(rows), np.arange(cols))
    assert (memory.offset(row, col) == (row * (cols + padding) + col) * element_bytes).all()
    assert memory.bytes == rows * (cols + padding) * element_bytes
    assert memory.row_bytes == memory.offset(1, 0)
    for what in (lambda: memory.map, memory.matrix_descriptor):
        with pytest.raises(LayoutError, match=r"padding|linear map"):
            what()


@pytest.mark.parametrize("row_bytes", [32, 64, 128, 256])
def test_padding_by_16_bytes_ends_the_conflicts_of_rows_that_are_whole_bank_cycles(row_bytes: int) -> None:
    """Eight rows read 16 bytes each, as by ldmatrix."""
    for padding, expected in ((0, row_bytes // 16 if row_bytes < 128 else 8), (8, 1)):
        memory = SharedLayout(8, row_bytes // 2, 2, padding=padding)
        assert wavefronts(memory.offset(np.arange(8), 0), 16).item() <= expected
        assert padding or wavefronts(memory.offset(np.arange(8), 0), 16).item() > 1


@given(st.integers(1, 70), st.sampled_from([8, 64, 128]), st.sampled_from([1, 2, 4]), st.sampled_from(SWIZZLES))
def test_map_is_the_offset(rows: int, cols: int, element_bytes: int, swizzle: Swizzle) -> None:
    memory = SharedLayout(rows, cols, element_bytes, swizzle)
    row, col = np.ix_(np.arange(rows), np.arange(cols))
    assert (memory.map.apply(row=row, col=col)["byte"] == memory.offset(row, col)).all()


def test_row_major_within_a_panel() -> None:
    memory = SharedLayout(48, 64, 2, Swizzle(3, 4, 3))
    assert memory.bytes == 48 * 128
    assert memory.offset(5, 8) == Swizzle(3, 4, 3).apply(5 * 128 + 16) == 5 * 128 + ((1 ^ 5) << 4)
    assert memory.alignment == 1024


def test_panels() -> None:
    memory = SharedLayout(64, 96, 2, Swizzle(3, 4, 3))
    assert memory.panels == (Panel(0, 64, 0), Panel(64, 32, 8192))
    assert memory.bytes == 8192 + 64 * 64
    assert memory.offset(3, 70) == 8192 + memory.panel_layout(1).offset(3, 6)
    assert [panel.cols for panel in SharedLayout(8, 80, 2).panels] == [64, 16]
    assert [panel.cols for panel in SharedLayout(8, 192, 2).panels] == [64, 64, 64]
    assert [panel.cols for panel in SharedLayout(8, 96, 4).panels] == [32, 32, 32]
    with pytest.raises(LayoutError, match=r"64\+32"):
        _ = memory.map
    with pytest.raises(LayoutError, match="different strides"):
        memory.offset(Traced("r"), Traced("c"))
    with pytest.raises(LayoutError, match="outside"):
        memory.offset(0, 96)


def test_panels_start_where_the_swizzle_starts_anew() -> None:
    memory = SharedLayout(12, 128, 2, Swizzle(3, 4, 3), panel_cols=64)
    assert memory.panels[1].byte_offset == 2048  # 12 rows of 128 bytes, rounded up to 1024


def test_equal_panels_are_one_map() -> None:
    memory = SharedLayout(64, 128, 2, Swizzle(3, 4, 3), panel_cols=64)
    row, col = np.ix_(np.arange(64), np.arange(128))
    assert (memory.map.apply(row=row, col=col)["byte"] == memory.offset(row, col)).all()


def test_traced_offsets() -> None:
    memory = SharedLayout(64, 64, 2, Swizzle(3, 4, 3))
    assert str(memory.offset(Traced("r"), 0)) == "((r << 7) ^ (((r << 7) & 896) >> 3))"
    panels = SharedLayout(64, 128, 2, NO_SWIZZLE, panel_cols=64)
    assert str(SharedLayout(64, 64, 2).offset(4, Traced("c"))) == "((c << 1) + 512)"
    assert str(panels.offset(Traced("r"), 72)) == "(((r << 7) + 16) + 8192)"


def test_cooperative_copy() -> None:
    positions = copy_positions(128, 64, 8)
    assert positions == LinearMap(
        {"thread": [(0, 8), (0, 16), (0, 32), (1, 0), (2, 0), (4, 0), (8, 0)]}, {"row": 16, "col": 64}
    )
    at = positions.apply(thread=np.arange(128))
    assert (at["row"] * 64 + at["col"] == np.arange(128) * 8).all()
    with pytest.raises(LayoutError, match="whole rows"):
        copy_positions(32, 512, 8)


def test_wrong_tiles_are_refused() -> None:
    with pytest.raises(LayoutError, match="needs rows and columns"):
        SharedLayout(0, 64, 2)
    with pytest.raises(LayoutError, match="power of two"):
        SharedLayout(8, 64, 3)
    with pytest.raises(LayoutError, match="the panel"):
        SharedLayout(8, 64, 2, NO_SWIZZLE, 48)
    for cols, swizzle, padding in ((64, NO_SWIZZLE, -8), (64, Swizzle(3, 4, 3), 8), (96, NO_SWIZZLE, 8)):
        with pytest.raises(LayoutError, match="padded tile is one panel"):
            SharedLayout(8, cols, 2, swizzle, padding=padding)


BASE = 7 * 1024  # of a tile in shared memory


@pytest.mark.parametrize("panel_cols", [64, 32, 16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "cols"), [(64, 64), (128, 64), (64, 192), (192, 128)])
def test_descriptors_point_at_the_tiles_elements(rows: int, cols: int, transposed: bool, panel_cols: int) -> None:
    tile = SharedLayout(rows, cols, 2, Swizzle.for_row_bytes(2 * panel_cols), panel_cols)
    shape = tile.matrix_descriptor(transposed=transposed)
    outer = 64  # rows of A
    for row in range(0, rows, 16 if transposed else 64):
        for col in range(0, cols, panel_cols if transposed else 16):
            if transposed and ((panel_cols < outer and len(tile.panels) == 1) or col + outer > cols):
                continue
            start = BASE + tile.matrix_offset(row, col, transposed=transposed)
            descriptor = shape.low_word(start) | shape.high_word << 32
            found = element_addresses(descriptor, outer, 16, k_contiguous=not transposed)
            r, c = np.ix_(np.arange(outer), np.arange(16))
            expected = tile.offset(row + c, col + r) if transposed else tile.offset(row + r, col + c)
            assert (found == BASE + expected).all(), (row, col)


def test_boxes_fill_panels() -> None:
    tile = SharedLayout(96, 128, 2, Swizzle.for_row_bytes(128), 64)
    spec = tile.tensor_map(bf16, (4096, 1000, 3), (8192, 8192000))
    assert (spec.box, spec.swizzle_bytes, spec.box_bytes) == ((64, 96, 1), 128, 96 * 128)
    assert tile.tensor_map(bf16, (4096, 1000), (8192,), rows=48).box_bytes * 4 == tile.bytes
    assert SharedLayout(8, 32, 4).tensor_map(f32, (40, 12), (160,)).swizzle_bytes == 0


def test_what_wgmma_and_the_tma_cannot_read_is_refused() -> None:
    tile = SharedLayout(64, 64, 2, Swizzle.for_row_bytes(128))
    with pytest.raises(LayoutError, match="elements of 2 bytes, the tensor of f32"):
        tile.tensor_map(f32, (64, 64), (256,))
    with pytest.raises(LayoutError, match='swizzle="auto"'):
        SharedLayout(64, 64, 2).matrix_descriptor()
    with pytest.raises(LayoutError, match="panels of one width, not 64\\+32"):
        SharedLayout(64, 96, 2, Swizzle.for_row_bytes(128)).matrix_descriptor()
    for row, col, transposed in ((4, 0, False), (0, 8, False), (64, 0, False), (0, 16, True), (0, 64, False)):
        with pytest.raises(LayoutError, match="starts at a row that is a multiple of 8"):
            tile.matrix_offset(row, col, transposed=transposed)
