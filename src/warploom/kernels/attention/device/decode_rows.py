# pyright: reportInvalidTypeForm=false
"""What the two decode kernels share: lengths of sequences, rows of query heads that share keys, and the way out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from warploom.core.dtypes import DType, f16, f32, s32, u16, u32
from warploom.kernels.attention.decode import CacheForm, Decode
from warploom.kernels.attention.device.scores import HeadArrays
from warploom.kernels.attention.problem import AttentionFeatures
from warploom.lang import GlobalPointer, Kernel, SharedTile, Traced
from warploom.lang.parameters import Compound, Global, Strided, StridedPointer
from warploom.tile.eight_bits import position
from warploom.tile.merge import with_sink
from warploom.tile.shares import WARP, BlockCursor, BlockPlace, SequenceBlocks, ceiling

CHUNK = 8
"""Elements that a thread copies at once: 16 bytes."""


class CacheBatch(Compound):
    """A parameter: ``size`` sequences of ``kv_heads`` key heads, whose keys have ``lengths`` of at most ``capacity``.

    ``q_len``: queries of each sequence, or of all where ``starts`` says which are whose.
    """

    lengths: Global[s32]
    starts: Global[s32]
    size: u32
    kv_heads: u32
    q_len: u32
    capacity: u32


class WorkSplit(Compound):
    """A parameter: ``ctas`` share all blocks; with a given split a tile has ``pieces`` of so many ``blocks``."""

    ctas: u32
    blocks: u32
    pieces: u32


@dataclass(frozen=True)
class Lengths:
    """The counts of keys and queries of each sequence: on the GPU (``keys`` reads a length), or numbers."""

    k: Kernel
    form: CacheForm
    given: CacheBatch
    keys: Callable[[Traced], Traced]

    def of(self, sequence: Traced) -> tuple[Traced, Traced, Traced]:
        """(keys, queries, the first query) of a sequence; what the arrays say is cut to what there is memory for."""
        k, given = self.k, self.given
        keys, queries, first = given.capacity, given.q_len, k.value(0, u32)
        if self.form.lengths:
            keys = self._within(self.keys(sequence), given.capacity)
        if self.form.packed:
            first, last = (self._within(given.starts.load(sequence + i), given.q_len) for i in (0, 1))
            queries = k.maximum(first, last) - first
            keys = k.select(queries == 0, 0, keys)
        return keys, queries, first

    def _within(self, number: Traced, most: Traced) -> Traced:
        return self.k.minimum(self.k.bitcast(self.k.maximum(number, 0), u32), most)


def spans(lengths: Lengths, config: Decode, features: AttentionFeatures) -> Callable[[Traced], SequenceBlocks]:
    """The way in which the list of blocks reads a sequence: blocks that no query sees are no part of it."""
    k, left = lengths.k, features.left

    def span(sequence: Traced) -> SequenceBlocks:
        keys, queries, first = lengths.of(sequence)
        begin: Traced = k.value(0, u32)
        end: Traced = k.maximum(ceiling(keys, config.tile_n), 1)
        if left is not None:
            seen = k.bitcast(keys, s32) - k.bitcast(queries, s32) - left
            begin = k.minimum(k.bitcast(k.maximum(seen, 0), u32) // config.tile_n, end - 1)
        tiles = k.maximum(ceiling(queries * features.group, config.tile_m), 1)
        return SequenceBlocks(begin, end, tiles, keys, queries, first)

    return span


@dataclass(frozen=True)
class TileNumbers:
    """A number for each tile of query rows, below what the host makes room for: as it knows no sequence's queries."""

    lengths: Lengths
    span: Callable[[Traced], SequenceBlocks]
    group: int
    tile_m: int

    def of(self, sequence: Traced, span: SequenceBlocks, tile: Traced) -> Traced:
        """The number of a sequence's tile."""
        if not self.lengths.form.packed:  # as many tiles of each
            return sequence * span.tiles + tile
        return self._before(sequence, span.first) + tile

    def _before(self, sequence: Traced, first: Traced) -> Traced:
        """At least as many as tiles come before: of each sequence the last may be less than whole."""
        return first * self.group // self.tile_m + sequence

    def find(self, number: Traced) -> tuple[Traced, SequenceBlocks, Traced]:
        """(sequence, what it is, tile) of a number; the tile is beyond those of the sequence where nothing has it."""
        k, batch = self.lengths.k, self.lengths.given.size
        if not self.lengths.form.packed:
            tiles = self.span(k.value(0, u32)).tiles
            return number // tiles, self.span(number // tiles), number % tiles
        through = k.register(u32, 0, "through")
        with k.loop(batch, step=WARP) as first:
            sequence = k.minimum(first + k.lane, batch - 1)
            begins = self._before(sequence, self.lengths.of(sequence)[2]) <= number
            through += k.popc(k.ballot(begins & (first + k.lane < batch)))
        sequence = k.maximum(through.get(), 1) - 1
        span = self.span(sequence)
        return sequence, span, number - self._before(sequence, span.first)


