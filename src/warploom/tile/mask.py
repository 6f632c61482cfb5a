"""Which keys a tile of query rows sees.

Which blocks are visited, which of them some row does not see whole, and which scores to mask follow from one predicate
on (row, key).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import TYPE_CHECKING

from warploom.core.dtypes import f32, s32, u32

if TYPE_CHECKING:
    from warploom.lang import Fragment, Kernel, Traced
    from warploom.lang.values import Number


@dataclass(frozen=True)
class Visible:
    """The keys that row i sees: ``i + offset - left <= key <= i + offset + right``, and ``key < kv_len``.

    ``window`` = (left, right); None leaves a side open. offset = kv_len - q_len aligns the last row with the last key.
    ``ragged``: kv_len is no multiple of the block.
    """

    window: tuple[int | None, int | None] = (None, None)
    ragged: bool = False

    @property
    def masks(self) -> bool:
        """Whether some block may have to be masked."""
        return self.ragged or self.window != (None, None)

    def seen(self, key: Traced, aligned: Traced, keys: Traced) -> list[Traced]:
        """The conditions under which the row aligned with key ``aligned`` sees a key, of ``keys`` (all s32)."""
        left, right = self.window
        found: list[Traced] = []
        if self.ragged:
            found.append(key < keys)
        if right is not None:
            found.append(key <= aligned + right)
        if left is not None:
            found.append(key >= aligned - left)
        return found

    def cuts(self, keys: tuple[Traced, int], top: Traced, bottom: tuple[Traced, int], beyond: Traced) -> Traced | None:
        """Whether some row does not see all ``keys`` (the first, and how many); None if every row always does.

        ``top`` and the sum ``bottom`` are aligned with the first row and the last; ``beyond``: not all keys exist.
        """
        (first, count), (left, right) = keys, self.window
        found = [beyond] if self.ragged else []
        if right is not None:
            found.append(first + (count - 1) > top + right)
        if left is not None:
            found.append(first < bottom[0] + (bottom[1] - left))
        return reduce(or_, found) if found else None


def mask_scores(
    k: Kernel, scores: Fragment, warp: Number, seen: Callable[[Traced, Traced], list[Traced]], masked: float
) -> None:
    """``masked`` in place of scores where not all of ``seen(row, column)`` hold."""
    for element, score in enumerate(scores.mutable):
        row, col = (k.value(x, u32) for x in scores.layout.coordinates(k.lane, element, warp))
        score.set(k.select(reduce(and_, seen(row, col)), score.get(), k.value(masked, f32)))


@dataclass(frozen=True)
class GroupMask:
    """The keys of a sequence that rows see, in blocks of ``block`` keys: ``query_of(row)`` is a row's query.

    So query heads that share keys are rows of one tile. ``lengths`` as of :class:`Mask`; any block may be visited.
    """

    k: Kernel
    visible: Visible
    block: int
    lengths: tuple[Traced, Traced]
    query_of: Callable[[Traced], Traced]

    def apply(self, scores: Fragment, block: Traced, first: Callable[[Traced], Traced]) -> None:
        """-inf in place of what does not count of a block; a warp's columns begin with key ``first(block)``."""
        k, visible, (q_len, kv_len) = self.k, self.visible, self.lengths
        keys, top = (k.bitcast(x, s32) for x in (kv_len, kv_len - q_len))
        begin, own = (k.bitcast(x, s32) for x in (block * self.block, first(block)))

        def seen(row: Traced, col: Traced) -> list[Traced]:
            aligned = k.bitcast(self.query_of(row), s32) + top
            return visible.seen(k.bitcast(col, s32) + own, aligned, keys)

        cuts = visible.cuts((begin, self.block), top, (keys, -1), begin + self.block > keys)
        if cuts is not None:
            with k.when(cuts, uniform=True):
                mask_scores(k, scores, 0, seen, -math.inf)


