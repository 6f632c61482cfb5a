# pyright: reportInvalidTypeForm=false
"""Where the tile of a CTA lies: by the CTA's place in the grid, or by an entry of a list of tiles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from warploom.lang import Traced
from warploom.tile.ragged import PieceList, RowRange, Slot

if TYPE_CHECKING:
    from warploom.kernels.attention.problem import AttentionFeatures
    from warploom.lang import GlobalPointer, Kernel, StridedPointer


@dataclass(frozen=True)
class Side:
    """The queries or the keys of one sequence: ``outer`` is its batch, or in packed arrays its first row.

    ``rows``: its length where tiles may reach beyond it, else None.
    """

    outer: Traced
    length: Traced
    rows: Traced | None

    @classmethod
    def packed(cls, rows: RowRange) -> Side:
        """Rows of packed arrays, which may end anywhere in a tile."""
        return cls(rows.begin, rows.count, rows.count)


@dataclass(frozen=True)
class Tensor:
    """An array with rows of heads, strides of (:attr:`Side.outer`, head), and the stride between its rows."""

    array: StridedPointer
    row: int

    @classmethod
    def of(cls, array: StridedPointer, row: int, *, packed: bool, head: int = 0) -> Tensor:
        """An array with strides of (batch, head); of ``packed`` sequences stride number ``head`` is that of heads."""
        return cls(replace(array, strides=(row, array.strides[head])) if packed else array, row)


@dataclass(frozen=True)
class TilePlace:
    """The sequence and the head of a CTA's tile; ``listed``: a list names the tile, else the grid.

    ``slot``: what a list says of the tile, if it has slots, ``slots`` of each head.
    """

    k: Kernel
    head: Traced
    queries: Side
    keys: Side
    listed: bool = False
    slot: Slot | None = None
    slots: Traced | None = None

    @property
    def number(self) -> Traced:
        """The number of the tile among those of its sequence."""
        return self.k.cta_x if self.slot is None else self.slot.number

    @property
    def lengths(self) -> tuple[Traced, Traced]:
        """Queries and keys of the sequence."""
        return self.queries.length, self.keys.length

    def vector(self, of: GlobalPointer, total_q: Traced) -> GlobalPointer:
        """The number of its first query in a vector (batch, heads, queries), of packed ones (heads, total_q)."""
        k, q, head = self.k, self.queries, self.head
        if self.listed:
            return of + (k.mul_wide(head, total_q) + k.mul_wide(q.outer, 1))
        return of + k.mul_wide(q.outer * k.special("nctaid.y") + head, q.length)

    def slot_of(self, block: Traced, head: Traced) -> Traced | None:
        """The number of a block of query rows among those of all heads, if a list gives it."""
        if self.slot is None or self.slots is None:
            return None
        return head * self.slots + self.slot.first + block


@contextmanager
def tile_of(
    k: Kernel,
    features: AttentionFeatures,
    lengths: tuple[Traced, Traced],
    tiles: GlobalPointer | None,
    slots: Traced | None = None,
) -> Iterator[TilePlace]:
    """The tile of this CTA: of a grid (tiles, heads, batches), or of a list of ``tiles`` that may be shorter.

    A listed tile's side begins at the tile's first row, as :class:`.ragged.Piece` has it.
    """
    if tiles is None:
        (q_len, kv_len), head, batch = lengths, k.cta_y, k.cta_z
        queries = Side(batch, q_len, q_len if features.ragged_q else None)
        yield TilePlace(k, head, queries, Side(batch, kv_len, kv_len if features.ragged_kv else None))
        return
    pieces = PieceList(k, tiles)
    with k.when(k.cta_x < pieces.count, uniform=True):
        if slots is None:
            piece = pieces.at(k.cta_x)
            yield TilePlace(k, piece.head, Side.packed(piece.queries), Side.packed(piece.keys), True)
        else:
            piece, slot = pieces.at(k.cta_x), pieces.slot(k.cta_x)
            sides = Side.packed(piece.queries), Side.packed(piece.keys)
            yield TilePlace(k, piece.head, *sides, True, slot, slots)
