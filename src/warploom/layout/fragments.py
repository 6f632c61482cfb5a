"""Fragments: which thread holds which element of a matrix, as a linear atom tiled by integer counts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from warploom.core.errors import LayoutError
from warploom.layout.formula import is_integer
from warploom.layout.linear import LinearMap

WARP_SIZE = 32

TileOrder = Literal["row", "col"]


@dataclass(frozen=True)
class FragmentLayout:
    """A matrix spread over the registers of a warp (or warpgroup).

    ``atom`` maps ``register`` (the index of an element among those a thread holds), ``lane`` and, for fragments of
    several warps, ``warp`` to ``row`` and ``col``. The whole fragment is ``tiles = (row tiles, col tiles)`` atoms,
    numbered row by row (``tile_order="row"``) or column by column; a thread's elements are those of atom 0, then of
    atom 1, and so on. ``element_bits`` is the size of an element in a register: elements narrower than 32 bits are
    packed, the lower index in the lower bits.
    """

    name: str
    atom: LinearMap
    element_bits: int
    tiles: tuple[int, int] = (1, 1)
    tile_order: TileOrder = "row"

    def __post_init__(self) -> None:
        if set(self.atom.out_dims) != {"row", "col"} or not {"register", "lane"} <= set(self.atom.in_dims):
            raise LayoutError(f"{self.name}: an atom maps register, lane (and warp) to row and col, not {self.atom!r}")
        if min(self.tiles) < 1:
            raise LayoutError(f"{self.name}: {self.tiles} atoms is no fragment; each count must be at least 1")
        if self.atom.in_size("lane") != WARP_SIZE:
            raise LayoutError(f"{self.name}: an atom spans the {WARP_SIZE} lanes of a warp")

    # ---------------------------------------------------------------- sizes

    @property
    def atom_shape(self) -> tuple[int, int]:
        """(rows, cols) of one atom."""
        return self.atom.out_size("row"), self.atom.out_size("col")

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols) of the whole fragment."""
        return self.atom_shape[0] * self.tiles[0], self.atom_shape[1] * self.tiles[1]

    @property
    def atom_elements_per_thread(self) -> int:
        """Elements of one atom that a thread holds."""
        return self.atom.in_size("register")

    @property
    def elements_per_thread(self) -> int:
        """Elements of the whole fragment that a thread holds."""
        return self.atom_elements_per_thread * self.tiles[0] * self.tiles[1]

    @property
    def registers(self) -> int:
        """32-bit registers per thread."""
        return -(-self.elements_per_thread * self.element_bits // 32)

    @property
    def warps(self) -> int:
        """Warps that hold it together: 1, or 4 of a warpgroup."""
        return self.atom.in_size("warp") if self.atom.has_input("warp") else 1

    @property
    def threads(self) -> int:
        """Threads that hold it together."""
        return self.warps * WARP_SIZE

    # ---------------------------------------------------------------- tiling

    def tile(self, row_tiles: int, col_tiles: int, order: TileOrder | None = None) -> FragmentLayout:
        """This fragment's atom repeated ``row_tiles × col_tiles`` times as often, numbered over the whole grid."""
        counts = self.tiles[0] * row_tiles, self.tiles[1] * col_tiles
        return replace(self, tiles=counts, tile_order=order or self.tile_order)

    def transposed(self) -> FragmentLayout:
        """Return this fragment as one of the transposed matrix: registers stay, rows and columns change places."""
        atom = self.atom.rename({"row": "col", "col": "row"}).project("row", "col")
        order: TileOrder = "col" if self.tile_order == "row" else "row"
        return replace(self, name=f"{self.name}^T", atom=atom, tiles=self.tiles[::-1], tile_order=order)

    def atom_index(self, i: int, j: int) -> int:
        """The number of the atom in row ``i``, column ``j`` of the grid of atoms."""
        rows, cols = self.tiles
        if not (0 <= i < rows and 0 <= j < cols):
            raise LayoutError(f"{self.name} has {rows}×{cols} atoms; there is no atom ({i}, {j})")
        return i * cols + j if self.tile_order == "row" else j * rows + i

    def atom_elements(self, i: int, j: int) -> slice:
        """The elements of a thread that belong to atom (i, j)."""
        count = self.atom_elements_per_thread
        index = self.atom_index(i, j)
        return slice(index * count, (index + 1) * count)

    def atom_registers(self, i: int, j: int) -> slice:
        """The 32-bit registers of a thread that hold atom (i, j)."""
        bits = self.atom_elements_per_thread * self.element_bits
        if bits % 32:
            raise LayoutError(f"{self.name}: an atom fills {bits} bits of a thread, not whole 32-bit registers")
        index = self.atom_index(i, j)
        return slice(index * bits // 32, (index + 1) * bits // 32)

    @cached_property
    def map(self) -> LinearMap:
        """The whole fragment as one linear map; raises LayoutError unless both tile counts are powers of two."""
        if any(count & (count - 1) for count in self.tiles):
            raise LayoutError(f"{self.name}: {self.tiles[0]}×{self.tiles[1]} atoms are no linear map; work by atom")
        row_bits = [(1 << bit, 0) for bit in range(self.tiles[0].bit_length() - 1)]
        col_bits = [(0, 1 << bit) for bit in range(self.tiles[1].bit_length() - 1)]
        bits = col_bits + row_bits if self.tile_order == "row" else row_bits + col_bits
        grid = LinearMap({"register": bits}, {"row": self.tiles[0], "col": self.tiles[1]})
        return self.atom.project("row", "col").product(grid)

    # ---------------------------------------------------------------- coordinates

    def coordinates(self, lane: Any, register: Any, warp: Any = 0) -> tuple[Any, Any]:
        """(row, col) of element ``register`` of a thread.

        ``register`` is an integer or an integer array; ``lane`` and ``warp`` may be traced values as well.
        """
        count = self.atom_elements_per_thread
        if is_integer(register) and not 0 <= register < self.elements_per_thread:
            raise LayoutError(f"{self.name}: element {register} is outside 0..{self.elements_per_thread - 1}")
        index = register // count
        rows, cols = self.tiles
        i, j = (index // cols, index % cols) if self.tile_order == "row" else (index % rows, index // rows)
        warps = {"warp": warp} if self.atom.has_input("warp") else {}
        at = self.atom.apply(register=register % count, lane=lane, **warps)
        return _moved(at["row"], i * self.atom_shape[0]), _moved(at["col"], j * self.atom_shape[1])

    def element_coordinates(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """``(rows, cols)``, each int64 [threads, elements per thread], read-only; thread = warp · 32 + lane."""
        return _element_coordinates(self)

    def gather_index(self) -> NDArray[np.int64]:
        """Flat ``row · cols + col`` of each element, int64 [threads, elements]: matrix → registers by indexing."""
        return _gather_index(self)

    def owner_index(self) -> NDArray[np.int64]:
        """Flat ``thread · elements + element`` that holds each matrix element, int64 [rows · cols]: registers → matrix.

        Of several holders (replication) the lowest thread is taken. Raises LayoutError if an element has no holder.
        """
        return _owner_index(self)

    def _repr_svg_(self) -> str:
        """The picture that notebooks show: each element with its lane and register."""
        from warploom.layout.draw import draw_elements

        return draw_elements(self).svg()

    def __str__(self) -> str:
        rows, cols = self.shape
        tiled = "" if self.tiles == (1, 1) else f" = {self.tiles[0]}×{self.tiles[1]} atoms of {self.atom_shape}"
        return f"{self.name}: {rows}×{cols}{tiled}, {self.elements_per_thread} × {self.element_bits} bit per thread"


def _moved(coordinate: Any, offset: Any) -> Any:
    # A traced coordinate should not get an instruction for the zero offset of the first atom.
    return coordinate if is_integer(offset) and offset == 0 else coordinate + offset


def _frozen(array: NDArray[np.int64]) -> NDArray[np.int64]:
    array.setflags(write=False)
    return array


@lru_cache(maxsize=512)
def _element_coordinates(layout: FragmentLayout) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    thread = np.arange(layout.threads, dtype=np.int64)[:, None]
    element = np.arange(layout.elements_per_thread, dtype=np.int64)[None, :]
    row, col = layout.coordinates(thread % WARP_SIZE, element, thread // WARP_SIZE)
    return _frozen(row), _frozen(col)


@lru_cache(maxsize=512)
def _gather_index(layout: FragmentLayout) -> NDArray[np.int64]:
    row, col = _element_coordinates(layout)
    return _frozen(row * layout.shape[1] + col)


@lru_cache(maxsize=512)
def _owner_index(layout: FragmentLayout) -> NDArray[np.int64]:
    flat = _gather_index(layout).reshape(-1)
    owner = np.full(layout.shape[0] * layout.shape[1], -1, dtype=np.int64)
    owner[flat[::-1]] = np.arange(flat.size, dtype=np.int64)[::-1]  # of equal indices the last write, the lowest, wins
    if (owner < 0).any():
        raise LayoutError(f"{layout.name}: {int((owner < 0).sum())} elements of the matrix are held by no thread")
    return _frozen(owner)
