# pyright: reportInvalidTypeForm=false
"""Packed sequences: rows of several sequences, one behind the other, whose lengths only the device knows.

``starts`` (batch + 1,) says where each begins; what it says is never taken beyond the rows that there are. A first
kernel writes the tiles of all sequences into a list (:class:`PieceList`), the long ones first; the kernels that work on
them read one entry a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warploom.core.dtypes import s32, u32
from warploom.isa.async_copy import Eviction
from warploom.lang.parameters import Compound, Global
from warploom.layout.tensor_map import RAGGED_ROWS
from warploom.tile.pipeline import Boxes
from warploom.tile.planning import ENTRY_WORDS
from warploom.tile.roles import WARP
from warploom.tile.scheduler import Divisor

if TYPE_CHECKING:
    from warploom.lang import GlobalPointer, Kernel, Traced
    from warploom.lang.hopper import TensorMapHandle
    from warploom.lang.values import Number

VECTOR = 4
"""32-bit words that a thread stores at once."""


@dataclass(frozen=True)
class RowRange:
    """``count`` rows from ``begin`` on."""

    begin: Traced
    count: Traced


def sequence_boxes(of: TensorMapHandle, eviction: Eviction = "") -> Boxes:
    """A ragged array (total, heads, columns): boxes at (row of the sequence, head, where it begins, its rows)."""

    def order(col: Number, row: Number, head: Number, begin: Number, rows: Number) -> tuple[Number, ...]:
        return col, head, RAGGED_ROWS - rows + row, RAGGED_ROWS, begin + rows

    return Boxes(of, order, eviction)


class Sequences(Compound):
    """A parameter: where sequences lie: number i in rows starts[i] … starts[i + 1] - 1 of ``total``.

    Of them the first ``used[i]``, where :meth:`cut`. Numbers that cannot be are cut to what can: nobody reads or writes
    beyond the arrays.
    """

    starts: Global[u32]
    used: Global[u32]
    total: u32

    def __init__(self, k: Kernel, *values: Any, cut: bool = False) -> None:
        super().__init__(k, *values)
        self._cut = cut

    def cut(self, cut: bool) -> Sequences:
        """All rows of each sequence, or where ``cut`` the used ones."""
        return Sequences(self.k, *self.values, cut=cut)

    def at(self, number: Traced) -> RowRange:
        """The rows of a sequence."""
        k = self.k
        begin, end = (k.minimum(self.starts.load(number + i), self.total) for i in range(2))
        count = k.select(end > begin, end - begin, 0)
        return RowRange(begin, k.minimum(count, self.used.load(number)) if self._cut else count)

    def rest(self, number: Traced, batch: Traced) -> tuple[RowRange, RowRange]:
        """Rows of no sequence: those in front of a sequence that is the first of ``batch``, and those behind it."""
        k, own = self.k, self.at(number)
        end, none = own.begin + own.count, k.value(0, u32)
        following = k.select(number + 1 < batch, k.minimum(self.starts.load(number + 1), self.total), self.total)
        return (
            RowRange(none, k.select(number == 0, own.begin, none)),
            RowRange(end, k.select(following > end, following - end, none)),
        )


class Spaced(Compound):
    """A parameter: sequences at equal distances: number i is the ``most`` rows from row i · ``pitch`` on."""

    pitch: u32
    most: u32

    def at(self, number: Traced) -> RowRange:
        """The rows of a sequence."""
        return RowRange(number * self.pitch, self.most)


class SpacedUsed(Spaced):
    """The first ``used[i]`` rows of them; numbers that cannot be are cut to what can."""

    used: Global[s32]

    def at(self, number: Traced) -> RowRange:
        """The rows of a sequence."""
        k = self.k
        count = k.minimum(k.bitcast(k.maximum(self.used.load(number), 0), u32), self.most)
        return RowRange(number * self.pitch, count)


class RaggedBatch(Compound):
    """A parameter: ``sequences`` of ``heads``, of which ``together`` form a group.

    ``most``: tiles of a head at most (:func:`.planning.most_pieces`).
    """

    sequences: u32
    heads: u32
    together: Divisor
    most: u32


@dataclass(frozen=True)
class Piece:
    """A tile's part of a sequence: ``queries`` from its first row to the sequence's end, and all ``keys``, of a head.

    The last query stands beside the last key, as it does for the whole sequence.
    """

    queries: RowRange
    keys: RowRange
    head: Traced


@dataclass(frozen=True)
class Slot:
    """The place of a tile: its ``number`` in the sequence, and the number of the sequence's ``first`` slot of a head.

    Slots are places for blocks of rows in memory between kernels.
    """

    number: Traced
    first: Traced


@dataclass(frozen=True)
class PieceList:
    """The list of tiles in memory: an entry of ``ENTRY_WORDS`` for each, behind one that counts them.

    The first word of that one is how many there are, the second how many have been claimed.
    """

    k: Kernel
    words: GlobalPointer

    @property
    def count(self) -> Traced:
        """The number of tiles in the list."""
        return self.words.load()

    @property
    def claimed(self) -> GlobalPointer:
        """The word that counts the tiles claimed, for :class:`.scheduler.Claimed`."""
        return self.words + 1

    def at(self, number: Traced) -> Piece:
        """The tile of a number, read from its entry."""
        place = self._entry(number)
        q_begin, q_count, k_begin, k_count = place.load(0, 4)
        return Piece(RowRange(q_begin, q_count), RowRange(k_begin, k_count), place.load(4))

    def slot(self, number: Traced) -> Slot:
        """The slot of a tile, if the list has slots."""
        place = self._entry(number)
        return Slot(place.load(5), place.load(6))

    def put(self, number: Traced, piece: Piece, slot: Slot | None = None) -> None:
        """Write a tile's entry."""
        place = self._entry(number)
        place.store([piece.queries.begin, piece.queries.count, piece.keys.begin, piece.keys.count], 0)
        place.store(piece.head, 4)
        if slot is not None:
            place.store(slot.number, 5)
            place.store(slot.first, 6)

    def _entry(self, number: Traced) -> GlobalPointer:
        return self.words + self.k.mul_wide(number + 1, ENTRY_WORDS)


