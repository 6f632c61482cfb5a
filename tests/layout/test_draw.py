from __future__ import annotations

import xml.etree.ElementTree as ET

import numpy as np
import pytest

from warploom.core.dtypes import f16
from warploom.core.errors import LayoutError
from warploom.layout import FRAGMENTS, NO_SWIZZLE, LinearMap, SharedLayout, Swizzle, mma_fragment, wmma_accumulator
from warploom.layout.catalogue import wgmma_accumulator
from warploom.layout.draw import draw_banks, draw_elements, draw_lanes, draw_observation, draw_permutation, lane_tone
from warploom.layout.fit import Observation
from warploom.layout.fragments import FragmentLayout
from warploom.layout.reduction import reduction_plan
from warploom.layout.wmma import wmma_fragment

SVG = "{http://www.w3.org/2000/svg}"


def contrast(colour: str, ink: str = "#1b1f24") -> float:
    """WCAG's contrast ratio."""

    def luminance(text: str) -> float:
        parts = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    return (luminance(colour) + 0.05) / (luminance(ink) + 0.05)


@pytest.mark.parametrize("name", FRAGMENTS)
def test_every_cell_names_who_holds_it(name: str) -> None:
    layout = FRAGMENTS[name]
    grid = draw_elements(layout)
    assert (len(grid.cells), len(grid.cells[0])) == layout.shape
    rows, cols = layout.element_coordinates()
    for thread in range(layout.threads):
        for i in range(layout.elements_per_thread):
            cell = grid.cells[int(rows[thread, i])][int(cols[thread, i])]
            assert cell.small == f"i{i}"
            assert cell.text.split("·")[-1] == str(thread % 32)
            assert cell.fill == lane_tone(thread % 32)
    lanes = draw_lanes(layout)
    assert lanes.cells[3][0].text == f"{rows[3, 0]},{cols[3, 0]}"


def test_figure_one_of_the_paper() -> None:
    grid = draw_elements(wmma_accumulator())
    assert [c.text for c in grid.cells[0]] == [str(x) for x in (0, 0, 1, 1, 2, 2, 3, 3) * 2]
    assert [c.text for c in grid.cells[9]] == [str(x) for x in (4, 4, 5, 5, 6, 6, 7, 7) * 2]
    assert "row = (lane >> 2) + 8*((i >> 1) & 1)" in grid.caption


def test_figure_two_of_the_paper() -> None:
    grid = draw_permutation(wmma_accumulator())
    before, after = grid.cells
    assert [c.small for c in before] == ["row 0", "row 0", "row 8", "row 8"] * 2
    assert [c.small for c in after] == ["row 0"] * 4 + ["row 8"] * 4
    assert [c.text for c in after] == [f"x[{i}]" for i in (0, 1, 4, 5, 2, 3, 6, 7)]
    assert [c.small for c in draw_permutation(mma_fragment("m16n8k16", "C"), "row").cells[1]] == ["col 0"] * 2 + [
        "col 1"
    ] * 2


