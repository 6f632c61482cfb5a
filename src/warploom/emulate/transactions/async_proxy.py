"""Shared memory as engines see it: what they read and write through the async proxy, against everybody else's accesses.

The source and destination of an engine's access are cells of one CTA, given as a flat list. It is checked with the
clock of the thread that starts it, and recorded in the name of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.findings.report import Reporter
from warploom.emulate.findings.traffic import TrafficCounter
from warploom.emulate.memory.shared_memory import SHARED_BASE, SharedMemory
from warploom.emulate.order.clocks import Clocks
from warploom.ir.statements import Op

Array = NDArray[Any]
Starter = tuple[Sequence[int], int | None]
"""Who starts an access: rows of warps that act together, and the lane if it is a single one."""


class AsyncProxy:
    """Checks and records of one batch."""

    def __init__(
        self, shared: SharedMemory, clocks: Clocks, reporter: Reporter, counter: TrafficCounter, checks: bool
    ) -> None:
        self.shared = shared
        self.clocks = clocks
        self.report = reporter
        self.counter = counter
        self.checks = checks

    def cells(self, addresses: Array, cta: int) -> Array:
        """The cells of a CTA that hold the bytes at shared addresses (each within one cell's reach)."""
        local = np.unique((addresses - SHARED_BASE) // self.shared.granule)
        return local + cta * self.shared.stride // self.shared.granule

    def chunk_cells(self, addresses: Array, cta: int) -> Array:
        """The cells of 16-byte chunks."""
        granule = self.shared.granule
        first = (addresses - SHARED_BASE + cta * self.shared.stride) // granule
        return first if granule == 16 else (first[:, None] + np.arange(16 // granule)).reshape(-1)

    def state(self, cells: Array) -> Array:
        """What a later call of :meth:`unchanged` compares with."""
        return self.shared.history.wrote[cells]

    def check(self, starter: Starter, cells: Array, what: str, op: Op) -> None:
        """Conflicts of an access ("read" or "write") with those before it."""
        self.shared.history.compare(starter, cells, what, op, proxy=True)

    def record_read(self, queue: int, cells: Array, stamp: int) -> None:
        """A queue (its column) reads cells until what it does up to ``stamp`` has been waited for."""
        self.shared.history.read_by(queue, cells, stamp)

    def unchanged(self, row: int, lane: int, cells: Array, before: Array, op: Op) -> None:
        """A read that ends now: nobody may have written its cells since it began."""
        history = self.shared.history
        changed = history.wrote[cells] != before
        if not changed.any():
            return
        cell = cells[changed]
        other = history.writer_of(cell)
        if other is None:
            return
        where = int(history.bytes(cell[:1])[0])
        message = (
            f"{op.instruction.mnemonic} may still read byte {where} of shared memory when {other.instruction.mnemonic} "
            "overwrites it: wait for its group before the memory is given away"
        )
        self.report.add("race", op.where, message, row, lane, other=other.where, count=cell.size, address=where)

    def begin_write(self, cells: Array, op: Op) -> int:
        """The cells hold nothing until the write lands. Returns the number of the copy."""
        return self.shared.history.begin(op, cells)

    def end_write(self, queue: int, cells: Array, number: int, op: Op) -> int:
        """The write lands, in cells that no other copy has claimed since. Returns its stamp."""
        return self.shared.history.land(number, queue, cells, op)
