"""Which tiles of keys a CTA of a backward pass works on, and the query rows that see each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from warploom.core.dtypes import u32
from warploom.kernels.attention.backward_sm90 import CONSUMERS
from warploom.kernels.attention.features import AttentionFeatures
from warploom.lang import Kernel, Traced
from warploom.lang.values import Number
from warploom.tile.mask import SeenBy, Visible, key_tiles
from warploom.tile.scheduler import Divisor, Persistent, Single


@dataclass(frozen=True)
class KeyTiles:
    """The tiles of this CTA by their numbers among them."""

    k: Kernel
    order: Persistent | Single
    at: Callable[[Number], KeyTile]

    @contextmanager
    def each(self) -> Iterator[Traced]:
        """Their numbers, one after another."""
        if isinstance(self.order, Single):
            with self.order.any():
                yield self.k.value(0, u32)
        else:
            with self.k.loop(self.order.count) as number:
                yield number


class Uses:
    """How often a ring was used by the tiles before, where there may be any."""

    def __init__(self, tiles: KeyTiles) -> None:
        self._before = None if isinstance(tiles.order, Single) else tiles.k.register(u32, 0, "uses")

    def at(self, turn: Traced) -> Traced:
        """The number of the use that is number ``turn`` of this tile."""
        return turn if self._before is None else turn + self._before

    def end(self, count: Traced) -> None:
        """The tile is done, after so many."""
        if self._before is not None:
            self._before.set(self._before + count)


@dataclass(frozen=True)
class KeyTile:
    """Tile ``number`` of the keys of a head, and the query rows that see them."""

    k: Kernel
    features: AttentionFeatures
    tile: tuple[int, int]
    number: Traced
    kv_head: Traced
    batch: Traced
    kv_heads: Traced
    lengths: tuple[Traced, Traced]
    mask: SeenBy
    of_head: Divisor | None = None
    """How many blocks of a query head come before those of the next; None where all heads of a block do."""

    @classmethod
    def of(
        cls,
        k: Kernel,
        features: AttentionFeatures,
        tile: tuple[int, int],
        at: tuple[Traced, Traced],
        lengths: tuple[Traced, Traced],
        kv_heads: Divisor,
        *,
        by_heads: bool = False,
        rising: bool = False,
    ) -> KeyTile:
        """A tile of so many query rows and keys at (tiles after it, plane)."""
        left, plane = at
        tiles = (lengths[1] + (tile[1] - 1)) // tile[1]
        number = tiles - 1 - left  # the first keys have the most query rows, and CTAs wait for those of lower numbers
        mask = SeenBy(k, visible(features), tile, number * tile[1], lengths, rising=rising)
        batch, head = kv_heads.divide(plane)
        of_head = Divisor.of(k, k.maximum(mask.blocks, 1)) if by_heads else None
        return cls(k, features, tile, number, head, batch, kv_heads.value, lengths, mask, of_head)

    @property
    def place(self) -> tuple[Number, ...]:
        """Where its K and V lie."""
        return self.number * self.tile[1], self.kv_head, self.batch

    def rows(self, block: Traced, head: Traced) -> tuple[Number, ...]:
        """Where Q and dO of a block of query rows lie."""
        rows = block * self.tile[0]
        return rows, head, self.batch

    def values(self, block: Traced, head: Traced, vector: int) -> tuple[Traced, Traced]:
        """Where shift and delta of a block lie, each with ``vector`` places."""
        return block * vector, self.plane_of(head)

    def plane_of(self, head: Traced) -> Traced:
        """The number of a query head among those of all batches."""
        return self.batch * (self.kv_heads * self.features.group) + head

    def part(self, turn: Traced, me: Number) -> Traced:
        """The number of a consumer's part of a block of dQ."""
        block, head = self.at(turn)
        blocks = (self.lengths[0] + (self.tile[0] - 1)) // self.tile[0]
        return (self.plane_of(head) * blocks + block) * CONSUMERS + me

    def before(self, turn: Traced) -> Traced:
        """How many tiles of keys add to a block of dQ before this one."""
        block, _ = self.at(turn)
        return self.number - key_tiles(self.k, visible(self.features), self.tile, block, self.lengths)[0]

    @property
    def count(self) -> Traced:
        """How many blocks of query rows see the keys, of all the query heads that share them."""
        return self.mask.blocks * self.features.group

    def at(self, turn: Traced) -> tuple[Traced, Traced]:
        """(block of query rows, query head) of number ``turn``."""
        group = self.features.group
        if group == 1:
            return self.mask.block(turn), self.kv_head
        own, step = (turn % group, turn // group) if self.of_head is None else self.of_head.divide(turn)
        return self.mask.block(step), self.kv_head * group + own


def visible(features: AttentionFeatures) -> Visible:
    """The mask of a problem."""
    return Visible(features.window, features.ragged_kv)
