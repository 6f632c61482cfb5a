"""Which blocks of keys a CTA visits, and which scores of a block count."""

from __future__ import annotations

import math
from collections.abc import Sequence

from warploom.core.dtypes import f32, s32, u32
from warploom.kernels.attention.features import AttentionFeatures
from warploom.lang import Fragment, Kernel, Mutable, Traced
from warploom.lang.values import Number
from warploom.layout.fragments import FragmentLayout


class Mask:
    """The keys that a CTA's query rows see.

    ``tile`` is (query rows, keys per block); ``lengths`` are (q_len, kv_len), traced u32; ``first_row`` is the first
    query row of the CTA's tile. A fragment's rows start ``fragment_row`` rows into the tile, in warp ``warp`` of those
    that share the fragment.
    """

    def __init__(
        self,
        k: Kernel,
        features: AttentionFeatures,
        tile: tuple[int, int],
        first_row: Traced,
        lengths: tuple[Traced, Traced],
        fragment_row: Number = 0,
        warp: Number = 0,
    ) -> None:
        q_len, kv_len = lengths
        self._k, self._features = k, features
        self._tile_m, self._tile_n = tile
        self._kv_len, self._first_row = kv_len, first_row
        self._fragment_row, self._warp = fragment_row, warp
        self._offset = k.bitcast(kv_len, s32) - k.bitcast(q_len, s32)

    def blocks(self, kv_blocks: Traced) -> tuple[Traced | int, Traced]:
        """(first block, count of blocks) that this CTA visits; at least one, which may be masked whole."""
        k = self._k
        left = self._features.window[0]
        first: Traced | int = 0
        end = self.end(kv_blocks)
        if left is not None:
            start = k.bitcast(k.maximum(self._top() - left, 0), u32) // self._tile_n
            first = k.minimum(start, end - 1)
        return first, end - first

    def end(self, kv_blocks: Traced) -> Traced:
        """One past the last block that some row of the tile sees, and at least 1."""
        k, right = self._k, self._features.window[1]
        if right is None:
            return kv_blocks
        reach = k.maximum(self._top() + (self._tile_m + right), 1)  # one past the last key of the last row
        return k.minimum(kv_blocks, k.bitcast(reach + (self._tile_n - 1), u32) // self._tile_n)

    def _top(self) -> Traced:
        """The key aligned with the tile's first row."""
        return self._k.bitcast(self._first_row, s32) + self._offset

    def apply(self, scores: Fragment, block: Traced) -> Fragment:
        """Scores with -inf where a key does not count."""
        if not self._features.masked:
            return scores
        kept = [self._k.register(f32, x) for x in scores.registers]
        self.cut(scores.layout, kept, block)
        return self._k.fragment(scores.layout, f32, [x.get() for x in kept])

    def cut(self, layout: FragmentLayout, scores: Sequence[Mutable], block: Traced) -> None:
        """Set scores to -inf in place where a key does not count; whole blocks that all rows see are passed over."""
        if self._features.masked:
            with self._k.when(self.cuts(block), uniform=True):
                self._cut(layout, scores, block)

    def cuts(self, block: Traced) -> Traced:
        """Whether some score of the block does not count for some row of the CTA."""
        k = self._k
        left, right = self._features.window
        begin = k.bitcast(block * self._tile_n, s32)
        top = self._top()
        found: list[Traced] = []
        if self._features.ragged_kv:
            found.append((block + 1) * self._tile_n > self._kv_len)
        if right is not None:
            found.append(begin + (self._tile_n - 1) > top + right)
        if left is not None:
            found.append(begin < top + (self._tile_m - 1 - left))
        any_of_them = found[0]
        for condition in found[1:]:
            any_of_them = any_of_them | condition
        return any_of_them

    def _cut(self, layout: FragmentLayout, scores: Sequence[Mutable], block: Traced) -> None:
        k = self._k
        left, right = self._features.window
        begin = k.bitcast(block * self._tile_n, s32)
        # The key aligned with the fragment's first row, counted within the block.
        top = k.bitcast(k.value(self._first_row + self._fragment_row, u32), s32) + self._offset - begin
        keys_left = k.bitcast(self._kv_len, s32) - begin
        for element, score in enumerate(scores):
            row, col = layout.coordinates(k.lane, element, self._warp)
            key, aligned = k.bitcast(k.value(col, u32), s32), top + k.bitcast(k.value(row, u32), s32)
            conditions: list[Traced] = []
            if self._features.ragged_kv:
                conditions.append(key < keys_left)
            if right is not None:
                conditions.append(key <= aligned + right)
            if left is not None:
                conditions.append(key >= aligned - left)
            visible = conditions[0]
            for condition in conditions[1:]:
                visible = visible & condition
            score.set(k.select(visible, score.get(), k.value(-math.inf, f32)))
