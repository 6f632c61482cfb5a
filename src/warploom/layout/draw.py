"""Pictures of layouts: who holds which element, where a tile's chunks lie in the banks, what a permutation gathers.

A picture is a grid of coloured cells. :meth:`Grid.svg` writes it by hand, without any library; the command line shows
the same cells as a table in the terminal and, where matplotlib is installed, as PNG.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import LayoutError
from warploom.layout.banks import wavefronts
from warploom.layout.fit import Observation, describe, fit
from warploom.layout.fragments import WARP_SIZE, FragmentLayout
from warploom.layout.linear import LinearMap
from warploom.layout.reduction import ReductionPlan, reduction_plan
from warploom.layout.shared import SharedLayout
from warploom.layout.swizzle import BANK_CYCLE_BYTES

INK, SOFT, FAINT, PAPER, EMPTY = "#1b1f24", "#3f4753", "#6b7280", "#ffffff", "#f3f4f6"
_CHUNK_BYTES = 16
_TALL, _PART = 32, 16  # rows from which on a narrow grid is drawn in parts, and rows of a part
_FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


def tone(group: int, shade: int = 0, groups: int = 8, shades: int = 4) -> str:
    """A light colour that dark text reads well on: a hue for ``group``, darker with ``shade``."""
    hue = group % groups / groups
    light = 0.90 - 0.16 * (shade % shades) / max(1, shades - 1)
    red, green, blue = colorsys.hls_to_rgb(hue, light, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def lane_tone(lane: int) -> str:
    """The colour of a lane: a hue for each quad, a shade for each lane of it."""
    return tone(lane >> 2, lane & 3)


@dataclass(frozen=True)
class Cell:
    """One box: a main text, a smaller one beneath it, the colour behind them, and what hovering over it says."""

    text: str
    small: str = ""
    fill: str = EMPTY
    title: str = ""


@dataclass(frozen=True)
class Rectangle:
    """A filled rectangle of a drawing, in pixels."""

    x: float
    y: float
    width: float
    height: float
    fill: str
    title: str = ""


@dataclass(frozen=True)
class Label:
    """A text of a drawing; ``anchor`` is ``start``, ``middle`` or ``end`` of it at (x, y), y its middle."""

    x: float
    y: float
    text: str
    size: float
    colour: str = INK
    anchor: str = "middle"
    bold: bool = False


@dataclass(frozen=True)
class Stroke:
    """An arrow of a drawing."""

    x: float
    y: float
    to_x: float
    to_y: float


@dataclass(frozen=True)
class Drawing:
    """Boxes, labels and arrows on a page of ``width`` × ``height`` pixels: what every file format is made from."""

    width: float
    height: float
    boxes: tuple[Rectangle, ...]
    labels: tuple[Label, ...]
    title: str
    strokes: tuple[Stroke, ...] = ()

    def svg(self) -> str:
        """The drawing as an SVG document that stands by itself."""
        w, h = f"{self.width:g}", f"{self.height:g}"
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" role="img" '
            f'font-family="{_FONT}" xml:space="preserve">',
            f"<title>{escape(self.title)}</title>",
            f'<rect width="{w}" height="{h}" fill="{PAPER}"/>',
        ]
        for b in self.boxes:
            hint = f"<title>{escape(b.title)}</title>" if b.title else ""
            parts.append(
                f'<rect x="{b.x:g}" y="{b.y:g}" width="{b.width:g}" height="{b.height:g}" rx="3" fill="{b.fill}" '
                f'stroke="#000000" stroke-opacity="0.13">{hint}</rect>'
            )
        for s in self.strokes:
            parts.append(
                f'<path d="M{s.x:g} {s.y:g}L{s.to_x:g} {s.to_y:g}" stroke="{SOFT}" stroke-width="1.2"/>'
                f'<circle cx="{s.to_x:g}" cy="{s.to_y:g}" r="2.5" fill="{SOFT}"/>'
            )
        for t in self.labels:
            weight = ' font-weight="600"' if t.bold else ""
            parts.append(
                f'<text x="{t.x:g}" y="{t.y:g}" font-size="{t.size:g}" fill="{t.colour}" text-anchor="{t.anchor}" '
                f'dominant-baseline="central"{weight}>{escape(t.text)}</text>'
            )
        return "\n".join([*parts, "</svg>\n"])


@dataclass(frozen=True)
class Grid:
    """A titled table of cells with labels above and beside it; a gap after every ``gap`` rows and columns."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]
    caption: tuple[str, ...] = ()
    gap: tuple[int, int] = (8, 8)
    cell_size: tuple[int, int] = (38, 32)
    corner: str = ""
    notes: tuple[str, ...] = ()

    def drawing(self) -> Drawing:
        """The grid laid out in pixels; a tall and narrow one in parts of 16 rows, side by side."""
        if len(self.rows) <= _TALL or len(self.rows) < 4 * len(self.columns):
            return self._whole()
        boxes, labels, x, height = list[Rectangle](), list[Label](), 0.0, 0.0
        for first in range(0, len(self.rows), _PART):
            last = first + _PART
            of = replace(self, rows=self.rows[first:last], cells=self.cells[first:last])
            drawn = (of if first == 0 else replace(of, title="", caption=(), notes=("",) * len(self.notes)))._whole()
            boxes += [replace(box, x=box.x + x) for box in drawn.boxes]
            labels += [replace(label, x=label.x + x) for label in drawn.labels]
            x, height = x + drawn.width, max(height, drawn.height)
        return Drawing(x, height, tuple(boxes), tuple(labels), self.title)

    def _whole(self) -> Drawing:
        margin, head, space = 18, 26, 7
        width, height = self.cell_size
        label = 8 + max(6.6 * len(self.corner), *(7.4 * len(r) for r in self.rows), 0)
        left, top = margin + label, margin + head + 18 + 16 * len(self.notes)
        boxes: list[Rectangle] = []
        labels = [Label(margin, margin + 8, self.title, 15, anchor="start", bold=True)]
        labels += [Label(margin, margin + 28 + 16 * i, note, 12, FAINT, "start") for i, note in enumerate(self.notes)]
        xs = _positions(len(self.columns), width, self.gap[1], left, space)
        ys = _positions(len(self.rows), height, self.gap[0], top, space)
        if self.corner:
            labels.append(Label(left - 8, top - 10, self.corner, 10.5, FAINT, "end"))
        labels += [Label(x + width / 2, top - 10, name, 10.5, FAINT) for x, name in zip(xs, self.columns, strict=True)]
        for y, name in zip(ys, self.rows, strict=True):
            labels.append(Label(left - 8, y + height / 2, name, 10.5, FAINT, "end"))
        for y, line in zip(ys, self.cells, strict=True):
            for x, cell in zip(xs, line, strict=False):
                boxes.append(Rectangle(x, y, width - 2, height - 2, cell.fill, cell.title))
                lift = height * 0.17 if cell.small else 0
                labels.append(Label(x + width / 2 - 1, y + height / 2 - 1 - lift, cell.text, 12.5))
                if cell.small:
                    labels.append(Label(x + width / 2 - 1, y + height * 0.72, cell.small, 9, SOFT))
        bottom = (ys[-1] + height if ys else top) + 18
        for i, line in enumerate(self.caption):
            labels.append(Label(margin, bottom + 17 * i, line, 12, INK, "start"))
        right = max(
            [
                (xs[-1] + width if xs else left) + margin,
                *(margin * 2 + 7.4 * len(c) for c in self.caption),
                margin * 2 + 9.2 * len(self.title),
                *(margin * 2 + 7.4 * len(n) for n in self.notes),
            ]
        )
        return Drawing(round(right), round(bottom + 17 * len(self.caption)), tuple(boxes), tuple(labels), self.title)

    def svg(self) -> str:
        """The grid as an SVG document."""
        return self.drawing().svg()


