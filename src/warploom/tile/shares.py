"""Blocks of keys of many sequences, of lengths that only the GPU knows, in equal shares for the CTAs of a grid.

All blocks form one list: sequence by sequence, in it key head by key head, then by tiles of query rows, each of which
visits its keys from the first block to the last. A CTA takes a contiguous share of the list (as "stream-K" shares the
steps of a product), so uneven lengths leave no SM idle. All shares but the last are equal: one block less would end no
sooner. Where all sequences are as long, shares are of whole tiles, if they need not be much longer for that. What a
share has of one tile of query rows is a *piece*; only the first and the last piece of a share may be less than all keys
of a tile. A tile costs time beyond that of its blocks: numbers of the list that no block has stand before its first.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import TYPE_CHECKING

from warploom.core.dtypes import u32
from warploom.tile.roles import WARP

if TYPE_CHECKING:
    from warploom.lang import Kernel, Mutable, Traced
    from warploom.lang.values import Number

AT_ONCE = 4
"""Neighbours whose lengths a lane loads together."""
MOST_LONGER = 16
"""A share of whole tiles is at most one in so many blocks longer."""


@dataclass(frozen=True)
class SequenceBlocks:
    """One sequence (all u32): blocks of keys ``begin`` … ``end`` - 1, at least one, for each of ``tiles`` tiles.

    ``tiles`` of query rows, at least one. ``keys`` and ``queries`` are its lengths, ``first`` the number of its first
    query among those of all sequences.
    """

    begin: Traced
    end: Traced
    tiles: Traced
    keys: Traced
    queries: Traced
    first: Traced

    @property
    def blocks(self) -> Traced:
        """Blocks of keys of one tile."""
        return self.end - self.begin


@dataclass(frozen=True)
class BlockPlace:
    """A block of the list: its sequence, key head, tile of query rows and block of keys; and where its tile begins.

    Of a number that no block has, the block behind it.
    """

    sequence: Traced
    span: SequenceBlocks
    head: Traced
    tile: Traced
    block: Traced
    start: Traced
    """The number of the tile's first block."""

    @property
    def stop(self) -> Traced:
        """One past the number of the tile's last block."""
        return self.start + self.span.blocks


