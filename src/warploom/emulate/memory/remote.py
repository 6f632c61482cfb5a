"""Accesses to the shared memory of other CTAs of a cluster: where they go, and whether those CTAs are there by then.

Sources: PTX ISA, "mapa", "State Spaces" (``.shared::cluster``); CUDA Programming Guide, "Distributed Shared Memory".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.control.frames import Frame
from warploom.emulate.findings.report import MemoryReports
from warploom.emulate.order.clocks import Clocks
from warploom.ir.statements import Op
from warploom.isa.memory import WINDOW_BITS

Array = NDArray[Any]

_NOWHERE = np.uint32(1 << 31)  # beyond all shared memory


_BEFORE = "before that CTA has begun: let the cluster meet (barrier.cluster) before"
_AFTER = "when that CTA has exited: let the cluster meet (barrier.cluster) at the end"


class RemoteAccesses:
    """Accesses of a batch to other CTAs' shared memory: where they go, and whether those CTAs are there by then.

    Each CTA's memory begins ``stride`` bytes after that of the one before it.
    """

    def __init__(self, clocks: Clocks, report: MemoryReports, stride: int) -> None:
        self.clocks, self.report, self.stride = clocks, report, stride
        self.last: dict[tuple[int, int], tuple[Op, int, int, Callable[[], str]]] = {}  # by row and CTA

    def locate(self, frame: Frame, address: Array, lanes: int, op: Op) -> tuple[Array, Array]:
        """Addresses within their CTA, and where its memory begins; an address that none has for a rank too high."""
        rank = np.broadcast_to((address >> np.uint32(WINDOW_BITS)).astype(np.int64) - 1, (*frame.shape, 32))
        together = self.clocks.domain // self.clocks.warps_per_cta
        own, exists = frame.cta[:, :, None], rank < together
        number = np.where(exists & (rank >= 0), own // together * together + rank, own)
        self._note(frame, number, op)
        place = np.where(exists, address & np.uint32((1 << WINDOW_BITS) - 1), _NOWHERE)
        return place, (number * self.stride)[..., :lanes]

    def _note(self, frame: Frame, number: Array, op: Op) -> None:
        for position, row in enumerate(frame.flat.tolist()):
            theirs = number.reshape(-1, 32)[position]
            acting = np.ones(32, np.bool_) if frame.active is None else frame.active[position]
            for cta in np.unique(theirs[acting]).tolist():
                if cta != row // self.clocks.warps_per_cta:
                    lane = int(np.nonzero(acting & (theirs == cta))[0][0])
                    self.reach(op, row, lane, cta, self.clocks.now + 1)

    def reach(
        self, op: Op, row: int, lane: int, cta: int, stamp: int, what: Callable[[], str] = lambda: "the shared memory"
    ) -> None:
        """A lane accesses the memory of another CTA, or arrives at an mbarrier there."""
        if (row, cta) not in self.last and not self._has_begun(row, cta):
            self.report.unreachable(op, row, lane, cta * self.clocks.warps_per_cta, what(), _BEFORE)
        self.last[row, cta] = op, lane, stamp, what

    def _has_begun(self, row: int, cta: int) -> bool:
        """Whether a warp knows of anything that a CTA of its cluster has done."""
        warps = np.arange(cta * self.clocks.warps_per_cta, (cta + 1) * self.clocks.warps_per_cta)
        return bool(self.clocks.passed(row)[self.clocks.columns[warps]].any())

    def at_exit(self) -> None:
        """Accesses to the memory of a CTA that may have exited: none of its threads knows of them."""
        warps = self.clocks.warps_per_cta
        for (row, cta), (op, lane, stamp, what) in self.last.items():
            rows = np.arange(cta * warps, (cta + 1) * warps)
            if not any(self.clocks.anybody_knows(rows, row, who, stamp) for who in (None, lane)):
                self.report.unreachable(op, row, lane, int(rows[0]), what(), _AFTER)
