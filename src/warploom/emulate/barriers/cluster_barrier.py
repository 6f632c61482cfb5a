"""``barrier.cluster``: the barrier of all threads of a cluster, in two halves.

Source: PTX ISA, ``barrier.cluster``. Threads that have exited count as arrived, and release nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.barriers.barriers import Wait
from warploom.emulate.control.frames import Frame
from warploom.emulate.findings.report import Reporter
from warploom.emulate.order.clocks import Clocks
from warploom.emulate.order.known import CONTROL, Known
from warploom.ir.statements import Op

Array = NDArray[Any]


@dataclass(eq=False)
class _Cluster:
    """The barrier of one cluster. ``done`` counts completed phases."""

    done: int = 0
    known: Known | None = None
    waits: list[tuple[Wait, int]] = field(default_factory=list[tuple[Wait, int]])


class ClusterBarriers:
    """The barriers of the clusters of a batch. ``arrived`` and ``waited`` count the phases of each warp."""

    def __init__(self, rows: int, clocks: Clocks, reporter: Reporter) -> None:
        self.clocks, self.report = clocks, reporter
        self.domain = clocks.domain
        self.arrived = np.zeros(rows, np.int64)
        self.waited = np.zeros(rows, np.int64)
        self.gone = np.zeros(rows, np.bool_)
        self.clusters = [_Cluster() for _ in range(rows // self.domain)]
        self.last: dict[int, Op] = {}

    def arrive(self, frame: Frame, op: Op, relaxed: bool) -> None:
        """All warps of the frame arrive."""
        self.clocks.stamp(op)
        self.clocks.absorb(frame.flat)
        for row in frame.flat.tolist():
            if self.arrived[row] > self.waited[row]:
                message = (
                    f"a warp executes {op.instruction.mnemonic} again before it has waited for the first arrival: "
                )
                message += "arrive once for each wait"
                self.report.add("barrier", op.where, message, row, 0, other=self.last[row].where)
                continue
            cluster = self.clusters[row // self.domain]
            known = self.clocks.release(row, None)
            # A relaxed arrival tells how far control has come, and which mbarriers' initialisation was published.
            known = known.only(CONTROL) if relaxed else known
            if cluster.known is None:
                cluster.known = known
            else:
                cluster.known.join(known)
            self.arrived[row] += 1
            self.last[row] = op
        for number in np.unique(frame.flat // self.domain).tolist():
            self._complete(number)

    def wait(self, frame: Frame, op: Op) -> Wait | None:
        """What the warps of the frame wait for, or None."""
        wait = Wait(op, set())
        for row in frame.flat.tolist():
            if self.arrived[row] == self.waited[row]:
                message = f"a warp executes {op.instruction.mnemonic} without having arrived (barrier.cluster.arrive): "
                message += "every thread arrives before it waits"
                self.report.add("barrier", op.where, message, row, 0)
                continue
            self.waited[row] += 1
            cluster = self.clusters[row // self.domain]
            if cluster.done >= self.waited[row]:
                self._learn(row, cluster)
            else:
                wait.rows.add(row)
                cluster.waits.append((wait, row))
        return None if wait.ready else wait

    def exited(self, rows: Array) -> None:
        """These warps have ended: nobody waits for them any more."""
        self.gone[rows] = True
        for number in np.unique(rows // self.domain).tolist():
            self._complete(number)

    def _complete(self, number: int) -> None:
        cluster = self.clusters[number]
        rows = np.arange(number * self.domain, (number + 1) * self.domain)
        present = rows[~self.gone[rows]]
        if not present.size or (self.arrived[present] <= cluster.done).any():
            return
        cluster.done += 1
        for wait, row in cluster.waits:
            self._learn(row, cluster)
            wait.rows.discard(row)
        cluster.waits.clear()

    def _learn(self, row: int, cluster: _Cluster) -> None:
        # The clock may hold later arrivals than the phase waited for: those wait for this warp, so that there are none.
        assert cluster.known is not None
        self.clocks.meet(np.array([row]), cluster.known)

    def describe(self, row: int) -> str:
        """Who is missing at the barrier of a warp's cluster; '' where nobody waits."""
        number = row // self.domain
        cluster = self.clusters[number]
        if not cluster.waits:
            return ""
        rows = np.arange(number * self.domain, (number + 1) * self.domain)
        missing = rows[~self.gone[rows] & (self.arrived[rows] <= cluster.done)]
        named = ", ".join(f"warp {r % self.clocks.warps_per_cta} of {self.report.cta(int(r))}" for r in missing[:4])
        more = f" and {missing.size - 4} more" if missing.size > 4 else ""
        return f"the cluster's barrier misses {named}{more}"

    def at_exit(self) -> None:
        """Arrivals that nobody waited for."""
        for row in np.nonzero(self.arrived > self.waited)[0][:1].tolist():
            message = "the kernel ends between barrier.cluster.arrive and its barrier.cluster.wait: wait for it"
            self.report.add("barrier", self.last[row].where, message, row, 0)
