"""What attention with few queries copies ahead of its products: blocks of keys, and the query rows of pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from warploom.core.dtypes import u32
from warploom.kernels.attention.decode_rows import GroupRows, load_queries, queries_for_fp8

if TYPE_CHECKING:
    from warploom.kernels.attention.decode import Decode
    from warploom.lang import Kernel, SharedTile, StridedPointer, Traced
    from warploom.lang.values import Number
    from warploom.tile.cache import WarpRing
    from warploom.tile.shares import BlockCursor


KEYS, VALUES = 0, 1
"""Tiles of the ring."""


class Turn:
    """Which of ``count`` stages is next, in a register."""

    def __init__(self, k: Kernel, count: int, name: str) -> None:
        self._k, self._count = k, count
        self._at = k.register(u32, 0, name)

    def now(self) -> Traced:
        """The stage."""
        return self._at.get()

    def before(self) -> Traced:
        """The one before it: the last to be filled again."""
        return self._k.select(self._at == 0, self._k.value(self._count - 1, u32), self._at - 1)

    def reset(self) -> None:
        """To the first."""
        self._at.set(0)

    def advance(self) -> None:
        """To the next."""
        self._at.set(self._k.select(self._at == self._count - 1, 0, self._at + 1))


@dataclass(frozen=True)
class Queries:
    """Query rows, strides of (sequence, query head, query)."""

    k: Kernel
    config: Decode
    group: int
    array: StridedPointer

    def rows(self, at: BlockCursor) -> GroupRows:
        """Those of a piece."""
        return GroupRows.at(self.k, at, self.group, self.config)

    def load(self, tile: SharedTile, at: BlockCursor) -> None:
        """Start their copies."""
        load_queries(self.k, tile, self.rows(at), self.array, self.config)

    def convert(self, tile: SharedTile) -> None:
        """What has arrived becomes what fp8 keys are multiplied by."""
        if self.config.fp8:
            queries_for_fp8(self.k, tile, self.config)


class Feed:
    """What is copied ahead: the blocks of a share, and the query rows of each piece with its first."""

    def __init__(self, k: Kernel, ring: WarpRing, queries: Queries, q_tile: SharedTile, cursor: BlockCursor) -> None:
        self._k, self.ring, self.queries, self.q_tile, self._cursor = k, ring, queries, q_tile, cursor
        self._begins, self._q_stage = k.register(u32, 1, "asks"), Turn(k, ring.stages, "q_ahead")

    def begin(self, end: Traced) -> None:
        """Start the copies of the first blocks, one less than there are stages; none is under way."""
        self._begins.set(1)
        self._q_stage.reset()
        self._look_up()
        for number in range(self.ring.stages - 1):
            self.put(number, end)

    def _look_up(self) -> None:
        self.ring.look_up(self._cursor.sequence.get(), self._cursor.block.get())

    def put(self, stage: Number, end: Traced) -> None:
        """Start the copies of the next block, if it is below ``end``; query rows come with its keys."""
        at = self._cursor
        for tile, also in ((KEYS, self._put_queries), (VALUES, self._advance)):
            self.ring.put(tile, stage, self._place, at.span.keys, when=at.number < end, also=also)

    def _put_queries(self) -> None:
        with self._k.when(self._begins != 0, uniform=True):
            self.queries.load(self.q_tile.stage(self._q_stage.now()), self._cursor)
            self._q_stage.advance()

    def _advance(self) -> None:
        self._begins.set(self._k.select(self._cursor.ends_piece, 1, 0))
        self._cursor.advance()
        self._look_up()

    def fetch(self, end: Traced) -> None:
        """The L2 fetches the block at the cursor, if that is below ``end``."""
        with self._k.when(self._cursor.number < end, uniform=True):
            self.ring.fetch(self._place, self._cursor.span.keys)

    @property
    def _place(self) -> tuple[Traced, Traced, Traced]:
        at = self._cursor
        return at.sequence.get(), at.head.get(), at.block.get()
