"""``cp.async.mbarrier.arrive``: copies of ``cp.async`` that complete on an mbarrier, as those of the TMA do.

They are in no group any more. Whoever waits for the phase knows that they are done; no barrier of the CTA tells it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warploom.emulate.async_proxy import AsyncProxy
from warploom.emulate.copies import CopyQueue, Taken
from warploom.emulate.engines import Engines
from warploom.emulate.mbarrier_state import Mbarrier
from warploom.emulate.mbarriers import Mbarriers
from warploom.ir.statements import Op


@dataclass(eq=False)
class TrackedCopies:
    """Copies that ``lanes`` of a warp have started, and their arrivals; ``passed``: how far others had come then."""

    op: Op
    row: int
    lane: int
    lanes: list[int]
    barrier: Mbarrier
    queue: CopyQueue
    parts: list[Taken]
    passed: NDArray[Any] | None

    def land(self, proxy: AsyncProxy, barriers: Mbarriers, engines: Engines) -> None:
        """They are done: their lanes arrive."""
        bar, clocks = self.barrier, proxy.clocks
        engine = engines.mbarrier(bar.cta, bar.address)
        for part in self.parts:
            self.queue.land(part)
            if proxy.checks:
                per_unit = part.data.dtype.itemsize * part.data.shape[1] // proxy.shared.granule
                cells = (part.index[:, None] * per_unit + np.arange(per_unit)).reshape(-1)
                proxy.end_write(engine, cells, part.copy.number, part.copy.op)
        known = clocks.of_engine(engine, clocks.now, self.passed)
        barriers.arrive_for(bar, self.lanes, known, engine, self.row, self.op)
