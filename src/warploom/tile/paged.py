"""Keys and values in pages as the TMA copies them: boxes of rows that lie side by side, where a block table says.

The tensor map is a ragged one (:meth:`TensorMapSpec.ragged`) whose sequences are pages: what a page holds behind the
last key reads as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from warploom.core.dtypes import u32
from warploom.isa.async_copy import Eviction
from warploom.tile.panels import box_rows
from warploom.tile.pipeline import Boxes
from warploom.tile.ragged import sequence_boxes

if TYPE_CHECKING:
    from warploom.lang import Kernel, Traced
    from warploom.lang.hopper import TensorMapHandle
    from warploom.lang.values import Number
    from warploom.tile.cache import Pages


@dataclass(frozen=True)
class Run:
    """Keys side by side: from ``row`` of a page on, whose first is number ``begin`` of all and which has ``count``."""

    row: Number
    begin: Traced
    count: Traced


@dataclass(frozen=True)
class PagedBoxes(Boxes):
    """Boxes of ``rows`` keys each; the place of a tile is its head, and a :class:`Run` for each of its boxes."""

    rows: int = 0

    @classmethod
    def of(cls, tensor_map: TensorMapHandle, eviction: Eviction = "", *, rows: int) -> PagedBoxes:
        """Those of pages as one ragged array (rows of all pages, heads, columns)."""
        return cls(tensor_map, sequence_boxes(tensor_map).order, eviction, rows)

    def parts(self, place: Sequence[Any]) -> Sequence[tuple[int, Sequence[Number]]]:
        """As many boxes as runs."""
        head, *runs = place
        return [(number * self.rows, (run.row, head, run.begin, run.count)) for number, run in enumerate(runs)]


class PageRuns:
    """Where blocks of ``block`` keys lie: read from the table ahead of the copies that need to know.

    ``pitch``: rows of a cache, as one array, from the first of a page to that of the next.
    """

    def __init__(self, k: Kernel, pages: Pages, pitch: Traced, block: int) -> None:
        self._k, self._pages, self._pitch, self._block = k, pages, pitch, block
        self._rows = box_rows(pages.size, block)
        self._named = k.registers(u32, block // self._rows, None, "page")

    def look_up(self, sequence: Traced, block: Traced) -> None:
        """Read which pages a block lies in; nobody waits for that before :meth:`at`."""
        for page, key in zip(self._named, self._keys(block), strict=True):
            page.set(self._pages.of(self._k, sequence, key))

    def at(self, block: Traced, keys: Traced) -> list[Run]:
        """The runs of the block looked up last, of a sequence of so many keys."""
        k, size = self._k, self._pages.size
        found: list[Run] = []
        for page, key in zip(self._named, self._keys(block), strict=True):
            row: Number = 0 if self._rows == size else key % size
            first = key - row
            left = k.select(keys > first, keys - first, 0)
            found.append(Run(row, page * self._pitch, k.minimum(left, size)))
        return found

    def _keys(self, block: Traced) -> list[Traced]:
        """The first key of each run."""
        return [block * self._block + i for i in range(0, self._block, self._rows)]
