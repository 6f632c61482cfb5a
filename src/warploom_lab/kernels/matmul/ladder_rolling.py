"""The order of a k-tile's work when fragments roll: each loads so many ``mma`` before the first that reads it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Literal

from warploom_lab.kernels.matmul.ladder_config import RungGemm


@dataclass(frozen=True)
class FragmentLoad:
    """One load of fragments: the ``index``-th of A's or B's at k-step ``step``."""

    operand: Literal["A", "B"]
    step: int
    index: int


@dataclass(frozen=True)
class Multiply:
    """One ``mma``: what two loads brought, into atom (``row``, ``col``) of the sums."""

    a: FragmentLoad
    b: FragmentLoad
    row: int
    col: int


class Mark(Enum):
    """The events between the ``mma`` of a tile."""

    MIDDLE = auto()
    """Half of them are issued."""
    BORDER = auto()
    """The loads from here on are of the next tile."""


Event = FragmentLoad | Multiply | Mark


@dataclass(frozen=True)
class RollingOrder:
    """``steps`` k-steps of ``rows`` × ``cols`` mma each, row by row; a load of A brings a row, one of B a column.

    Loads come ``lead`` mma, less than a k-step's, before their first use: those of a tile's first ``lead`` mma during
    the tile before.
    """

    steps: int
    rows: int
    cols: int
    lead: int

    @classmethod
    def of(cls, config: RungGemm) -> RollingOrder:
        """The order of a warp's work in a configuration."""
        return cls(config.k_steps, config.mma_rows, config.mma_cols, config.lead)

    @property
    def _multiplies(self) -> list[Multiply]:
        return [
            Multiply(FragmentLoad("A", step, row), FragmentLoad("B", step, col), row, col)
            for step in range(self.steps)
            for row in range(self.rows)
            for col in range(self.cols)
        ]

    @property
    def _first_uses(self) -> dict[FragmentLoad, int]:
        """The number of the first mma that reads what a load brings, in the order of those."""
        found: dict[FragmentLoad, int] = {}
        for number, multiply in enumerate(self._multiplies):
            found.setdefault(multiply.a, number)
            found.setdefault(multiply.b, number)
        return found

    @property
    def carried(self) -> list[FragmentLoad]:
        """The loads of a tile that happen during the tile before."""
        return [load for load, use in self._first_uses.items() if use < self.lead]

    def events(self) -> Iterator[Event]:
        """One tile's loads and mma; from the border on the loads are the next tile's."""
        multiplies = self._multiplies
        count, uses = len(multiplies), self._first_uses
        at: dict[int, list[FragmentLoad]] = {}
        for load, use in uses.items():
            at.setdefault((use - self.lead) % count, []).append(load)
        for number, multiply in enumerate(multiplies):
            if number == count // 2:
                yield Mark.MIDDLE
            if number == count - self.lead:
                yield Mark.BORDER
            yield from at.get(number, ())
            yield multiply
