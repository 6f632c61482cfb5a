# pyright: reportInvalidTypeForm=false
"""New keys and values into a cache, keys (and queries) turned by their positions: rotary embedding.

Source: J. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (neighbours turned together); most
models turn the elements a half apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from warploom.core.dtypes import e4m3, f32, s32, u16, u32
from warploom.kernels.attention.append import CHUNK, THREADS, AppendForm
from warploom.lang import Compound, Global, GlobalPointer, Kernel, Strided, StridedPointer, Traced, kernel
from warploom.tile.cache import Pages, PageTable

WORDS = CHUNK // 2


@kernel(threads=THREADS, drop_unused=True)
def append_to_cache(
    k: Kernel,
    key: Moved,
    value: Moved,
    q: Moved,
    lengths: Global[s32],
    table: PageTable,
    angles: Angles,
    new: TokenRows,
    queries: TokenRows,
    capacity: u32,
    *,
    form: AppendForm,
) -> None:
    """Grid: (rows of heads, 16 bytes a thread; keys, values and queries; sequences).

    Sequence b has ``lengths[b]`` keys with its new ones, which are its last. What has no place in the cache is left
    out.
    """
    sequence, chunks = k.cta_z, form.head_dim // CHUNK
    item = k.cta_x * THREADS + k.thread
    row, col = item // chunks, item % chunks * CHUNK
    length = lengths.load(sequence)
    turn = Rotation(k, form, angles)
    named = Pages(form.page_size, table) if form.page_size else None
    move = Move(k, form, sequence, row, col, length, turn, Cache(k, sequence, capacity, named))

    with k.when(k.cta_y == 0, uniform=True):
        move.rows(key, new, turned=True)
    with k.when(k.cta_y == 1, uniform=True):
        move.rows(value, new, turned=False)
    if form.queries:
        with k.when(k.cta_y == 2, uniform=True):
            move.rows(q, queries, turned=True, cached=False)


append_to_cache_sm90 = replace(append_to_cache, name="append_to_cache_sm90", requires="sm_90")
"""The same where it makes fp8: GPUs do from sm_90 on."""


class Moved(Compound):
    """A parameter: rows (sequence, head, token), where they go (sequence or page, head, token), and their scales.

    ``scale`` (sequence, key head): what an fp8 cache is multiplied by.
    """

    given: Strided[u16, 3]
    kept: Strided[u16, 3]
    scale: Strided[f32, 2]


class TokenRows(Compound):
    """A parameter: how many ``tokens`` of a sequence come, and the ``heads`` of each."""

    tokens: u32
    heads: u32


class Angles(Compound):
    """A parameter: cosines and sines of ``positions`` positions, with 16 or with 32 bits."""

    cos: Global[u16]
    sin: Global[u16]
    wide_cos: Global[f32]
    wide_sin: Global[f32]
    positions: u32


@dataclass(frozen=True)
class Cache:
    """Where a sequence's keys or values lie."""

    k: Kernel
    sequence: Traced
    capacity: Traced
    pages: Pages | None

    def place(self, at: Traced, of: StridedPointer) -> tuple[Traced, Traced]:
        """Elements from the first to a token's of head 0, and whether the cache has a place for it."""
        k, (outer, _, of_row) = self.k, of.strides
        exists = (at >= 0) & (k.bitcast(at, u32) < self.capacity)
        position = k.minimum(k.bitcast(at, u32), self.capacity - 1)
        if self.pages is None:
            return k.mul_wide(self.sequence, outer) + k.mul_wide(position, of_row), exists
        page = self.pages.entry(k, self.sequence, position)
        within = k.mul_wide(position % self.pages.size, of_row)
        return k.mul_wide(page, outer) + within, exists & (page < self.pages.table.pages)


