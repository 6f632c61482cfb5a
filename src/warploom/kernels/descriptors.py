"""Shared tiles as operands of ``wgmma``: descriptors of any part of any stage, from one base."""

from __future__ import annotations

from warploom.core.dtypes import u32
from warploom.kernels.mapped import PANEL_BYTES
from warploom.lang import Kernel, SharedTile, Traced
from warploom.lang.values import Number, TileAddress
from warploom.layout.wgmma import MatrixDescriptor

GROUP_BYTES = 8 * PANEL_BYTES
"""Eight rows of a panel: the unit that the 128-byte swizzle repeats over."""


class WgmmaOperand:
    """Descriptors of a shared tile: a base made once, then additions of constants in 16-byte units.

    ``start``: where this warpgroup's part of every stage begins, in bytes.
    """

    def __init__(self, k: Kernel, tile: SharedTile, shape: MatrixDescriptor, start: Traced | int = 0) -> None:
        self._k, self._tile, self._shape = k, tile, shape
        self._base: Traced = shape.low_word(tile.at(start))

    def at(self, stage: Number, offset: int) -> Traced:
        """The descriptor of the operand ``offset`` bytes (a multiple of 16) into a stage."""
        low = self._base + self._k.value(stage, u32) * (self._tile.stage_bytes >> 4) + (offset >> 4)
        return TileAddress(self._k.descriptor_of(low, self._shape), self._tile.extent)
