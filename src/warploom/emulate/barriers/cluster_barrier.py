"""``barrier.cluster``: the barrier of all threads of a cluster, in two halves.

Source: PTX ISA, ``barrier.cluster``. Threads that have exited count as arrived, and release nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.barriers.barriers import Phase, Wait
from warploom.emulate.control.frames import Frame
from warploom.emulate.findings.report import Reporter
from warploom.emulate.order.clocks import Clocks
from warploom.emulate.order.known import CONTROL
from warploom.ir.statements import Op

Array = NDArray[Any]


class ClusterBarriers:
    """The barriers of the clusters of a batch: the current phase of each, and those that rows have yet to wait for."""

    def __init__(self, rows: int, clocks: Clocks, reporter: Reporter) -> None:
        self.clocks, self.report = clocks, reporter
        self.domain = clocks.domain
        self.gone = np.zeros(rows, np.bool_)
        self.current = [Phase() for _ in range(rows // self.domain)]
        self.arrived: dict[int, tuple[Phase, Op]] = {}

    def arrive(self, frame: Frame, op: Op, relaxed: bool) -> None:
        """All warps of the frame arrive."""
        self.clocks.stamp(op)
        self.clocks.absorb(frame.flat)
        for row in frame.flat.tolist():
            if row in self.arrived:
                message = f"a warp executes {op.instruction.mnemonic} again before it has waited for the first "
                message += "arrival: arrive once for each wait"
                self.report.add("barrier", op.where, message, row, 0, other=self.arrived[row][1].where)
                continue
            known = self.clocks.release(row, None)
            # A relaxed arrival tells how far control has come, and which mbarriers' initialisation was published.
            known = known.only(CONTROL) if relaxed else known
            self.current[row // self.domain].arrive(row, self.clocks.now, known)
            self.arrived[row] = self.current[row // self.domain], op
        self._complete(frame.flat)

    def wait(self, frame: Frame, op: Op) -> Wait | None:
        """What the warps of the frame wait for, or None."""
        wait = Wait(op, set())
        for row in frame.flat.tolist():
            if row not in self.arrived:
                message = f"a warp executes {op.instruction.mnemonic} without having arrived (barrier.cluster.arrive): "
                self.report.add("barrier", op.where, message + "every thread arrives before it waits", row, 0)
                continue
            phase, _ = self.arrived.pop(row)
            if phase.over:
                phase.tell(self.clocks, [row])
            else:
                phase.wait(wait, row)
        return None if wait.ready else wait

    def exited(self, rows: Array) -> None:
        """These warps have ended: nobody waits for them any more."""
        self.gone[rows] = True
        self._complete(rows)

    def _missing(self, number: int) -> list[int]:
        """The warps of a cluster that have yet to come."""
        rows = np.arange(number * self.domain, (number + 1) * self.domain)
        return [row for row in rows[~self.gone[rows]].tolist() if row not in self.current[number].arrived]

    def _complete(self, rows: Array) -> None:
        for number in np.unique(rows // self.domain).tolist():
            if self.current[number].arrived and not self._missing(number):
                self.current[number].complete(self.clocks)
                self.current[number] = Phase()

    def describe(self, row: int) -> str:
        """Who is missing at the barrier of a warp's cluster; '' where nobody waits."""
        number = row // self.domain
        if not self.current[number].waits:
            return ""
        missing = self._missing(number)
        named = ", ".join(f"warp {r % self.clocks.warps_per_cta} of {self.report.cta(r)}" for r in missing[:4])
        return f"the cluster's barrier misses {named}" + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")

    def at_exit(self) -> None:
        """Arrivals that nobody waited for."""
        for row in sorted(self.arrived)[:1]:
            message = "the kernel ends between barrier.cluster.arrive and its barrier.cluster.wait: wait for it"
            self.report.add("barrier", self.arrived[row][1].where, message, row, 0)
