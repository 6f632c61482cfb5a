"""``warploom layout``: pictures and formulas of fragments and of shared-memory tiles."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from warploom.cli.errors import explains_errors
from warploom.cli.output import console, write_json

if TYPE_CHECKING:
    from warploom.layout.draw import Grid
    from warploom.layout.fragments import FragmentLayout
    from warploom.layout.shared import SharedLayout

_TILE = re.compile(r"shared\.(\d+)x(\d+)\.(\w+?)(?:\.(none|auto|<\d,\d,\d>))?")


@explains_errors
def layout(
    name: Annotated[
        str | None, typer.Argument(help="A fragment's name, or a tile as shared.64x64.bf16[.auto|.none|.<3,4,3>].")
    ] = None,
    view: Annotated[
        str, typer.Option(metavar="elements|lanes|permutation", help="Who holds what, what each holds, or Figure 2.")
    ] = "elements",
    axis: Annotated[str, typer.Option(metavar="row|col", help="What a permutation prepares to reduce over.")] = "col",
    svg: Annotated[str | None, typer.Option(metavar="FILE", help="Write the picture as SVG.")] = None,
    png: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the picture as PNG (needs matplotlib).")
    ] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write map and formulas as JSON; - for standard output.")
    ] = None,
) -> None:
    """Draw a layout; without a name, list those there are.

    \b
    Examples:
      warploom layout
      warploom layout wmma.m16n16k16.C.b32
      warploom layout mma.m16n8k16.A.b16 --view lanes --svg a.svg
      warploom layout shared.16x64.bf16 --png swizzled.png
    """
    if name is None:
        _list(json)
        return
    tile = _tile(name)
    fragment = None if tile is not None else find_fragment(name)
    if json is not None:
        write_json(_as_json(fragment, tile), json)
    if json != "-":
        grid = _grid(fragment, tile, view, axis)
        _show(grid, svg, png)


def find_fragment(name: str) -> FragmentLayout:
    """A fragment by its name. Raises LayoutError that suggests names like it."""
    from difflib import get_close_matches

    from warploom.core.errors import LayoutError

    known = all_fragments()
    if name not in known:
        longer = [other for other in known if other.startswith(name)][:5]
        close = longer or get_close_matches(name, known, 5, 0.5)
        near = f"did you mean {', '.join(close)}? " if close else ""
        raise LayoutError(
            f"no fragment is called {name!r}; {near}`warploom layout` lists all, and shared.64x64.bf16 is a tile"
        )
    return known[name]


def all_fragments() -> dict[str, FragmentLayout]:
    """The catalogue, and the ``wmma`` fragments that were traced on a GPU."""
    from warploom.core.dtypes import DTYPES
    from warploom.layout.catalogue import FRAGMENTS
    from warploom.layout.wmma import discovered, wmma_fragment

    known = dict(FRAGMENTS)
    for traced in discovered()["fragments"]:
        _, shape, operand, dtype, *order = traced.split(".")
        known[traced] = wmma_fragment(shape, operand, DTYPES[dtype], *order)
    return known


def _tile(name: str) -> SharedLayout | None:
    """A tile in shared memory from ``shared.ROWSxCOLS.TYPE[.SWIZZLE]``, or None for other names."""
    from warploom.core.dtypes import dtype_of
    from warploom.core.errors import LayoutError
    from warploom.layout.shared import SharedLayout
    from warploom.layout.swizzle import Swizzle

    if not name.startswith("shared."):
        return None
    match = _TILE.fullmatch(name)
    if match is None:
        raise LayoutError(f"{name!r} is no tile; write shared.64x64.bf16, or shared.64x64.bf16.none for no swizzle")
    rows, cols = int(match[1]), int(match[2])
    try:
        dtype = dtype_of(match[3])
    except ValueError as error:
        raise LayoutError(str(error)) from None
    tile = SharedLayout(rows, cols, dtype.bytes)
    if match[4] == "none":
        return tile
    if match[4] in (None, "auto"):
        return replace(tile, swizzle=Swizzle.for_row_bytes(tile.row_bytes))
    bits, base, shift = (int(x) for x in match[4][1:-1].split(","))
    return replace(tile, swizzle=Swizzle(bits, base, shift))


def _grid(fragment: FragmentLayout | None, tile: SharedLayout | None, view: str, axis: str) -> Grid:
    from warploom.layout.draw import PICTURES, draw_banks, draw_permutation

    if tile is not None:
        return draw_banks(tile)
    assert fragment is not None
    if view not in PICTURES:
        raise typer.BadParameter(f"--view is {', '.join(PICTURES)}, not {view!r}")
    return draw_permutation(fragment, axis) if view == "permutation" else PICTURES[view](fragment)


def _show(grid: Grid, svg: str | None, png: str | None) -> None:
    from warploom.cli.pictures import show, write_png, write_svg

    if svg:
        write_svg(grid, svg)
    if png:
        write_png(grid, png)
    if not (svg or png):
        show(grid)


def _as_json(fragment: FragmentLayout | None, tile: SharedLayout | None) -> dict[str, Any]:
    if tile is not None:
        panels = [{"first_col": p.first_col, "cols": p.cols, "byte_offset": p.byte_offset} for p in tile.panels]
        return {
            "rows": tile.rows,
            "cols": tile.cols,
            "element_bytes": tile.element_bytes,
            "swizzle": str(tile.swizzle),
            "bytes": tile.bytes,
            "panels": panels,
        }
    assert fragment is not None
    from warploom.layout.fit import formulas

    atom = fragment.atom
    return {
        "name": fragment.name,
        "shape": fragment.shape,
        "element_bits": fragment.element_bits,
        "elements_per_thread": fragment.elements_per_thread,
        "registers": fragment.registers,
        "warps": fragment.warps,
        "atom": {dim: atom.bases(dim) for dim in atom.in_dims},
        "tiles": fragment.tiles,
        "formulas": formulas(fragment.map) if all(n & (n - 1) == 0 for n in fragment.tiles) else formulas(atom),
    }


def _list(json: str | None) -> None:
    from rich.table import Table

    known = all_fragments()
    if json is not None:
        write_json([_as_json(f, None) for f in known.values()], json)
        if json == "-":
            return
    table = Table(
        title="Fragments: elements and registers of a thread",
        title_justify="left",
        box=None,
        header_style="bold",
        padding=(0, 2, 0, 0),
    )
    table.add_column("name", no_wrap=True, min_width=max(map(len, known)))  # to be typed: never cut
    for head in ("shape", "elements", "registers"):
        table.add_column(head, no_wrap=True, min_width=len(head))
    for head in ("row", "col"):
        table.add_column(head, overflow="fold")
    from warploom.layout.fit import formulas

    for f in known.values():
        text = formulas(f.map)
        size = f"{f.shape[0]}×{f.shape[1]}"
        table.add_row(f.name, size, str(f.elements_per_thread), str(f.registers), text["row"], text["col"])
    out = console()
    if not out.is_terminal:
        out.width = 160
    out.print(table)
