"""Fixed displacements in swizzled memory: what is a plain immediate, and what a per-lane stride.

A shared tile's map is linear, so the address of (lane position + constant) is ``address(lane) ^ d`` with one constant
``d``. On bits the lanes never set, XOR with ``d`` is addition of an immediate. On the others it is, per bit, ``+2^b``
for lanes whose address has the bit clear and ``-2^b`` for lanes whose address has it set: a *strided swizzle*.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from warploom.core.errors import LayoutError
from warploom.layout.formula import is_integer
from warploom.layout.linear import LinearMap
from warploom.layout.shared import SharedLayout


@lru_cache(maxsize=512)
def lane_addresses(memory: SharedLayout, lanes: LinearMap) -> LinearMap:
    """The map ``lane → byte`` of the positions ``lanes`` (lane → (row, col)) in the first panel of ``memory``.

    Raises LayoutError if the lanes reach beyond that panel.
    """
    within = memory.panel_layout(0).map
    positions = lanes.project("row", "col")
    for dim in ("row", "col"):
        if positions.out_mask(dim) >= within.in_size(dim):
            raise LayoutError(
                f"the lanes reach {dim} {positions.out_mask(dim)}, but a panel of this tile has {within.in_size(dim)}"
            )
    sizes = {dim: within.in_size(dim) for dim in ("row", "col")}
    return within.compose(LinearMap({dim: positions.bases(dim) for dim in positions.in_dims}, sizes))


def split_displacement(memory: SharedLayout, lanes: LinearMap, row: int, col: int) -> tuple[int, int]:
    """``(immediate, varying)`` so that ``offset(lane position + (row, col)) = (base ^ varying) + immediate``.

    ``lanes`` maps lane → (row, col) and ``base`` is ``lane_addresses(memory, lanes)`` of the lane; both in bytes from
    the tile's start. ``varying`` has only bits that some lane's base sets, ``immediate`` none of them within a panel.
    Raises LayoutError when adding (row, col) carries into bits the lanes use, and when (row, col) leads to a panel of
    another width than the first, whose rows have another stride.
    """
    panel = next((p for p in memory.panels if p.first_col <= col < p.first_col + p.cols), None)
    if panel is None or not 0 <= row < memory.rows:
        raise LayoutError(f"({row}, {col}) is outside the tile of {memory.rows}×{memory.cols}")
    if panel.cols != memory.panels[0].cols:
        raise LayoutError(f"column {col} is in a panel of {panel.cols} columns; address it through panel_layout")
    within = memory.panel_layout(0)
    inner = col - panel.first_col
    for dim, constant in (("row", row), ("col", inner)):
        used = lanes.out_mask(dim)
        if used & constant:
            span = 1 << used.bit_length()
            raise LayoutError(
                f"{dim} {constant} is within the {span} {dim}s that one load takes: give a multiple of {span}. If "
                "the tile stores the operand's transpose (B with rows along N), say so: k.load_fragment(…, "
                "transposed=True), k.reader(tile, layout.transposed())"
            )
    displacement: int = within.map.apply(row=row, col=inner)["byte"]
    reached = lane_addresses(memory, lanes).out_mask("byte")
    return (displacement & ~reached) + panel.byte_offset, displacement & reached


def signed_strides(
    varying: int, base: Any, select: Callable[[Any, Any, Any], Any] | None = None
) -> tuple[tuple[int, Any], ...]:
    """``(2^b, stride)`` per bit of ``varying``, lowest first: +2^b where ``base`` has the bit clear, −2^b where set.

    ``base`` is the lanes' byte offset: an integer, an array (strides are then int64 arrays) or a traced value. For
    those, ``select(bit_of_base, if_set, if_clear)`` must choose by whether its first argument, 0 or 2^b, is non-zero.
    For any set S of the bits, ``base ^ sum(S) == base + sum of the strides of S``.
    """
    choose = select or _select
    bits = [1 << b for b in range(varying.bit_length()) if varying >> b & 1]
    return tuple((bit, choose(base & bit, -bit, bit)) for bit in bits)


def _select(condition: Any, if_set: int, if_clear: int) -> Any:
    if is_integer(condition):
        return if_set if condition else if_clear
    if isinstance(condition, np.ndarray):
        return np.where(condition != 0, np.int64(if_set), np.int64(if_clear))
    raise LayoutError("signed_strides of traced values needs select=, a function that emits a select")
