"""An access to memory: where each lane of some warps goes, and what history compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame
from warploom.ir.statements import Op

Array = NDArray[Any]


@dataclass(slots=True)
class Access:
    """An access to cells, which may be many times the same: ``rows`` and ``lanes`` make it, one for each cell.

    Several warps may act together: then there are several arrays of rows. ``whole``: on behalf of all lanes of a warp;
    ``proxy``: through the async proxy.
    """

    op: Op
    what: str
    rows: tuple[Array, ...]
    lanes: Array
    cells: Array
    whole: bool = False
    proxy: bool = False

    def __getitem__(self, which: Array) -> Access:
        rows = tuple(rows[which] for rows in self.rows)
        return Access(self.op, self.what, rows, self.lanes[which], self.cells[which], self.whole, self.proxy)


@dataclass(slots=True)
class Place:
    """Where ``op`` accesses ``size`` bytes a lane: the lanes that act, and whether for the whole warp (``collective``).

    Local byte ``addresses`` (broadcast shape); unit ``index`` (warps, lanes).
    """

    frame: Frame
    op: Op
    size: int
    collective: bool
    addresses: Array
    index: Array
    active: Array | None

    def access(self, what: str, which: tuple[Array, ...], parts: int) -> Access:
        """The access to some cells, by their places among (warps, lanes, parts)."""
        warp, lane, part = which
        cells = self.index[warp, lane] * parts + part
        return Access(self.op, what, (self.frame.flat[warp],), lane, cells, self.collective)

    def cells(self, parts: int) -> Array:
        """All cells of the lanes that act."""
        index = self.index if self.active is None else self.index[self.active]
        return (index.reshape(-1, 1) * parts + np.arange(parts)).reshape(-1)