@dataclass(frozen=True)
class Slots:
    """Slots for blocks of ``rows`` of the other side's sequences (``of_keys``), or the own; at most ``most`` a head.

    A sequence that has none left is listed without rows.
    """

    rows: int
    of_keys: bool
    most: Traced

    def of(self, queries: Traced, keys: Traced) -> Traced:
        """The number of slots that a sequence takes."""
        return ((keys if self.of_keys else queries) + (self.rows - 1)) // self.rows


@dataclass(frozen=True)
class RaggedTiles:
    """All tiles of ``tile_m`` queries × heads, in the order they are to run. Neighbours have about as many keys.

    Where all tiles of a sequence have as many keys, the longest sequence comes first, group of heads by group.
    ``by_row``: later tiles have more (a causal mask). Then all sequences of a group, whose keys the L2 holds, come
    before the next; the last group ends with its short tiles, and every other way round the groups before: a list that
    jumped from the shortest to the longest would give some CTAs of a :class:`Persistent` kernel more work than others.

    Every tile's place is counted from the lengths alone, by a warp for each sequence.
    """

    k: Kernel
    queries: Sequences | Spaced
    keys: Sequences | Spaced
    batch: RaggedBatch
    tile_m: int
    by_row: bool
    slots: Slots | None = None

    def write(self, to: PieceList, sequence: Traced, first: Traced, step: Traced) -> None:
        """Write, by a warp, a sequence's entries: those of its tiles ``first``, ``first + step`` … ."""
        k = self.k
        queries, keys = self.queries.at(sequence), self.keys.at(sequence)
        own = self._tiles(queries.count)
        ahead, count = self._over_sequences(lambda j, q, n: self._longer(keys.count, sequence, j, n, self._tiles(q)))
        count = k.minimum(count, self.batch.most)
        with k.when((sequence == 0) & (first == 0) & (k.lane == 0)):
            to.words.store([count * self.batch.heads, k.value(0, u32)])
        slots, fits = self._first_slot(sequence, queries.count, keys.count)
        with k.loop(own, start=first, step=step) as tile:
            place = ahead
            if self.by_row:
                last = _signed(k, keys.count) - _signed(k, queries.count) + _signed(k, (tile + 1) * self.tile_m)
                place, _ = self._over_sequences(self._later(last, sequence))
            row = tile * self.tile_m
            piece, others = RowRange(queries.begin + row, queries.count - row), keys
            if fits is not None:
                none = k.value(0, u32)
                piece = RowRange(k.select(fits, piece.begin, none), k.select(fits, piece.count, none))
                others = RowRange(k.select(fits, keys.begin, none), k.select(fits, keys.count, none))
            slot = None if slots is None else Slot(tile, slots)
            with k.loop(self.batch.heads, start=k.lane, step=WARP) as head:
                number, exists = self._number(head, place, count, tile, own)
                with k.when(exists):
                    to.put(number, Piece(piece, others, head), slot)

    def clear(self, rows_of: GlobalPointer, words: int, sequence: Traced, first: Traced, step: Traced) -> None:
        """Clear, by a warp, the rows of ``words`` words that are of no sequence, in turns as in :meth:`write`."""
        k, queries = self.k, self.queries
        assert isinstance(queries, Sequences)
        for rows in queries.rest(sequence, self.batch.sequences):
            with k.loop(rows.count, start=first, step=step) as row:
                to = rows_of + k.mul_wide(rows.begin + row, words)
                with k.loop(words // VECTOR, start=k.lane, step=WARP) as vector:
                    to.store([k.value(0, u32)] * VECTOR, vector * VECTOR)

    def _number(self, head: Traced, place: Traced, count: Traced, tile: Traced, own: Traced) -> tuple[Traced, Traced]:
        """The number of tile ``tile`` of ``own`` of a sequence for a head, and whether the list has room for it.

        ``place``: how many of ``count`` tiles come before it where it is sorted by row, else before the sequence.
        """
        k, heads, divisor = self.k, self.batch.heads, self.batch.together
        together, (group, member) = divisor.value, divisor.divide(head)
        before = group * together
        members = k.minimum(heads - before, together)
        if not self.by_row:
            number = place * heads + before * own + tile * members + member
            return number, number < count * heads
        last, _ = divisor.divide(heads - 1)
        within, forwards = place * members + member, ((last - group) & 1) == 0
        return before * count + k.select(forwards, within, members * count - 1 - within), place < count

    def _first_slot(self, me: Traced, queries: Traced, keys: Traced) -> tuple[Traced | None, Traced | None]:
        """The number of a sequence's first slot, and whether all of them are there."""
        k, slots = self.k, self.slots
        if slots is None:
            return None, None
        zero: Traced = k.value(0, u32)
        first, _ = self._over_sequences(lambda j, q, n: k.select(j < me, slots.of(q, n), zero))
        fits = first + slots.of(queries, keys) <= slots.most
        return k.select(fits, first, zero), fits

    def _tiles(self, rows: Traced) -> Traced:
        return (rows + (self.tile_m - 1)) // self.tile_m

    def _longer(self, mine: Traced, me: Traced, other: Traced, keys: Traced, tiles: Traced) -> Traced:
        """Tiles of another sequence that come before all of mine: if it has more keys, or as many and comes first."""
        longer = (keys > mine) | ((keys == mine) & (other < me))
        return self.k.select(longer, tiles, 0)

    def _later(self, last: Traced, me: Traced) -> Callable[[Traced, Traced, Traced], Traced]:
        """Tiles of another sequence that see more keys than ``last``, or as many and come first."""
        k = self.k

        def count(other: Traced, queries: Traced, keys: Traced) -> Traced:
            tiles, top = self._tiles(queries), _signed(k, keys) - _signed(k, queries)
            more = last - top - k.select(other < me, k.value(1, s32), k.value(0, s32))
            fewer = k.bitcast(k.maximum(more, 0), u32) // self.tile_m
            return tiles - k.minimum(fewer, tiles)

        return count

    def _over_sequences(self, tiles: Callable[[Traced, Traced, Traced], Traced]) -> tuple[Traced, Traced]:
        """Sums over all sequences of ``tiles(number, queries, keys)`` and of their tiles; the same in all lanes."""
        k = self.k
        found, all_tiles = k.register(u32, 0), k.register(u32, 0)
        with k.loop(self.batch.sequences, start=k.lane, step=WARP) as other:
            queries, keys = self.queries.at(other).count, self.keys.at(other).count
            found += tiles(other, queries, keys)
            all_tiles += self._tiles(queries)
        return self._sum(found.get()), self._sum(all_tiles.get())

    def _sum(self, value: Traced) -> Traced:
        for step in (16, 8, 4, 2, 1):
            value = value + self.k.shfl_xor(value, step)
        return value


def _signed(k: Kernel, value: Number) -> Traced:
    return k.bitcast(k.value(value, u32), s32)