@dataclass(frozen=True)
class GroupRows:
    """A tile of query rows: query after query of a sequence, of each the ``group`` heads that share a key head.

    So ``tile_m`` rows of the first of ``heads`` key heads, and then those of the next.
    """

    k: Kernel
    sequence: Traced
    span: SequenceBlocks
    head: Traced
    """Which ``heads`` key heads."""
    tile: Traced
    group: int
    tile_m: int
    heads: int

    @classmethod
    def at(cls, k: Kernel, place: BlockCursor | BlockPlace, group: int, config: Decode) -> GroupRows:
        """The rows that a position in the list of blocks is about."""
        sequence, head, tile = (k.value(x, u32) for x in (place.sequence, place.head, place.tile))
        return cls(k, sequence, place.span, head, tile, group, config.tile_m, config.heads)

    def _number(self, row: Traced) -> Traced:
        """The number of a row among those of its key head in the sequence."""
        return self.tile * self.tile_m + (row if self.heads == 1 else row % self.tile_m)

    def key_head(self, row: Traced) -> Traced:
        """The key head that a row is of."""
        return self.head if self.heads == 1 else self.head * self.heads + row // self.tile_m

    def query(self, row: Traced) -> Traced:
        """The query of the sequence that a row is of."""
        return self._number(row) // self.group

    def query_head(self, row: Traced) -> Traced:
        """The query head that a row is of."""
        return self.key_head(row) * self.group + self._number(row) % self.group

    def exists(self, row: Traced) -> Traced:
        """Whether there is such a row."""
        return self._number(row) < self.span.queries * self.group

    def pointer(self, of: StridedPointer, row: Traced) -> GlobalPointer:
        """A row's first element in an array (sequence, query head, query)."""
        query, head = self.query(row) + self.span.first, self.query_head(row)
        return of.at(self.sequence, head, query)

    def scale(self, of: StridedPointer, row: Traced) -> Traced:
        """A row's number in an array (sequence, key head)."""
        return of.at(self.sequence, self.key_head(row)).load()