def test_a_swizzled_tile_is_free_of_conflicts_and_says_so() -> None:
    tile = SharedLayout(16, 64, 2, Swizzle(3, 4, 3))
    grid = draw_banks(tile)
    assert "free of conflicts" in grid.caption[0]
    for row in range(16):
        for col in range(0, 64, 8):
            byte = int(tile.offset(row, col))
            assert grid.cells[byte // 128][byte % 128 // 16].text == f"{row},{col}"
    first_eight = [[c.fill for c in line] for line in grid.cells[:8]]
    columns = {fill: sorted(line.index(fill) for line in first_eight) for fill in set(first_eight[0])}
    assert all(places == list(range(8)) for places in columns.values())


def test_a_plain_tile_conflicts_and_says_how_much() -> None:
    assert "8 wavefronts instead of 1" in draw_banks(SharedLayout(16, 64, 2, NO_SWIZZLE)).caption[0]


def test_tiles_without_whole_chunks_are_refused() -> None:
    with pytest.raises(LayoutError, match="no whole 16-byte chunks"):
        draw_banks(SharedLayout(8, 4, 2))


@pytest.mark.parametrize(
    "grid",
    [
        draw_elements(wmma_accumulator()),
        draw_lanes(mma_fragment("m16n8k16", "A")),
        draw_permutation(wmma_accumulator()),
        draw_banks(SharedLayout(16, 96, 2, Swizzle(3, 4, 3))),
    ],
)
def test_the_svg_is_well_formed_and_nothing_leaves_the_page(grid) -> None:
    root = ET.fromstring(grid.svg())
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    boxes = root.findall(f"{SVG}rect")
    texts = root.findall(f"{SVG}text")
    assert len(boxes) == 1 + sum(len(line) for line in grid.cells)
    for box in boxes:
        x, y, w, h = (float(box.get(key, 0)) for key in ("x", "y", "width", "height"))
        assert min(x, y) >= 0
        assert x + w <= width
        assert y + h <= height
    for text in texts:
        x, size, content = float(text.get("x", 0)), float(text.get("font-size", 0)), text.text or ""
        reach = 0.61 * size * len(content)  # a monospaced letter is about 0.6 of its size wide
        left = x - {"start": 0.0, "middle": reach / 2, "end": reach}[text.get("text-anchor", "start")]
        assert left >= 0, content
        assert left + reach <= width, content
        assert float(text.get("y", 0)) < height


def test_texts_are_readable_on_every_colour() -> None:
    assert min(contrast(lane_tone(lane)) for lane in range(32)) > 4.5
    assert len({lane_tone(lane) for lane in range(32)}) == 32


def test_what_is_not_linear_is_drawn_with_the_reason() -> None:
    rows, cols = (x.copy() for x in mma_fragment("m16n8k16", "C").element_coordinates())
    cols[3, 1], cols[3, 0] = cols[3, 0], cols[3, 1]
    grid = draw_observation(Observation("odd", (16, 8), rows, cols))
    assert grid.caption[0].startswith("not linear: lane 3, register 0")
    held_twice = Observation("twice", (16, 8), rows, np.zeros_like(cols))
    cells = draw_observation(held_twice).cells
    assert cells[0][1].text == "–"
    assert cells[0][0].small == "i0+7"


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (mma_fragment("m16n8k16", "A"), ["lanes repeat every 8 rows and every 8 columns"]),
        (mma_fragment("m16n8k16", "B"), ["lanes repeat every 8 rows"]),
        (wgmma_accumulator(8), ["lanes repeat every 8 rows"]),
        (mma_fragment("m16n8k16", "C").tile(1, 3), ["lanes repeat every 8 rows and every 8 columns"]),
        (mma_fragment("m8n8k16", "C"), []),
        (
            wmma_fragment("m16n16k16", "A", f16, "row"),
            ["lanes repeat every 8 rows and every 8 columns", "+n: held n times more"],
        ),
    ],
)
def test_what_repeats_in_a_fragment_is_told(layout: FragmentLayout, says: list[str]) -> None:
    assert list(draw_elements(layout).notes[1:]) == says


@pytest.mark.parametrize(
    ("tile", "says"),
    [
        (SharedLayout(64, 64, 2, Swizzle(3, 4, 3)), ["rows 0–15 of 64: the banks repeat every 8 rows"]),
        (SharedLayout(64, 64, 2), ["rows 0–15 of 64: the banks repeat every row"]),
        (SharedLayout(64, 32, 4, Swizzle(5, 2, 5)), ["rows 0–15 of 64"]),
        (SharedLayout(16, 64, 2, Swizzle(3, 4, 3)), []),
    ],
)
def test_rows_that_are_not_drawn_are_told(tile: SharedLayout, says: list[str]) -> None:
    assert list(draw_banks(tile).notes[1:]) == says


def test_notebooks_draw_layouts() -> None:
    for thing in (wmma_accumulator(), SharedLayout(64, 64, 2, Swizzle(3, 4, 3))):
        assert ET.fromstring(thing._repr_svg_()).tag == f"{SVG}svg"


def test_plans_and_maps_draw_themselves_in_notebooks() -> None:
    layout = mma_fragment("m16n8k16", "C")
    shown = [x._repr_svg_() for x in (reduction_plan(layout, "col"), layout.atom, LinearMap({"x": [(1,)]}, {"y": 2}))]  # pyright: ignore[reportPrivateUsage]
    assert shown[0] is not None
    assert ">after<" in shown[0]
    assert "costs no instruction" in shown[0]
    assert shown[1] is not None
    assert "lane 31, i = 3" in shown[1]
    assert shown[2] is None


def test_a_swizzle_of_single_elements_is_drawn_by_element():
    tile = SharedLayout(32, 32, 4, Swizzle(5, 2, 5))
    grid = draw_banks(tile)
    assert len(grid.columns) == 32
    for row in range(16):
        for col in range(32):
            line, place = divmod(tile.offset(row, col), 128)
            assert grid.cells[line][place // 4].text == f"{row},{col}"
    assert grid.caption == ("a column of 32 rows, one element a lane: free of conflicts",)
    shifted = draw_banks(SharedLayout(32, 32, 4, Swizzle(3, 3, 5)))
    assert shifted.columns[:2] == ("0–1", "2–3")
    assert (shifted.cells[1][0].text, shifted.cells[2][0].text) == ("1,0", "2,2")
    assert "4 wavefronts instead of 1" in shifted.caption[0]


def test_a_tall_fragment_is_drawn_in_parts_side_by_side() -> None:
    tall = draw_elements(wgmma_accumulator(8))
    drawn = tall.drawing()
    assert len(drawn.boxes) == 64 * 8
    assert len({(box.x, box.y) for box in drawn.boxes}) == 64 * 8
    assert len({box.y for box in drawn.boxes}) == 16
    assert all(box.x + box.width <= drawn.width and box.y + box.height <= drawn.height for box in drawn.boxes)
    assert {label.text for label in drawn.labels} >= {str(row) for row in range(64)}
