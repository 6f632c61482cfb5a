"""An access to memory: the cells that it goes to, who makes it, and what those know of earlier accesses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import ASCENDING, Frame, Turns
from warploom.emulate.findings.traffic import TrafficCounter
from warploom.emulate.memory.buffers import GlobalBuffer
from warploom.ir.statements import Op

Array = NDArray[Any]


@dataclass(slots=True, kw_only=True)
class MemoryAccess:
    """``op`` reads, writes or updates ("atomic") the units ``index`` (n, k), of ``parts`` cells each.

    Line i is accessed by row ``rows[0][i]``, or by the rows of several arrays, which act together. ``lanes`` (n,) are
    the lanes that do so; without them, lane j accesses column j. ``whole``: each warp acts as one. Of the units, those
    that are ``active`` are accessed; None: all. Records up to ``bound`` (n,) are of accesses known to whole warps;
    on a single line, those up to ``reach``, for each column, may be known beyond that.
    """

    op: Op
    what: str
    rows: tuple[Array, ...]
    index: Array
    parts: int = 1
    lanes: Array | None = None
    whole: bool = False
    active: Array | None = None
    bound: Array | None = None
    reach: Array | None = None
    proxy: bool = False
    """Through the async proxy."""
    strong: bool = False
    narrow: int = 0
    """The CTAs that are in the scope of a strong access together: 1, or those of a cluster; 0 if all are."""
    width: int = 0
    """The bytes of each element of a strong access; 0 if nobody has said."""
    turns: Turns = ASCENDING
    """The order in which the lanes of a warp access one unit."""
    stamp: int = 0
    buffers: Mapping[int, GlobalBuffer] | None = None
    """Global memory's, by their numbers."""
    numbers: Array | None = None
    """The buffer that each unit is in."""
    agent: int = 0
    """In place of its warps: the number of the queue that makes a transaction's access to global memory."""

    @property
    def units(self) -> Array:
        """The units that are accessed: ``index`` itself, or a flat array."""
        return self.index if self.active is None else self.index[self.active]

    @property
    def cells(self) -> Array:
        """All cells that are accessed, flat."""
        units = self.units.reshape(-1)
        return units if self.parts == 1 else (units[:, None] * self.parts + np.arange(self.parts)).reshape(-1)

    def each(self, values: Array) -> Array:
        """Values (n, 1) or (1, k) in a shape that broadcasts to that of :attr:`units`."""
        return values if self.active is None else np.broadcast_to(values, self.index.shape)[self.active]

    @property
    def lane_of_each(self) -> Array:
        """The lane that accesses each of :attr:`units`."""
        lanes = np.arange(self.index.shape[1])[None] if self.lanes is None else self.lanes[:, None]
        return self.each(lanes)

    def newer(self, newest: Array, columns: Array) -> Array:
        """Which agents, whose ``newest`` records and ``columns`` are (n, agents), have records that may be unknown."""
        if self.reach is not None:
            known = self.reach[columns]
        else:
            assert self.bound is not None
            known = self.bound[:, None]
        return np.any(newest > known, axis=0)

    def late(self, records: Array, columns: Array) -> Array | None:
        """Which cells (n, k, parts) have records that are not known at once; None for none.

        ``columns`` are those of the agents that made them, one for each cell or one alone.
        """
        if self.reach is not None:
            (cells,) = self.index
            known = self.reach[columns if columns.size == 1 else columns[cells]]
            found = (records[cells] > known)[None, :, None]
        else:
            assert self.bound is not None
            found = records.reshape(-1, self.parts).take(self.index, axis=0) > self.bound[:, None, None]
        if self.active is not None:
            found &= self.active[..., None]
        return found if np.count_nonzero(found) else None

    def among(self, which: Array) -> MemoryAccess:
        """The access to some of its cells (n, k, parts), one on each line."""
        line, column, part = np.nonzero(which)
        lanes = column if self.lanes is None else self.lanes[line]
        cells, rows = self.index[line, column] * self.parts + part, tuple(rows[line] for rows in self.rows)
        numbers = None if self.numbers is None else self.numbers[line, column][:, None]
        found = replace(self, rows=rows, index=cells[:, None], parts=1, lanes=lanes, active=None, numbers=numbers)
        found.bound = found.reach = None
        return found

    @property
    def flat(self) -> MemoryAccess:
        """The access to all its cells, one on each line."""
        shape = (*self.index.shape, self.parts)
        if self.lanes is not None and self.active is None and shape[1:] == (1, 1):
            return self
        return self.among(np.broadcast_to(np.True_ if self.active is None else self.active[..., None], shape))

    def buffer(self, line: int = 0) -> GlobalBuffer | None:
        """The buffer that a line with one cell is in; None in shared memory."""
        if self.buffers is None or self.numbers is None:
            return None
        return self.buffers[int(self.numbers[line, 0])]

    def __getitem__(self, lines: Array) -> MemoryAccess:
        """Some of the lines of an access with one cell on each."""
        assert self.lanes is not None
        rows, bound = tuple(rows[lines] for rows in self.rows), None if self.bound is None else self.bound[lines]
        numbers = None if self.numbers is None else self.numbers[lines]
        return replace(self, rows=rows, index=self.index[lines], lanes=self.lanes[lines], bound=bound, numbers=numbers)

    @property
    def first(self) -> tuple[int, int]:
        """The row and lane of the first cell."""
        return int(self.rows[0][0]), 0 if self.lanes is None else int(self.lanes[0])


@dataclass(slots=True, kw_only=True)
class SharedAccess(MemoryAccess):
    """Lanes of a frame access ``size`` bytes each, at byte ``addresses`` (broadcast shape) within their CTA."""

    frame: Frame
    size: int
    addresses: Array

    def count(self, counter: TrafficCounter, name: str) -> None:
        """Add the wavefronts and bank conflicts of the access to the traffic of its line."""
        frame, addresses, active = self.frame, self.addresses, self.active
        repeat = frame.n // addresses.shape[0]
        if active is not None:
            addresses, repeat = np.broadcast_to(addresses, active.shape), 1
        counter.shared(name, self.op.where, addresses, self.size, active, repeat)


@dataclass(slots=True, kw_only=True)
class GlobalAccess(MemoryAccess):
    """Lanes of a frame access ``size`` bytes each (an array where they differ), at global ``addresses``."""

    frame: Frame
    size: Array | int
    addresses: Array

    def count(self, counter: TrafficCounter, name: str) -> None:
        """Add the sectors of the access to the traffic of its line."""
        counter.global_access(name, self.op.where, self.addresses, self.size, self.frame.active)