class Mask:
    """The keys that ``tile[0]`` query rows from ``first`` on see, in blocks of ``tile[1]`` keys.

    ``lengths`` are (q_len, kv_len), traced u32. ``begin``: the first block to visit, by default the first that a row
    sees. Blocks are visited from the last to the first, so that the masked ones of a causal mask come first.
    ``may_lack_keys``: kv_len may be 0, and one block is visited all the same, masked whole.
    """

    def __init__(
        self,
        k: Kernel,
        visible: Visible,
        tile: tuple[int, int],
        first: Number,
        lengths: tuple[Traced, Traced],
        *,
        begin: Number | None = None,
        may_lack_keys: bool = False,
    ) -> None:
        self._k, self._visible = k, visible
        self._rows, self._block = tile
        q_len, self._kv_len = lengths
        self._top = k.bitcast(k.value(first, u32), s32) + (k.bitcast(self._kv_len, s32) - k.bitcast(q_len, s32))
        """The key aligned with the first row."""
        left, right = visible.window
        all_blocks = (self._kv_len + (self._block - 1)) // self._block
        if may_lack_keys:
            all_blocks = k.maximum(all_blocks, 1)
        self.end: Traced = all_blocks
        """One past the last block that some row sees, and at least 1."""
        if right is not None:
            reach = k.maximum(self._top + (self._rows + right), 1) + (self._block - 1)
            self.end = k.minimum(all_blocks, k.bitcast(reach, u32) // self._block)
        self.begin: Number = 0 if begin is None else begin
        """The first block that is visited."""
        if left is not None and begin is None:
            start = k.bitcast(k.maximum(self._top - left, 0), u32) // self._block
            self.begin = k.minimum(start, self.end - 1)

    def reach(self, row: Number, rows: int) -> Traced | None:
        """One past the last key of the first visited block that some of ``rows`` rows from ``row`` of the tile on see.

        Counted within the block, s32: 0 or less where they see none. None if nothing is masked on that side.
        """
        k, (_, right) = self._k, self._visible.window
        ends: list[Traced] = []
        if self._visible.ragged:
            ends.append(k.bitcast(self._kv_len, s32))
        if right is not None:
            ends.append(self._top + (k.bitcast(k.value(row, u32), s32) + (rows + right)))
        return reduce(k.minimum, ends) - k.bitcast((self.end - 1) * self._block, s32) if ends else None

    @property
    def blocks(self) -> Traced:
        """The number of blocks to visit; at least one, which may be masked whole."""
        return self.end - self.begin

    def block(self, step: Number) -> Traced:
        """The block that is visited as number ``step``: the last comes first."""
        return self._k.value(self.end - 1 - step, u32)

    def cuts(self, block: Traced) -> Traced | None:
        """Whether some row does not see all of a block; None if every row always does."""
        begin, beyond = self._k.bitcast(block * self._block, s32), (block + 1) * self._block > self._kv_len
        return self._visible.cuts((begin, self._block), self._top, (self._top, self._rows - 1), beyond)

    def apply(
        self, scores: Fragment, block: Traced, *, row: Number = 0, warp: Number | None = None, masked: float = -math.inf
    ) -> None:
        """``masked`` in place of what does not count of a block; passed over where every row sees the whole block.

        The fragment's rows begin ``row`` rows into the tile; ``warp`` is the warp's index among those that share it,
        by default its number in the CTA modulo theirs.
        """
        k, cuts, seen = self._k, self.cuts(block), self._visible.seen
        if cuts is None:
            return
        with k.when(cuts, uniform=True):
            begin, warp = k.bitcast(block * self._block, s32), scores.warp if warp is None else warp
            top = self._top + k.bitcast(k.value(row, u32), s32) - begin  # counted within the block
            keys = k.bitcast(self._kv_len, s32) - begin
            mask_scores(
                k, scores, warp, lambda row, col: seen(k.bitcast(col, s32), top + k.bitcast(row, s32), keys), masked
            )


class SeenBy:
    """The query rows that see a tile of ``tile[1]`` keys from ``first`` on, in blocks of ``tile[0]`` rows.

    That is the mask of a transposed product: the keys are its rows. A block is visited if one of its rows sees one of
    the keys; the last block comes first, or with ``rising`` the first one: under a causal mask tiles that begin
    together then visit different blocks at a time.
    """

    def __init__(
        self,
        k: Kernel,
        visible: Visible,
        tile: tuple[int, int],
        first: Traced,
        lengths: tuple[Traced, Traced],
        *,
        rising: bool = False,
    ) -> None:
        self._k, self._visible, self._rising = k, visible, rising
        self._block, self._keys = tile
        self._q_len, self._kv_len = lengths
        self._offset = k.bitcast(self._kv_len, s32) - k.bitcast(self._q_len, s32)
        self._first = k.bitcast(first, s32)
        left, right = visible.window
        zero: Traced = k.value(0, u32)
        self.begin: Traced = zero
        """The first block that is visited."""
        self.end: Traced = (self._q_len + (self._block - 1)) // self._block
        """One past the last."""
        if left is not None:
            last = k.minimum(self._first + self._keys, k.bitcast(self._kv_len, s32)) - self._offset + left
            self.end = k.minimum(self.end, (k.bitcast(k.maximum(last, 0), u32) + (self._block - 1)) // self._block)
        if right is not None:
            start = k.bitcast(k.maximum(self._first - self._offset - right, 0), u32)
            self.begin = k.minimum(k.select(start < self._q_len, start // self._block, self.end), self.end)

    @property
    def blocks(self) -> Traced:
        """The number of blocks to visit; none where no row sees the keys."""
        return self.end - self.begin

    def block(self, step: Number) -> Traced:
        """The block that is visited as number ``step``."""
        return self.begin + step if self._rising else self.end - 1 - step

    def cuts(self, block: Traced) -> Traced | None:
        """Whether some row of a block does not see all the keys; None if every row always does."""
        top = self._k.bitcast(block * self._block, s32) + self._offset  # the key aligned with the block's first row
        beyond = self._first + self._keys > self._k.bitcast(self._kv_len, s32)
        return self._visible.cuts((self._first, self._keys), top, (top, self._block - 1), beyond)

    def apply(
        self, scores: Fragment, block: Traced, *, row: Number = 0, col: Number = 0, warp: Number | None = None
    ) -> None:
        """0 in place of the probabilities of a block that do not count.

        Keys are the fragment's rows, from ``row`` of the tile on, and query rows its columns, from ``col`` on.
        """
        cuts = self.cuts(block)
        if cuts is None:
            return
        k = self._k
        with k.when(cuts, uniform=True):
            first = self._first + k.bitcast(k.value(row, u32), s32)
            top = k.bitcast(block * self._block + col, s32) + self._offset - first  # counted within the rows
            keys, warp = k.bitcast(self._kv_len, s32) - first, scores.warp if warp is None else warp
            seen = self._visible.seen
            mask_scores(
                k, scores, warp, lambda row, col: seen(k.bitcast(row, s32), top + k.bitcast(col, s32), keys), 0.0
            )


def key_tiles(
    k: Kernel, visible: Visible, tile: tuple[int, int], block: Traced, lengths: tuple[Traced, Traced]
) -> tuple[Traced, Traced]:
    """(first, one past the last) of the tiles of keys that visit a block of query rows: the reverse of SeenBy."""
    rows, keys = tile
    q_len, kv_len = lengths
    offset = k.bitcast(kv_len, s32) - k.bitcast(q_len, s32)
    left, right = visible.window
    begin: Traced = k.value(0, u32)
    end: Traced = (kv_len + (keys - 1)) // keys
    if right is not None:
        last = k.bitcast(k.minimum((block + 1) * rows, q_len), s32) + offset + right  # one past the last key
        end = k.minimum(end, (k.bitcast(k.maximum(last, 0), u32) + (keys - 1)) // keys)
    if left is not None:
        start = k.bitcast(k.maximum(k.bitcast(block * rows, s32) + offset - left, 0), u32)
        begin = k.minimum(k.select(start < kv_len, start // keys, end), end)
    return begin, end
