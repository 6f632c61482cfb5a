"""An access to memory: where each lane of some warps goes, and what history compares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame
from warploom.emulate.findings.traffic import TrafficCounter
from warploom.emulate.memory.buffers import GlobalBuffer
from warploom.ir.statements import Op

Array = NDArray[Any]


@dataclass(slots=True)
class Access:
    """An access to cells, which may be many times the same: ``rows`` and ``lanes`` make it, one for each cell.

    Several warps may act together: then there are several arrays of rows. ``whole``: on behalf of all lanes of a warp;
    ``proxy``: through the async proxy. Of global memory: the ``buffer`` it was formed from, its ``stamp``, whether it
    is ``strong``, perhaps at a scope that ends at the CTA, and a ``name`` to record it in, if not its threads'.
    """

    op: Op
    what: str
    rows: tuple[Array, ...]
    lanes: Array
    cells: Array
    whole: bool = False
    proxy: bool = False
    buffer: GlobalBuffer | None = None
    stamp: int = 0
    strong: bool = False
    cta_only: bool = False
    name: int = 0

    def __getitem__(self, which: Array) -> Access:
        rows = tuple(rows[which] for rows in self.rows)
        return replace(self, rows=rows, lanes=self.lanes[which], cells=self.cells[which])

    @property
    def first(self) -> tuple[int, int]:
        """The row and lane of the first cell."""
        return int(self.rows[0][0]), int(self.lanes[0])


class Footprint(Protocol):
    """The cells of an access that begins, in a shape of its own, and what those who make it know."""

    def homes(self, warps: int) -> Array:
        """The first rows of the warps, so many, that see the memory."""
        ...

    def beyond(self, past: str, newest: Array, columns: Array) -> bool:
        """Whether a record of agents with such columns may be unknown; ``newest`` is their newest."""
        ...

    def late(self, past: str, records: Array, columns: Array) -> Array | None:
        """Which of the cells have records that are not known at once, of agents with such columns; None for none."""
        ...

    def access(self, what: str, which: Array) -> Access:
        """The access to some of the cells."""
        ...


@dataclass(slots=True)
class Place:
    """Where ``op`` accesses ``size`` bytes a lane: the lanes that act, and whether for the whole warp (``collective``).

    Local byte ``addresses`` (broadcast shape); unit ``index`` (warps, lanes), of ``parts`` cells each; records up to
    ``bound`` (warps) are known to the whole warp.
    """

    frame: Frame
    op: Op
    size: int
    collective: bool
    addresses: Array
    index: Array
    active: Array | None
    parts: int
    bound: Array

    def homes(self, warps: int) -> Array:
        """As :class:`Footprint`."""
        return self.frame.flat - self.frame.flat % warps

    def beyond(self, past: str, newest: Array, columns: Array) -> bool:
        """As :class:`Footprint`."""
        return bool(np.count_nonzero(newest > self.bound))

    def late(self, past: str, records: Array, columns: Array) -> Array | None:
        """As :class:`Footprint`: (warps, lanes, parts)."""
        found = records.reshape(-1, self.parts).take(self.index, axis=0) > self.bound[:, None, None]
        if self.active is not None:
            found &= self.active[:, :, None]
        return found if np.count_nonzero(found) else None

    def access(self, what: str, which: Array) -> Access:
        """As :class:`Footprint`."""
        warp, lane, part = np.nonzero(which)
        cells = self.index[warp, lane] * self.parts + part
        return Access(self.op, what, (self.frame.flat[warp],), lane, cells, self.collective)

    def count(self, counter: TrafficCounter, name: str) -> None:
        """Count the wavefronts."""
        frame, addresses, active = self.frame, self.addresses, self.active
        if active is None:
            repeat = frame.n // (addresses.shape[0] * addresses.shape[1])
        else:
            addresses, repeat = np.broadcast_to(addresses, (*frame.shape, addresses.shape[2])).reshape(frame.n, -1), 1
        counter.shared(name, self.op.where, addresses, self.size, active, repeat)

    @property
    def cells(self) -> Array:
        """All cells of the lanes that act, flat."""
        index = self.index if self.active is None else self.index[self.active]
        return (index.reshape(-1, 1) * self.parts + np.arange(self.parts)).reshape(-1)


@dataclass(slots=True)
class Cells:
    """``cells`` of one CTA that rows, which act together, or one lane of one row access by ``op``.

    ``bounds``: records up to there are known, for each kind of access and column; ``owner`` is the CTA's first row.
    """

    op: Op
    rows: Sequence[int]
    lane: int | None
    cells: Array
    proxy: bool
    bounds: dict[str, Array]
    owner: int

    def homes(self, warps: int) -> Array:
        """As :class:`Footprint`."""
        return np.array(self.owner - self.owner % warps)

    def beyond(self, past: str, newest: Array, columns: Array) -> bool:
        """As :class:`Footprint`."""
        return bool(newest > self.bounds[past][columns])

    def late(self, past: str, records: Array, columns: Array) -> Array | None:
        """As :class:`Footprint`: (cells,)."""
        columns = columns[self.cells] if columns.size > 1 else columns
        found = records[self.cells] > self.bounds[past][columns]
        return found if np.count_nonzero(found) else None

    def access(self, what: str, which: Array) -> Access:
        """As :class:`Footprint`."""
        cells = self.cells[which]
        rows = tuple(np.full(cells.shape, row) for row in self.rows)
        lanes = np.full(cells.shape, self.lane or 0)
        return Access(self.op, what, rows, lanes, cells, self.lane is None, self.proxy)
