"""The tiles of the attention kernels for ``wgmma``: what a CTA works on by turns, and how it is fed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from warploom.tile.mask import Mask, Visible
from warploom.tile.roles import WARPGROUP_ROWS
from warploom.tile.scheduler import Divisor, Persistent, RowTiles, Single, TileScheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

    from warploom.kernels.attention.features import AttentionFeatures
    from warploom.kernels.attention.sm90 import ForwardSm90
    from warploom.lang import GlobalPointer, Kernel, Traced
    from warploom.lang.values import Number
    from warploom.tile.pipeline import Cursor, Pipeline


@dataclass(frozen=True)
class Tile:
    """``tile_m`` query rows of one head, a CTA's turn. A consumer sees ``own`` of its keys, after ``masked`` blocks.

    ``queries``: where its first row lies: the row, and what else the boxes' places have; ``keys``: what theirs have
    beside the row. ``own_row``: where the consumer's rows begin among those that ``own`` is about. ``idle``: how many
    of its blocks, after the first, a consumer passes over that has no rows.
    """

    turn: Number
    queries: tuple[Number, ...]
    keys: tuple[Number, ...]
    tile_n: int
    mask: Mask
    own: Mask
    own_row: Number = 0
    masked: Traced | None = None
    idle: Traced | None = None

    @property
    def steps(self) -> Traced:
        """Blocks that the consumer works on."""
        return self.own.blocks if self.idle is None else self.own.blocks - self.idle

    def q_place(self, consumer: int) -> tuple[Number, ...]:
        """Where Q and O of a consumer lie."""
        return self.queries[0] + consumer * WARPGROUP_ROWS, *self.queries[1:]

    def kv_place(self, block: Traced) -> tuple[Number, ...]:
        """Where a block of its K and V lies."""
        return block * self.tile_n, *self.keys


@dataclass(frozen=True)
class Tiles(ABC):
    """The tiles of a CTA by its turns; ``lse``: where log-sum-exps go, ``sinks``: (heads,)."""

    k: Kernel
    config: ForwardSm90
    features: AttentionFeatures
    lse: GlobalPointer
    sinks: GlobalPointer
    may_lack_keys: ClassVar[bool] = False

    @cached_property
    def order(self) -> TileScheduler:
        """Which tiles this CTA takes: first asked for before the roles part."""
        return self.schedule()

    @cached_property
    def claims(self) -> tuple[Pipeline, ...]:
        """What the order needs set up."""
        return ()

    @abstractmethod
    def schedule(self) -> TileScheduler:
        """A new :attr:`order`."""

    @abstractmethod
    def item(self, turn: Number) -> tuple[Traced, ...]:
        """What tells the tile of a turn from others."""

    @abstractmethod
    def place(self, item: Sequence[Traced]) -> tuple[tuple[Number, ...], tuple[Number, ...], tuple[Traced, Traced]]:
        """``queries`` and ``keys`` of an item's :class:`Tile`, and how long their sequences are."""

    @abstractmethod
    def lse_of(self, tile: Tile) -> tuple[GlobalPointer, Number, Traced]:
        """Where its log-sum-exps go: element 0, the tile's first row's, and one past the last."""

    def feed(self, tile: Tile, blocks_in: Cursor, *, claims: bool) -> None:
        """One thread: the blocks of a tile's K or V into its ring; who ``claims`` tiles does so before the last few."""
        order, blocks = self.order, tile.mask.blocks
        last: Number = 0
        if claims and order.is_claimed:
            last = blocks - self.k.minimum(blocks, self.config.stages)
            self.feed_part(tile, blocks_in, 0, last)
            order.claim(tile.turn + 1)
        self.feed_part(tile, blocks_in, last, blocks)

    def feed_part(self, tile: Tile, blocks_in: Cursor, first: Number, end: Traced) -> None:
        """The blocks from number ``first`` up to ``end``."""
        with self.k.loop(end, start=first) as step:
            blocks_in.put(tile.kv_place(tile.mask.block(step)))

    def kv_head(self, head: Traced) -> Traced:
        """Whose keys a head sees."""
        return head // self.features.group if self.features.group > 1 else head

    def at(self, turn: Number, own_row: Traced | None = None, item: Sequence[Traced] | None = None) -> Tile:
        """The tile of a turn, by its :meth:`item` where that is known.

        ``own_row``: as the consumer sees it whose 64 rows begin there in the tile.
        """
        c, f = self.config, self.features
        queries, keys, lengths = self.place(self.item(turn) if item is None else item)
        visible, lacking = Visible(f.window, f.ragged_kv), self.may_lack_keys
        mask = Mask(self.k, visible, (c.tile_m, c.tile_n), queries[0], lengths, may_lack_keys=lacking)
        if own_row is None or not c.skip_masked or f.window[1] is None:
            return Tile(turn, queries, keys, c.tile_n, mask, mask, 0 if own_row is None else own_row)
        own = Mask(
            self.k,
            visible,
            (WARPGROUP_ROWS, c.tile_n),
            queries[0] + own_row,
            lengths,
            begin=mask.begin,
            may_lack_keys=lacking,
        )
        return Tile(turn, queries, keys, c.tile_n, mask, own, masked=mask.blocks - own.blocks)


@dataclass(frozen=True)
class EvenTiles(Tiles):
    """Those of sequences of one length."""

    rows: RowTiles
    heads: Divisor
    lengths: tuple[Traced, Traced]

    def schedule(self) -> TileScheduler:
        """All tiles that there are."""
        if self.config.persistent:
            return Persistent(self.k, self.rows.count, alternating=self.rows.grouped)
        return Single(self.k)

    def item(self, turn: Number) -> tuple[Traced, ...]:
        """(row, head, batch)."""
        block, plane = self.rows.tile(self.order.item(turn))
        batch, head = self.heads.divide(plane)
        return block * self.config.tile_m, head, batch

    def place(self, item: Sequence[Traced]) -> tuple[tuple[Number, ...], tuple[Number, ...], tuple[Traced, Traced]]:
        """(row, head, batch) of queries, (head, batch) of keys."""
        row, head, batch = item
        return (row, head, batch), (self.kv_head(head), batch), self.lengths

    def lse_of(self, tile: Tile) -> tuple[GlobalPointer, Number, Traced]:
        """Of (batch, heads, q_len)."""
        (row, head, batch), q_len = tile.queries, self.lengths[0]
        return self.lse + self.k.mul_wide(batch * self.heads.value + head, q_len), row, q_len
