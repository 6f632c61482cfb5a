"""Who copies what of a tile: the arithmetic that a configuration is checked with, without the language."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warploom.layout.linear import LinearMap

CHUNK_BYTES = 16
SEGMENT_BYTES = 128
"""A row is copied in segments of one bank cycle: eight threads, 16 bytes each."""


@dataclass(frozen=True)
class CopyPlan:
    """Who copies what of a ``rows × cols`` tile of 16-bit elements.

    ``cooperative``: the CTA's threads walk the tile together (the seeds' kernel 8); else each warp copies its own
    contiguous ``rows / warps`` rows. A thread copies ``chunk`` neighbouring elements per step (8 are 16 bytes).
    """

    rows: int
    cols: int
    warps: int
    cooperative: bool
    chunk: int = 8

    @property
    def chunks(self) -> int:
        """Threads side by side on one row segment."""
        return min(SEGMENT_BYTES, self.cols * 2) // (2 * self.chunk)

    @property
    def rows_per_step(self) -> int:
        """Rows that one step of the copy covers (of the CTA, or of each warp)."""
        return (32 * self.warps if self.cooperative else 32) // self.chunks

    @property
    def own_rows(self) -> int:
        """Rows that the group of threads is responsible for."""
        return self.rows if self.cooperative else self.rows // self.warps

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """Displacements (row, col) of every step, in elements, rows outermost."""
        columns = range(0, self.cols, self.chunks * self.chunk)
        return tuple((row, col) for row in range(0, self.own_rows, self.rows_per_step) for col in columns)

    def threads(self) -> LinearMap:
        """The map from the copying thread (``lane``: its bits in the CTA or the warp) to its first (row, col)."""
        from warploom.layout.shared import copy_positions

        count = 32 * self.warps if self.cooperative else 32
        return copy_positions(count, self.chunks * self.chunk, self.chunk).rename({"thread": "lane"})

    def problems(self) -> list[str]:
        """Why the tile cannot be copied this way; empty if it can."""
        found: list[str] = []
        who = "CTA" if self.cooperative else "warp"
        if self.own_rows % self.rows_per_step:
            found.append(
                f"{self.own_rows} rows are no multiple of the {self.rows_per_step} rows a {who} copies per step"
            )
        if self.cols % (self.chunks * self.chunk):
            found.append(f"{self.cols} columns are no multiple of a {2 * self.chunks * self.chunk}-byte row segment")
        return found