def _positions(count: int, size: int, every: int, start: float, space: int) -> list[float]:
    return [start + i * size + (i // every * space if every else 0) for i in range(count)]


# -------------------------------------------------------------------- fragments


def draw_elements(layout: FragmentLayout) -> Grid:
    """The matrix, each element with its lane and, beneath, the index of the element in that thread (Figure 1)."""
    linear = all(count & (count - 1) == 0 for count in layout.tiles)
    formulas = tuple(describe(layout.map).splitlines()) if linear else ()
    return _element_grid(Observation.of(layout), formulas)


def draw_map(shown: LinearMap) -> Grid | None:
    """Draw a map from the registers and lanes of one warp to rows and columns as a fragment; None for other maps."""
    is_fragment = set(shown.out_dims) == {"row", "col"} and {"register", "lane"} <= set(shown.in_dims)
    if not is_fragment or shown.in_size("lane") != WARP_SIZE:
        return None
    return draw_elements(FragmentLayout("map", shown, 32))


def draw_observation(observed: Observation) -> Grid:
    """Draw a fragment that was observed on a GPU, linear or not."""
    found = fit(observed)
    formulas = (f"not linear: {found.reason}",) if found.map is None else tuple(describe(found.map).splitlines())
    return _element_grid(observed, formulas)


def _element_grid(observed: Observation, caption: tuple[str, ...]) -> Grid:
    rows, cols = observed.shape
    holders: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for thread in range(observed.rows.shape[0]):
        for i in range(observed.elements):
            holders.setdefault(observed.at(thread, i), []).append((thread, i))
    several = observed.warps > 1
    lines = [tuple(_element_cell(several, r, c, holders.get((r, c), [])) for c in range(cols)) for r in range(rows)]
    who = "warp·lane" if several else "lane"
    return Grid(
        observed.name,
        tuple(map(str, range(cols))),
        tuple(map(str, range(rows))),
        tuple(lines),
        caption,
        notes=(
            f"{rows}×{cols}, {observed.elements} elements per thread: {who}, and beneath it i",
            *_repeats(holders, observed.shape),
        ),
        corner="row\\col",
    )


def _repeats(holders: Mapping[tuple[int, int], list[tuple[int, int]]], shape: tuple[int, int]) -> Iterator[str]:
    """Where the lanes come again, and that elements are held several times."""
    ids: dict[frozenset[int], int] = {}
    lanes = np.zeros(shape, np.int64)
    for place in np.ndindex(*shape):
        held = frozenset(thread % WARP_SIZE for thread, _ in holders.get(place, []))
        lanes[place] = ids.setdefault(held, len(ids))
    found = [(_period(lanes), "row", shape[0]), (_period(lanes.T), "column", shape[1])]
    if said := [_every(period, what) for period, what, count in found if period < count]:
        yield f"lanes repeat {' and '.join(said)}"
    if any(len(held) > 1 for held in holders.values()):
        yield "+n: held n times more"


def _period(table: NDArray[np.int64]) -> int:
    """The fewest lines after which a table repeats, at least twice in all; all of them if it does not."""
    halves = range(1, len(table) // 2 + 1)
    return next((p for p in halves if np.array_equal(table[p:], table[:-p])), len(table))


def _every(count: int, what: str) -> str:
    return f"every {count} {what}s" if count > 1 else f"every {what}"


def _element_cell(several: bool, row: int, col: int, holders: list[tuple[int, int]]) -> Cell:
    if not holders:
        return Cell("–", title=f"({row}, {col}) is held by no lane")
    thread, i = holders[0]
    lane = thread % WARP_SIZE
    told = [f"{f'warp {t // WARP_SIZE}, ' if several else ''}lane {t % WARP_SIZE}, i = {e}" for t, e in holders]
    more = f"+{len(holders) - 1}" if len(holders) > 1 else ""
    text = f"{thread // WARP_SIZE}·{lane}" if several else str(lane)
    return Cell(text, f"i{i}{more}", lane_tone(lane), f"({row}, {col}): {'; '.join(told)}")


def draw_lanes(layout: FragmentLayout) -> Grid:
    """The threads, each with the (row, col) of every element it holds, coloured by row."""
    at_row, at_col = layout.element_coordinates()
    count = layout.shape[0]
    lines: list[tuple[Cell, ...]] = []
    names: list[str] = []
    for thread in range(layout.threads):
        lane, warp = thread % WARP_SIZE, thread // WARP_SIZE
        names.append(f"warp {warp} lane {lane}" if layout.warps > 1 else f"lane {lane}")
        cells: list[Cell] = []
        for r, c in zip(at_row[thread].tolist(), at_col[thread].tolist(), strict=True):
            cells.append(Cell(f"{r},{c}", fill=tone(r, r // 8, 8, max(2, -(-count // 8)))))
        lines.append(tuple(cells))
    heads = tuple(f"i{i}" for i in range(layout.elements_per_thread))
    packed = 32 // layout.element_bits if layout.element_bits < 32 else 1
    return Grid(
        f"{layout.name}: what each lane holds",
        heads,
        tuple(names),
        tuple(lines),
        (),
        (4, packed if packed > 1 else 4),
        (52, 22),
        notes=("row,col of element i, coloured by row",),
    )


def draw_permutation(layout: FragmentLayout, axis: str = "col") -> Grid:
    """The registers of lane 0 as they are and in the order that puts what is reduced together (Figure 2)."""
    return draw_plan(reduction_plan(layout, axis), f"{layout.name}: ")


def draw_plan(plan: ReductionPlan, of: str = "") -> Grid:
    """:func:`draw_permutation` of a plan; ``of`` comes before the title."""
    kept = "row" if plan.axis == "col" else "col"
    group_of = {element: g for g, group in enumerate(plan.groups) for element in group}
    at = [int(plan.group_coordinate(group, 0)) for group in range(len(plan.groups))]

    def line(elements: Sequence[int]) -> tuple[Cell, ...]:
        return tuple(
            Cell(f"x[{e}]", f"{kept} {at[group_of[e]]}", tone(group_of[e], 1, max(2, len(at)))) for e in elements
        )

    before, after = line(sorted(group_of)), line(plan.permutation)
    heads = tuple(str(i) for i in range(len(before)))
    return Grid(
        f"{of}lane 0 before and after the permutation",
        heads,
        ("before", "after"),
        (before, after),
        tuple(str(plan).splitlines()),
        (1, len(plan.groups[0])),
        (52, 40),
        notes=("the permutation only renames registers: it costs no instruction",),
    )


# -------------------------------------------------------------------- shared memory


def draw_banks(tile: SharedLayout, rows: int | None = None) -> Grid:
    """A tile in the banks: lines of 128 bytes, cells of 16 (four banks), each with the row and chunk that lies there.

    A column of 16-byte chunks is one colour: reading eight rows of it (one phase of ``ldmatrix``) is free of conflicts
    when eight cells of that colour lie in eight different columns. Where the swizzle moves less than 16 bytes (its base
    is below 4), chunks and cells are what it moves, but at least an element.
    """
    size = _chunk_bytes(tile)
    per_chunk = size // tile.element_bytes
    if per_chunk < 1 or tile.cols % per_chunk:
        raise LayoutError(f"rows of {tile.cols} elements of {tile.element_bytes} bytes are no whole {size}-byte chunks")
    shown = min(tile.rows, rows or 16)
    chunks = tile.cols // per_chunk
    row, chunk = np.indices((shown, chunks))
    offset = np.asarray(tile.offset(row.reshape(-1), chunk.reshape(-1) * per_chunk))
    width = BANK_CYCLE_BYTES // size
    count = int(offset.max()) // BANK_CYCLE_BYTES + 1
    table: list[list[Cell]] = [[Cell("") for _ in range(width)] for _ in range(count)]
    for r, c, byte in zip(row.reshape(-1).tolist(), chunk.reshape(-1).tolist(), offset.tolist(), strict=True):
        cell = byte % BANK_CYCLE_BYTES // size
        first = c * per_chunk
        hint = f"row {r}, columns {first}…{first + per_chunk - 1}: byte {byte}, banks {_banks(cell, size, '…')}"
        table[byte // BANK_CYCLE_BYTES][cell] = Cell(f"{r},{first}", "", tone(c, c // 8), hint)
    heads = tuple(_banks(i, size, "–") for i in range(width))
    return Grid(
        f"{tile.rows}×{tile.cols} tile of {tile.element_bytes}-byte elements, swizzle {tile.swizzle}",
        heads,
        tuple(f"{i * BANK_CYCLE_BYTES}" for i in range(count)),
        tuple(map(tuple, table)),
        _conflict_lines(tile, chunks, per_chunk),
        (8, 0),
        (64 if size == _CHUNK_BYTES else 46, 26),
        corner="byte\\banks",
        notes=(
            f"row, first column of each {size}-byte chunk; one colour per column of chunks",
            *_rows_beyond(tile, shown, per_chunk),
        ),
    )


def _rows_beyond(tile: SharedLayout, shown: int, per_chunk: int) -> Iterator[str]:
    """Yield a note where rows are left out, with the number of rows after which the picture repeats."""
    if shown < tile.rows:
        chunks = np.arange(0, tile.cols, per_chunk)
        period = _period(np.asarray(tile.offset(np.arange(tile.rows)[:, None], chunks)) % BANK_CYCLE_BYTES)
        again = f": the banks repeat {_every(period, 'row')}" if period <= shown else ""
        yield f"rows 0–{shown - 1} of {tile.rows}{again}"


def _chunk_bytes(tile: SharedLayout) -> int:
    """The bytes that lie together whatever the swizzle does, at most 16."""
    moved = 1 << tile.swizzle.base if tile.swizzle.bits else _CHUNK_BYTES
    return min(_CHUNK_BYTES, max(tile.element_bytes, moved))


def _banks(cell: int, size: int, between: str) -> str:
    """The banks of 4 bytes that a cell of a line covers."""
    first, last = cell * size // 4, ((cell + 1) * size - 1) // 4
    return str(first) if first == last else f"{first}{between}{last}"


def _conflict_lines(tile: SharedLayout, chunks: int, per_chunk: int) -> tuple[str, ...]:
    if per_chunk * tile.element_bytes < _CHUNK_BYTES:  # nobody reads 16 bytes of a row at once
        if tile.rows < WARP_SIZE:
            return ()
        column = np.asarray(tile.offset(np.arange(WARP_SIZE)[None, :], np.arange(tile.cols)[:, None]))
        worst = int(wavefronts(column, tile.element_bytes).max())
        free = "free of conflicts" if worst == 1 else f"{worst} wavefronts instead of 1"
        return (f"a column of {WARP_SIZE} rows, one element a lane: {free}",)
    if tile.rows < 8:
        return ()
    offset = np.asarray(tile.offset(np.arange(8)[None, :], np.arange(chunks)[:, None] * per_chunk))
    worst = int(wavefronts(offset, _CHUNK_BYTES).max())
    free = "free of conflicts" if worst == 1 else f"{worst} wavefronts instead of 1"
    return (f"eight rows of one column of chunks (a phase of ldmatrix): {free}",)


PICTURES: dict[str, Callable[[FragmentLayout], Grid]] = {
    "elements": draw_elements,
    "lanes": draw_lanes,
    "permutation": draw_permutation,
}
"""The pictures of a fragment by name."""
