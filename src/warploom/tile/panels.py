"""How wide the panels of a shared tile are, how high boxes, and more arithmetic that configurations use too."""

from __future__ import annotations

from math import gcd

PANEL_COLS = 64
"""16-bit elements in a row of 128 bytes: the widest that the TMA and ``wgmma`` swizzle."""


def panel_cols(cols: int, *, tight: bool = False) -> int:
    """16-bit elements in a row of a panel of a tile that is ``cols`` wide: the TMA's box, and the swizzle's width.

    ``tight``: 32 where the second of two panels of 64 would hold 32 columns of zeros.
    """
    if tight and PANEL_COLS < cols <= PANEL_COLS * 3 // 2:
        return PANEL_COLS // 2
    return min(PANEL_COLS, max(16, 1 << (cols - 1).bit_length()))


def padded_cols(cols: int, *, tight: bool = False) -> int:
    """``cols`` rounded up to whole panels."""
    panel = panel_cols(cols, tight=tight)
    return -(-cols // panel) * panel


def box_rows(page_size: int, block: int) -> int:
    """Keys of a box: those that lie side by side in pages wherever a block of so many begins."""
    return gcd(page_size, block)


def part_size(registers: int, warps: int = 4) -> int:
    """Elements of the part of so many warps with so many accumulator registers a thread (:mod:`.accumulation`)."""
    return registers * warps * 32