@dataclass(frozen=True)
class Move:
    """A thread's part of moving rows of heads: ``row`` of those of a sequence, 16 bytes of it from ``col`` on."""

    k: Kernel
    form: AppendForm
    sequence: Traced
    row: Traced
    col: Traced
    length: Traced
    rotation: Rotation
    cache: Cache

    def rows(self, moved: Moved, count: TokenRows, *, turned: bool, cached: bool = True) -> None:
        """The sequence's last tokens; to their places in the cache, or one after another."""
        k, tokens, heads, source, to = self.k, count.tokens, count.heads, moved.given, moved.kept
        with k.when(self.row < tokens * heads):
            token, head = self.row // heads, self.row % heads
            at = self.length + k.bitcast(token, s32) - k.bitcast(tokens, s32)
            offset, into = source.offset(self.sequence, head, token), to.strides
            if cached:
                place, exists = self.cache.place(at, to)
            else:
                place, exists = k.mul_wide(self.sequence, into[0]) + k.mul_wide(token, into[2]), None
            with nullcontext() if exists is None else k.when(exists):
                words = self.rotation.load(source + offset, self.col, at if turned else None)
                col = self.col
                if cached and self.form.fp8:
                    words, col = self._narrowed(words, moved.scale, head), col // 2
                (to + (place + k.mul_wide(head, into[1])) + col).store(words, dtype=u32)

    def _narrowed(self, words: Sequence[Traced], scale: StridedPointer, head: Traced) -> list[Traced]:
        """Four ``e4m3`` in each word; beyond its largest number that."""
        k = self.k
        values = [x for word in words for x in k.unpack(word, self.form.dtype)]
        if self.form.scaled:
            factor = scale.at(self.sequence, head).load()
            values = [x / factor for x in values]
        return [k.pack_bytes(values[i : i + 4], e4m3) for i in range(0, len(values), 4)]


class Rotation:
    """Pairs (x, y) of a row become (x·cos - y·sin, y·cos + x·sin) by its position's row of a table."""

    def __init__(self, k: Kernel, form: AppendForm, angles: Angles) -> None:
        self._k, self._form, self._positions = k, form, angles.positions
        self._table = (angles.wide_cos, angles.wide_sin) if form.table is f32 else (angles.cos, angles.sin)

    def load(self, row: GlobalPointer, col: Traced, at: Traced | None) -> list[Traced]:
        """Eight elements of a row from a column on, packed; turned by position ``at``, if given."""
        k, f = self._k, self._form
        words = (row + col).load(0, WORDS, dtype=u32)
        if at is None or not f.rotary:
            return words
        kept = k.registers(u32, WORDS, None)
        for register, word in zip(kept, words, strict=True):
            register.set(word)
        with k.when(col < f.rotary):
            position = k.minimum(k.bitcast(k.maximum(at, 0), u32), self._positions - 1)
            for register, word in zip(kept, self._turned(row, col, words, position), strict=True):
                register.set(word)
        return [register.get() for register in kept]

    def _turned(self, row: GlobalPointer, col: Traced, words: list[Traced], position: Traced) -> list[Traced]:
        k, f, half = self._k, self._form, self._form.rotary // 2
        if f.interleaved:
            cos, sin = (self._angles(table, position, col // 2, CHUNK // 2) for table in self._table)
            pairs = [k.unpack(word, f.dtype) for word in words]
            return [
                k.pack(k.fma(x, c, -(y * s)), k.fma(y, c, x * s), f.dtype)
                for (x, y), c, s in zip(pairs, cos, sin, strict=True)
            ]
        lower = col < half
        other = (row + k.select(lower, col + half, col - half)).load(0, WORDS, dtype=u32)
        first = k.select(lower, col, col - half)
        cos, sin = (self._angles(table, position, first, CHUNK) for table in self._table)
        mine, theirs = ([x for word in given for x in k.unpack(word, f.dtype)] for given in (words, other))
        turned = [
            k.fma(x, c, k.select(lower, -(y * s), y * s)) for x, y, c, s in zip(mine, theirs, cos, sin, strict=True)
        ]
        return k.pack_all(turned, f.dtype)

    def _angles(self, table: GlobalPointer, position: Traced, first: Traced, count: int) -> list[Traced]:
        """Consecutive numbers of a position's row."""
        k, kind = self._k, self._form.table
        at = k.mul_wide(position, self._form.rotary // 2)
        if kind is f32:
            return [x for i in range(0, count, WORDS) for x in (table + at + first).load(i, WORDS)]
        assert kind is not None
        return [x for word in (table + at + first).load(0, count // 2, dtype=u32) for x in k.unpack(word, kind)]
