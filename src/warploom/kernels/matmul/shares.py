"""How stream-K divides a product: equal shares of k-tiles of the tiles that make no whole wave, then whole tiles.

The k-tiles of the tiles that are cut lie one after another, tile after tile, and each CTA takes as many of them as any
other (one more or less): a share begins and ends within a tile as a rule. What a CTA does is therefore a row of
segments, each a part of one tile or all of it. Tiles that fill whole waves follow, uncut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Segment:
    """K-tiles ``begin`` … ``stop`` - 1 of one tile of C."""

    tile: int
    begin: int
    stop: int


@dataclass(frozen=True)
class StreamShares:
    """``cut`` tiles of ``k_tiles`` each are shared by ``ctas``; ``waves`` whole tiles for each CTA come after them.

    The first ``longer`` CTAs have ``share`` + 1 k-tiles, the others ``share``.
    """

    ctas: int
    k_tiles: int
    cut: int
    waves: int

    @classmethod
    def of(cls, tiles: int, k_tiles: int, ctas: int) -> StreamShares:
        """For so many tiles and at most so many CTAs.

        Between one and two waves of tiles are cut where there are so many: the last wave with its idle CTAs, and the
        one before, so that a share is longer than a tile and few tiles have more than two parts.
        """
        ctas = max(1, min(ctas, tiles * k_tiles))
        whole, rest = divmod(tiles, ctas)
        waves = max(0, whole - 1) if rest else whole
        return cls(ctas, k_tiles, tiles - waves * ctas, waves)

    @property
    def share(self) -> int:
        """K-tiles of the tiles that are cut, for each CTA."""
        return self.cut * self.k_tiles // self.ctas

    @property
    def longer(self) -> int:
        """CTAs that have one k-tile more."""
        return self.cut * self.k_tiles % self.ctas

    def start(self, cta: int) -> int:
        """The first k-tile of a CTA's share."""
        return cta * self.share + min(cta, self.longer)

    def owner(self, item: int) -> int:
        """The CTA that has a k-tile."""
        wide = self.longer * (self.share + 1)
        return item // (self.share + 1) if item < wide else self.longer + (item - wide) // self.share

    def parts(self, tile: int) -> int:
        """CTAs that a tile is shared by."""
        if tile >= self.cut:
            return 1
        return self.owner((tile + 1) * self.k_tiles - 1) - self.owner(tile * self.k_tiles) + 1

    def segments(self, cta: int) -> Iterator[Segment]:
        """The segments of a CTA, in order."""
        item, end = self.start(cta), self.start(cta + 1)
        while item < end:
            tile, begin = divmod(item, self.k_tiles)
            stop = min(self.k_tiles, begin + end - item)
            yield Segment(tile, begin, stop)
            item += stop - begin
        for wave in range(self.waves):
            yield Segment(self.cut + wave * self.ctas + cta, 0, self.k_tiles)