def query_parts(k: Kernel, tile: SharedTile, of: Decode) -> list[tuple[Traced, Traced, Traced]]:
    """(row, first column, whether there is such a part) of what a thread copies of a tile of query rows."""
    each = CHUNK * (1 + of.fp8)
    across = tile.layout.cols // each
    count = of.tile_rows * across
    numbers = [k.thread + first for first in range(0, count, of.threads)]
    return [(number // across, number % across * each, number < count) for number in numbers]


def load_queries(k: Kernel, tile: SharedTile, rows: GroupRows, q: StridedPointer, of: Decode) -> None:
    """Start the copies of a tile of query rows, by all threads; rows that do not exist are zeros."""
    for row, col, there in query_parts(k, tile, of):
        valid = k.select(rows.exists(row) & (col < of.head_dim), 2 * CHUNK, 0)
        with k.when(there):
            source = rows.pointer(q, row) + col
            for at in range(0, CHUNK * (1 + of.fp8), CHUNK):
                k.cp_async(tile.address(row, col + at), source + at, 16, valid_bytes=valid)


def queries_for_fp8(k: Kernel, tile: SharedTile, of: Decode) -> None:
    """Convert the queries that :func:`load_queries` has copied to f16, in the order of fp8 keys.

    Each thread works on what it has copied itself.
    """
    for row, col, there in query_parts(k, tile, of):
        with k.when(there):
            words: list[Traced] = []
            for at in (0, CHUNK):
                for pair in tile.load(row, col + at, CHUNK // 2, dtype=u32):
                    words.append(k.pack(*k.unpack(pair, of.dtype), f16))
            for pair in range(2):  # four columns on in each half of the 16
                tile.store(words[pair::2], row, col + position(2 * pair), dtype=u32)


class ResultArrays(Compound):
    """A parameter: O and log-sum-exps (sequence, query head, query), and what changes them at last.

    ``v_scale``: of the values of each sequence and key head; strides of one scale for all are 0.
    """

    v_scale: Strided[f32, 2]
    options: HeadArrays
    out: Strided[u16, 3]
    lse: Strided[f32, 2]


@dataclass(frozen=True)
class Results:
    """O and, where asked for, the log-sum-exps; a sink joins at last."""

    k: Kernel
    dtype: DType
    to: ResultArrays
    features: AttentionFeatures
    scaled: bool

    def counted(self, rows: GroupRows, row: Traced, log: Traced) -> tuple[Traced | None, Traced]:
        """The factor of a row's O, if it has one, and its log-sum-exp: with the sink of its head."""
        factor = rows.scale(self.to.v_scale, row) if self.scaled else None
        if not self.features.sink:
            return factor, log
        sink = self.to.options.number(self.features.sink, rows.query_head(row))
        part, log = with_sink(self.k, log, sink)
        return part if factor is None else part * factor, log

    def store(self, rows: GroupRows, row: Traced, col: Traced, values: Sequence[Traced], factor: Traced | None) -> None:
        """Some columns of a row of O."""
        k = self.k
        values = values if factor is None else [x * factor for x in values]
        words = [k.pack(low, high, self.dtype) for low, high in zip(values[::2], values[1::2], strict=True)]
        (rows.pointer(self.to.out, row) + col).store(words, dtype=u32)

    def store_log(self, rows: GroupRows, row: Traced, log: Traced) -> None:
        """A row's log-sum-exp."""
        if self.features.lse:
            rows.pointer(self.to.lse, row).store(log)


@dataclass(frozen=True)
class PartSlots:
    """Which part a piece that is no whole tile leaves.

    ``pieces``: of each tile, with a given split; else a CTA has two slots, the second for a tile that it begins.
    """

    k: Kernel
    numbers: TileNumbers
    heads: Traced
    pieces: Traced | None

    def of(self, at: BlockCursor, opens: Traced) -> Traced:
        """The slot of the piece which ends ``at`` a block; ``opens``: it begins its tile."""
        k = self.k
        if self.pieces is None:
            return k.cta_x * 2 + k.select(opens, 1, 0)
        tile = self.numbers.of(at.sequence.get(), at.span, at.tile.get()) * self.heads + at.head
        return tile * self.pieces + at.piece


class PieceParts(Compound):
    """A parameter: where pieces leave O (slot, tile_rows, head_dim) and log-sum-exps (slot, tile_rows), in float32."""

    outputs: Global[f32]
    logs: Global[f32]

    def output(self, of: Decode, slot: Traced, row: Traced) -> GlobalPointer:
        """A row of O."""
        return (self.outputs + row * of.head_dim) + self.k.mul_wide(slot, of.tile_rows * of.head_dim)

    def log(self, of: Decode, slot: Traced, row: Traced) -> GlobalPointer:
        """A row's log-sum-exp."""
        return (self.logs + row) + self.k.mul_wide(slot, of.tile_rows)