class BlockShares:
    """The list of ``batch`` sequences and ``heads`` key heads; ``span(b)`` reads sequence b.

    ``split``: every piece has so many blocks, counted from a tile's first (the last one what is left), wherever the
    shares would end: then results do not depend on what else is in the list. ``gap``: numbers before each tile.
    Everything else follows a :meth:`survey`.
    """

    def __init__(
        self,
        k: Kernel,
        span: Callable[[Traced], SequenceBlocks],
        batch: Traced,
        heads: Traced,
        *,
        ctas: Traced,
        split: Traced | None = None,
        gap: int = 0,
    ) -> None:
        self._k, self.span, self._batch, self.heads, self.split = k, span, batch, heads, split
        self.gap, self._ctas = gap, ctas
        self._total, self._each = k.register(u32, 0, "total"), k.register(u32, 1, "share")

    @property
    def total(self) -> Traced:
        """Numbers of the list."""
        return self._total.get()

    def read_by(self, span: Callable[[Traced], SequenceBlocks]) -> BlockShares:
        """A copy whose sequences are read in another way: a survey of one holds for both."""
        other = copy(self)
        other.span = span
        return other

    def survey(self) -> None:
        """Find how long the list is, and the shares."""
        k, batch = self._k, self._batch
        first_span, total = self.span(k.value(0, u32)), k.register(u32, 0, "blocks")  # loaded beside the others
        with k.loop(batch, step=AT_ONCE * WARP) as first:
            for blocks in self._next_blocks(first):
                total += blocks
        self._add_lanes(total)
        self._total.set(total.get())
        self._each.set(self._whole(k.maximum(ceiling(self.total, self._ctas), 1), first_span))

    def _whole(self, least: Traced, span: SequenceBlocks) -> Traced:
        """The length of shares: ``least`` or, where all tiles are as long as those of ``span``, of whole ones."""
        k, each = self._k, self._k.register(u32, least, "each")
        tile = span.blocks + self.gap
        with k.when(tile * span.tiles * (self.heads * self._batch) == self.total, uniform=True):
            whole = ceiling(least, tile) * tile
            each.set(k.select(whole - least <= least // MOST_LONGER, whole, least))
        return each.get()

    def _next_blocks(self, first: Traced) -> list[Traced]:
        """Numbers of the sequences from ``first`` on, so many neighbours to a lane."""
        own = first + self._k.lane * AT_ONCE
        return [self._blocks(own + i) for i in range(AT_ONCE)]

    def _blocks(self, sequence: Traced) -> Traced:
        """Numbers of a sequence; 0 beyond the last."""
        k = self._k
        span = self.span(k.minimum(sequence, self._batch - 1))
        return k.select(sequence < self._batch, (span.blocks + self.gap) * span.tiles * self.heads, 0)

    def of(self, cta: Traced) -> tuple[Traced, Traced]:
        """(first, one past the last) number of a CTA's share."""
        return self._bound(cta), self._bound(cta + 1)

    def _bound(self, cta: Traced) -> Traced:
        k = self._k
        number = k.minimum(cta * self._each, self.total)
        if self.split is None:
            return number
        at = self.find(k.minimum(number, self.total - 1))
        beyond = (at.block - at.span.begin) % self.split
        whole = k.select(beyond == 0, number, k.minimum(number + (self.split - beyond), at.stop))
        return k.select(number < self.total, whole, self.total)

    def ctas_of(self, place: BlockPlace) -> tuple[Traced, Traced]:
        """The first and the last CTA with blocks of a tile, where no split is given."""
        return place.start // self._each, (place.stop - 1) // self._each

    def start(self, tile: Traced) -> Traced:
        """The number of the first block of a tile, counted through all sequences, of which each has as many tiles."""
        k = self._k
        of_each = self.span(k.value(0, u32)).tiles * self.heads
        sequence, before = tile // of_each, k.register(u32, 0, "before")
        with k.loop(self._batch, step=AT_ONCE * WARP) as first:
            for i, blocks in enumerate(self._next_blocks(first)):
                before += k.select(first + k.lane * AT_ONCE + i < sequence, blocks, 0)
        self._add_lanes(before)
        return before + tile % of_each * (self.span(sequence).blocks + self.gap) + self.gap

    def _add_lanes(self, total: Mutable) -> None:
        for distance in (16, 8, 4, 2, 1):
            total += self._k.shfl_xor(total.get(), distance)

    def find(self, number: Traced) -> BlockPlace:
        """The place of a number."""
        k = self._k
        sequence, start, before = (k.register(u32, 0, name) for name in ("sequence", "start", "before"))
        with k.loop(self._batch, step=AT_ONCE * WARP) as first:
            ends = list(accumulate(self._next_blocks(first)))
            through = k.register(u32, ends[-1])
            for distance in (1, 2, 4, 8, 16):
                below = k.shfl_up(through.get(), distance)
                through.set(through + k.select(k.lane >= distance, below, 0))
            own = before + through - ends[-1]
            holds = k.ballot((own <= number) & (number < own + ends[-1]))
            with k.when(holds != 0, uniform=True):
                lane = k.clz(k.brev(holds))
                passed, offset = k.register(u32, 0), k.register(u32, 0)
                for i, end in enumerate(ends[:-1]):
                    beyond = number >= own + end
                    passed.set(k.select(beyond, k.value(i + 1, u32), passed.get()))
                    offset.set(k.select(beyond, end, offset.get()))
                sequence.set(first + lane * AT_ONCE + k.shfl_idx(passed.get(), lane))
                start.set(k.shfl_idx(own + offset, lane))
            before += k.shfl_idx(through.get(), WARP - 1)
        span = self.span(sequence.get())
        length = span.blocks + self.gap
        tiles, offset = (number - start) // length, (number - start) % length
        block = k.maximum(offset, self.gap) - self.gap if self.gap else offset
        return BlockPlace(
            sequence.get(),
            span,
            tiles // span.tiles,
            tiles % span.tiles,
            span.begin + block,
            number - offset + self.gap,
        )

    def cursor(self, name: str) -> BlockCursor:
        """A position in the list that moves on block by block, once it is somewhere."""
        return BlockCursor(self._k, self, name)

    def after(self, sequence: Traced) -> Traced:
        """The next sequence; the last one stays."""
        return self._k.minimum(sequence + 1, self._batch - 1)


class BlockCursor:
    """A position in the list of blocks, in registers."""

    def __init__(self, k: Kernel, shares: BlockShares, name: str) -> None:
        self._k, self._shares = k, shares

        def held(what: str) -> Mutable:
            return k.register(u32, 0, f"{name}_{what}")

        self.sequence, self.head, self.tile, self.block = map(held, ("sequence", "head", "tile", "block"))
        self.number = held("number")
        self._span = {f.name: held(f.name) for f in fields(SequenceBlocks)}
        self._since = self._piece = None
        if shares.split is not None:
            self._since, self._piece = held("since"), held("piece")

    def move(self, place: BlockPlace) -> None:
        """Move to a place."""
        offset = place.block - place.span.begin
        for name in ("sequence", "head", "tile", "block"):
            getattr(self, name).set(getattr(place, name))
        self.number.set(place.start + offset)
        for name, register in self._span.items():
            register.set(getattr(place.span, name))
        split = self._shares.split
        if self._since is not None and self._piece is not None and split is not None:
            self._since.set(offset % split)
            self._piece.set(offset // split)

    @property
    def span(self) -> SequenceBlocks:
        """The sequence it is in."""
        return SequenceBlocks(**{name: register.get() for name, register in self._span.items()})

    @property
    def piece(self) -> Traced:
        """The number of its piece among those of its tile, where pieces are split alike."""
        assert self._piece is not None
        return self._piece.get()

    @property
    def ends_tile(self) -> Traced:
        """Whether this is the last block of its tile of query rows."""
        return self.block + 1 == self._span["end"]

    @property
    def ends_piece(self) -> Traced:
        """Whether this is the last block of its piece, but for the end of the share."""
        if self._since is None:
            return self.ends_tile
        return self.ends_tile | (self._since + 1 == self._shares.split)

    def advance(self) -> None:
        """Move on to the next block of the list; past its end nothing is to be read."""
        k = self._k
        done, split = self.ends_tile, self.ends_piece
        self.block += 1
        self.number += 1
        if self._since is not None and self._piece is not None:
            self._piece += k.select(split, 1, 0)
            self._since.set(k.select(split, 0, self._since + 1))
        with k.when(done, uniform=True):
            self.number += self._shares.gap
            self.tile += 1
            if self._piece is not None:
                self._piece.set(0)
            with k.when(self.tile == self._span["tiles"], uniform=True):
                self._next_head()
            self.block.set(self._span["begin"])

    def _next_head(self) -> None:
        k = self._k
        self.tile.set(0)
        self.head += 1
        with k.when(self.head == self._shares.heads, uniform=True):
            self.head.set(0)
            self.sequence.set(self._shares.after(self.sequence.get()))
            span = self._shares.span(self.sequence.get())
            for name, register in self._span.items():
                register.set(getattr(span, name))


def ceiling(number: Traced, divisor: Number) -> Traced:
    """A quotient of u32, rounded up."""
    return (number + (divisor - 1)) // divisor
