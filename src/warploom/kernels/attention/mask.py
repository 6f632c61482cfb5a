"""Which blocks of keys a CTA visits, and which scores of a block count."""

from __future__ import annotations

import math

from warploom.core.dtypes import f32, s32, u32
from warploom.kernels.attention.config import AttentionConfig
from warploom.kernels.attention.features import AttentionFeatures
from warploom.lang import Fragment, Kernel, Mutable, Traced


class Mask:
    """The keys that a CTA's query rows see; ``lengths`` are (q_len, kv_len), traced u32."""

    def __init__(
        self,
        k: Kernel,
        config: AttentionConfig,
        features: AttentionFeatures,
        q_block: Traced,
        lengths: tuple[Traced, Traced],
    ) -> None:
        q_len, kv_len = lengths
        self._k, self._config, self._features = k, config, features
        self._kv_len = kv_len
        self._first_row = q_block * config.tile_m
        self._offset = k.bitcast(kv_len, s32) - k.bitcast(q_len, s32)

    def blocks(self, kv_blocks: Traced) -> tuple[Traced | int, Traced]:
        """(first block, count of blocks) that this CTA visits; at least one, which may be masked whole."""
        k, c = self._k, self._config
        left, right = self._features.window
        first: Traced | int = 0
        end = kv_blocks
        top = k.bitcast(self._first_row, s32) + self._offset  # the key aligned with the CTA's first row
        if right is not None:
            reach = k.maximum(top + (c.tile_m + right), 1)  # one past the last key of the last row
            needed = k.bitcast(reach + (c.tile_n - 1), u32) // c.tile_n
            end = k.minimum(kv_blocks, needed)
        if left is not None:
            start = k.bitcast(k.maximum(top - left, 0), u32) // c.tile_n
            first = k.minimum(start, end - 1)
        return first, end - first

    def apply(self, scores: Fragment, block: Traced) -> Fragment:
        """Scores with -inf where a key does not count; blocks that all rows see whole are left as they are."""
        if not self._features.masked:
            return scores
        k = self._k
        kept = [k.register(f32, x) for x in scores.registers]
        with k.when(self._cuts(block), uniform=True):
            self._cut(scores, kept, block)
        return k.fragment(scores.layout, f32, [x.get() for x in kept])

    def _cuts(self, block: Traced) -> Traced:
        """Whether some score of the block does not count for some row of the CTA."""
        k, c = self._k, self._config
        left, right = self._features.window
        begin = k.bitcast(block * c.tile_n, s32)
        top = k.bitcast(self._first_row, s32) + self._offset
        found: list[Traced] = []
        if self._features.ragged_kv:
            found.append((block + 1) * c.tile_n > self._kv_len)
        if right is not None:
            found.append(begin + (c.tile_n - 1) > top + right)
        if left is not None:
            found.append(begin < top + (c.tile_m - 1 - left))
        any_of_them = found[0]
        for condition in found[1:]:
            any_of_them = any_of_them | condition
        return any_of_them

    def _cut(self, scores: Fragment, kept: list[Mutable], block: Traced) -> None:
        k, c = self._k, self._config
        left, right = self._features.window
        layout = scores.layout
        begin = k.bitcast(block * c.tile_n, s32)
        # The key aligned with the warp's first row, counted within the block.
        top = k.bitcast(self._first_row + k.warp * c.warp_rows, s32) + self._offset - begin
        keys_left = k.bitcast(self._kv_len, s32) - begin
        for element in range(layout.elements_per_thread):
            row, col = layout.coordinates(k.lane, element)
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
            kept[element].set(k.select(visible, scores.registers[element], k.value(-math.inf, f32)))
