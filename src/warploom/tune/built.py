"""A compiled candidate: what a launch needs, and whether it is worth timing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from warploom.core.targets import Target
from warploom.inspect.occupancy import Occupancy, occupancy

if TYPE_CHECKING:
    from warploom.cuda.store import CompiledKernel

MOST_SPILLED_BYTES = 128
"""Spill stores and loads of a candidate worth timing: a few outside the main loop cost nothing, hundreds always do."""

LEAST_WARPS_PER_SM = 4
"""One for each of the SM's four schedulers."""


@dataclass(frozen=True)
class Built:
    """A compiled candidate: all a launch needs, so that the program is not traced again in this process.

    ``shared_bytes`` is the dynamic shared memory per CTA; ``scalars`` are the names of the scalar parameters in order.
    """

    kernel: CompiledKernel
    threads: int
    shared_bytes: int
    scalars: tuple[str, ...]

    def occupancy(self, goal: Target) -> Occupancy:
        """Theoretical occupancy on a target."""
        needs = self.kernel.resources
        shared = needs.static_shared_bytes + self.shared_bytes
        return occupancy(goal, threads=self.threads, registers=needs.registers, shared_bytes=shared)

    def faults(self, goal: Target, most_spilled: int = MOST_SPILLED_BYTES) -> list[str]:
        """Why it is not worth timing, from the cubin alone; empty if it is."""
        found: list[str] = []
        spilled = self.kernel.resources.spill_bytes or 0
        if spilled > most_spilled:
            found.append(f"spills {spilled} bytes")
        resident = self.occupancy(goal)
        if resident.ctas_per_sm == 0:
            found.append(f"no CTA fits an SM ({', '.join(resident.limited_by)})")
        elif resident.warps_per_sm < LEAST_WARPS_PER_SM:
            found.append(f"only {resident.warps_per_sm} warps fit an SM")
        return found
